"""Mixtures of experts larger than memory, on llama.cpp: the same numbers as from memory, to the bit."""

import ctypes
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

from alone import Generation, served
from conftest import few
from edgespec.backends.llamacpp import engine as llamacpp_engine
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.engine import load
from edgespec.backends.llamacpp.ggml import ggml_tensor
from edgespec.backends.llamacpp.ggml.files import PROCESSOR_ONLY, all_tensors, llama_cpp, load_model
from edgespec.backends.llamacpp.ggml.ggml_tensor import GgmlTensor, is_known
from edgespec.backends.llamacpp.memory import mixture as llamacpp_mixture
from edgespec.backends.llamacpp.memory import planning as llamacpp_memory
from edgespec.backends.llamacpp.memory import skip_padding as llamacpp_sparing
from edgespec.backends.llamacpp.memory.foresight import floats
from edgespec.backends.llamacpp.memory.mixture import Mixture
from folder_texts import check_head
from head_files import write_eagle3, write_glm4moe
from hybrid_files import write_with_head
from mixture_files import EXPERTS, KINDS, LAYERS, mixtures
from test_offload_llamacpp import check_that_nothing_grows

import edgespec
from edgespec.errors import ModelError, UsageError
from edgespec.loading.exact import apply_row_class
from edgespec.loop.backend import Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill, run
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.machine.this_machine import this_machine
from edgespec.planners.auto import new_auto_state
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler
from edgespec.weights import direct_io as direct
from edgespec.weights import expert_memory, experts
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.plan import Pool, layer_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is locked and dropped on Linux only")
__all__ = ["mixtures"]

OPTIONS: dict[str, Any] = {"context_length": 512, "threads": 2, "budget": 32}
TEXT = "the theory of the one and the many, the one and the two; " * 3
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(temperature=1, seed=4),
]


@pytest.fixture(autouse=True)
def _steady_memory(monkeypatch):
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)


@pytest.fixture
def from_disk(monkeypatch, mixtures):
    """Loads a mixture with pools of so many slots; plans count in huge pages, which are larger than these models."""
    made = []

    def get(kind: str, *slots: int, **options: Any) -> LlamaBackend:
        path = str(mixtures.get(kind, kind))
        least = llamacpp_memory.ContextSize(512, 32, 1, llamacpp_memory.CHUNKS[0], "f16")
        planner = llamacpp_memory.MemoryPlanner(path, LoadOptions(**options), this_machine())
        needed = planner.needs([least])[0] + planner._drafts(replace(least, chunk=llamacpp_memory.MIN_NODES))
        memory = needed + llamacpp_memory.file_size(path) - (300 << 10)
        with monkeypatch.context() as patch:

            def pools(layers: Any, room: int) -> tuple[Pool, ...]:
                return tuple(Pool(tuple(range(len(layers)))[i :: len(slots)], one) for i, one in enumerate(slots))

            patch.setattr(experts, "most_pools", pools)
            patch.setattr(llamacpp_memory, "memory_of", lambda layers, pools: 0)
            patch.setattr(llamacpp_memory, "pool_reserve", lambda room: 0)
            backend = load(path, memory=memory, **OPTIONS, kv_type="f16", **options)
        made.append(backend)
        assert backend._hooks is not None
        return backend

    yield get
    for backend in made:
        backend.close()


def logits_of(backend: LlamaBackend) -> list[Any]:
    """Of a prompt, a tree, another, and what comes after one of its paths."""
    session, found = backend.open(), []
    ids = backend.vocab.encode(TEXT, add_bos=False, parse_special=False)
    last = prefill(backend, session, ids, want_last=True)
    found.append(last[0].row(last[1]))
    for parents in ([-1, 0, 0, 1], [-1], [-1, 0, 1, 2, 1, 0]):
        tokens = np.array([5 * i + len(parents) for i in range(len(parents))], np.int32)
        nodes = np.arange(len(parents), dtype=np.int32)
        logits = backend.forward([Work(session, tokens, np.array(parents, np.int32), nodes)])[0]
        found += [logits.row(node) for node in nodes.tolist()]
        session.commit([0])
    session.close()
    return found


@pytest.mark.parametrize("slots", [[EXPERTS], [EXPERTS + 3], [EXPERTS, EXPERTS + 1], [LAYERS * EXPERTS]])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_model_in_memory(kind, slots, mixtures, from_disk):
    there = load(str(mixtures[kind]), kv_type="f16", repack=False, **OPTIONS)
    expected = logits_of(there)
    there.close()
    backend = from_disk(kind, *slots)
    memory = backend.mixture.memory
    assert backend.capabilities.experts == (EXPERTS, KINDS[kind][1])
    for before in ((0, 0), None):  # with empty pools, and as they were left
        before = before or (memory.wanted, memory.hits)
        for row, right in zip(logits_of(backend), expected, strict=True):
            assert np.array_equal(row, right)
    wanted, hits = memory.wanted - before[0], memory.hits - before[1]
    assert 0 < hits <= wanted
    assert (hits == wanted) == (slots == [LAYERS * EXPERTS])


@pytest.mark.parametrize("kind", few(KINDS, "qwen3 moe", "gpt-oss"))
def test_texts_are_equal(kind, mixtures, from_disk):
    """With and without drafting, streamed and in memory, at several temperatures."""
    target = from_disk(kind, EXPERTS + 3)
    apply_row_class(target, str(mixtures[kind]), remember=False)
    draft = load(str(mixtures[kind]), in_order=False, **OPTIONS)
    ids = target.vocab.encode(TEXT, add_bos=False, parse_special=False)
    for i, sampling in enumerate(SAMPLINGS):
        texts = []
        for planner in (NonePlanner(), SssdPlanner() if i == 1 else SpecExecPlanner(draft, depth=4, beam=3)):
            session, text = target.open(), []
            for step in Generation(
                target, session, planner, ids, sampling, max_tokens=12, budget=6, stats=GenerationStats(), log_probs=0
            ).steps():
                text += zip(step.tokens, step.log_probs, strict=True)
            texts.append(text)
            session.close()
            planner.close()
        assert texts[0] == texts[1]
    draft.close()


@pytest.fixture(scope="module")
def headed(mixtures, tmp_path_factory):
    """Kind -> files of a mixture and of its head, which is one, too, where it is in the mixture's own file."""
    folder = tmp_path_factory.mktemp("heads")
    own = write_glm4moe(folder / "glm4moe.gguf", experts=EXPERTS, layers=LAYERS + 1, bits=8)
    recurrent = write_with_head(folder / "qwen3next.gguf", arch="qwen3next")
    eagle = write_eagle3(folder / "eagle3.gguf", width=128, layers=(0, 1, 2))
    return {"own": (own, own), "recurrent": (recurrent, recurrent)} | {kind: (mixtures[kind], eagle) for kind in KINDS}


@pytest.mark.parametrize("kind", few(("own", "recurrent", *KINDS), "own", "gpt-oss"))
def test_a_head_drafts_as_for_the_mixture_in_memory(kind, headed, from_disk, whole_grid):
    """Texts are those of plain decoding. A head's own experts stay in memory: no pool has them."""
    path, head_path = map(str, headed[kind])
    options, found = {"own_head": path == head_path, "draft_files": (head_path,) * (path != head_path)}, []
    there = load(path, kv_type="f16", repack=False, **OPTIONS, own_head=path == head_path)
    for target in (
        there,
        *(from_disk(path, slots, **options) for slots in ((EXPERTS, EXPERTS + 3) if whole_grid else (EXPERTS + 3,))),
    ):
        head = llamacpp_engine.engine.load_head(target, head_path, LoadOptions(**OPTIONS).for_draft())
        apply_row_class(target, path, remember=False)
        found.append(check_head(target, head, whole_grid))
        head.close()
    there.close()
    assert all(one == found[0] for one in found)
    assert max(length for length, _ in found[0]) > 1 or kind == "recurrent"
    memory = target.mixture.memory
    assert 0 < memory.hits < memory.wanted


def test_what_passes_want_is_learned_with_a_head(headed, from_disk):
    path, head_path = map(str, headed["own"])
    target = from_disk(path, EXPERTS, own_head=True)
    head = llamacpp_engine.engine.load_head(target, head_path, LoadOptions(**OPTIONS).for_draft())
    state = new_auto_state(target.capabilities.streams, target.capabilities.experts)
    planner = SpecExecPlanner(head, depth=4)
    served(Scheduler(target, [planner], budget=2, pace=state), [Request([1, 2, 3], SamplingParams(), max_tokens=6)])
    assert state.target.experts[:2] == (EXPERTS, 2)
    assert state.power.hoped > 0


@pytest.mark.parametrize(("kind", "draft"), [("own", "own"), ("gpt-oss", "eagle3"), ("gpt-oss", "qwen3 moe")])
def test_a_draft_pass_reads_no_experts_that_a_token_does_not_use(kind, draft, headed, mixtures):
    """A head in the model's file computes its output with the model's."""
    path, head = headed[kind]
    file = {"own": path, "eagle3": head}.get(draft) or mixtures[draft]
    tensors = [one for one in all_tensors(str(file)) if draft != "own" or layer_of(one) == LAYERS + 1]
    share = {"own": 2 / EXPERTS, "qwen3 moe": 3 / EXPERTS}.get(draft, 1.0)
    expected = sum(one.size * (share if "_exps." in one.name else 1) for one in tensors)
    expected += sum(one.size for one in all_tensors(str(path)) if draft == "own" and one.name == "output.weight")
    own = {"own_head": True} if draft == "own" else {"draft_files": (str(file),)}
    planner = llamacpp_memory.MemoryPlanner(str(path), LoadOptions(**OPTIONS, **own), this_machine())
    assert planner._draft_reads() == expected


def test_a_disk_error_in_the_middle(monkeypatch, from_disk):
    right = logits_of(from_disk("mixtral", EXPERTS + 3))
    backend = from_disk("mixtral", EXPERTS + 3)  # whose slots are empty
    real, left = direct.read_unaligned, 7

    def read(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("the disk is on fire")
        real(*arguments)

    monkeypatch.setattr(direct, "read_unaligned", read)
    session = backend.open()
    with pytest.raises(ModelError, match=r"experts of layer \d cannot be read: the disk is on fire"):
        prefill(backend, session, [1, 2, 3, 4, 5, 6, 7, 8], want_last=True)
    session.close()
    monkeypatch.setattr(direct, "read_unaligned", real)
    assert all(np.array_equal(*rows) for rows in zip(logits_of(backend), right, strict=True))


def test_ctrl_c_while_an_expert_is_read(monkeypatch, from_disk):
    backend = from_disk("mixtral", EXPERTS + 3)
    right = logits_of(backend)
    real, before, pressed = direct.read_unaligned, signal.signal(signal.SIGINT, signal.default_int_handler), list[int]()

    def read(*arguments: Any) -> None:
        if not pressed:
            pressed.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)  # the layer's last weights are not read yet when the pass ends
        real(*arguments)

    session = backend.open()
    try:
        monkeypatch.setattr(direct, "read_unaligned", read)
        with pytest.raises(KeyboardInterrupt):
            prefill(backend, session, [1, 2, 3, 4, 5, 6, 7, 8], want_last=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert session.token_ids == []
    session.close()
    monkeypatch.setattr(direct, "read_unaligned", real)
    assert all(np.array_equal(*rows) for rows in zip(logits_of(backend), right, strict=True))


def test_two_of_one_file_in_two_threads_on_a_slow_disk(monkeypatch, from_disk):
    """Reads that take any time, and end in any order, change nothing."""
    both, draw, real = (
        [from_disk("mixtral", slots) for slots in (EXPERTS, EXPERTS + 3)],
        Random(1),
        direct.read_unaligned,
    )
    right = logits_of(both[0])

    def slowly(*arguments: Any) -> None:
        time.sleep(draw.choice([0, 0.001, 0.004]))
        real(*arguments)

    monkeypatch.setattr(direct, "read_unaligned", slowly)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(logits_of, both):
            assert all(np.array_equal(*rows) for rows in zip(found, right, strict=True))
    assert all(backend.wait_seconds > 0 for backend in both)


def test_llama_cpp_finds_its_own_weights_after_every_pass(from_disk):
    """Whoever is not told of slots finds experts, and nothing changes what they are."""
    backend = from_disk("gpt-oss", EXPERTS + 3)
    tensors = [tensor for layer in backend.mixture._layers for tensor, *_ in layer.tensors]
    assert len(tensors) == LAYERS * 6  # weights and biases
    before = [bytes(tensor) for tensor in tensors]
    logits_of(backend)
    assert [bytes(tensor) for tensor in tensors] == before


@pytest.mark.parametrize(("kind", "step"), [("qwen3 moe", 1), ("gpt-oss", 2)], ids=["none", "others are"])
def test_a_layer_that_is_not_watched_is_right(from_disk, kind, step):
    """As if llama.cpp had changed its graph: experts come from the mapped file then."""
    backend = from_disk(kind, EXPERTS + 3)
    right = logits_of(backend)
    backend.mixture._before.difference_update(sorted(backend.mixture._before)[::step])
    for _ in range(2):
        assert all(np.array_equal(*rows) for rows in zip(logits_of(backend), right, strict=True))


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "glm4moe", "deepseek2", "lfm2moe", "gemma4"])
def test_a_router_that_is_shown_its_own_layers_input_chooses_as_the_model(family, tmp_path, monkeypatch, from_disk):
    """With biases of logits and of probabilities. Gemma's reads something else than its experts, so it has none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "vulkan"))
    models, seen, choose = import_module("models"), list[bool](), Mixture._choose
    monkeypatch.setattr(expert_memory, "SURE", 1)

    def compare(mixture: Mixture, number: int, tensor: int) -> None:
        sources = GgmlTensor.from_address(tensor).src
        rows = floats(sources[1])
        if number in mixture._routers and not mixture._prompt and rows is not None:
            chosen = mixture._chosen_by_row(sources[2], llamacpp_mixture.numbers_at(sources[2]))
            seen.append(mixture._routers[number].best(rows, models.USED) == np.unique(chosen).tolist())
        choose(mixture, number, tensor)

    monkeypatch.setattr(Mixture, "_choose", compare)
    backend = from_disk(str(models.write(tmp_path / "model.gguf", family, "F32")), 3 * models.EXPERTS)
    logits_of(backend)
    assert seen == [True] * (0 if family == "gemma4" else 3 * len(backend.mixture.memory.layers))


def test_what_a_router_predicts_is_read_ahead_and_changes_no_bit(monkeypatch, mixtures, from_disk):
    there = load(str(mixtures["qwen3 moe"]), kv_type="f16", repack=False, **OPTIONS)
    expected = logits_of(there)
    there.close()
    monkeypatch.setattr(expert_memory, "LEAST_RIGHT", 0)  # these routers are random
    memory = (backend := from_disk("qwen3 moe", 2 * EXPERTS)).mixture.memory
    for _ in range(3):
        assert all(np.array_equal(*rows) for rows in zip(logits_of(backend), expected, strict=True))
    assert 0 < memory.right < memory.predicted


def test_factors_of_experts_are_those_of_the_experts(mixtures, from_disk):
    """As Gemma 4 has them: an operation behind the products needs the experts' own numbers, not those of slots."""
    there = load(str(mixtures["scaled"]), kv_type="f16", repack=False, **OPTIONS)
    right = logits_of(there)
    there.close()
    backend = from_disk("scaled", EXPERTS + 3)
    for _ in range(2):
        assert all(np.array_equal(*rows) for rows in zip(logits_of(backend), right, strict=True))
    apply_row_class(backend, str(mixtures["scaled"]), remember=False)
    logits_of(backend)  # with padding
    assert len(backend.mixture._later) == LAYERS


def test_an_operation_that_does_not_get_the_experts_numbers_fails_the_pass(monkeypatch, from_disk):
    """As if llama.cpp had named it otherwise; the numbers of slots are here some of experts, too."""
    backend = from_disk("scaled", EXPERTS)
    others = {name + b"?": number for name, number in backend.mixture._later.items()}
    monkeypatch.setattr(backend.mixture, "_later", others)
    with pytest.raises(ModelError, match="has not told which operation of layer 0 needs experts' numbers"):
        prefill(backend, backend.open(), [1, 2, 3])


def test_a_graph_that_is_not_known(monkeypatch, from_disk):
    monkeypatch.delitem(llamacpp_mixture.USERS, b"ADD_ID")
    backend = from_disk("gpt-oss", EXPERTS + 3)  # whose biases are then users of experts' numbers that nobody knows
    assert backend.mixture is None
    assert backend.capabilities.experts is None
    assert backend.streamer.plan.slots_of_experts == -1
    assert any("of experts as the page cache keeps them" in note for note in backend.notes)
    assert not any("experts of each layer" in note for note in backend.notes)
    assert any("left to the page cache" in note and "needs the experts' numbers" in note for note in backend.notes)
    assert np.isfinite(logits_of(backend)[0]).all()


def test_a_system_that_cannot_move_memory(monkeypatch, from_disk):
    """Experts need no such system."""
    right = logits_of(from_disk("mixtral", EXPERTS + 3))
    monkeypatch.setenv("EDGESPEC_PAGE_CACHE", "1")
    backend = from_disk("mixtral", EXPERTS + 3)
    assert all(np.array_equal(*rows) for rows in zip(logits_of(backend), right, strict=True))
    assert backend.mixture.memory.bytes_read


def test_the_page_cache_is_spared_experts_of_padding(monkeypatch, from_disk, mixtures):
    monkeypatch.setitem(OPTIONS, "exact", "narrow")
    there, found, left = load(str(mixtures["mixtral"]), kv_type="f16", **OPTIONS), [], []
    monkeypatch.setattr(llamacpp_memory.MemoryPlanner, "find_expert_layers", lambda planner: [])
    cached, skip = from_disk("mixtral", EXPERTS + 3), ggml_tensor.skip_rows
    monkeypatch.setattr(llamacpp_sparing, "skip_rows", lambda *given: left.append(given) or skip(*given))
    for backend in (there, cached):
        apply_row_class(backend, str(mixtures["mixtral"]), "narrow", remember=False)
        left.clear()
        found.append(logits_of(backend))
        assert left
    there.close()
    assert cached.mixture is None
    assert all(np.array_equal(*rows) for rows in zip(*found, strict=True))


def test_what_was_used_is_not_remembered_if_the_user_says_so(monkeypatch, mixtures, from_disk):
    def refused(entry, draft, models_file, options, **_):
        raise UsageError(f"remember is {options.remember}")

    with monkeypatch.context() as patch:
        patch.setattr("edgespec.model.open_pair", refused)
        with pytest.raises(UsageError, match="remember is False"):
            edgespec.load(str(mixtures["mixtral"]), remember=False)
    for remember in (True, False):
        kept = []
        monkeypatch.setattr(expert_memory, "remember", lambda about, value, kept=kept: kept.append(about["kind"]))
        if not remember:
            monkeypatch.setattr(expert_memory, "recall", lambda about, form: pytest.fail("experts are looked up"))
        backend = from_disk("mixtral", EXPERTS + 3, remember=remember)
        logits_of(backend)
        backend.close()
        assert kept == ["experts"] * remember


def test_what_was_used_is_remembered(monkeypatch, tmp_path, from_disk):
    monkeypatch.delenv("EDGESPEC_NO_MEMORY_OF_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    first = from_disk("mixtral", EXPERTS + 3)
    logits_of(first)
    scores = np.array(first.mixture.memory.scores)
    first.close()
    second = from_disk("mixtral", EXPERTS + 3).mixture.memory
    assert np.allclose(second.scores, scores, atol=1e-3)
    assert second.bytes_read == 0


@pytest.mark.parametrize("slots", [[EXPERTS], [LAYERS * EXPERTS]])
def test_the_first_token_reads_the_experts_that_it_uses(slots, monkeypatch, tmp_path, from_disk):
    """Nothing else, whether or not it is remembered which were used; and the bits of all loads are equal."""
    monkeypatch.delenv("EDGESPEC_NO_MEMORY_OF_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows, used, want = [], set(), ExpertMemory.want
    monkeypatch.setattr(
        ExpertMemory,
        "want",
        lambda memory, layer, some, *rest: (
            used.update((layer, one) for one in some) or want(memory, layer, some, *rest)
        ),
    )
    for _ in range(2):
        used.clear()
        backend = from_disk("qwen3 moe", *slots)
        memory = backend.mixture.memory
        logits, node = prefill(backend, backend.open(), [5, 9, 2, 7, 5, 9, 1, 4], want_last=True)
        assert 0 < memory.bytes_read <= 1.1 * len(used) * memory.layers[0].bytes_each
        rows.append(logits.row(node).copy())
        backend.close()
    assert np.array_equal(*rows)


def test_a_pass_tells_how_many_experts_it_has_chosen(from_disk):
    backend, nodes = from_disk("qwen3 moe", EXPERTS), np.arange(5, dtype=np.int32)
    session = backend.open()
    prefill(backend, session, [1, 2, 3])
    for count in (1, 5):
        ran = run(backend, [Work(session, nodes[:count] + 7, nodes[:count] - 1, nodes[:count])])[1]
        session.commit([])
        assert (ran.experts == 3) if count == 1 else (3 < ran.experts <= EXPERTS)


def mapped_pages(path: str) -> tuple[int, set[str]]:
    """Bytes of a file's mappings that are in memory, and their flags."""
    size, flags, ours = 0, set[str](), False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for name, *rest in map(str.split, lines):
            ours = rest[-1:] == [path] if "-" in name else ours
            size += 1024 * int(rest[0]) if ours and name == "Rss:" else 0
            flags |= {*rest} if ours and name == "VmFlags:" else set()
    return size, flags


def test_a_load_reads_no_weights_that_stay_on_disk(from_disk, mixtures, monkeypatch):
    """llama.cpp would have the system read the whole file; nor does Linux read single pages of it afterwards."""
    path, seen, start = os.path.realpath(mixtures["mixtral"]), [], llamacpp_engine.start_streaming
    model = load_model(path, load_mode=llama_cpp.LLAMA_LOAD_MODE_MMAP, **PROCESSOR_ONLY)
    whole, _ = mapped_pages(path)
    llama_cpp.llama_model_free(model)
    assert whole > os.path.getsize(path) // 2
    monkeypatch.setattr(
        llamacpp_engine, "start_streaming", lambda *given: seen.append(mapped_pages(path)) or start(*given)
    )
    backend = from_disk("mixtral", EXPERTS + 3)
    [(read, flags)] = seen
    assert read < whole // 4
    assert "rd" in flags
    assert "rr" not in flags
    assert np.isfinite(logits_of(backend)[0]).all()


def test_padding_reads_nothing(from_disk, mixtures):
    backend = from_disk("mixtral", EXPERTS + 3)
    apply_row_class(backend, str(mixtures["mixtral"]), remember=False)
    assert backend.capabilities.exact.trees.least == 2
    session, memory = backend.open(), backend.mixture.memory
    prefill(backend, session, [1, 2, 3])
    before = memory.wanted
    backend.forward([Work(session, np.array([9], np.int32), np.array([-1], np.int32), np.array([0], np.int32))])
    assert memory.wanted - before <= 2 * (LAYERS - 1) + 4  # of the last layer both rows are computed for the output


@pytest.mark.parametrize("kind", few(KINDS, "gpt-oss"))
def test_padding_computes_nothing_and_changes_no_bit(kind, from_disk, mixtures, monkeypatch):
    there = load(str(mixtures[kind]), kv_type="f16", exact="narrow", **OPTIONS)
    streamed, found, left = from_disk(kind, EXPERTS + 3), [], []
    skip = ggml_tensor.skip_rows
    for module in (llamacpp_mixture, llamacpp_sparing):
        monkeypatch.setattr(module, "skip_rows", lambda *given: left.append(given) or skip(*given))
    for backend in (there, streamed):
        apply_row_class(backend, str(mixtures[kind]), "narrow", remember=False)
        assert backend.capabilities.exact.trees.least == 2
        session = backend.open()
        prefill(backend, session, [1, 2, 3])
        for token in (9, 5, 7):
            work = Work(session, np.array([token], np.int32), np.array([-1], np.int32), np.array([0], np.int32))
            found.append(backend.forward([work])[0].row(0))
            session.commit([0])
        assert left
        left.clear()
    there.close()
    alone = load(str(mixtures[kind]), kv_type="f16", repack=False, **OPTIONS)  # of its padding all is computed
    alone.keep_to(there.capabilities.exact)
    session = alone.open()
    prefill(alone, session, [1, 2, 3])
    for token, row in zip((9, 5, 7), found, strict=False):
        work = Work(session, np.array([token], np.int32), np.array([-1], np.int32), np.array([0], np.int32))
        assert np.array_equal(alone.forward([work])[0].row(0), row)
        session.commit([0])
    assert not left
    alone.close()
    for row, right in zip(found[3:], found[:3], strict=True):
        assert np.array_equal(row, right)


def test_ctrl_c_while_padding_is_spared(mixtures, monkeypatch, capfd):
    """Python handles a signal in the callback, from where no exception comes through: it has to wait for the end."""
    there, pressed = load(str(mixtures["mixtral"]), kv_type="f16", exact="narrow", **OPTIONS), list[int]()
    apply_row_class(there, str(mixtures["mixtral"]), "narrow", remember=False)
    session, skip, node = there.open(), ggml_tensor.skip_rows, np.array([0], np.int32)
    prefill(there, session, [1, 2, 3])
    work = Work(session, node + 9, node - 1, node)

    def press(*given):
        if not pressed:
            pressed.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return skip(*given)

    monkeypatch.setattr(llamacpp_sparing, "skip_rows", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            there.forward([work])
        assert pressed
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert session.token_ids == [1, 2, 3]
    row = there.forward([work])[0].row(0)
    session.close()
    session = there.open()
    prefill(there, session, [1, 2, 3])
    assert np.array_equal(there.forward([replace(work, session=session)])[0].row(0), row)
    there.close()
    assert "ignored" not in capfd.readouterr().err


def test_too_little_memory_says_how_much_is_needed(mixtures):
    with pytest.raises(UsageError, match=r"needs at least .* for the experts of one layer"):
        load(str(mixtures["mixtral"]), memory=1 << 20, **OPTIONS)


def test_experts_that_are_cut_short(tmp_path, mixtures):
    whole = mixtures["mixtral"].read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ModelError, match=r"short\.gguf"):
        load(str(path), **OPTIONS)


def test_the_layout_of_tensors_is_known(monkeypatch, from_disk):
    """`GgmlTensor` is the struct of this build, and another one is noticed."""
    backend = from_disk("mixtral", EXPERTS + 3)
    operations = backend._hooks.operations(backend.context)
    assert len(operations) > 50
    assert all(map(is_known, operations))
    fields = [("src", ctypes.c_void_p * 12) if name == "src" else (name, kind) for name, kind in GgmlTensor._fields_]
    monkeypatch.setattr(ggml_tensor, "GgmlTensor", type("Other", (ctypes.Structure,), {"_fields_": fields}))
    assert not any(map(is_known, operations))


def test_passes_do_not_grow(from_disk):
    """Experts come and go all the time."""
    backend = from_disk("gpt-oss", EXPERTS + 3)
    session, nodes = backend.open(), np.arange(2, dtype=np.int32)
    prefill(backend, session, [1, 2, 3])

    def passes(count):
        wanted = backend.mixture.memory.wanted
        for number in range(count):
            session.rewind(3)
            backend.forward([Work(session, nodes + number % 50, nodes - 1, nodes[:0])])
        assert backend.mixture.memory.wanted > wanted + count

    check_that_nothing_grows(passes, 50, 120, 4 << 20)
    session.close()
