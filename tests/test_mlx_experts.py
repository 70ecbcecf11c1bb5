"""Mixtures larger than memory on MLX: chosen experts are read, and the bits are those of the model in memory."""

import gc
import math
import os
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import contract
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import mlx.core as mx
from conftest import few
from eagle_folders import head_weights, write_head
from edgespec.backends.mlx import backend as backend_module
from edgespec.backends.mlx import memory as memory_module
from edgespec.backends.mlx.backend import load
from edgespec.backends.mlx.engine import engine
from edgespec.backends.mlx.expert_files import find_experts
from edgespec.backends.mlx.loading import load_weights
from edgespec.backends.mlx.memory import find_layout
from edgespec.backends.mlx.streaming import SlotStore
from folder_texts import check_head_over_pools
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_models import FAMILIES, HYBRIDS, VOCAB_SIZE, write_model
from same_bits import Pair, check_failing_disk, check_given_up_passes, do_everything, replayed
from test_mlx_streaming import (
    DESCRIPTORS,
    LAYERS,
    many_layers,
    needed_by,
    poisoned,
    shift,
    unstack_experts,
)

from edgespec.errors import Interrupted, ModelError, NoRoom
from edgespec.loading.timed_pass import time_pass
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.models.safetensors_header import Stored
from edgespec.weights import direct_io, expert_memory, experts
from edgespec.weights import plan as residency
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.plan import Pool

MIXTRAL, QWEN = (
    many_layers(FAMILIES["mixtral"]),
    many_layers(FAMILIES["qwen3 moe"]) | {"moe_intermediate_size": 32, "hidden_size": 64},
)
OPTIONS = {"context_length": 64, "sessions": 2, "remember": False}


def halve(folder: Path) -> None:
    """Gate and up in one tensor, as the hub has Granite."""
    found = mx.load(str(folder / "model.safetensors"))
    for gate in [name for name in found if name.endswith("switch_mlp.gate_proj.weight")]:
        up, down = gate.replace("gate_proj", "up_proj"), gate.replace("gate_proj", "down_proj")
        before = gate.partition("switch_mlp.")[0]
        found[f"{before}input_linear.weight"] = mx.concatenate([found.pop(gate), found.pop(up)], axis=1)
        found[f"{before}output_linear.weight"] = found.pop(down)
    mx.save_safetensors(str(folder / "model.safetensors"), found)


def one_each(folder: Path) -> None:
    unstack_experts(folder, {name: name for name in ("gate_proj", "up_proj", "down_proj")})


def ones_of_nemotron(folder: Path) -> None:
    """Two matrices each; and routers that are not all zeros."""
    unstack_experts(folder, {"fc1": "up_proj", "fc2": "down_proj"})
    found, key = mx.load(str(folder / "model.safetensors")), mx.random.key(1)
    found |= {name: mx.random.normal(one.shape, key=key) for name, one in found.items() if "gate.weight" in name}
    mx.save_safetensors(str(folder / "model.safetensors"), found)


NEMOTRON = HYBRIDS["nemotron-h"] | {
    "num_hidden_layers": 6, "hybrid_override_pattern": ["M", "E", "*", "E", "M", "E"], "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
FOLDERS = {
    "mixtral": ({"config": MIXTRAL}, None),
    "mixtral, apart": ({"config": MIXTRAL}, unstack_experts),
    "qwen3, apart": ({"config": QWEN}, one_each),
    "gpt-oss": ({"config": many_layers(FAMILIES["gpt-oss"])}, None),
    "granite": ({"config": HYBRIDS["granite"]}, None),
    "granite, halves": ({"config": HYBRIDS["granite"]}, halve),
    "nemotron-h, apart": ({"config": NEMOTRON}, ones_of_nemotron),
    "qwen3-next, two files": ({"config": HYBRIDS["qwen3-next"], "shards": 2}, None),
    "qwen3, 4 bits": ({"config": QWEN, "bits": 4}, None),
    "qwen3, mxfp4": ({"config": QWEN, "bits": 4, "mode": "mxfp4"}, None),
    "qwen3, mxfp8": ({"config": QWEN, "bits": 8, "mode": "mxfp8"}, None),
    "qwen3, nvfp4": ({"config": QWEN, "bits": 4, "mode": "nvfp4"}, None),
    "qwen3, 4 and 8 bits": ({"config": QWEN, "bits": 4, "mixed": True}, None),
}


def make(folder: Path, name: str) -> Path:
    options, change = FOLDERS[name]
    write_model(folder, **options)
    if change:
        change(folder)
    return folder


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Tiny weights count as large, and free slots of layers are poisoned."""
    monkeypatch.setattr(SlotStore, "hide", poisoned)
    monkeypatch.setattr(residency, "SMALL", 64)
    monkeypatch.setattr(memory_module, "ALIGNED", 0)
    monkeypatch.setattr(experts, "HUGE", 1)


@pytest.fixture
def pooled(monkeypatch):
    """Loads a folder with so many slots for a layer, or where dense weights are streamed, too (0); or these pools."""
    made = []

    def get(folder: Path, slots: float = 0, given: Sequence[Pool] = (), **options):
        def plan_memory(lazy, size, *_):
            layout = find_layout(lazy.model, lazy.folder)
            layers, all_experts = layout.expert_layers, [t for one in layout.experts for t in one.tensors]
            pools = experts.memory_of(layers, experts.pools_of(layers, slots / layers[0].count))
            dense = layout.size - sum(tensor.size for tensor in all_experts)
            for share in (1.0,) if slots else (0.7, 0.9, 0.97):
                with suppress(NoRoom):
                    plan = memory_module.plan_weights(layout, pools + int(share * dense), 0, own_layers=False)
                    break
            return replace(plan, pools=tuple(given) or plan.pools), size, layout, []

        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "plan_memory", plan_memory)
            made.append(load(str(folder), **OPTIONS | options))
        assert made[-1].mixture
        assert made[-1].capabilities.streams == (not slots)
        return made[-1]

    yield get
    for backend in made:
        backend.close()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("mlx") / "mixtral", "mixtral")


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [0, 1, 2.4])
@pytest.mark.parametrize("name", few(FOLDERS, *FOLDERS.keys() - {"mixtral", "granite", "qwen3, mxfp8", "qwen3, nvfp4"}))
def test_to_the_bit(name, slots, tmp_path, pooled):
    """Trees, and several sessions in one pass, before and behind the number of rows from which mlx-lm sorts."""
    folder = make(tmp_path / "model", name)
    resident, backend = load(str(folder), **OPTIONS), pooled(folder, slots)
    pair = Pair(resident, backend)
    do_everything(pair, 1)
    for number in range(2):
        pair.each(number, lambda session: session.commit([]))
    pair.forward((0, list(range(40)), list(range(-1, 39))), (1, [7], [-1]))
    resident.close()
    memory = backend.mixture.memory
    wanted, hits, read = memory.counted
    assert hits < wanted
    assert hits > 0 or not slots  # without them nothing is kept from pass to pass
    assert read > 0
    few = name.startswith(("granite", "nemotron"))  # of their layers have experts
    assert (memory.predicted > 0) == (slots > 2 and not few)


def test_a_router_that_reads_something_else_than_its_experts_predicts_nothing(mixtral, pooled):
    """As one of Nemotron, whose experts read something narrower."""
    resident, backend = load(str(mixtral), **OPTIONS), pooled(mixtral, 2.4)
    before = backend.mixture.memory.predicted
    backend.mixture._routers = [nn.Linear(3, 4) for _ in backend.mixture._routers]
    do_everything(Pair(resident, backend), 1)
    assert backend.mixture.memory.predicted == before
    resident.close()


@pytest.mark.parametrize("slots", few((1, 2.4), 2.4))
@pytest.mark.parametrize("name", few(("mixtral", "gpt-oss", "granite"), "gpt-oss"))
def test_a_head_drafts_as_for_the_mixture_in_memory(name, slots, tmp_path, pooled, whole_grid):
    """Texts are those of plain decoding."""
    folder = make(tmp_path / "model", name)
    path = str(write_head(tmp_path / "head", head_weights(VOCAB_SIZE, VOCAB_SIZE - 20)))
    targets = load(str(folder), **OPTIONS), pooled(folder, slots, draft_files=(path,))
    options = LoadOptions(context_length=64, budget=16).for_draft()
    check_head_over_pools(targets, lambda target: engine.load_head(target, path, options), whole_grid)


def test_the_contract(mixtral, pooled):
    for check in (
        contract.several_sessions_in_one_forward, contract.a_broken_work_changes_nothing,
        contract.forks_are_independent, contract.prefill_in_pieces, contract.a_saved_session_goes_on,
    ):  # fmt: skip
        check(lambda **options: pooled(mixtral, 1.5, **options))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError, Interrupted])
@pytest.mark.parametrize("slots", [0, 1.5])
def test_a_pass_given_up_within_a_layer(error, slots, mixtral, pooled, monkeypatch):
    resident = load(str(mixtral), **OPTIONS)
    check_given_up_passes(Pair(resident, pooled(mixtral, slots)), error, LAYERS - 2, 2, monkeypatch)
    resident.close()


def test_a_disk_that_fails_and_comes_back(mixtral, pooled, monkeypatch):
    resident = load(str(mixtral), **OPTIONS)
    check_failing_disk(Pair(resident, pooled(mixtral, 1.5)), monkeypatch)
    resident.close()


def test_a_file_that_shrinks(tmp_path, pooled):
    backend = pooled(make(tmp_path / "model", "mixtral"), 1.5)
    session = backend.open()
    os.truncate(tmp_path / "model" / "model.safetensors", 5000)
    with pytest.raises(ModelError, match="has shrunk"):
        backend.forward([contract.work(session, [5], [-1])])
    assert session.token_ids == []


@pytest.mark.parametrize(("slots", "where", "name"), [(0, SlotStore, "read"), (1.5, direct_io, "read_unaligned")])
def test_a_slow_disk(slots, where, name, mixtral, pooled, monkeypatch):
    """Reads of layers and of experts that take any time, and end in any order, change nothing."""
    resident, backend = load(str(mixtral), **OPTIONS), pooled(mixtral, slots)
    read, draw = getattr(where, name), random.Random(1)

    def slowly(*arguments):
        time.sleep(draw.choice([0, 0.001, 0.004]))
        read(*arguments)

    monkeypatch.setattr(where, name, slowly)
    do_everything(Pair(resident, backend), 1)
    assert backend.wait_seconds > 0
    resident.close()


def test_one_process_loads_a_mixture_twice_and_closing_frees_all(mixtral, pooled):
    gc.collect()  # what other tests have left must not go meanwhile
    before = mx.get_active_memory(), len(os.listdir(DESCRIPTORS)), threading.active_count()
    both = [pooled(mixtral, 1.5), pooled(mixtral, 2)]
    needed = sum(one._sweep.bytes_held for one in both)  # which a Mac's GPU must hold
    assert needed <= mx.get_active_memory() - before[0] < needed + 20_000  # no other expert, and no stack of them
    do_everything(Pair(*both), 1)
    for backend in (*both, *both):
        backend.close()
    assert mx.get_active_memory() < before[0] + 100
    assert (len(os.listdir(DESCRIPTORS)), threading.active_count()) == before[1:]


def test_layers_whose_experts_all_stay_compute_as_they_are(mixtral, pooled):
    resident = load(str(mixtral), **OPTIONS)
    backend = pooled(mixtral, 1.5, [Pool((0, 3, 5), 5), Pool((1, 6), 9), Pool((4,), 4), Pool((2,), 6)])
    modules = [layer.block_sparse_moe.switch_mlp for layer in backend.model.layers]
    assert [type(one) is SwitchGLU for one in modules] == [False, True, True, False, True, False, True]
    do_everything(Pair(resident, backend), 1)
    assert 0 < backend.mixture.memory.hits < backend.mixture.memory.wanted
    resident.close()


@pytest.mark.parametrize("by", range(1, 4))
def test_files_whose_tensors_begin_anywhere(by, tmp_path, pooled):
    folder = make(tmp_path / "model", "qwen3, mxfp4")
    shift(folder, by)
    resident, backend = load(str(folder), **OPTIONS), pooled(folder, 1.5)
    do_everything(Pair(resident, backend), 1)
    resident.close()


def test_values_that_a_model_class_changes(tmp_path, pooled, monkeypatch):
    """Same names, shapes and types, other bits: noticed before the first pass."""
    from mlx_lm.models.mixtral import Model

    folder, sanitize = make(tmp_path / "model", "mixtral, apart"), Model.sanitize

    def swapped(self, weights):
        names = {"w1": "w3", "w3": "w1"}
        turn = lambda name: ".".join(names.get(part, part) for part in name.split("."))  # noqa: E731
        return sanitize(self, {turn(name): one for name, one in weights.items()})

    monkeypatch.setattr(Model, "sanitize", swapped)
    with pytest.raises(ModelError, match=r"layer 0's weight .* is changed by mlx-lm as it is loaded.*mlx_lm.convert"):
        pooled(folder, 1.5)


def test_dense_weights_that_a_model_class_changes(tmp_path, pooled):
    """Those that stay are mlx-lm's own: it adds 1 to norms of Qwen3-Next as the hub has it, and turns convolutions."""
    folder = write_model(tmp_path / "model", HYBRIDS["qwen3-next"])
    one_each(folder)
    found = mx.load(str(folder / "model.safetensors"))
    for name, array in found.items():
        if name.endswith(("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")):
            found[name] = array - 1
        if name.endswith("conv1d.weight"):
            found[name] = mx.contiguous(array.moveaxis(1, 2))
    mx.save_safetensors(str(folder / "model.safetensors"), found)
    resident, backend = load(str(folder), **OPTIONS), pooled(folder, 1.5)
    do_everything(Pair(resident, backend), 1)
    resident.close()


def test_no_more_is_read_than_llama_cpp_reads(mixtral, pooled, monkeypatch):
    with replayed(monkeypatch, find_layout(load_weights(mixtral), mixtral).paths) as compare:
        compare(pooled(mixtral, 1.6))


def test_a_prompt_counts_and_what_was_used_is_remembered(mixtral, pooled, monkeypatch):
    kept, first, fill = [], [], ExpertMemory.fill
    monkeypatch.setattr(expert_memory, "remember", lambda about, scores: kept.append(scores))
    monkeypatch.setattr(expert_memory, "recall", lambda about, form: kept[-1] if kept else None)
    monkeypatch.setattr(ExpertMemory, "fill", lambda memory, how: first.append(memory.scores) or fill(memory, how))
    for remember in (False, True, True):
        backend = pooled(mixtral, 1.5, remember=remember)
        memory = backend.mixture.memory
        wanted, scores = memory.wanted, memory.scores
        prefill(backend, backend.open(), list(range(20)))
        assert memory.wanted == wanted  # which is of generated tokens
        assert memory.scores != scores
        backend.close()
    assert len(kept) == 2
    assert np.max(first[1]) == 0
    assert first[2] == kept[0]


def test_a_later_load_reads_no_experts(mixtral, pooled, monkeypatch, tmp_path):
    """That a tree can be read is found with a few passes, once."""
    monkeypatch.delenv("EDGESPEC_NO_MEMORY_OF_COSTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []
    for remember in (True, True, False):
        backend = pooled(mixtral, 1.5, remember=remember)
        session = backend.open()
        found.append(
            (backend.mixture.memory.bytes_read > 0, prefill(backend, session, [5, 6, 7], want_last=True)[0].row(2))
        )
        backend.close()
    assert [read for read, _ in found] == [True, False, True]
    assert np.array_equal(found[0][1], found[1][1])


def test_experts_of_a_pass_are_counted(mixtral, pooled):
    made = time_pass(pooled(mixtral, 1.5), 4)
    assert 2 <= made.experts <= 4
    assert 0 <= made.hits <= 1
    assert made.read > 0


def test_memory_for_dense_weights_comes_first_and_pools_have_the_rest(mixtral, monkeypatch):
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(memory_module, "MARGIN", 0)
    layout, needed = find_layout(load_weights(mixtral), mixtral), needed_by(mixtral)
    assert load(str(mixtral), context_length=64, memory=layout.size + needed).plan is None
    for missing, streams, slots in ((1, False, 3), (layout.size // 2, False, 1), (int(0.65 * layout.size), True, 0)):
        backend = load(str(mixtral), context_length=64, memory=layout.size + needed - missing)
        plan = backend.plan
        assert (bool(plan.streamed), plan.slots_of_experts) == (streams, slots)
        assert f"{slots} of 4 experts of each layer in" in backend.notes[0]
        assert plan.pinned_bytes + plan.pool_bytes <= layout.size - missing
        assert (backend.capabilities.experts, backend.capabilities.streams) == ((4, 2), streams)
        backend.close()
    with pytest.raises(NoRoom, match="for the experts of one layer"):
        load(str(mixtral), context_length=64, memory=needed + layout.size // 5)


IN_LAYER, OF_HEAD = "model.layers.0.mlp.", "mtp.layers.0.mlp."
EACH = [f"experts.{i}.{part}.weight" for i in range(2) for part in ("gate_proj", "up_proj", "down_proj")]
OTHERS = [name.replace("gate_proj", "w1").replace("up_proj", "w3") for name in EACH]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
STARTS = [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("names", "starts"),
    [
        ([IN_LAYER + name for name in EACH], STARTS),
        ([f"language_model.{IN_LAYER}{name}" for name in EACH], STARTS),
        ([IN_LAYER + name for name in OTHERS], STARTS),
        ([IN_LAYER + name for name in BOTH], [[0, 2], [1, 3], [4, 5]]),
        ([OF_HEAD + name for name in EACH], None),
        ([before + name for before in (IN_LAYER, OF_HEAD) for name in EACH], STARTS),
        ([IN_LAYER + name for name in EACH[:5]], None),
        ([f"{IN_LAYER}shared_{name}" for name in EACH], None),
    ],
)
def test_experts_are_found_by_their_names(names, starts):
    """In units of a matrix."""
    model, unit = nn.Module(), 4 * 8 * 8
    model.experts = SwitchGLU(8, 8, 2)
    shapes = [(2, 16, 8), (2, 8, 8)] if "gate_up" in names[0] else [(8, 8)] * len(names)
    at = np.cumsum([0, *(math.prod(shape) * 4 for shape in shapes)]).tolist()
    stored = {
        name: (0, Stored(name, "F32", shape, start, stop - start))
        for name, shape, start, stop in zip(names, shapes, at[:-1], at[1:], strict=True)
    }
    found = find_experts(model, lambda path: 0, stored)
    if starts is None:
        assert found == []
    else:
        parts = [form.name.partition("_")[0] for form in found[0].forms]
        places = dict(zip(parts, found[0].layer.places, strict=True))
        assert [[one.start // unit for (one,) in places[part]] for part in ("gate", "up", "down")] == starts
        assert sum(tensor.size for tensor in found[0].tensors) == 6 * unit


def test_whole_scales_of_experts_are_found_too():
    """MLX computes with them on a GPU only."""
    module = SwitchGLU(32, 32, 3)
    for name in ("gate_proj", "up_proj", "down_proj"):
        module[name] = module[name].to_quantized(16, 4, "nvfp4", True)
    model, kinds = nn.Module(), {mx.uint32: "U32", mx.uint8: "U8", mx.float32: "F32"}
    model.experts = module
    stored = {
        f"experts.{name}": (0, Stored(name, kinds[array.dtype], array.shape, 1000 * i, array.nbytes))
        for i, (name, array) in enumerate(tree_flatten(module.parameters()))
    }
    [found] = find_experts(model, lambda path: 0, stored)
    assert {form.name: form.size for form in found.forms}["up_proj.global_scale"] == 4
    assert found.layer.bytes_each == sum(array.nbytes for _, array in tree_flatten(module.parameters())) // 3
