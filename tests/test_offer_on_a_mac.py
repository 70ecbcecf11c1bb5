"""On a Mac, for a dense model larger than memory: both engines' predictions, and the faster one is offered."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.cli import commands
from edgespec.loading import exact
from edgespec.machine.described import find_machine, with_speeds
from edgespec.machine.measurements import OFF, remember
from edgespec.machine.this_machine import Machine
from edgespec.measure import doctor, predictor, report
from edgespec.measure.predictor import about_engines, offer
from edgespec.model import Model, load
from edgespec.models.registry import Entry, all_models, is_folder

GIB = 1 << 30
MAC = find_machine("macbook-16")[1]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Machine]:
    """This machine is a Mac with little memory."""
    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def become(free: int, platform: str = "darwin") -> Machine:
        gpus = tuple(replace(gpu, free=free, limit=free) for gpu in MAC.gpus)
        machine = replace(MAC, free=free, operations=2e9, platform=platform, gpus=gpus)  # a slow processor
        monkeypatch.setattr(predictor, "this_machine", lambda *about: machine)
        monkeypatch.setattr(commands, "this_machine", lambda *about: machine)
        monkeypatch.setattr(predictor, "chip", lambda: "")
        return machine

    return become


@pytest.fixture
def large(smollm2: Path) -> Callable[[float], int]:
    """Free memory that holds a share of the model."""
    from edgespec.backends.llamacpp.context import ContextSize
    from edgespec.backends.llamacpp.memory.planning import memory_needs

    def room(share: float) -> int:
        needed = memory_needs(str(smollm2), ContextSize(4096, 64, 1, 512), MAC)
        return int((needed + share * smollm2.stat().st_size) / 0.95)

    return room


def test_the_better_engine_is_offered_by_computation(
    smollm2: Path, mac: Callable[..., Machine], large: Callable[[float], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mac(large(0.5))
    [line] = offer(str(smollm2)).lines  # both engines compute all layers on the GPU
    assert re.match(r"larger than memory: llamacpp about .* tokens/s, on the GPU; mlx about", line)
    monkeypatch.setattr("edgespec.backends.llamacpp.memory.planning.auto_layers", lambda *_, **__: 0)
    found = offer(str(smollm2))
    assert re.match(r"larger than memory: llamacpp about .* tokens/s, with streamed layers on the proc", found.lines[0])
    assert "computed, not measured" in found.lines[0]
    assert f"converting {smollm2} would quantise it a second time" in found.lines[1]
    assert found.folder == ""


def test_a_ready_folder_of_the_hub_is_offered_first_and_a_file_in_16_bits_is_converted(
    smollm2: Path, mac: Callable[..., Machine], large: Callable[[float], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mac(large(0.5))
    monkeypatch.setattr("edgespec.backends.llamacpp.memory.planning.auto_layers", lambda *_, **__: 0)
    entry = Entry(name="small", target=f"file:{smollm2}", mlx="hf:mlx-community/small-4bit")
    monkeypatch.setattr(predictor, "find_model", lambda *about: entry)
    assert "edgespec run hf:mlx-community/small-4bit" in offer("small").lines[1]
    remember(about_engines(), {"llamacpp": 3.0, "mlx": 1.0})
    assert offer("small").folder == ""
    monkeypatch.setattr(predictor, "folder_for_mlx", lambda *about: "/hub/small-4bit")  # it was fetched
    assert offer("small").folder == "/hub/small-4bit"
    remember(about_engines(), {})
    assert offer("small").lines[1] == "for mlx: edgespec run /hub/small-4bit"
    monkeypatch.setattr(predictor, "folder_for_mlx", lambda *about: "")
    monkeypatch.setattr(predictor, "find_model", lambda *about: Entry(name="small", target=f"file:{smollm2}"))
    monkeypatch.setattr(predictor, "QUANTISED", 4)  # bits of a weight; the file has 5
    assert f"edgespec convert {smollm2} " in offer("small").lines[1]
    assert " --bits 4 --requantise, then" in offer("small").lines[1]
    monkeypatch.setattr(predictor, "FLOAT", 4)
    assert " --bits 4, then" in offer("small").lines[1]


def test_named_models_have_ready_folders_for_mlx() -> None:
    named = {entry.name: entry.mlx for entry in all_models() if entry.mlx}
    assert named["llama-3.3-70b"] == "hf:mlx-community/Llama-3.3-70B-Instruct-4bit"
    assert all(is_folder(source) for source in named.values())


def test_where_the_model_fits_doctor_compares_and_run_says_nothing(
    smollm2: Path, mac: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    mac(12 * GIB)
    assert offer(str(smollm2)).lines == ()
    monkeypatch.setattr(doctor, "compare", lambda *about, **options: [SimpleNamespace(cannot_run="")])
    monkeypatch.setattr(report, "report", lambda found: "what doctor found")
    _, line = CliRunner().invoke(commands.cli, ["doctor", str(smollm2)]).stdout.split("\n\n")
    assert re.match(r"llamacpp about .* tokens/s, on the GPU; mlx about .* tokens/s, on the GPU", line)


@pytest.mark.parametrize("draft", ["head", "layers", "folder"])
def test_a_draft_that_cannot_be_predicted_keeps_no_model_from_running(
    draft: str, smollm2: Path, mac: Callable[..., Machine], large: Callable[[float], int], tmp_path: Path
) -> None:
    mac(large(0.5))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert offer(str(smollm2), draft=str(tmp_path / draft) if draft == "folder" else draft).lines == ()


def test_it_becomes_the_default_only_where_it_was_measured_and_its_folder_is_here(
    smollm2: Path, mac: Callable[..., Machine], large: Callable[[float], int]
) -> None:
    mac(large(0.5))
    folder = Path(str(smollm2).removesuffix(".gguf") + "-mlx")  # as `edgespec convert` was told to write it
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    try:
        assert offer(str(smollm2)).folder == ""
        remember(about_engines(), {"llamacpp": 3.0, "mlx": 1.0})
        found = offer(str(smollm2))
        assert found.folder == str(folder)
        assert "measured that streamed passes on mlx are 3.0 times as fast here" in found.lines[1]
        remember(about_engines(), {"llamacpp": 1.0, "mlx": 3.0})
        assert offer(str(smollm2)).folder == ""
        assert len(offer(str(smollm2)).lines) == 1  # measured to be slower: only the figures
    finally:
        (folder / "config.json").unlink()
        folder.rmdir()


@pytest.mark.parametrize("case", ["it fits", "no Mac"])
def test_nothing_is_offered(
    case: str, smollm2: Path, mac: Callable[..., Machine], large: Callable[[float], int]
) -> None:
    mac(*((12 * GIB,) if case == "it fits" else (large(0.5), "linux")))
    assert offer(str(smollm2)).lines == ()


def test_speeds_of_the_same_chip_are_taken_for_those_that_are_not_known() -> None:
    blank = replace(
        MAC, memory_speed=0.0, operations=0.0, disk=replace(MAC.disk, speed=1e9),
        gpus=tuple(replace(gpu, memory_speed=0.0, operations=0.0) for gpu in MAC.gpus),
    )  # fmt: skip
    assert with_speeds(blank, "Apple M4") == replace(MAC, disk=blank.disk)
    assert with_speeds(blank, "Apple M99") == blank
    assert with_speeds(replace(blank, memory=60 * GIB), "Apple M4 Max").gpus[0].memory_speed == 546e9


def test_run_prints_the_offer_after_the_first_line(
    smollm2: Path, mac: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    mac(12 * GIB)
    monkeypatch.setattr(predictor, "offer", lambda *about, **options: predictor.Offer(["an offer"]))
    said = CliRunner().invoke(commands.cli, ["run", str(smollm2), "Hi", "-n", "1", "--exact", "off"])
    assert said.stderr.splitlines()[1] == "an offer"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ([], True),
        (["--memory", "1G"], True),
        (["--kv-type", "f16"], False),
        (["--threads", "1"], False),
        (["--gpu-layers", "0"], False),
        (["--exact", "off"], False),
        (["--resume", "talk"], False),
    ],
)
def test_the_folder_gets_the_settings_of_the_model_and_no_options_of_the_file(
    given: list[str],
    used: bool,
    smollm2_tiny: Path,
    smollm2_tiny_q2k: Path,
    mac: Callable[..., Machine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    mac(12 * GIB)
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)  # of other tests, too
    monkeypatch.chdir(tmp_path)
    folder, loaded = str(smollm2_tiny_q2k), list[tuple[Any, Model]]()  # a file, which loads as a folder would
    monkeypatch.setattr(predictor, "offer", lambda *about, **options: predictor.Offer(["an offer"], folder))

    def loading(target: Any, **options: Any) -> Model:
        loaded.append((target, load(target, **options | {"exact": "off"})))  # row classes are found otherwise
        return loaded[0][1]

    monkeypatch.setattr(commands, "load", loading)
    monkeypatch.setattr(exact, "find", lambda *about, **options: [])
    settings = "{context_length: 64, temperature: 0.5, system: Be brief.}"
    Path("models.yaml").write_text(
        f"models: [{{name: large, target: 'file:{smollm2_tiny}', defaults: {settings}}}]", "utf-8"
    )
    said = CliRunner().invoke(commands.cli, ["run", "large", "Hi", "-n", "1", "--models", "models.yaml", *given])
    assert said.exit_code == 0, said.stderr
    ((target, model),) = loaded
    assert target == "large" if not used else target.target == f"file:{folder}"
    assert model.target.capabilities.context_length == 64
    assert (model.sampling.temperature, model.system) == (0.5, "Be brief.")
    line = f"so {folder} is used" if used else f"{given[0]} goes with the file, so {folder} is not used"
    assert line in said.stderr
