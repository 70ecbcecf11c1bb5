"""Self-drafting on MLX: layers of the target draft, in memory and where the others are streamed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import mlx.core as mx
from conftest import few
from contract import Reused, by_main_check, work
from edgespec.backends.mlx import memory as memory_module
from edgespec.backends.mlx.backend import load
from edgespec.backends.mlx.engine import engine
from edgespec.backends.mlx.loading import load_weights
from edgespec.backends.mlx.memory import find_layout
from folder_texts import by_temperature, check_layers_by_name, check_lossless, rows_of
from mlx_models import FAMILIES, HYBRIDS, check_closing_frees, write_model

from edgespec.errors import ModelError
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.weights import plan as residency

OPTIONS: dict[str, Any] = {"context_length": 128, "budget": 16}
LAYERS = 12
TARGETS = ["llama-3", "mistral-windows", "gemma3", "qwen3 moe", "gpt-oss"]
PROMPT = [5, 9, 30, 7, 9, 30]
CELLS = 1 << 9  # bytes of a token's keys and values
CHUNK = 128  # prompt tokens of a pass, the fewest


def many_layers(config: dict[str, Any]) -> dict[str, Any]:
    kinds = {"layer_types": config["layer_types"] * (LAYERS // 2)} if "layer_types" in config else {}
    return {**config, "num_hidden_layers": LAYERS, **kinds}


@pytest.fixture(scope="module", params=few(TARGETS, "llama-3", "mistral-windows", "gpt-oss"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("own") / "target", many_layers(FAMILIES[request.param]))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is taken by weights and the layers' cells only."""
    for name in ("machine.memory.private_memory", "backends.mlx.memory.work_bytes"):
        monkeypatch.setattr(f"edgespec.{name}", lambda *_: 0)
    monkeypatch.setattr(memory_module, "cell_bytes", lambda *_: (CELLS, 4))
    for name in ("MARGIN", "KEPT", "ALIGNED"):
        monkeypatch.setattr(memory_module, name, 0)
    monkeypatch.setattr(residency, "SMALL", 64)


def pair(folder: Path, share: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A target with memory for that share of its weights (0: all), and its draft."""
    options = OPTIONS | options
    if share:
        cells = options["context_length"] + CHUNK
        options["memory"] = int(share * find_layout(load_weights(folder), folder).size) + 2 * cells * CELLS
    target = load(str(folder), **options, own_layers=True)
    assert target.capabilities.streams == (share > 0)
    return target, own(target, folder, options.get("sessions", 1))


def own(target: Any, folder: Path, sessions: int = 1) -> Any:
    options = LoadOptions(**OPTIONS, sessions=sessions, own_layers=True).for_draft()
    return engine.load_head(target, str(folder), options)


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("share", [0.0, 0.9, 0.7])
@pytest.mark.parametrize("planner", [SpecExecPlanner, ChainPlanner])
def test_texts_are_those_of_plain_decoding(folder, share, planner, sampling, room):
    target, draft = pair(folder, share)
    before = draft.pass_number
    check_lossless(target, [planner(draft, depth=6, tau=0.5)], PROMPT, sampling, 24)
    assert draft.pass_number > before
    target.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("share", [0.9, 0.7])
def test_streamed_it_drafts_with_the_whole_layers_in_memory_and_reads_nothing(folder, share, room, monkeypatch):
    target, draft = pair(folder, share)
    streamed, plan = {layer.index for layer in target.plan.streamed}, target.plan
    assert plan.draft_reads == plan.total_bytes - plan.streamed_bytes - plan.looked_up_bytes > 0
    assert sorted(streamed) == list(range(min(streamed), max(streamed) + 1))
    assert draft._kept == [number for number in range(LAYERS) if number not in streamed]
    monkeypatch.setattr(target._sweep.streamer, "begin", lambda: pytest.fail("the draft has read weights"))
    found = rows_of(draft, PROMPT)
    other = load(str(folder), **OPTIONS)
    monkeypatch.setattr("edgespec.backends.mlx.own_layers.kept_layers", lambda *_: draft._kept)
    np.testing.assert_array_equal(found, rows_of(own(other, folder), PROMPT))
    target.close()


def test_rows_are_those_of_a_model_of_these_layers(tmp_path):
    """Of tokens that the target has not read."""
    config = many_layers(FAMILIES["llama-3"])
    folder = write_model(tmp_path / "target", config)
    target, draft = pair(folder)
    short = write_model(tmp_path / "short", {**config, "num_hidden_layers": len(draft._kept)})
    weights, names = mx.load(str(folder / "model.safetensors")), {}
    for name, array in weights.items():
        number = int(name.split(".")[2]) if ".layers." in name else -1
        if number < 0:
            names[name] = array
        elif number in draft._kept:
            names[name.replace(f".{number}.", f".{draft._kept.index(number)}.", 1)] = array
    mx.save_safetensors(str(short / "model.safetensors"), names)
    other = load(str(short), **OPTIONS)
    np.testing.assert_array_equal(rows_of(draft, PROMPT), rows_of(other, PROMPT))
    assert 1 < len(draft._kept) < LAYERS
    before = rows_of(target, PROMPT)
    target.close()
    again = load(str(folder), **OPTIONS)
    np.testing.assert_array_equal(before, rows_of(again, PROMPT))  # the layers are back


def test_any_layers_can_be_left_out(folder, monkeypatch):
    """Also those by whose caches a model class makes its masks."""
    monkeypatch.setattr("edgespec.backends.mlx.own_layers.kept_layers", lambda *_: [0, LAYERS - 1])
    target, draft = pair(folder)
    assert np.isfinite(rows_of(draft, PROMPT)).all()
    target.close()


def test_cells_are_those_of_the_target_where_it_has_read(folder):
    target, draft = pair(folder, sessions=2)
    ours, theirs = draft.open(), target.open()
    prefill(draft, ours, PROMPT)  # before the target
    prefill(target, theirs, [*PROMPT, 1, 2])
    target.open()  # of another text
    draft.forward([work(ours, [1, 2, 3], [-1, 0, 1], wanted=[2])])
    for cache, number in zip(ours.caches, draft._kept, strict=True):
        for name in ("keys", "values"):
            mine, wanted = (getattr(one, name)[..., :8, :] for one in (cache, theirs.caches[number]))
            assert mx.array_equal(mine, wanted)
    last, wanted = ours.caches[-1].keys[..., 8, :], theirs.caches[-1].keys[..., 8, :]
    assert not mx.array_equal(last, wanted)
    target.close()


@pytest.fixture(scope="module")
def drafts(llama):
    yield (reused := Reused(lambda **options: own(load(str(llama), **options), llama, options["sessions"])))
    reused.close()


@by_main_check
def test_contract(check, drafts):
    check(drafts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("own") / "llama", many_layers(FAMILIES["llama-3"]))


def test_memory_is_planned_for_cells(llama, room):
    fits = find_layout(load_weights(llama), llama).size + (128 + CHUNK) * CELLS
    plans = []
    for asked in (False, True):
        target = load(str(llama), **OPTIONS, memory=fits, own_layers=asked)
        plans.append(target.plan)
        target.close()
    assert plans[0] is None
    assert plans[1].needed >= 2 * (128 + CHUNK) * CELLS


def test_layers_of_a_hybrid_are_refused(tmp_path):
    folder = write_model(tmp_path / "target", HYBRIDS["lfm2"])
    target = load(str(folder), **OPTIONS)
    with pytest.raises(ModelError, match=r"target: has recurrent layers, so its own layers cannot draft"):
        own(target, folder)


def test_closing_frees_the_model(llama):
    check_closing_frees(lambda: pair(llama), PROMPT)


def test_the_user_names_them_layers(llama):
    check_layers_by_name(llama, "mlx")
