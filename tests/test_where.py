"""What computes which layers, and whether the text is exact: one line for run, doctor, --json and the server."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec.model
from edgespec.cli.commands import cli
from edgespec.errors import UsageError
from edgespec.loading import where as module
from edgespec.loading.where import EXACTLY, UP_TO_TIES, Where, where
from edgespec.loop.backend import Capabilities, Placed
from edgespec.loop.engines import LoadOptions
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.machine import cards

CARD = "NVIDIA GeForce RTX 3060"


def backend(placed: Placed, name: str = "llamacpp", tolerance: float = 0.0) -> Any:
    limits = Capabilities(context_length=64, max_nodes=8, max_wanted=8, max_leaves=8, logit_tolerance=tolerance)
    return SimpleNamespace(name=name, placed=placed, capabilities=limits)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A card in this machine, and what the engine sees."""

    def there(seen: Sequence[Any] = (), names: Sequence[str] = (CARD,)) -> None:
        monkeypatch.setattr(module, "nvidia_cards", lambda: names)
        monkeypatch.setattr(module, "find_engine", lambda name: SimpleNamespace(gpus=lambda device: seen))

    return there


@pytest.mark.parametrize(
    ("placed", "line"),
    [
        (Placed(32), "all 32 layers on the processor, none streamed"),
        (Placed(32, "CUDA0", 32), "all 32 layers on CUDA0, none streamed"),
        (
            Placed.on([(50, "CUDA0"), (0, "CUDA1"), (20, "CUDA2")], 80),
            "50 of 80 layers on CUDA0, 20 of 80 layers on CUDA2, 10 of 80 layers on the processor, none streamed",
        ),
        (Placed.on([(80, "CUDA0"), (0, "CUDA1")], 80), "all 80 layers on CUDA0, none streamed"),
        (Placed(80, "MTL0", 34, 46), "34 of 80 layers on MTL0, 46 of 80 layers on the processor, 46 layers streamed"),
    ],
)
def test_the_line_names_engine_devices_and_streamed_layers(placed: Placed, line: str) -> None:
    assert Where(engine="llamacpp", placed=placed, exact=True).line == f"llamacpp: {line}; {EXACTLY}"
    assert Where(engine="mlx", placed=placed).line == f"mlx: {line}; {UP_TO_TIES}"


def test_the_line_names_the_row_class_and_repacked_weights(card: Callable[..., None]) -> None:
    """Both decide the text."""
    card(names=())
    found = backend(Placed(4))
    found.capabilities = replace(found.capabilities, exact=BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 7)))
    found.computing = {"threads": 2}
    assert where(found).line.endswith(f"{EXACTLY} (row class narrow)")
    found.computing = {"threads": 2, "repacked": True}
    assert where(found).line.endswith(f"{EXACTLY} (row class narrow, weights repacked)")


def test_planner_and_budget_do_not_change_how_weights_are_computed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the text with drafts is not that without."""
    seen = []

    def stop(entry: Any, draft: Any, models_file: Any, options: LoadOptions, **how: Any) -> Any:
        seen.append(replace(options, budget=1, widest=0))
        raise UsageError("enough was seen")

    monkeypatch.setattr(edgespec.model, "open_pair", stop)
    for given in ({"planner": "none"}, {"planner": "sssd", "budget": 62}, {"draft": tiny, "budget": 62}, {}):
        with pytest.raises(UsageError, match="enough"):
            edgespec.load(tiny, **given)
    assert seen == [seen[0]] * 4


@pytest.mark.parametrize(("tolerance", "exactness"), [(0.0, EXACTLY), (0.1, UP_TO_TIES)])
def test_exact_is_what_the_row_class_says(tolerance: float, exactness: str, card: Callable[..., None]) -> None:
    card(names=())
    assert where(backend(Placed(4), tolerance=tolerance)).line.endswith(exactness)


def test_a_card_that_the_engine_was_not_built_for_is_named_with_the_build_line(card: Callable[..., None]) -> None:
    card()
    line = where(backend(Placed(4))).line
    assert f"{CARD} is not used, since llama-cpp-python is a build without CUDA: CMAKE_ARGS=-DGGML_CUDA=on " in line
    assert line.endswith(
        "-m pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
    )
    assert "docs/guides/gpus.md" in where(backend(Placed(4), "torch")).unused


def test_a_card_without_room_is_named_with_this_reason(card: Callable[..., None]) -> None:
    card(seen=["CUDA0"])
    assert "none fits into its free memory" in where(backend(Placed(4))).unused


@pytest.mark.parametrize("case", ["it computes", "--gpu-layers 0", "another engine", "no card"])
def test_nothing_is_said_of_a_card(case: str, card: Callable[..., None]) -> None:
    card(names=() if case == "no card" else (CARD,))
    one = backend(
        Placed(4, "CUDA0", 4) if case == "it computes" else Placed(4), "mlx" if "engine" in case else "llamacpp"
    )
    assert where(one, 0 if case == "--gpu-layers 0" else None).unused == ""


def test_cards_by_the_driver_or_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards.nvidia_cards.cache_clear()
    monkeypatch.setattr(cards, "DRIVER", tmp_path / "gpus")
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    information = f"Model: \t\t {CARD}\nIRQ:   \t\t 153\nGPU UUID: \t GPU-0\n"
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text(information)
    assert cards.nvidia_cards() == [CARD]
    cards.nvidia_cards.cache_clear()
    monkeypatch.setattr(cards, "DRIVER", tmp_path / "none")
    if sys.platform != "win32":
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\necho '{CARD}'\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert cards.nvidia_cards() == [CARD]
        cards.nvidia_cards.cache_clear()
        command.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
        assert cards.nvidia_cards() == []
    cards.nvidia_cards.cache_clear()


def test_run_says_it_first_and_json_has_it(smollm2: Path) -> None:
    arguments = ["run", str(smollm2), "Hi", "-n", "2", "--exact", "off", "--gpu-layers", "0"]
    said = CliRunner().invoke(cli, arguments)
    assert said.stderr.splitlines()[0] == f"llamacpp: all 30 layers on the processor, none streamed; {UP_TO_TIES}"
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)["where"]
    assert (found["engine"], found["layers"], found["device"], found["exact"]) == ("llamacpp", 30, "", False)
    assert found["line"] == said.stderr.splitlines()[0]
