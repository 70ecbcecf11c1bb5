"""The models that have a name: their facts, and which of them fit a machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import Run

from edgespec.cli import catalogue
from edgespec.machine.described import find_machine, named
from edgespec.machine.disk import Reading
from edgespec.machine.memory import parse_size
from edgespec.machine.this_machine import Machine
from edgespec.measure import fit as measure_fit
from edgespec.measure import predictor
from edgespec.measure.fit import RUNTIME, fit, measured_here, with_memory
from edgespec.models.hub import parse
from edgespec.models.registry import BUILT_IN, Entry, FileFacts, read_models
from edgespec.weights.plan import SAFETY

GB = 10**9
TARGET, DRAFT = "hf:o/r/big.gguf", "hf:o/r/small.gguf"


def entry(target: int = 40 * GB, draft: int = 1 * GB) -> Entry:
    files = {TARGET: FileFacts(bytes=target)} | ({DRAFT: FileFacts(bytes=draft)} if draft else {})
    return Entry(name="a", target=TARGET, draft=DRAFT if draft else None, files=files)


def with_room(room: int) -> Machine:
    """A laptop where models may use this much memory."""
    return replace(find_machine("laptop-32")[1], free=round(room / (1 - SAFETY)))


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
        (60, 100, 0, "fits into memory; speed not known: its shape is not known"),
        (
            20,
            100,
            40 * GB + GB + RUNTIME - 20 * GB,
            "22.5 GB larger than memory; speed not known: its shape is not known",
        ),
        (2, 100, 40 * GB, "too little memory"),
        (60, 30, 0, "too large for the disk: 30 GB are free"),
    ],
)
def test_a_model_without_a_shape_is_judged_by_its_size(memory: int, disk: int, streamed: int, says: str) -> None:
    found = fit(entry(), with_room(memory * GB), disk * GB)
    assert (found.streamed, found.verdict) == (pytest.approx(streamed, abs=2), says)
    assert (found.target, found.draft, found.missing) == (40 * GB, GB, 41 * GB)
    assert found.tokens_per_second == 0


def test_a_model_of_which_only_the_shape_is_known_cannot_be_fetched() -> None:
    known = {one.name: one for one in read_models(BUILT_IN)}
    shapes = [name for name, one in known.items() if one.target.startswith("shape:")]
    assert shapes == [name for name, one in known.items() if "cannot be fetched" in one.description]
    assert {"mistral-large-123b", "glm-4.5-air"} < {*shapes}
    some = ("mistral-large-123b", "qwen3-8b")
    ends = [fit(known[name], with_room(GB)).verdict.endswith("; cannot be fetched") for name in some]
    assert ends == [True, False]


def test_a_small_model_needs_little_memory() -> None:
    small = fit(entry(GB // 10, 0), with_room(GB // 2))
    assert small.verdict.startswith("fits into memory")
    assert small.order == (0, -GB // 10)
    assert fit(entry(GB, 0), with_room(GB // 2)).order == (3, GB)


def test_what_is_here_needs_no_disk(smollm2_tiny: Path) -> None:
    found = fit(Entry(name="a", target=f"file:{smollm2_tiny}"), with_room(10 * GB), 0)
    assert (found.target, found.missing, found.verdict) == (smollm2_tiny.stat().st_size, 0, "stays in memory")
    assert found.tokens_per_second > 0


def test_a_file_that_is_damaged_and_a_folder_hide_no_size(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x" * 50)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for name, says in (("a.gguf", "a.gguf: "), ("folder", "folder is a folder; speeds are computed for GGUF files")):
        found = fit(Entry(name="a", target=f"file:{tmp_path / name}"), with_room(10 * GB))
        assert found.target > 0
        assert found.verdict.startswith("fits into memory; speed not known: ")
        assert says in found.verdict


def test_a_speed_that_is_not_known_is_named_in_the_row() -> None:
    big = next(one for one in read_models(BUILT_IN) if one.name == "llama-3.3-70b")
    machine = with_room(20 * GB)
    found = fit(big, replace(machine, disk=Reading()))
    assert found.verdict.endswith(" GB per pass; speed not known: the machine's description lacks disk: speed")
    assert found.tokens_per_second == 0
    assert found.streamed == fit(big, machine).streamed > 20 * GB


def test_where_nothing_can_be_streamed_a_large_model_does_not_stay_in_memory() -> None:
    big = next(one for one in read_models(BUILT_IN) if one.name == "llama-3.3-70b")
    found = fit(big, replace(with_room(20 * GB), platform="win32", moves_pages=False))
    assert found.verdict == "reads 22.5 GB per pass"


def test_a_mixture_has_the_same_row_here_and_by_the_description_of_this_machine(
    run: Run, few_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was charged for all its experts here: 1.1 tokens/s instead of 110."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"machines": [named()["laptop-32"]]}))
    machine = find_machine(str(tmp_path / "mine.yaml"))[1]
    mixture = next(one for one in read_models(BUILT_IN) if one.name == "qwen3-coder-30b-a3b")
    monkeypatch.setattr(catalogue, "all_models", lambda models_file: [mixture])
    monkeypatch.setattr(predictor, "this_machine", lambda *about: machine)
    monkeypatch.setattr(measure_fit, "with_measured", lambda machine, path: machine)
    (here,), (there,) = (
        json.loads(run("models", "--fit", "--json", *more)[1])
        for more in ([], ["--machine", str(tmp_path / "mine.yaml")])
    )
    assert here == there
    assert here["tokens_per_second"] > 3 * machine.memory_speed / here["bytes"]["target"]


def test_the_disk_is_measured_at_the_largest_file_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a.gguf", 9), ("b.gguf", 99)):
        (tmp_path / name).write_bytes(b"x" * size)
    monkeypatch.setattr(measure_fit, "machine_here", lambda path: path)
    monkeypatch.setattr(measure_fit, "with_measured", lambda machine, path: path)
    entries = [Entry(name=name, target=f"file:{tmp_path / name}") for name in ("b.gguf", "a.gguf", "gone.gguf")]
    assert measured_here(entries, tmp_path) == str(tmp_path / "b.gguf")
    assert measured_here(entries[2:], tmp_path) == str(tmp_path)


@pytest.mark.parametrize("few_models", [{"smollm2-135m"}], indirect=True)
def test_a_date_in_models_yaml_is_text_in_json(run: Run, few_models: None, tmp_path: Path) -> None:
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
        ("doctor --describe --memory 4G", "--describe only prints this machine: leave out --memory"),
        ("doctor --describe --draft x.gguf", "--describe only prints this machine: leave out --draft"),
    ],
)
def test_what_would_be_ignored_is_refused(run: Run, command: str, says: str) -> None:
    assert run(*command.split()) == (2, "", f"edgespec: {says}\n")


def test_a_wrong_size_names_its_option(run: Run) -> None:
    status, out, err = run("models", "--memory", "abc")
    assert (status, out) == (2, "")
    assert err == "edgespec: --memory: 'abc' is not a size: write for example 12G, 900M or 1.5GiB\n"


def test_models_sorted_by_how_they_fit(run: Run, few_models: None) -> None:
    status, out, _ = run("models", "--fit", "--memory", "24G", "--json")
    assert status == 0
    found = {one["name"]: one for one in json.loads(out)}
    order = ["qwen3-coder-30b-a3b", "qwen2.5-14b", "qwen3-8b", "gemma-4-e4b", "smollm2-135m", "llama-3.3-70b"]
    assert list(found) == order
    assert [one["streamed"] > 0 for one in found.values()] == [False] * 5 + [True]
    status, out, err = run("models", "--memory", "24G")
    assert status == 0
    assert out.index("smollm2-135m") < out.index("qwen3-coder") < out.index("qwen2.5-14b")  # as in models.yaml
    assert "llama3.3" in out
    assert "20.4 GB of memory (4.3 more for the system and other programs), which processors read at 20.0 GB/s" in err
    assert "stays in memory, about 2.3 tokens/s" in out  # 9.0 GB, of which a pass reads 8.5, at 20 GB/s
    assert "not known" not in out
    status, out, err = run("models", "--memory", "much")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1


def test_memory_that_a_gpu_shares_grows_with_the_memory_that_is_given() -> None:
    machine = find_machine("macbook-16")[1]
    found = with_memory(machine, 2 * machine.memory, 28 << 30)
    assert (found.memory, found.free) == (32 << 30, 28 << 30)
    assert found.gpus[0].limit == 2 * machine.gpus[0].limit
