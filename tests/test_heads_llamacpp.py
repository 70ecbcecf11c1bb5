"""Heads on llama.cpp, of made-up files: EAGLE-3 for a Llama, and the head in a qwen35's own file."""

import ctypes
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import llama_cpp
from conftest import Run, few
from contract import (
    CHECKS,
    TREE,
    Reused,
    a_saved_session_goes_on,
    a_tree_with_several_tops,
    random_tokens,
    work,
)
from edgespec.backends.llamacpp import heads, states
from edgespec.backends.llamacpp.context import ContextSize
from edgespec.backends.llamacpp.engine import engine, load
from edgespec.backends.llamacpp.ggml.files import all_tensors, load_model, loaded_tensors
from edgespec.backends.llamacpp.heads import LlamaHeadSession
from edgespec.backends.llamacpp.memory import planning
from edgespec.backends.llamacpp.memory.gpu import Buffers
from folder_texts import states_of
from gemma4_files import copy, write_assistant, write_gemma4
from gguf_files import small_llama
from gguf_writer import add, finish
from head_files import gguf, write_eagle3, write_glm4moe, write_step35
from hybrid_files import write_with_head
from test_offload_llamacpp import last_row, least_memory

import edgespec
import edgespec.loading.pair as pair_module
from edgespec.errors import Closed, Interrupted, ModelError
from edgespec.loop.backend import GivesStates
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.loop.tree import path_to
from edgespec.machine.this_machine import this_machine

TEXT = [5, 40, 17, 99, 23, 201, 64, 8, 150, 77, 31, 12]
KINDS = ["eagle3", "own", "mixture", "sidecar", "assistant", "chain"]  # "own" and "sidecar" have recurrent targets
OPTIONS = {"context_length": 256, "threads": 1, "budget": 32}
HELD = 1 << 26  # bytes of this program: messages round what is above 1 GiB to more than a head


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Kind -> files of a target and of its head."""
    folder = tmp_path_factory.mktemp("heads")
    own, mixture = write_with_head(folder / "qwen35.gguf"), write_glm4moe(folder / "glm4moe.gguf")
    chain = write_step35(folder / "step35.gguf")
    return {
        "eagle3": (small_llama(folder / "llama.gguf"), write_eagle3(folder / "eagle3.gguf")),
        "own": (own, own),
        "mixture": (mixture, mixture),
        "chain": (chain, chain),
        "assistant": (write_gemma4(folder / "gemma4.gguf", wide=8), write_assistant(folder / "assistant.gguf")),
        "sidecar": (write_with_head(folder / "trunk.gguf", "model"), write_with_head(folder / "mtp.gguf", "head")),
    }


@contextmanager
def pair(target: Path, head: Path, **more: Any):
    options = OPTIONS | more
    backend = load(str(target), own_head=target == head, **options)
    try:
        memoryless = {name: value for name, value in options.items() if name not in ("memory", "draft_files")}
        yield backend, engine.load_head(backend, str(head), LoadOptions(**memoryless).for_draft())
    finally:
        backend.close()


def test_a_head_uses_no_gpu_where_its_target_uses_none(files, monkeypatch):
    devices = list[int]()

    def load_head_file(path, **options):
        devices.append(ctypes.c_void_p.from_address(options["devices"].value).value)
        return load_model(path, **options)

    monkeypatch.setattr(heads, "load_model", load_head_file)
    with pair(*files["eagle3"], gpu_layers=0):
        assert devices == [None]  # the list ends before its first entry


def read(target, head, tokens):
    """Sessions of both after `tokens`, which the head has read with the target's states; and its last logits."""
    ours, its = target.open(), head.open()
    prefill(
        target, ours, tokens[:-1],
        saw=lambda work, logits: its.give(len(ours.token_ids), logits.states(range(len(work.token_ids)))),
    )  # fmt: skip
    logits, node = prefill(head, its, tokens, want_last=True)
    return ours, its, logits.row(node)


class Reference:
    """llama.cpp's own loop (common/speculative.cpp): one sequence, chains."""

    def __init__(self, target: Path, head: Path) -> None:
        self.own, self.calls = head.name != "eagle3.gguf", states.functions()
        self.model = load_model(str(target), load_mtp=self.own)
        self.head = self.model if target == head else load_model(str(head), load_mtp=self.own)
        self.shared = head.name == "assistant.gguf"  # all drafted rows have one position, and no cells
        self.heads = 1 if self.shared else max(1, llama_cpp.llama_model_n_layer_nextn(self.head))
        self.context = self._context(self.model)
        kind = llama_cpp.LLAMA_CONTEXT_TYPE_MTP if self.own else llama_cpp.LLAMA_CONTEXT_TYPE_DEFAULT
        self.draft = self._context(self.head, ctx_other=self.context, ctx_type=kind)
        self.width = llama_cpp.llama_model_n_embd_out(self.head)
        self.calls.llama_set_embeddings_nextn(self.draft, True, True)
        self.layers = [self.calls.llama_model_target_layer_ids(self.head)[i] for i in range(0 if self.own else 3)]
        for layer in self.layers:
            self.calls.llama_set_embeddings_layer_inp(self.context, layer, True)
        if self.own:
            self.calls.llama_set_embeddings_nextn(self.context, True, False)

    def _context(self, model: Any, **more: Any) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
        params.n_batch = params.n_ubatch = params.n_outputs_max = 64
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = 0
        for name, value in more.items():
            setattr(params, name, value)
        return llama_cpp.llama_init_from_model(model, params)

    def _decode(self, context, rows, wanted, call=llama_cpp.llama_decode):
        """`rows` are (token, position, state); a token or a state may be None."""
        keep, batch = [], llama_cpp.llama_batch()
        fields = {
            "token": (llama_cpp.llama_token, [row[0] for row in rows]),
            "pos": (llama_cpp.llama_pos, [row[1] for row in rows]),
            "embd": (ctypes.c_float, None if rows[0][2] is None else np.concatenate([row[2] for row in rows])),
            "logits": (ctypes.c_int8, [int(wanted)] * len(rows)),
        }  # fmt: skip
        for name, (kind, values) in fields.items():
            if values is not None and values[0] is not None:
                keep.append((kind * len(values))(*values))
                setattr(batch, name, ctypes.cast(keep[-1], ctypes.POINTER(kind)))
        batch.n_tokens = len(rows)
        assert call(context, batch) == 0

    def _rows(self, pointer, count, width):
        return np.ctypeslib.as_array(pointer, (count, width)).copy()

    def chain(self, tokens, drafted):
        """Logits after all of `tokens`, and after each of `drafted`, of which each is the child of the one before."""
        before, size = len(tokens) - 1, llama_cpp.llama_model_n_embd(self.model)
        self._decode(self.context, [(token, i, None) for i, token in enumerate(tokens[:-1])], wanted=True)
        if self.own:
            given = self._rows(self.calls.llama_get_embeddings_nextn(self.context), before, size)
            pairs = [(tokens[0], 0, np.zeros(size, np.float32))]
            pairs += [(tokens[i + 1], i + 1, given[i]) for i in range(before)]
        else:
            parts = [
                self._rows(self.calls.llama_get_embeddings_layer_inp(self.context, layer), before, size)
                for layer in self.layers
            ]
            features = np.concatenate(parts, axis=1)
            self._decode(self.draft, [(None, i, row) for i, row in enumerate(features)], True, llama_cpp.llama_encode)
            given = self._rows(self.calls.llama_get_embeddings_nextn(self.draft), before, self.width)
            pairs = [(tokens[i + 1], i, given[i]) for i in range(before)]
        memory = llama_cpp.llama_get_memory(self.draft)
        for head in range(0 if self.shared else self.heads):  # each fills cells of its own layer
            llama_cpp.llama_memory_seq_rm(memory, 0, 0, -1)
            self.calls.llama_set_nextn_layer_offset(self.draft, head)
            self._decode(self.draft, pairs[:-1], wanted=False)
        found, chain = [], pairs[-1:]
        for head, token in enumerate([*drafted, None]):
            if self.heads > 1:
                llama_cpp.llama_memory_seq_rm(memory, 0, before, -1)
                self.calls.llama_set_nextn_layer_offset(self.draft, head)
            rows = chain if self.heads > 1 else chain[-1:]
            self._decode(self.draft, rows, wanted=True)
            count = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.head))
            found.append(self._rows(llama_cpp.llama_get_logits_ith(self.draft, len(rows) - 1), 1, count)[0])
            state = self._rows(self.calls.llama_get_embeddings_nextn(self.draft), len(rows), self.width)[-1]
            chain.append((token, chain[-1][1] + (not self.shared), state))
        return found

    def close(self) -> None:
        llama_cpp.llama_free(self.draft)
        llama_cpp.llama_free(self.context)
        for model in {self.model, self.head}:
            llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_what_llama_cpp_drafts(files, kind):
    reference = Reference(*files[kind])
    drafted = [9, 120, 33][: reference.heads - 1 if reference.heads > 1 else 3]
    expected = reference.chain(TEXT, drafted)
    reference.close()
    with pair(*files[kind]) as (target, head):
        _, session, row = read(target, head, TEXT)
        found = [row]
        for node, token in enumerate(drafted):
            found.append(head.forward([work(session, [token], [node - 1], node)])[0].row(node))
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_of_a_heads_tree_has_the_logits_of_its_chain(files, kind):
    with pair(*files[kind]) as (target, head):
        tokens = random_tokens(head, len(TREE), 3)
        _, session, _ = read(target, head, TEXT)
        rows, layers = {}, [[0], [1, 2], [3, 4, 5], [6, 7, 8], [9]]
        for layer in layers:
            made = work(session, [tokens[i] for i in layer], [TREE[i] for i in layer], layer[0])
            rows |= {node: logits.row(node) for logits in head.forward([made]) for node in layer}
        for leaf in (4, 5, 6, 8, 9):
            session.commit([])
            for at, node in enumerate(path := path_to(TREE, leaf)):
                row = head.forward([work(session, [tokens[node]], [at - 1], at)])[0].row(at)
                np.testing.assert_allclose(row, rows[node], atol=1e-3, err_msg=f"{node} of {path}")


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_nodes(files, kind):
    """Of a tree, of two texts in one pass, with tokens that are read again, of nodes that are not wanted."""
    with pair(*files[kind], sessions=3) as (target, _):
        tokens = random_tokens(target, len(TREE), 4)
        texts, sessions = [TEXT, TEXT[3:9]], [target.open(), target.open()]
        for text, session in zip(texts, sessions, strict=True):
            prefill(target, session, text)
        works = [work(session, tokens, TREE, wanted=[0, 9]) for session in sessions]
        every = [logits.states([9, 8, 5, 0]) for logits in target.forward(works)]
        for text, given in zip(texts, every, strict=True):
            assert given.shape == (4, target.capabilities.states)
            for node, state in zip([9, 8, 5, 0], given, strict=True):
                expected = states_of(target, [*text, *(tokens[i] for i in path_to(TREE, node))])[-1]
                np.testing.assert_allclose(state, expected, atol=2e-3)
        sessions[0].commit(path_to(TREE, 9))  # some of them must be read again, before the next nodes
        sessions[1].commit([])
        [logits] = target.forward([work(sessions[0], [7, 8], [-1, 0])])
        text = [*TEXT, *(tokens[i] for i in path_to(TREE, 9)), 7, 8]
        given = logits.states([0, 1])
        np.testing.assert_allclose(given, states_of(target, text)[-2:], atol=2e-3)


def test_without_a_head_nothing_is_kept(files):
    target = load(str(files["own"][0]), **OPTIONS)
    session = target.open()
    [logits] = target.forward([work(session, [5], [-1])])
    assert not hasattr(logits, "states")
    assert target.capabilities.states == 0
    target.close()


@pytest.fixture(  # those of the others are made by the same classes
    scope="module", params=few(["eagle3", "own", "mixture", "sidecar"], "eagle3", "own")
)
def heads_of_kind(request, files):
    target, head = files[request.param]

    def factory(**options: int):
        options["context_length"] = options["context_length"] or 256
        backend = load(str(target), own_head=target == head, threads=1, **options)
        return engine.load_head(backend, str(head), LoadOptions(threads=1, **options).for_draft())

    yield request.param, (reused := Reused(factory))
    reused.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_a_head(check, heads_of_kind, monkeypatch):
    """With states of zeros, logits depend on tokens only, as the contract has it."""
    kind, factory = heads_of_kind
    if kind == "eagle3" and check in (a_tree_with_several_tops, a_saved_session_goes_on):
        pytest.skip("its first token, which others must not see, leaves a free cell, so the order of cells changes")
    monkeypatch.setattr(
        LlamaHeadSession,
        "inputs",
        lambda self, _, positions: np.zeros((len(positions), self._backend.width), np.float32),
    )
    check(factory)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planner", ["specexec", "chain", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("streamed", [False, True])
def test_texts_are_those_of_plain_decoding(files, kind, planner, temperature, streamed):
    if streamed and kind == "mixture":
        pytest.skip("its few experts need less memory than is reserved to read them")
    target, head = files[kind]
    options: dict[str, Any] = {"context_length": 256, "threads": 1, "remember": False}
    texts = []
    for name in ("none", planner):
        draft = None if name == "none" else "head" if target == head else str(head)
        more = {} if name in ("none", "auto") else {"budget": 12}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("edgespec.machine.memory.private_memory", lambda: HELD)
            if streamed:
                beside = {"own_head": draft == "head", "draft_files": (draft,) if draft == str(head) else ()}
                least = least_memory(target, context_length=256, budget=more.get("budget", 64), **beside)
                more["memory"] = least + (1 << 20)
            model = edgespec.load(str(target), draft=draft, planner=name, **options, **more)
        with model:
            result = model.generate("the quick brown fox", max_tokens=12, temperature=temperature, seed=3)
            again = model.generate("the quick brown fox jumps", max_tokens=6, temperature=temperature, seed=3)
            texts.append((result.text, again.text))
            if name != "auto":  # which may leave the head out, so that nothing is streamed
                assert (model.scheduler.target.plan is not None) == streamed
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_several_texts_and_second_turns_share_a_head(files, kind):
    target, head = files[kind]
    found = []
    for planner, draft in (("none", None), ("specexec", "head" if target == head else str(head))):
        options = {"context_length": 256, "threads": 1, "remember": False, "parallel": 2, "budget": 8}
        with edgespec.load(str(target), draft=draft, planner=planner, **options) as model:
            texts = model.branch("one two three", 3, max_tokens=8, temperature=0.8, seed=5)
            more = model.generate("one two three" + texts[0].text, max_tokens=6, temperature=0.8, seed=6)
            found.append([text.text for text in (*texts, more)])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_session_goes_on_with_its_head(files, kind, tmp_path):
    """After `save` and `load` in another program, a second turn is drafted, and its text is the same."""
    target, head = files[kind]
    draft = "head" if target == head else str(head)
    options = {"context_length": 256, "threads": 1, "remember": False, "budget": 8, "planner": "specexec"}
    sampling = {"max_tokens": 8, "temperature": 0.8, "seed": 5}
    with edgespec.load(str(target), draft=draft, **options) as model:
        first = model.generate("one two three", **sampling)
        model.scheduler.save(tmp_path / "kept")
        second = model.generate("one two three" + first.text, **sampling)
    with edgespec.load(str(target), draft=draft, **options) as model:
        model.scheduler.load(tmp_path / "kept")
        again = model.generate("one two three" + first.text, **sampling)
        assert again.text == second.text
        assert again.stats.cached_tokens > 0 or kind in ("own", "sidecar")  # a state of another length is of no use
        assert again.stats.draft_passes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_ends_a_pass_of_the_head_but_not_its_states(files, kind, tmp_path):
    target, head = files[kind]
    if kind == "eagle3":
        head = write_eagle3(tmp_path / "head.gguf", norm=True)  # which llama.cpp can interrupt
    with pair(target, head) as (target, head):
        _, session, _ = read(target, head, TEXT)
        given = head.fuse(states := np.ones((2, target.capabilities.states), np.float32))
        head.interrupt(head.pass_number)
        np.testing.assert_array_equal(head.fuse(states), given)  # Ctrl-C between two passes
        with pytest.raises(Interrupted):
            head.forward([work(session, [7], [-1], wanted=[0])])
        assert session.token_ids == TEXT
        head.forward([work(session, [7], [-1])])


def test_a_small_vocabulary_of_a_head_drafts_the_targets_tokens(files, tmp_path):
    known = list(range(40, 240, 2))
    head = write_eagle3(tmp_path / "head.gguf", known=known, whole=True)
    with pair(files["eagle3"][0], head) as (target, draft):
        _, _, row = read(target, draft, TEXT)
        assert np.isfinite(row[known]).all()
        assert np.isneginf(np.delete(row, known)).all()
    with edgespec.load(str(files["eagle3"][0]), draft=str(head), planner="specexec", budget=8, remember=False) as model:
        assert model.generate("one two", max_tokens=8).stats.draft_passes


def test_an_embedded_head_is_pinned_and_counted_where_it_is_asked_for(files, monkeypatch):
    path = str(files["own"][0])
    options: dict[str, Any] = {"context_length": 256, "threads": 1, "budget": 8}
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: HELD)
    without, asked = (least_memory(Path(path), own_head=own, **options) for own in (False, True))
    whole = {tensor.name: tensor for tensor in all_tensors(path)}
    head = [tensor for tensor in whole.values() if tensor.name.startswith("blk.4.")]
    assert asked - without > sum(tensor.size for tensor in head)
    target = load(path, memory=asked + (1 << 20), own_head=True, **options)
    assert {layer.index for layer in target.plan.streamed} <= set(range(4))
    for tensor in (*head, whole["output.weight"]):
        held_in = sum(
            max(0, min(extent.stop, tensor.start + tensor.size) - max(extent.start, tensor.start))
            for extent in target.plan.pinned
        )
        assert held_in == tensor.size
    target.close()


@pytest.mark.parametrize("kind", ["eagle3", "sidecar", "assistant"])
def test_a_head_in_another_file_is_counted(files, kind, monkeypatch):
    """Its weights, also those of layers that its model would not load, and the states that the target keeps."""
    target, head = files[kind]
    monkeypatch.setattr(planning, "rehearse", lambda path, sizes, free, target: (0, [Buffers(0, 0, ())]))
    planner = planning.MemoryPlanner(str(target), LoadOptions(draft_files=(str(head),)), this_machine())
    size = ContextSize(64, 8, 1, 64)
    found, weights = planner._drafts(size), sum(tensor.size for tensor in all_tensors(str(head)))
    assert found == weights + planning.states_bytes(str(head), size)


@pytest.mark.parametrize("kind", ["eagle3", "own"])
def test_cells_and_buffers_of_a_head_are_counted(files, kind, monkeypatch):
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: HELD)
    target, head = files[kind]
    more = {"own_head": True} if kind == "own" else {"draft_files": (str(head),)}
    few, many = (
        least_memory(target, context_length=length, threads=1, budget=8, **more)
        - least_memory(target, context_length=length, threads=1, budget=8)
        for length in (256, 8192)
    )
    assert many - few > 2 * 2 * 64 * 4 * (8192 - 256) // 2  # keys and values, in 16 bits or 32


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"block_count": 2}, "has block_count 2, but a head of this kind needs 1"),
        ({"layers": (1, 2)}, "has target_layers of number 2, but a head of this kind needs 3"),
        ({"attention.value_length": 32}, "has attention.value_length 32, but a head of this kind needs 64"),
        ({"layers": (1, 2, 4)}, r"starts from the layers \[1, 2, 4\], but llama.cpp gives 4 of llama"),
        ({"layers": (1, 2, -1)}, r"starts from the layers \[1, 2, -1\], but llama.cpp gives 4 of llama"),
        ({"width": 128}, "is for targets with states of width 128, but a head of this kind needs 256"),
        ({"target_hidden_size": 128}, "cannot be loaded"),
        ({"vocab": 300}, "has a vocabulary of size 300, but a head of this kind needs 288"),
        ({"known": [5, 288]}, "the tensor d2t maps to the token 288, but the vocabulary has 288"),
        ({"known": [-1, 7]}, "the tensor d2t maps to the token -1, but the vocabulary has 288"),
    ],
)
def test_a_head_that_llama_cpp_would_end_the_process_over_is_refused(files, tmp_path, changed, line):
    refused(files["eagle3"][0], write_eagle3(tmp_path / "head.gguf", **changed), line)


def refused(target: Path, head: Path, line: str) -> None:
    backend = load(str(target), **OPTIONS)
    with pytest.raises(ModelError, match=line):
        engine.load_head(backend, str(head), LoadOptions(**OPTIONS).for_draft())
    backend.forward([work(backend.open(), [5], [-1])])  # it goes on
    backend.close()


@pytest.mark.parametrize("name", ["dflash", "deepseek32", "deepseek4", "glm-dsa"])
def test_other_kinds_of_heads_are_refused_by_name(name, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", name)
    add(writer, block_count=2, nextn_predict_layers=1)
    for tensor in ("blk.0.attn_norm", "blk.1.nextn.eh_proj"):
        writer.add_tensor(f"{tensor}.weight", np.zeros(32, np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=rf"a head .*{name}.* which is not supported: use"):
        engine.has_head(str(tmp_path / "head.gguf"))


def test_what_a_llama_cpp_without_heads_lacks_is_named(monkeypatch):
    monkeypatch.setitem(states._FUNCTIONS, "llama_new_thing", ("P13llama_context", None, []))
    states.functions.cache_clear()
    with pytest.raises(ModelError, match=r"needs llama_new_thing of llama.cpp, which .* lacks: 0.3.36 has it"):
        states.functions()
    states.functions.cache_clear()


def test_a_file_without_its_head_and_heads_of_other_targets(files):
    assert not engine.has_head(str(files["eagle3"][0]))
    refused(*files["own"], "needs that model as its target, loaded with it")
    line = "is for targets of architecture qwen35, but a head of this kind needs llama"
    refused(files["eagle3"][0], files["sidecar"][1], line)


def test_a_head_is_freed_with_its_target(files):
    for kind in KINDS:
        with pair(*files[kind]) as (_, head):
            head.close()
            head.close()
        with pair(*files[kind]) as (_, head):
            session = head.open()
        with pytest.raises(Closed):
            head.forward([work(session, [7], [-1])])


def test_row_classes_are_probed_with_the_states_that_a_head_needs(files):
    """The head of a glm4moe asks for all rows of the last layer, which other passes compute for wanted rows only."""
    for kind, whole in (("mixture", True), ("eagle3", False)):
        plain = load(str(files[kind][0]), **OPTIONS)
        with pair(*files[kind]) as (target, _), engine.probe_model(str(files[kind][0]), target.computing) as probe:
            assert (target.computing != plain.computing) == (target.identity != plain.identity) == whole
            assert (probe.states is not None) == whole
        plain.close()


@pytest.mark.parametrize("key", ["attention.key_length", "attention.key_length_swa", "attention.head_count_kv"])
def test_an_assistant_for_another_shape_of_cells_is_refused(files, tmp_path, key):
    """llama.cpp would read the target's keys and values as if they had that shape."""
    changed = {key: (8, gguf.GGUFValueType.UINT32), key.replace("key_l", "value_l"): (8, gguf.GGUFValueType.UINT32)}
    head = copy(files["assistant"][1], tmp_path / "head.gguf", keys=changed)
    refused(files["assistant"][0], head, rf"has {key} 8, but a head of this kind needs|cannot be loaded")


def test_a_header_may_name_a_head_that_the_file_lacks(files, tmp_path):
    """As of a model whose head is a file of its own: its last layer is no head, and is planned."""
    path = str(
        copy(
            files["mixture"][0],
            tmp_path / "trunk.gguf",
            tensor=lambda name, values: None if "blk.3." in name else values,
        )
    )
    assert not engine.has_head(path)
    assert all(tensor.size for tensor in loaded_tensors(path))
    load(path, **OPTIONS).close()


def test_a_head_that_was_pulled_with_its_model_is_the_draft(files, monkeypatch):
    target, head = files["eagle3"]
    monkeypatch.setattr(pair_module, "local_head", lambda source: str(head))
    with edgespec.load(str(target), planner="specexec", budget=8, context_length=256, remember=False) as model:
        assert model.generate("hello", max_tokens=4).stats.draft_passes
        assert str(head) in repr(model)


def test_a_models_head_drafts_in_a_bench_as_in_a_run(files, tmp_path, monkeypatch, run: Run):
    target, head = files["eagle3"]
    monkeypatch.setattr(pair_module, "local_head", lambda source: str(head))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    command = ["bench", str(prompts), "--model", str(target), "--raw", "--ctx", "256", "-n", "4", "--exact", "off"]
    status, out, err = run(*command, "--planners", "auto,specexec", "--tau", "0.7", "--json")
    assert status == 0, err
    assert json.loads(out)["draft_backend"]
    assert json.loads(run(*command, "--planners", "sssd", "--json")[1])["draft_backend"] is None


@pytest.mark.parametrize(("width", "line"), [(128, "states of width 128"), (256, "does not give for qwen2")])
def test_a_head_of_another_model_is_named_before_anything_is_loaded(files, tmp_path, width, line):
    target = files["eagle3"][0] if width == 128 else small_llama(tmp_path / "qwen2.gguf", kind="qwen2")
    head = write_eagle3(tmp_path / "other.gguf", width=width)
    with pytest.raises(ModelError, match=line):
        edgespec.load(str(target), draft=str(head), context_length=256, remember=False)


@pytest.mark.parametrize("kind", ["eagle3", "mixture"])
def test_states_are_kept_only_while_a_head_is_loaded(files, kind):
    with pair(*files[kind]) as (target, head):
        with_head, computing = last_row(target, TEXT), target.computing
        assert target.capabilities.states
        head.close()
        assert target.capabilities.states == 0
        assert (target.computing == computing) == (kind == "eagle3")  # the mixture's whole last layer was computed
        np.testing.assert_allclose(last_row(target, TEXT), with_head, atol=1e-4)
        [logits] = target.forward([work(target.open(), TEXT, range(-1, len(TEXT) - 1))])
        assert not isinstance(logits, GivesStates)
