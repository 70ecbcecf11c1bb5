"""scripts/bench offload: what it is told, and its tables."""

import sys
from pathlib import Path

import pytest

from benchmarks import offload
from benchmarks.memory_group import memory_group
from benchmarks.offload import check_variants, interleaved, parse_models, weight_bytes
from benchmarks.offload_report import make_report, tables
from benchmarks.offload_worker import Task
from edgespec.errors import EdgespecError, UsageError
from edgespec.machine.files import weight_files


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    for name in ("big", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * 100)
    return str(tmp_path / "big"), str(tmp_path / "small")


def test_engines_and_folders(folders: tuple[str, str]) -> None:
    big, small = folders
    assert parse_models(f"mlx:{big}") == Task(big, backend="mlx")
    assert parse_models(f"torch:{big}+{small}") == Task(big, small, backend="torch")
    file = f"{big}/model.safetensors"
    assert parse_models(f"llamacpp:{file}") == parse_models(file) == Task(file)
    assert parse_models(f"{file}+{file}") == Task(file, file)
    assert weight_bytes(big) == weight_bytes(file) == 100


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


@pytest.mark.parametrize("text", ["{big}", "llamacpp:{big}", "mlx:", "mlx:{big}/no", "mlx:{big}+{big}/no", ""])
def test_what_is_none(text: str, folders: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_models(text.format(big=folders[0]))
    assert "\n" not in str(caught.value)


def passes(one: float, many: float) -> dict[str, dict[str, float]]:
    return {"1": {"seconds": one}, "64": {"seconds": many}}


def texts(seconds: float, passes: int) -> dict[str, object]:
    run = {"tokens": 11, "gained": 10, "passes": passes, "seconds": seconds, "target_seconds": seconds}
    return {"runs": [run], "bytes": 0}


def test_the_tables_compare_with_what_is_possible() -> None:
    about = {"limit": 1 << 30, "peak": 1 << 29, "bandwidth": 1e9, "streamed": 800_000_000}
    killed = {"failed": "it was killed: out of memory", "bandwidth": 1e9}
    report = make_report(
        Task("big", backend="mlx"), 1 << 30,
        {"in memory": [about | {"passes": passes(0.5, 1.0)}], "streamed": [about | {"passes": passes(2.0, 2.0)}]},
        {"plain": [about | texts(5.0, 10)], "specexec": [about | texts(2.0, 4)], "chain": [killed]},
    )  # fmt: skip
    lines = tables(report).splitlines()
    cells = {row[1]: row[2:] for line in lines if len(row := [cell.strip() for cell in line.split("│")]) > 2}
    assert cells["1"] == ["2.000 s", "0.500 s", "2.50", "0.50", ""]
    assert cells["64"][2] == "2.00"
    assert cells["specexec"][:4] == ["2.50 (2.50-2.50)", "5.00", "2.50", "0.500"]
    assert lines[-1] == "chain: it was killed: out of memory"


def test_variants_are_planners() -> None:
    assert check_variants(None, draft=False) == ["sssd"]
    assert check_variants(None, draft=True) == ["specexec", "sssd"]
    assert check_variants("none, chain", draft=True) == ["chain"]
    tasks = offload._texts(Task("big", "small", memory=9, limit=9), ["chain", "sssd"], 4)
    assert [(name, one.draft, one.planner) for name, one in tasks.items()] == [
        ("mapped, none", "", "none"), ("streamed, none", "", "none"),
        ("streamed, chain", "small", "chain"), ("streamed, sssd", "", "sssd"),
    ]  # fmt: skip
    assert tasks["mapped, none"].memory == 0 < tasks["streamed, none"].memory


def test_a_row_that_failed_is_exit_code_1(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "given.jsonl"
    given.write_text('{"prompt": "Why?"}\n')

    def measure(pair: Task, nodes: list[int], variants: list[str], *sizes: object, **more: object) -> object:
        assert (pair.prompts, variants, sizes) == (["Why?"], ["sssd"], (1 << 30, 600 << 20))
        return make_report(pair, 1, {}, {"streamed, sssd": [{"failed": "out of memory", "bandwidth": 1e9}]})

    monkeypatch.setattr("benchmarks.commands.offload.measure", measure)
    code, shown, _ = bench("offload", given, "--prompts", given, "--room", "1G", "--program", "600M")
    assert (code, shown.splitlines()[-1]) == (1, "streamed, sssd: out of memory")


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_small_model_is_measured(bench, small: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n')
    code, shown, said = bench("offload", small, "--nodes", 1, "--prompts", prompts, "-n", 8, "--rounds", 1)
    if "no control group may be made" in said:
        pytest.skip(said)
    assert (code, "in memory" in shown) == (0, True), said
    assert all(f" streamed, {name} " in shown for name in ("none", "sssd"))


def test_answers_of_one_token_have_no_speed() -> None:
    run = {"tokens": 1, "gained": 0, "passes": 0, "seconds": 0.0, "target_seconds": 0.0}
    result = texts(2.0, 4) | {"runs": [run], "limit": 1, "peak": 1, "bandwidth": 1e9}
    report = make_report(Task("big"), 1, {}, {"plain": [result]})
    assert tables(report).splitlines()[-1] == "plain: no answer has two tokens"


def test_parts_take_turns_and_none_is_empty(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str], object]] = []

    def run(task: Task, group: object) -> dict[str, object]:
        ran.append((task.planner, task.prompts, task.pace))
        return {"pace": {"runs": len(ran)}}

    monkeypatch.setattr("benchmarks.offload.run", run)
    monkeypatch.setattr("benchmarks.offload.disk_bandwidth", lambda path, seconds: 1e9)
    one = Task(folders[0], prompts=["a", "b"])
    tasks = {"plain": one, "drafted": Task(folders[0], prompts=["a", "b"], planner="sssd")}
    found = interleaved(tasks, 3, None, lambda line: None)  # type: ignore[arg-type]
    assert ran == [
        ("none", ["a"], None), ("sssd", ["a"], None), ("none", ["b"], {"runs": 1}), ("sssd", ["b"], {"runs": 2}),
    ]  # fmt: skip
    assert [len(results) for results in found.values()] == [2, 2]
    assert found["plain"][0]["bandwidth"] == 1e9
