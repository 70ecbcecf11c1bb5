"""The models that have a name: their facts, and which of them fit a machine."""

import json
from pathlib import Path

import pytest
from conftest import Run

from edgespec.machine.memory import parse_size
from edgespec.models import fit as module
from edgespec.models.fit import RUNTIME, fit
from edgespec.models.hub import parse
from edgespec.models.registry import BUILT_IN, Entry, FileFacts, read_models

GB = 10**9
TARGET, DRAFT = "hf:o/r/big.gguf", "hf:o/r/small.gguf"


def entry(target: int = 40 * GB, draft: int = 1 * GB) -> Entry:
    files = {TARGET: FileFacts(bytes=target)} | ({DRAFT: FileFacts(bytes=draft)} if draft else {})
    return Entry(name="a", target=TARGET, draft=DRAFT if draft else None, files=files)


@pytest.fixture(autouse=True)
def _nothing_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub.constants", reason="the extra `hub` is not installed")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))


def test_every_built_in_model_from_the_hub_has_its_facts() -> None:
    for one in read_models(BUILT_IN):
        for source in filter(None, (one.target, one.draft)):
            if source.startswith("hf:"):
                assert not parse(source[3:]).is_folder
                assert one.files[source].bytes > 10**8
                assert one.license
        assert set(one.files) <= {one.target, one.draft}
        assert not one.memory or parse_size(one.memory) >= 8 << 30


def test_the_same_file_has_the_same_facts_everywhere() -> None:
    known: dict[str, FileFacts] = {}
    for one in read_models(BUILT_IN):
        for source, facts in one.files.items():
            assert known.setdefault(source, facts) == facts


@pytest.mark.parametrize(
    ("memory", "disk", "streamed", "says"),
    [
        (60, 100, 0, "stays in memory"),
        (20, 100, 40 * GB + GB + RUNTIME - 20 * GB, "streams about 22.5 GB per pass"),
        (4, 100, 38.5 * GB, "too little memory"),
        (60, 30, 0, "too large for the disk: 30 GB are free"),
    ],
)
def test_what_fits(memory: int, disk: int, streamed: int, says: str) -> None:
    found = fit(entry(), memory * GB, disk * GB, disk_speed=5.0 * GB)
    assert (found.streamed, found.verdict) == (streamed, says)
    assert (found.target, found.draft, found.missing) == (40 * GB, GB, 41 * GB)
    seconds = {0: 40 / 20, 22.5: streamed / GB / 5}.get(round(streamed / GB, 1), 0) if "too" not in says else 0
    assert found.tokens_per_second == (pytest.approx(1 / seconds) if seconds else 0)


def test_a_model_of_which_only_the_shape_is_known_cannot_be_fetched() -> None:
    assert (
        [one.name for one in read_models(BUILT_IN) if fit(one, 1, 1).verdict == "cannot be fetched"]
        == [one.name for one in read_models(BUILT_IN) if "cannot be fetched" in one.description]
        == ["mistral-large-123b"]
    )


def test_a_small_model_needs_little_memory() -> None:
    small = fit(entry(GB // 10, 0), GB // 2, GB)
    assert (small.verdict, small.order) == ("stays in memory", (0, -GB // 10))
    assert fit(entry(GB, 0), GB // 2, GB).order == (3, GB)


def test_what_is_here_needs_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = [tmp_path / f"a-{i:05}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(b"x" * 50)
    monkeypatch.setattr(module, "local_path", lambda source, fetch: str(parts[0]))
    found = fit(Entry(name="a", target="file:a"), GB * 10, 0)
    assert (found.target, found.missing, found.verdict) == (100, 0, "stays in memory")


def test_a_date_in_models_yaml_is_text_in_json(run: Run, tmp_path: Path) -> None:
    """YAML reads a date without quotes as one."""
    own = tmp_path / "models.yaml"
    own.write_text("models: [{name: mine, target: 'hf:o/r/a.gguf', measured: [{date: 2026-01-31}]}]")
    for arguments in ([], ["mine"]):
        status, out, _ = run("models", *arguments, "--models", str(own), "--json")
        found = json.loads(out)
        assert (found[0] if isinstance(found, list) else found)["measured"] == [{"date": "2026-01-31"}]
        assert status == 0


@pytest.mark.parametrize("option", [["--fit"], ["--memory", "16G"], ["--machine", "macbook-24"]])
def test_one_models_settings_are_those_of_every_machine(run: Run, option: list[str]) -> None:
    status, out, err = run("models", "smollm2-135m", *option)
    assert (status, out) == (2, "")
    assert f"{option[0]} goes without MODEL" in err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("models --installed nosuch", "--installed lists what edgespec fetched: leave out MODEL"),
        ("models --installed --fit", "--installed lists what edgespec fetched: leave out --fit"),
        ("models --yes --installed", "--yes is for --delete: leave it out"),
        ("models --delete x --fit", "--delete only deletes: leave out --fit"),
        ("doctor --forget-costs --json --memory foo", "--forget-costs only deletes: leave out --memory"),
        ("doctor --describe --memory 4G", "--describe prints this machine as YAML: leave out --memory"),
        ("doctor --describe --draft x.gguf", "--describe prints this machine as YAML: leave out --draft"),
    ],
)
def test_what_would_be_ignored_is_refused(run: Run, command: str, says: str) -> None:
    assert run(*command.split()) == (2, "", f"edgespec: {says}\n")


def test_a_wrong_size_names_its_option(run: Run) -> None:
    status, out, err = run("models", "--memory", "abc")
    assert (status, out) == (2, "")
    assert err == "edgespec: --memory: 'abc' is not a size: write for example 12G, 900M or 1.5GiB\n"


def test_models_sorted_by_how_they_fit(run: Run) -> None:
    status, out, _ = run("models", "--fit", "--memory", "24G", "--json")
    assert status == 0
    found = [one for one in json.loads(out) if one["bytes"]["target"] > GB]
    streamed = [one["streamed"] for one in found if "too" not in one["verdict"]]
    assert streamed == sorted(streamed)
    in_memory = [one["bytes"]["target"] for one in found if one["verdict"] == "stays in memory"]
    assert len(in_memory) > 3
    assert in_memory == sorted(in_memory, reverse=True)
    status, out, err = run("models", "--fit", "--memory", "24G")
    assert status == 0
    assert out.index("qwen2.5-14b") < out.index("llama-3.3-70b")
    assert "llama3.3" in out
    assert "assumed: 20.4 GB of memory (4.3 more for the system and other programs)" in err
    assert "stays in memory, about 2.2 tokens/s" in out  # 9.0 GB at 20 GB/s
    status, out, err = run("models", "--memory", "much")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
