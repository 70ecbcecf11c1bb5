"""What the check for Macs has found is a section of a page."""

from benchmarks.mac_report import section


def test_a_report_is_a_section_with_three_tables() -> None:
    page = section(
        "Apple M4, macOS-15.1-arm64",
        [("slots, GPU", True, "0 differ"), ("growth", False, "1 | 2 bytes"), ("machine", None, "16 GB")],
        {"MLX": {1: 0.01234, 8: 0.05}, "llama.cpp, GPU": {1: 0.02}},
        [("arrays of 2 GiB", "the sum is right", "they load")],
    )
    assert page.startswith("## Of a Mac: Apple M4, macOS-15.1-arm64\n")
    for line in (
        "|  | 1 | 8 |",
        "| MLX | 0.0123 | 0.05 |",
        "| llama.cpp, GPU | 0.02 |  |",
        "| slots, GPU | yes | 0 differ |",
        "| growth | **no** | 1 / 2 bytes |",
        "| machine | – | 16 GB |",
        "| arrays of 2 GiB | the sum is right | they load |",
    ):
        assert f"\n{line}\n" in page
