"""scripts/bench offload: what it is told, and its tables."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import offload
from benchmarks.memory_group import memory_group
from benchmarks.offload import check_variants, interleaved, parse_models, shown, weight_bytes
from benchmarks.offload_worker import Task
from edgespec.errors import EdgespecError, UsageError
from edgespec.machine.files import weight_files


def test_a_model_and_its_draft(tmp_path: Path) -> None:
    file = tmp_path / "big.gguf"
    file.write_bytes(b"x" * 100)
    assert parse_models(str(file)) == Task(str(file))
    assert parse_models(f"{file}+{file}") == Task(str(file), str(file))
    assert weight_bytes(str(file)) == 100
    for text in (str(tmp_path), f"{file}+{file}x", ""):
        with pytest.raises(UsageError, match="is no GGUF file"):
            parse_models(text)


def test_a_split_file_is_all_its_parts(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"x" * 100)
    assert weight_files(str(parts[0])) == weight_files(str(parts[1])) == parts
    assert weight_bytes(str(parts[0])) == 200


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_every_process_has_a_new_group_so_that_its_peak_is_its_own() -> None:
    try:
        with memory_group() as group:
            first = group.folder.stat()
            group.limit(1 << 30)
            assert group.folder.stat().st_ino != first.st_ino
    except EdgespecError as error:
        pytest.skip(str(error))
    assert not group.folder.exists()


def texts(seconds: float, passes: int) -> dict[str, object]:
    run = {"tokens": 11, "gained": 10, "passes": passes, "seconds": seconds, "target_seconds": seconds}
    return {"runs": [run], "bytes": 0, "limit": 1 << 30, "peak": 1 << 29, "bandwidth": 1e9}


def test_the_table_compares_with_the_first_variant() -> None:
    killed = {"failed": "it was killed: out of memory", "bandwidth": 1e9, "limit": 1 << 30}
    text, failed = shown("big", {"plain": [texts(5.0, 10)], "specexec": [texts(2.0, 4)], "chain": [killed]})
    lines = text.splitlines()
    cells = {row[1]: row[2:] for line in lines if len(row := [cell.strip() for cell in line.split("│")]) > 2}
    assert cells["specexec"][:4] == ["2.50 (2.50-2.50)", "5.00", "2.50", "0.500"]
    assert cells["plain"][0] == "1.00 (1.00-1.00)"
    assert cells["plain"][-2] == "0.50"
    assert failed == ["chain: it was killed: out of memory"]


def test_variants_are_planners() -> None:
    assert check_variants(None, draft=False) == ["sssd"]
    assert check_variants(None, draft=True) == ["specexec", "sssd"]
    assert check_variants("none, chain", draft=True) == ["chain"]
    tasks = offload.tasks(Task("big", "small", memory=9, limit=9), ["chain", "sssd"], 4)
    assert [(name, one.draft, one.planner) for name, one in tasks.items()] == [
        ("mapped, none", "", "none"), ("streamed, none", "", "none"),
        ("streamed, chain", "small", "chain"), ("streamed, sssd", "", "sssd"),
    ]  # fmt: skip
    assert [one.mapped for one in tasks.values()] == [True, False, False, False]


def test_a_row_that_failed_is_exit_code_1(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "given.jsonl"
    given.write_text('{"prompt": "Why?"}\n')

    def measure(pair: Task, variants: list[str], room: int, **more: object) -> object:
        assert (pair.prompts, variants, room) == (["Why?"], ["sssd"], 1 << 30)
        return {"streamed, sssd": [{"failed": "out of memory", "bandwidth": 1e9, "limit": 1}]}

    monkeypatch.setattr("benchmarks.commands.offload.measure", measure)
    code, shown, _ = bench("offload", given, "--prompts", given, "--room", "1G")
    assert (code, shown.splitlines()[-1]) == (1, "streamed, sssd: out of memory")


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_small_model_is_measured(bench, small: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n')
    code, shown, said = bench("offload", small, "--prompts", prompts, "-n", 8, "--rounds", 1)
    if "no control group may be made" in said:
        pytest.skip(said)
    assert code == 0, said
    assert all(f" {name} " in shown for name in ("mapped, none", "streamed, none", "streamed, sssd"))


def test_answers_of_one_token_have_no_speed() -> None:
    run = {"tokens": 1, "gained": 0, "passes": 0, "seconds": 0.0, "target_seconds": 0.0}
    assert shown("big", {"plain": [texts(2.0, 4) | {"runs": [run]}]})[1] == ["plain: no answer has two tokens"]


def test_parts_take_turns_and_none_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str], object]] = []

    def run(task: Task, group: object) -> dict[str, object]:
        ran.append((task.planner, task.prompts, task.pace))
        return {"pace": {"runs": len(ran)}}

    monkeypatch.setattr("benchmarks.offload.run", run)
    monkeypatch.setattr("benchmarks.offload.disk_bandwidth", lambda path, seconds: 1e9)
    file = tmp_path / "big.gguf"
    file.touch()
    one = Task(str(file), prompts=["a", "b"])
    tasks = {"plain": one, "drafted": replace(one, planner="sssd")}
    found = interleaved(tasks, 3, None, lambda line: None)  # type: ignore[arg-type]
    assert ran == [
        ("none", ["a"], None), ("sssd", ["a"], None), ("none", ["b"], {"runs": 1}), ("sssd", ["b"], {"runs": 2}),
    ]  # fmt: skip
    assert [len(results) for results in found.values()] == [2, 2]
    assert found["plain"][0]["bandwidth"] == 1e9
