"""Mixtures larger than memory on PyTorch: chosen experts are read, and the bits are those of the model in memory."""

import gc
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial

import contract
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'edgespec[torch]'")

from cards import GIB
from cards import cards as cards
from conftest import few
from edgespec.backends.torch import backend as backend_module
from edgespec.backends.torch import experts as experts_module
from edgespec.backends.torch import loading as loading_module
from edgespec.backends.torch.backend import load
from edgespec.backends.torch.engine import engine
from edgespec.backends.torch.experts import ExpertFolder, Slots, by_slots, find_folder
from edgespec.backends.torch.loading import WORKSPACE, Placement, work_bytes
from edgespec.backends.torch.offload import HostCopies
from folder_texts import check_head_over_pools
from hf_models import add_head, save, tiny_model, torch
from same_bits import Pair, check_failing_disk, check_given_up_passes, do_everything, replayed
from test_heads_torch import head_folder
from test_torch import at_home, needs, needs_bitsandbytes

from edgespec.errors import Interrupted, ModelError, NoRoom
from edgespec.loading.timed_pass import time_pass
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.weights import expert_memory, experts
from edgespec.weights.plan import Pool

LAYERS = 7
DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
OPTIONS = {"context_length": 64, "budget": 8, "sessions": 2, "threads": 1, "remember": False, "device": "cpu"}
HYBRIDS = ("granite", "qwen3-next", "nemotron-h moe")
HEADS = {"glm4 moe": {"num_hidden_layers": 3}, "qwen3-next": {}, "nemotron-h moe": {}}  # with heads in their folders


def many_layers(family):
    if family == "nemotron-h moe":
        return {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "moe", "moe"]}
    kinds = {"gpt-oss": ["sliding_attention", "full_attention"], "granite": ["mamba", "attention"]}
    kinds["qwen3-next"] = ["linear_attention", "full_attention"]
    return {"num_hidden_layers": LAYERS} | ({"layer_types": (kinds[family] * 4)[:LAYERS]} if family in kinds else {})


def make(folder, family, *, stacked=False, **changes):
    """As the hub has such a folder, or as transformers computes: with all experts of a layer in a tensor."""
    model = tiny_model(family, **many_layers(family) | changes)
    torch.manual_seed(1)
    for name, one in model.named_parameters():  # routers that are not all zeros
        if "gate.weight" in name or "router.weight" in name:
            torch.nn.init.normal_(one.data)
    save(model, folder)
    if stacked:
        model.save_pretrained(folder, save_original_format=False)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return make(tmp_path_factory.mktemp("torch") / "mixtral", "mixtral")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Tiny weights count, and nothing else does."""
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    monkeypatch.setattr(backend_module, "MARGIN", 0)
    monkeypatch.setattr(backend_module, "_on_cpu", type("Nobody", (set,), {"add": lambda *_: None})())
    monkeypatch.setattr(experts, "HUGE", 1)
    monkeypatch.setattr(ExpertFolder, "work_bytes", lambda *_: 0)


@pytest.fixture
def pooled(monkeypatch):
    """Loads a folder with so many slots for a layer, or where layers are streamed, too (0); or with these pools.

    With `card` the processor acts as a card that has so many.
    """
    made = []

    def get(folder, slots=0, given=(), card=0, **options):
        plan_pools, calls = experts_module.plan_pools, []

        def choose_placement(sizes, *_):
            calls.append(sizes)
            if len(calls) == 1:  # with experts
                raise NoRoom("experts")
            streamed = [] if slots else [1, 2, 4, 5]
            return Placement(streamed, streamed, 2, [(0, range(len(sizes)))])

        def plan(found, *rest):
            pools = tuple(given) or experts.pools_of(found.layers, slots / found.layers[0].count)
            on_card = list[Pool]()
            for _, numbers in rest[-1].runs if card else ():
                at = [number for number, layer in enumerate(found.layers) if layer.index in numbers]
                some = experts.pools_of([found.layers[number] for number in at], card / found.layers[0].count)
                on_card += [replace(pool, layers=tuple(at[i] for i in pool.layers)) for pool in some]
            return replace(plan_pools(found, *rest), pools=pools, device_pools=tuple(on_card))

        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "choose_placement", choose_placement)
            patch.setattr(backend_module, "plan_pools", plan)
            patch.setattr(backend_module, "PLENTY", 1 << 60)
            made.append(load(str(folder), **OPTIONS | ({"copies": HostCopies} if card else {}) | options))
        assert made[-1].mixture
        assert made[-1].capabilities.streams == (not slots)
        return made[-1]

    yield get
    for backend in made:
        backend.close()


FOLDERS = {name: (name, {}) for name in ("mixtral", "qwen3 moe", "gpt-oss", "glm4 moe", *HYBRIDS)} | {
    "mixtral, stacked": ("mixtral", {"stacked": True}),
    "granite, stacked": ("granite", {"stacked": True}),
    "qwen3 moe, 3 of 9": ("qwen3 moe", {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40}),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [0, 1, 2.4])
@pytest.mark.parametrize("name", FOLDERS)
def test_to_the_bit(name, slots, tmp_path, pooled):
    family, changes = FOLDERS[name]
    folder = make(tmp_path / "model", family, **changes)
    resident, backend = load(str(folder), **OPTIONS), pooled(folder, slots)
    # Where weights are streamed, works of a hybrid share passes.
    resident.capabilities = replace(resident.capabilities, streams=backend.capabilities.streams)
    pair = Pair(resident, backend)
    do_everything(pair, 1)
    for number in range(2):
        pair.each(number, lambda session: session.commit([]))
    pair.forward((0, list(range(33)), list(range(-1, 32))), (1, [7], [-1]))
    resident.close()
    wanted, hits, read = backend.mixture.memory.counted
    assert (slots > 1) <= hits < wanted
    assert read > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [0, 1, 2.4, 4])
@pytest.mark.parametrize("card", [1, 2.4, 4])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "granite, stacked"])
def test_a_card_has_pools_of_its_own(name, card, slots, tmp_path, pooled):
    """What it lacks comes from memory, and from disk what is not there."""
    family, changes = FOLDERS[name]
    folder = make(tmp_path / "model", family, **changes)
    resident, backend = load(str(folder), **OPTIONS), pooled(folder, slots, card=card)
    resident.capabilities = replace(resident.capabilities, streams=backend.capabilities.streams)
    pair, memory = Pair(resident, backend), backend.mixture.memory
    do_everything(pair, 1)
    for number in range(2):
        pair.each(number, lambda session: session.commit([]))
    pair.forward((0, list(range(33)), list(range(-1, 32))), (1, [7], [-1]))
    if card == 4:
        pair.each(1, lambda session: session.commit([]))
        count, read = memory.wanted, memory.bytes_read
        pair.forward((1, [1, 2], [-1, 0]))
        assert (memory.wanted, memory.bytes_read) == (count, read)  # all experts are there, so none are counted
    else:
        assert 0 < memory.hits <= memory.wanted
        assert (memory.hits == memory.wanted) == (slots == 4)
    resident.close()


def test_a_made_up_card_with_kernels_of_its_own(mixtral, pooled, cards):
    """As of CUDA: experts are uploaded, and rows sorted by slots. A card has pools for the layers that it computes."""
    mode = cards(GIB, GIB)
    options = {"device": "cuda", "gpu_memory": None}
    resident = load(str(mixtral), **OPTIONS | options)
    backend = pooled(mixtral, 1.5, card=2, copies=None, **options)
    mode.moves.clear()
    do_everything(Pair(resident, backend), 1)
    places = backend.mixture.memory._devices.places
    found = [{str(one.device) for one in places[number].weights} for number in sorted(places)]
    assert found == [{str(device)} for device, numbers in backend.spans for _ in numbers]
    assert [str(device) for device, _ in backend.spans] == ["cuda:0", "cuda:1"]
    assert {("cpu", "cuda:0"), ("cpu", "cuda:1")} <= {*mode.moves}
    assert 0 < backend.mixture.memory.hits < backend.mixture.memory.wanted
    resident.close()


@pytest.mark.parametrize("how", ["eager", "batched_mm"])
def test_other_ways_of_computing_experts(how, tmp_path, pooled):
    """Of an older PyTorch, or that a user of transformers names; eager ones add up in the order of experts."""
    folder = make(tmp_path / "model", "gpt-oss", num_local_experts=8, num_experts=8, num_experts_per_tok=4)
    backends = load(str(folder), **OPTIONS), pooled(folder, 5)
    for backend in backends:
        backend.model.set_experts_implementation(how)
    do_everything(Pair(*backends), 1)
    backends[0].close()


@pytest.mark.parametrize("slots", few((1, 2.4), 2.4))
@pytest.mark.parametrize("card", few((0, 2), 0))
@pytest.mark.parametrize("family", few((*HEADS, "qwen3 moe", "gpt-oss", "granite"), "glm4 moe", "gpt-oss"))
def test_a_head_drafts_as_for_the_mixture_in_memory(family, card, slots, tmp_path, pooled, whole_grid):
    """Texts are those of plain decoding. A head in the folder is a mixture, too, whose experts stay in memory."""
    changes = HEADS.get(family, {})
    folder = make(tmp_path / "model", family, **changes)
    if family in HEADS:
        head_path, asked = folder, {"own_head": True}
        add_head(family, tiny_model(family, **many_layers(family) | changes), folder)
    else:
        head_path = head_folder(tmp_path / "head")
        asked = {"draft_files": (str(head_path),)}
    options, of_head = OPTIONS | {"budget": 16}, LoadOptions(context_length=64, budget=16).for_draft()
    targets = load(str(folder), **options), pooled(folder, slots, card=card, **options, **asked)
    check_head_over_pools(targets, lambda target: engine.load_head(target, str(head_path), of_head), whole_grid)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_products_of_groups_in_slots(rows, transposed, dtype, whole_grid):
    """As of stacked experts, on the processor, and as a device computes them."""
    for seed in range(100 if whole_grid else 10):
        torch.manual_seed(seed)
        count, width, out = (int(torch.randint(2, 12, ())) for _ in range(3))
        weight = torch.randn(count, 8 * width, 8 * out).to(dtype)
        numbers, x = torch.randint(0, count, (rows,)).sort()[0], torch.randn(rows, 8 * width).to(dtype)
        ends = torch.bincount(numbers, minlength=count).cumsum(0, dtype=torch.int32)
        table, pool = torch.randperm(20)[:count], torch.full((20, *weight.shape[1:]), torch.nan, dtype=dtype)
        pool[table] = weight
        if transposed:
            weight, pool = (one.mT.contiguous().mT for one in (weight, pool))
        expected = torch.nn.functional.grouped_mm(x, weight, offs=ends)
        found = torch.nn.functional.grouped_mm(x, Slots(pool, table), offs=ends)
        on_device = by_slots(torch.nn.functional.grouped_mm, x, ends, pool, table)
        assert torch.equal(expected, found)
        assert torch.equal(expected, on_device)


def test_what_else_computes_with_experts_is_refused():
    slots = Slots(torch.zeros(3, 2, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TypeError, match="cannot be used by"):
        torch.bmm(torch.zeros(4, 1, 2), slots)


def test_the_contract(mixtral, pooled):
    reused = contract.Reused(partial(pooled, mixtral, 1.5))
    for check in (
        contract.several_sessions_in_one_forward,
        contract.a_broken_work_changes_nothing,
        contract.forks_are_independent,
        contract.prefill_in_pieces,
        contract.a_saved_session_goes_on,
    ):
        check(reused)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError, Interrupted])
@pytest.mark.parametrize("slots", [0, 1.5])
def test_a_pass_given_up_within_a_layer(error, slots, mixtral, pooled, monkeypatch):
    resident = load(str(mixtral), **OPTIONS)
    check_given_up_passes(Pair(resident, pooled(mixtral, slots)), error, LAYERS - 2, 1, monkeypatch)
    resident.close()


def test_a_disk_that_fails_and_comes_back(mixtral, pooled, monkeypatch):
    resident = load(str(mixtral), **OPTIONS)
    check_failing_disk(Pair(resident, pooled(mixtral, 1.5)), monkeypatch)
    resident.close()


def test_a_file_that_shrinks(tmp_path, pooled):
    backend = pooled(make(tmp_path / "model", "mixtral"), 1.5)
    session = backend.open()
    os.truncate(tmp_path / "model" / "model.safetensors", 50_000)
    with pytest.raises(ModelError, match="has shrunk"):
        backend.forward([contract.work(session, [5], [-1])])
    assert session.token_ids == []


def test_one_process_loads_a_mixture_twice_and_closing_frees_all(mixtral, pooled):
    load(str(mixtral), **OPTIONS).close()  # threads of PyTorch itself begin
    before = len(os.listdir(DESCRIPTORS)), threading.active_count()
    both = [pooled(mixtral, 1.5), pooled(mixtral, 2)]
    do_everything(Pair(*both), 1)
    for backend in (*both, *both):
        backend.close()
    gc.collect()
    assert (len(os.listdir(DESCRIPTORS)), threading.active_count()) == before


@pytest.mark.parametrize("where", ["run_probe", "Cells"])
def test_a_load_that_fails_late_leaves_nothing(where, mixtral, pooled, monkeypatch):
    def fail(*_):
        raise ModelError("too late")

    before = len(os.listdir(DESCRIPTORS)), threading.active_count()
    monkeypatch.setattr(backend_module, where, fail)
    with pytest.raises(ModelError, match="too late"):
        pooled(mixtral, 1.5)
    gc.collect()
    assert (len(os.listdir(DESCRIPTORS)), threading.active_count()) == before


def test_layers_whose_experts_all_stay_compute_as_they_are(mixtral, pooled):
    resident = load(str(mixtral), **OPTIONS)
    backend = pooled(mixtral, 1.5, [Pool((0, 3, 5), 5), Pool((1, 6), 9), Pool((4,), 4), Pool((2,), 6)])
    modules = [layer.mlp.experts for layer in backend.model.get_decoder().layers]
    assert [isinstance(one.down_proj, Slots) for one in modules] == [True, False, False, True, False, True, False]
    assert [bool(one._forward_pre_hooks) for one in modules] == [True, False, False, True, False, True, False]
    do_everything(Pair(resident, backend), 1)
    assert 0 < backend.mixture.memory.hits < backend.mixture.memory.wanted
    resident.close()


def test_values_that_transformers_changes(mixtral, monkeypatch):
    """Same names, shapes and types, other bits: then all experts are in memory, or it is refused."""
    taken = ExpertFolder.take
    monkeypatch.setattr(ExpertFolder, "take", lambda folder, model: taken(folder, changed(folder, model)))

    def changed(folder, model):
        model.get_decoder().layers[0].mlp.experts.down_proj[2, 0, 0] += 1
        return model

    backend = load(str(mixtral), **OPTIONS, memory="8G")
    assert backend.mixture is None
    assert backend.model.get_decoder().layers[0].mlp.experts.down_proj.shape[0] == 4
    backend.close()
    with pytest.raises(NoRoom, match=r"experts are put together at load, and cannot be streamed: use a GGUF"):
        load(str(mixtral), **OPTIONS, memory="100K")


def test_a_mixture_that_clearly_fits_is_loaded_once(mixtral, monkeypatch):
    monkeypatch.setattr(backend_module, "find_folder", lambda *_: pytest.fail("it was looked into"))
    backend = load(str(mixtral), **OPTIONS)
    assert backend.mixture is None
    backend.close()


def test_no_more_is_read_than_llama_cpp_reads(mixtral, pooled, monkeypatch):
    with replayed(monkeypatch, find_folder(mixtral, None).paths) as compare:
        compare(pooled(mixtral, 1.6))


def test_a_prompt_counts_and_what_was_used_is_remembered(mixtral, pooled, monkeypatch):
    kept = []
    monkeypatch.setattr(expert_memory, "remember", lambda about, scores: kept.append((about, scores)))
    monkeypatch.setattr(expert_memory, "recall", lambda about, form: kept[-1][1] if kept else None)
    for remember in (False, True, True):
        backend = pooled(mixtral, 1.5, remember=remember)
        memory = backend.mixture.memory
        wanted, scores = memory.wanted, memory.scores
        prefill(backend, backend.open(), list(range(20)))
        assert memory.wanted == wanted  # which is of generated tokens
        assert memory.scores != scores
        backend.close()
    assert len(kept) == 2
    assert kept[0][0]["kind"] == "experts"


def test_experts_of_a_pass_are_counted(mixtral, pooled):
    made = time_pass(pooled(mixtral, 1.5), 4)
    assert 2 <= made.experts <= 4
    assert 0 <= made.hits <= 1
    assert made.read > 0


def test_memory_for_dense_weights_comes_first_and_pools_have_the_rest(mixtral):
    """And intermediate values of experts, which a model in memory takes from what is left."""
    layer, fixed = needs(mixtral, **OPTIONS)
    found, whole = find_folder(mixtral, None), fixed - WORKSPACE + LAYERS * layer
    of_experts = sum(found.sizes(LAYERS))
    backend = load(str(mixtral), **OPTIONS, memory=whole)
    assert (backend.mixture, backend.plan) == (None, None)
    backend.close()
    dense, least = layer - of_experts // LAYERS, of_experts // LAYERS
    for missing, streams, slots in ((1, False, 3), (of_experts // 2, False, 2), (of_experts + dense - least, True, 0)):
        backend = load(str(mixtral), **OPTIONS, memory=whole - missing)
        plan = backend.plan
        assert (bool(plan.streamed), plan.slots_of_experts) == (streams, slots)
        assert (bool(backend.streamers), backend.capabilities.streams) == (streams, streams)
        assert f"{slots} of 4 experts of each layer in" in backend.notes[-1]
        assert plan.pool_bytes <= max(of_experts - missing, least)
        assert backend.capabilities.experts == (4, 2)
        backend.close()
    with pytest.raises(NoRoom, match="give at least"):
        load(str(mixtral), **OPTIONS, memory=fixed - WORKSPACE)


@pytest.mark.parametrize(
    ("rooms", "counts"),
    [([60, 60], [5, 5]), ([100, 20], [8, 2]), ([109, 11], [9, 1]), ([110, 9], [10]), ([50, 50, 50], [3, 4, 3]),
     ([60, -1], [10]), ([60], [10])],
)  # fmt: skip
def test_cards_compute_layers_in_proportion_to_their_memory(rooms, counts):
    runs = experts_module.divide_layers([10] * 10, rooms)
    assert ([len(numbers) for _, numbers in runs], runs[-1][1].stop) == (counts, 10)


def test_each_card_has_pools_in_its_own_memory(mixtral, cards, monkeypatch):
    monkeypatch.setattr(backend_module, "MIN_NODES_ON_GPU", loading_module.MIN_NODES)
    layer, fixed = needs(mixtral, **OPTIONS)
    of_experts, sent = sum(find_folder(mixtral, None).sizes(LAYERS)), at_home(mixtral, **OPTIONS)
    resident = load(str(mixtral), **OPTIONS | {"sessions": 4})
    work = work_bytes(resident.model, resident.capabilities, None)
    dense = LAYERS * layer - of_experts
    free, found = [fixed + dense + of_experts // 3 - sent, work + dense + of_experts // 3], []
    for count in (1, 2):
        cards(*free[:count])
        backend = load(str(mixtral), **OPTIONS | {"device": "cuda"}, memory=4 * of_experts)
        found.append(backend.plan.device_pools)
        where = {layer: device for device, numbers in backend.spans for layer in numbers}
        places = backend.mixture.memory._devices.places
        assert {n: str(places[n].weights[0].device) for n in range(LAYERS)} == {n: str(where[n]) for n in range(LAYERS)}
        do_everything(Pair(resident, backend), 1)
        backend.close()
    assert [sum(pool.slots for pool in pools) for pools in found] == [9, 22]
    assert [pool.device for pool in found[1]] == ["Card (cuda:0)", "Card (cuda:1)"]
    assert "of 4 experts of 1 layers on Card (cuda:1)" in backend.notes[-1]
    resident.close()


def test_a_cards_memory_and_this_machines_have_pools_each(mixtral):
    layer, fixed = needs(mixtral, **OPTIONS)
    found, whole = find_folder(mixtral, None), fixed + LAYERS * layer
    of_experts, sent = sum(found.sizes(LAYERS)), at_home(mixtral, **OPTIONS)
    for missing, memory, there, here in (
        (-1, 2 * of_experts, 0, 0),
        (-1, of_experts - 1, 4, 3),  # experts cannot be put together
        (of_experts // 2, of_experts + sent, 2, 4),
        (of_experts - layer, of_experts // 3, 0, 1),
    ):
        options = OPTIONS | {"copies": HostCopies, "memory": memory, "gpu_memory": whole - missing}
        backend = load(str(mixtral), **options)
        plan = backend.plan
        assert bool(plan) == bool(here)
        if plan:
            assert experts.memory_of(found.layers, plan.pools) <= memory
            assert experts.memory_of(found.layers, plan.device_pools) <= of_experts - missing + sent
            slots = sum(pool.slots for pool in plan.device_pools) // LAYERS, plan.slots_of_experts
            assert slots == (there, here)
            assert f"{there} of 4 experts of 7 layers on cpu, {here} of each layer in" in backend.notes[-1]
        backend.close()


def test_values_between_experts_are_in_the_plan(mixtral, monkeypatch):
    monkeypatch.undo()
    found = find_folder(mixtral, None)
    assert found.work_bytes(10) == 10 * 2 * (96 + 32 + 32 + 48) * 4


@pytest.mark.parametrize(
    "options", [{"own_layers": True}, {"dtype": "bfloat16"}, pytest.param({"dtype": "nf4"}, marks=needs_bitsandbytes)]
)
def test_experts_that_cannot_be_read_as_they_are_chosen(options, mixtral):
    """All of a layer are streamed to draft with other layers; what another type makes is in memory; nf4 is refused."""
    backend = None
    with suppress(ModelError):
        backend = load(str(mixtral), **OPTIONS | options)
        assert backend.mixture is None
    assert (backend is None) == (options.get("dtype") == "nf4")


def test_no_folder_of_a_mixture(tmp_path, mixtral):
    assert find_folder(mixtral, "float32")
    assert find_folder(mixtral, "bfloat16") is None
    assert find_folder(save(tiny_model("llama"), tmp_path), None) is None
    assert find_folder(tmp_path / "nowhere", None) is None
