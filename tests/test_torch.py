"""The PyTorch backend: every family, offloading, 4 bits, and what is refused."""

import json
import math
import mmap
import re
import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'edgespec[torch]'")

import contract
from contract import (
    BUDGET,
    CONTEXT,
    TREE,
    Reused,
    by_main_check,
    chain_rows,
    commit_any_path,
    growth_layer_by_layer,
    random_tokens,
    several_sessions_in_one_forward,
    tree_equals_chains,
    work,
)
from edgespec.backends.torch import attention
from edgespec.backends.torch import backend as backend_module
from edgespec.backends.torch import loading as loading_module
from edgespec.backends.torch import logits as logits_module
from edgespec.backends.torch import offload as offload_module
from edgespec.backends.torch.attention import build_mask
from edgespec.backends.torch.backend import check_tree, load
from edgespec.backends.torch.engine import engine
from edgespec.backends.torch.loading import choose_placement, untied_embeddings, work_bytes
from edgespec.backends.torch.logits import top_on_device
from edgespec.backends.torch.offload import (
    BUFFERS,
    MOST_BUFFERS,
    CudaCopies,
    block_bytes,
    count_resident,
    streamed_layers,
)
from edgespec.backends.torch.session import TorchSession
from edgespec.backends.torch.spans import Cells
from hf_models import FAMILIES, SMALL, save, tiny_model, torch, transformers
from safetensors.torch import load_file, save_file

from edgespec.errors import (
    ContextFull,
    Interrupted,
    MissingPackage,
    ModelError,
    NoRoom,
    UsageError,
)
from edgespec.loop.backend import Capabilities
from edgespec.loop.engines import load_at_once
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import top_of_rows
from edgespec.loop.tree import ancestor_mask, depths
from edgespec.machine.this_machine import Gpu, this_machine

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes: pip install 'edgespec[nf4]'",
)
by_tree_check = pytest.mark.parametrize(
    "check",
    [growth_layer_by_layer, several_sessions_in_one_forward, tree_equals_chains, commit_any_path],
    ids=lambda check: check.__name__,
)
CAPABILITIES = Capabilities(
    context_length=CONTEXT, max_nodes=BUDGET, max_wanted=BUDGET, max_leaves=BUDGET, logit_tolerance=0.0
)
OPTIONS = {"context_length": CONTEXT, "budget": BUDGET, "sessions": 3, "threads": 1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Six layers, so that there is something to stream."""
    return save(tiny_model("llama", num_hidden_layers=6), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return save(tiny_model(request.param), tmp_path_factory.mktemp("family"))


def test_a_quota_of_processors_bounds_pytorchs_threads(llama):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for machine_cores, used in ((2, 2), (64, 2)):  # more than PyTorch has chosen itself are not taken
            load_at_once(engine, str(llama), replace(this_machine(), cores=machine_cores)).close()
            assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(before)


class TestFamilies:
    @pytest.mark.covering(1)
    @by_tree_check
    def test_trees_are_texts(self, folder, check):
        check(partial(load, str(folder), threads=1))

    def test_texts_are_what_transformers_computes(self, folder):
        """Its own attention, masks, windows and positions, on a text longer than any window."""
        backend = load(str(folder), **OPTIONS)
        text = random_tokens(backend, 30, 1)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([text])).logits[0].numpy()
        assert expected.std() > 1
        mixture = hasattr(model.config, "num_experts_per_tok")
        assert backend.capabilities.experts == ((4, 2) if mixture else None)
        np.testing.assert_allclose(chain_rows(backend, text), expected, atol=1e-4)
        session = backend.open()
        logits, last = prefill(backend, session, text, want_last=True)
        np.testing.assert_allclose(logits.row(last), expected[-1], atol=1e-4)


def test_a_text_model_inside_one_that_sees(tmp_path):
    """Gemma 3 from 4 B up: the folder holds a vision model, too, which is not used."""
    name, differences = FAMILIES["gemma3"]
    assert name == "gemma3_text"
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=SMALL | differences, vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=270, boi_token_index=268, eoi_token_index=269,
    )  # fmt: skip
    tree_equals_chains(partial(load, str(save(transformers.Gemma3ForConditionalGeneration(config), tmp_path))))


def test_16_bit_weights(llama):
    for dtype in ("float16", "bfloat16"):
        tree_equals_chains(partial(load, str(llama), threads=1, dtype=dtype))


class TestMasks:
    @pytest.mark.parametrize("window", [None, 1, 2, 3, 100])
    @pytest.mark.parametrize("length", [0, 1, 7])
    def test_masks_by_their_definition(self, length, window):
        parents = np.array(TREE)
        sees = ancestor_mask(parents)
        positions = [length + int(depth) for depth in depths(parents)]
        low, mask = build_mask(sees[4:], positions, length, window, torch.float32, torch.device("cpu"))
        where = [*range(length), *positions]  # of every cell
        for node in range(4, len(parents)):
            for cell, position in enumerate(where):
                inside = window is None or positions[node] - position < window
                visible_ = inside and (cell < length or sees[node, cell - length])
                found = cell >= low and (mask is None or mask[node - 4, cell - low] == 0)
                assert found == visible_
        assert mask is None or set(mask.unique().tolist()) <= {0.0, -math.inf}

    @pytest.mark.parametrize("first", [1, 2, 3])
    def test_the_first_cell_is_hidden_from_all_but_its_own_node_whatever_pass_they_are_in(self, first):
        """As heads need it; the first `first` nodes were in a pass before."""
        parents = np.array([-1, 0, 0, 1])
        sees = ancestor_mask(parents)
        before, _ = build_mask(
            sees[:first, :first], [0, 1, 1, 2][:first], 0, None, torch.float32, "cpu", hides_first=True
        )
        low, mask = build_mask(sees[first:], [0, 1, 1, 2], 0, None, torch.float32, "cpu", hides_first=True)
        assert before == low == 0
        for node in range(first, 4):
            for cell in range(4):
                assert (mask[node - first, cell] == 0) == (sees[node, cell] and cell > 0)

    def test_no_mask_where_kernels_need_none(self):
        make = partial(build_mask, dtype=torch.float32, device=torch.device("cpu"))
        tree = ancestor_mask([-1, 0, 0])
        assert make(np.tri(3, dtype=bool), [0, 1, 2], 0, None) == (0, None)  # a prompt's first chunk
        assert make(np.ones((1, 1), bool), [7], 7, None) == (0, None)  # plain decoding
        assert make(np.ones((1, 1), bool), [7], 7, 8) == (0, None)
        assert make(np.ones((1, 1), bool), [7], 7, 7)[0] == 1  # the window's first cell
        assert make(tree, [0, 1, 1], 0, None)[1] is not None
        assert make(np.tri(3, dtype=bool), [1, 2, 3], 1, None)[1] is not None


def test_top_on_a_device_is_top_on_the_host():
    generator = np.random.default_rng(2)
    logits = generator.normal(size=(4, 500)).astype(np.float32)
    long, short = generator.gumbel(size=520).astype(np.float32), generator.gumbel(size=430).astype(np.float32)
    short[7] = -np.inf
    noise, index = [long, None, short, short], [3, 0, 0, 2]
    for k in (1, 5, 450, 600):
        ids, values = top_on_device(torch.from_numpy(logits), index, k, 0.7, noise)
        expected_ids, expected = top_of_rows((logits[i] for i in index), k, 0.7, noise)
        for found, right, some, others in zip(ids, expected_ids, values, expected, strict=True):
            finite = np.isfinite(others)
            assert found[finite].tolist() == right[finite].tolist()
            assert len(found) == len(right) == len(set(found.tolist()))
            np.testing.assert_allclose(some, others, atol=1e-5)


class Cudart:
    """CUDA's runtime that pins `allowed` blocks of memory."""

    def __init__(self, allowed):
        self.allowed = allowed
        self.calls = 0
        self.pinned = set()

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.calls += 1
        if len(self.pinned) == self.allowed:
            return 2
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.pinned.remove(address)


class Recorder:
    """A copy engine that fills a buffer only when it must, with what cannot pass for weights until then."""

    def __init__(self, device, buffers):
        self.events = []
        self.waiting = {}
        self.free = [False] * buffers
        self.closed = False
        self.waits = 0  # each of which counts as a second
        self.threads = []  # that have filled buffers

    def fill(self, buffer, target, source):
        assert self.free[buffer], "the buffer is still in use"
        self.free[buffer] = False
        target.fill_(255)  # NaN in every floating-point format
        self.threads.append(threading.current_thread())
        self.waiting[buffer] = target, source
        self.events.append(("fill", buffer))

    def wait(self, buffer):
        if buffer in self.waiting:
            target, source = self.waiting.pop(buffer)
            target.copy_(source)
            self.waits += 1
        self.events.append(("wait", buffer))

    def release(self, buffer):
        self.free[buffer] = True
        self.events.append(("release", buffer))

    def waited(self):
        return float(self.waits)

    def close(self):
        self.closed = True


@cache
def needs(folder, **options):
    """Bytes of a layer, and of all but layers."""
    backend = load(str(folder), **options)
    fixed = options.get("sessions", 1) * backend.open().cells.nbytes
    fixed += work_bytes(backend.model, backend.capabilities, backend.capabilities.max_wanted)
    return max(block_bytes(layer) for layer in backend.model.get_decoder().layers), fixed


@cache
def at_home(folder, **options):
    """Bytes of input embeddings that stay in host memory where a GPU's layers are streamed."""
    return untied_embeddings(load(str(folder), **options).model)


def memory_for(folder, resident, **options):
    """Bytes that let so many layers stay on the device."""
    layer, fixed = needs(folder, **options)
    return fixed - at_home(folder, **options) + (resident + BUFFERS) * layer


def streaming(folder, resident, **options):
    """A backend with so many resident layers, its recorder, and its streamed layers."""
    engines = []

    def copies(device, buffers):
        engines.append(Recorder(device, buffers))
        return engines[0]

    options = OPTIONS | options
    memory = memory_for(folder, resident, **options)
    backend = load(str(folder), **options, gpu_memory=memory, copies=copies)
    layers = backend.model.get_decoder().layers
    streamed = [layers[i] for i in streamed_layers(len(layers), resident)]
    for i, layer in enumerate(streamed):
        layer.register_forward_pre_hook(lambda *_, i=i: engines[0].events.append(("compute", i)))
    engines[0].events.clear()
    return backend, engines[0], streamed


@pytest.fixture(scope="module")
def reused(llama):
    yield (found := Reused(partial(load, str(llama), threads=1, gpu_memory=2**29 + 2**27, copies=Recorder)))
    found.close()


class TestOffload:
    @pytest.mark.parametrize("resident", [0, 3])
    def test_the_logits_are_the_same_to_the_bit(self, llama, resident):
        text = [5, 9, 30, 7]
        backend, _, _ = streaming(llama, resident)
        np.testing.assert_array_equal(chain_rows(backend, text), chain_rows(load(str(llama), **OPTIONS), text))

    @by_main_check
    def test_contract(self, reused, check):
        check(reused)

    @pytest.mark.parametrize("resident", [0, 1, 2])
    def test_order_overlap_and_reuse(self, llama, resident):
        """One pass after another: what is filled when, and what has been asked for by then."""
        backend, recorder, streamed = streaming(llama, resident)
        count = len(streamed)
        assert count == 6 - resident
        held = {buffer: buffer for buffer in range(BUFFERS)}  # after the pass that `load` makes
        session = backend.open()
        for _ in range(3):
            backend.forward([work(session, [5], [-1])])
            session.commit([0])
            computed = [i for kind, i in recorder.events if kind == "compute"]
            assert computed == list(range(count))  # order
            for kind, value in recorder.events:
                if kind == "fill":
                    # The buffer goes to the next layer that lives in it, of this pass or the next.
                    following = held[value] + BUFFERS
                    held[value] = following if following < count else value
                elif kind == "compute":
                    assert held[value % BUFFERS] == value  # the right layer lies in the buffer …
                    if value + 1 < count:
                        assert held[(value + 1) % BUFFERS] == value + 1  # … and the next one is on its way
            for before, after in pairwise(recorder.events):
                if after[0] == "compute":
                    assert before == ("wait", after[1] % BUFFERS)  # nothing is used before it is there
                if after[0] == "fill":
                    assert before == ("release", after[1])  # nothing is overwritten before it was used
            assert held == {buffer: buffer for buffer in range(BUFFERS)}  # the next pass's first layers are coming
            recorder.events.clear()

    def test_what_is_said_about_it(self, llama):
        """Resident layers wait for nothing; of six streamed ones, each pass waits for each."""
        backend, _, _ = streaming(llama, 0)
        session, before = backend.open(), backend.wait_seconds
        backend.forward([work(session, [5], [-1])])
        assert backend.wait_seconds - before == 6
        assert backend.capabilities.streams
        assert len(backend.notes) == 1
        assert backend.notes[0].startswith("6 of 6 layers are streamed: ")
        resident = load(str(llama), **OPTIONS)
        resident.forward([work(resident.open(), [5], [-1])])
        assert (resident.wait_seconds, resident.capabilities.streams, list(resident.notes)) == (0.0, False, [])

    def test_device_memory_is_the_buffers(self, llama):
        """Streamed weights are views of two buffers; the blocks hold each of them once. Closing ends the copies."""
        backend, recorder, streamed = streaming(llama, 1)
        places = {
            tensor.untyped_storage().data_ptr()
            for layer in streamed
            for tensor in [*layer.parameters(), *layer.buffers()]
        }
        assert len(places) == BUFFERS
        assert sum(block.host.numel() for block in backend.streamers[0].blocks) == sum(map(block_bytes, streamed))
        backend.close()
        backend.close()
        assert recorder.closed

    def test_ctrl_c_within_a_copy(self, llama, monkeypatch):
        """A layer whose copy was not begun is copied in the next pass."""
        backend, engine, streamed = streaming(llama, 0)
        expected, session, fill = chain_rows(backend, [5, 6, 7]), backend.open(), engine.fill
        for number in range(len(streamed)):
            copies = iter(range(9))

            def copied(*arguments, copies=copies, number=number):
                if next(copies) == number:
                    signal.raise_signal(signal.SIGINT)
                fill(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(engine, "fill", copied)
                with pytest.raises(KeyboardInterrupt):
                    backend.forward([work(session, [9], [-1])])
            np.testing.assert_array_equal(chain_rows(backend, [5, 6, 7]), expected)
        assert session.token_ids == []

    @pytest.mark.parametrize("ctrl_c", [False, True])
    def test_an_interrupted_pass_ends_within_a_layer(self, llama, ctrl_c):
        backend, _, streamed = streaming(llama, 0)
        expected, session, entered = chain_rows(backend, [5, 6, 7]), backend.open(), []
        for i, layer in enumerate(streamed):
            layer.register_forward_pre_hook(lambda *_, i=i: entered.append(i))
        for stop in range(5):
            entered.clear()
            hook = streamed[stop].register_forward_hook(
                lambda *_: signal.raise_signal(signal.SIGINT) if ctrl_c else backend.interrupt(backend.pass_number)
            )
            with pytest.raises(KeyboardInterrupt if ctrl_c else Interrupted):
                backend.forward([work(session, [9], [-1])])
            hook.remove()
            assert entered == list(range(stop + 2))
            np.testing.assert_array_equal(chain_rows(backend, [5, 6, 7]), expected)
        assert session.token_ids == []

    @pytest.mark.parametrize("sessions", [1, 4, 64])
    def test_all_logits_of_a_pass_are_in_the_plan(self, llama, monkeypatch, sessions):
        counted, really = set(), backend_module.work_bytes

        def noted(model, limits, wanted):
            counted.add(wanted)
            return really(model, limits, wanted)

        monkeypatch.setattr(backend_module, "work_bytes", noted)
        backend = load(str(llama), **OPTIONS | {"sessions": sessions}, gpu_memory=2**40, copies=Recorder)
        assert counted == {backend.capabilities.max_wanted, None}  # None: of a further GPU
        assert backend.streamers == []  # enough memory streams nothing

    @pytest.fixture
    def made(self, monkeypatch):
        """Made-up events of CUDA, in order."""
        made = []

        class Event:
            def __init__(self, **options):
                made.append(self)
                self.number = len(made)

            record = synchronize = lambda self, *_: None
            query = lambda self: self.number < len(made) - 8  # the device is some waits behind  # noqa: E731
            elapsed_time = lambda self, other: 1000.0  # noqa: E731

        stream = SimpleNamespace(wait_event=lambda event: None)
        for name, value in {"Event": Event, "Stream": lambda device: stream}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        return made

    def test_a_small_copy_waits_for_a_piece_of_a_large_one(self, made, monkeypatch):
        monkeypatch.setattr(offload_module, "PIECE", 10)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        copies, arrived = CudaCopies("cpu", 2), []
        target, source = torch.zeros(25, dtype=torch.uint8), torch.arange(1, 26, dtype=torch.uint8)
        copies._gap = SimpleNamespace(zero_=lambda: arrived.append(int((target == source).sum())))
        copies.fill(0, target, source)
        assert arrived == [10, 20, 25]

    def test_a_draft_whose_waits_nobody_asks_for_keeps_no_events(self, made):
        copies = CudaCopies("cpu", 2)
        for buffer in [0, 1] * 100:
            copies.wait(buffer)
        assert len(copies._waits) < 8
        assert copies.waited() == 200.0

    def test_another_thread_asks_for_waits_while_a_pass_counts_them(self, made):
        """As that of the server's metrics."""
        copies, threads = CudaCopies("cpu", 2), []

        def query():
            threads.append(threading.Thread(target=copies.waited))
            threads[-1].start()
            threads[-1].join(0.1)  # it may have to wait for this one
            return True

        copies.wait(0)
        made[-1].query = query
        copies.wait(1)
        for thread in threads:
            thread.join(60)
        assert threads
        assert copies.waited() == 2.0

    @pytest.mark.parametrize(("asked", "kept"), [(-1, 6), (7, 6), (6, 5), (3, 2), (1, 0), (0, 0), (99, 6)])
    def test_so_many_layers_stay(self, llama, asked, kept):
        backend = load(str(llama), **OPTIONS, gpu_layers=asked, copies=Recorder)
        assert sum(len(one.blocks) for one in backend.streamers) == 6 - kept
        backend.close()

    def test_layers_that_do_not_fit(self, llama, monkeypatch):
        monkeypatch.setattr("edgespec.backends.torch.loading.count_resident", lambda *_: 2)
        for asked in (4, -1):
            with pytest.raises(UsageError, match=rf"with --gpu-layers {asked} [36] layers stay .* 2 of 6 fit"):
                load(str(llama), **OPTIONS, gpu_layers=asked, copies=Recorder)

    def test_layers_without_a_gpu(self, llama):
        backend = load(str(llama), **OPTIONS, device="cpu", gpu_layers=2)
        assert backend.streamers == []
        assert any("--gpu-layers changes nothing" in note for note in backend.notes)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gpu_memory": "1M"}, r"cannot hold 2 layers of .* MiB besides the .*: give at least "),
            ({"gpu_memory": 2**29}, r"cannot hold 2 layers of .* MiB besides the .*: give at least "),
            ({"gpu_layers": 2, "gpu_memory": "1G"}, "give one of them"),
        ],
    )
    def test_memory_that_is_refused(self, llama, options, message):
        with pytest.raises(UsageError, match=message):
            load(str(llama), **OPTIONS, **options, copies=Recorder)

    def test_the_message_gives_what_is_enough(self):
        with pytest.raises(UsageError, match=r"1\.00 GiB of GPU memory cannot .* 3\.00 GiB .* at least 7\.00 GiB"):
            count_resident(2**30, [2**31] * 4, 3 * 2**30)
        assert count_resident(7 * 2**30, [2**31] * 4, 3 * 2**30) == 0
        assert count_resident(9 * 2**30, [2**31] * 4, 3 * 2**30) == 1
        assert count_resident(11 * 2**30 - 1, [2**31] * 4, 3 * 2**30) == 1
        assert count_resident(11 * 2**30, [2**31] * 4, 3 * 2**30) == 4  # no buffers, so all fit

    @pytest.mark.parametrize("allowed", [0, 2, 99])
    def test_memory_that_cuda_refuses_to_pin_is_used_as_it_is(self, llama, monkeypatch, allowed):
        cuda = Cudart(allowed)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        for module in (backend_module, loading_module):
            monkeypatch.setattr(module, "needs_pinning", lambda device: True)
        backend, _, streamed = streaming(llama, 1)
        assert cuda.calls == min(allowed + 1, len(streamed))  # none is asked for after a refusal
        assert len(cuda.pinned) == min(allowed, len(streamed))
        assert all(address % mmap.PAGESIZE == 0 for address in cuda.pinned)
        feeder, threads = backend.streamers[0].feeder, backend.streamers[0]._engine.threads
        backend.forward([work(backend.open(), [5, 6], [-1, 0])])
        for buffer in range(len(backend.streamers[0]._buffers)) if feeder else ():
            feeder.wait(buffer)
        apart = [thread for thread in threads[-len(streamed) :] if thread != threading.current_thread()]
        assert len(apart) == max(0, len(streamed) - allowed)  # such a copy returns late, and would hold up the pass
        told = [note for note in backend.notes if "CUDA refuses to pin" in note]
        assert len(told) == (allowed < len(streamed))
        text = [5, 9, 30, 7]
        np.testing.assert_array_equal(chain_rows(backend, text), chain_rows(load(str(llama), **OPTIONS), text))
        backend.close()
        assert not cuda.pinned

    def test_memory_that_is_left_becomes_buffers(self):
        layers = [100] * 20
        assert choose_placement(layers, 1250, 50).buffers == BUFFERS  # layers stay instead
        for gpu_layers, left in ((10, 3), (9, 4), (3, MOST_BUFFERS)):
            placement = choose_placement(layers, 1250, 50, gpu_layers=gpu_layers)
            assert (len(placement.streamed), placement.buffers) == (21 - gpu_layers, left)
        assert choose_placement(layers, 10_000, 50, gpu_layers=18).buffers == 3  # as many as are streamed

    @pytest.mark.parametrize("stay", [1, 3, 5])
    def test_more_buffers_change_no_bit(self, llama, stay):
        text = [5, 9, 30, 7]
        backend = load(str(llama), **OPTIONS, gpu_layers=stay, copies=Recorder)
        assert len({block.size for block in backend.streamers[0].blocks}) == 1
        expected = chain_rows(load(str(llama), **OPTIONS), text)
        for _ in range(2):
            np.testing.assert_array_equal(chain_rows(backend, text), expected)

    def test_streamed_layers_are_spread(self):
        assert streamed_layers(6, 6) == []
        assert streamed_layers(6, 0) == [0, 1, 2, 3, 4, 5]
        assert streamed_layers(6, 3) == [1, 3, 5]
        for count in range(1, 40):
            for resident in range(count):
                layers = streamed_layers(count, resident)
                assert len(layers) == count - resident
                gaps = [b - a for a, b in pairwise([*layers, layers[0] + count])]  # also over the end of the pass
                assert max(gaps) - min(gaps) <= 1


NO_MEMORY = [
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    (RuntimeError, "MPS backend out of memory (MPS allocated: 9.00 GB)."),
    (RuntimeError, "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: Error 12"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "text"), NO_MEMORY, ids=["CUDA", "MPS", "CPU"])
@pytest.mark.parametrize("where", ["build_mask", "top_on_device", "move", "row", "view", "states", "save", "load"])
def test_a_device_whose_memory_runs_out_beside_the_model_is_one_line(llama, monkeypatch, tmp_path, where, kind, text):
    def fail(*_):
        raise kind(text)

    def step():
        logits = backend.forward([work(session, [5, 6, 7], [-1, 0, 0])])[0]
        logits._logits = Rows()
        logits._kept = [Rows()]
        if where == "top_on_device":
            logits.top([0], 1, 1.0, [None])
        elif where in ("row", "view"):
            getattr(logits, where)(0)
        elif where == "states":
            logits.states([0])
        session.commit([0, 2])
        session.save(tmp_path / "session")
        session.load(tmp_path / "session")

    class Rows:
        device = torch.device("cpu" if where == "states" else "cuda")
        __getitem__ = fail

    backend = load(str(llama), **OPTIONS)
    backend.keep_states([backend.model.get_decoder().norm])
    session = backend.open()
    places = {
        "build_mask": backend_module, "top_on_device": logits_module, "move": Cells, "_saved": TorchSession,
        "_make": TorchSession,
    }  # fmt: skip
    name = {"save": "_saved", "load": "_make"}.get(where, where)
    if name in places:
        monkeypatch.setattr(places[name], name, fail)
    with pytest.raises(ModelError, match=rf"no memory on the device for .*: {re.escape(text)}"):
        step()
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_scores_that_no_kernel_computes_are_counted(family, monkeypatch):
    """Gemma 2's are capped, gpt-oss's have sinks; all of them are in memory, in float32, too."""
    model = tiny_model(family)
    limits = replace(CAPABILITIES, context_length=512, max_nodes=512)
    counted = work_bytes(model, limits, 9)
    monkeypatch.setattr(model.config, "attn_logit_softcapping", None, raising=False)
    for layer in model.get_decoder().layers:
        layer.self_attn._parameters.pop("sinks", None)
    assert counted - work_bytes(model, limits, 9) == 4 * 512 * 1024 * (4 + 8)


class TestTreeCheck:
    @pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_right_attention(self, family, dtype, tmp_path):
        backend = load(str(save(tiny_model(family), tmp_path)), threads=1, dtype=dtype)
        check_tree(backend)
        assert backend.open().token_ids == []

    def test_it_takes_two_passes(self, llama):
        backend, passes = load(str(llama), **OPTIONS), []
        backend.model.get_decoder().layers[0].register_forward_hook(lambda *_: passes.append(1))
        check_tree(backend)
        assert len(passes) == 2

    @pytest.mark.parametrize("length", [32, 1024])
    def test_a_kernel_that_is_wrong_behind_many_cells_is_found(self, llama, length, monkeypatch):
        backend, kernel = load(str(llama), **OPTIONS | {"context_length": 1100}), attention.scaled_dot_product_attention

        def broken(query, key, value, attn_mask, **options):
            if key.shape[-2] > length:
                attn_mask = attn_mask.clone()
                attn_mask[:, -2:] = 0  # siblings see each other
            return kernel(query, key, value, attn_mask=attn_mask, **options)

        check_tree(backend)
        monkeypatch.setattr(attention, "scaled_dot_product_attention", broken)
        with pytest.raises(ModelError, match="its attention cannot read a tree on cpu"):
            check_tree(backend)

    @pytest.mark.parametrize("wrong", ["all", "itself", "nan"])
    def test_a_kernel_that_computes_another_attention_is_found(self, llama, monkeypatch, wrong):
        backend = load(str(llama), **OPTIONS)
        kernel = attention.scaled_dot_product_attention

        def broken(query, key, value, attn_mask, scale, is_causal):
            if wrong == "itself":
                return value[..., -query.shape[-2] :, :].contiguous()
            found = kernel(query, key, value, scale=scale)
            return found if wrong == "all" else found * float("nan")

        monkeypatch.setattr(attention, "scaled_dot_product_attention", broken)
        with pytest.raises(ModelError, match="its attention cannot read a tree on cpu"):
            check_tree(backend)


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("DiffLlama", {}, "computes attention twice in a layer"),
        ("Doge", {}, "its attention has a mask of its own"),
        ("Phimoe", {"sliding_window": 5, "num_local_experts": 2}, "its window of 5 tokens is not one that"),
    ],
)
def test_attention_that_is_not_computed_here_is_refused(tmp_path, family, more, reason):
    """Else the text would be another, without a word."""
    config = getattr(transformers, f"{family}Config")(**SMALL, **more)
    folder = save(getattr(transformers, f"{family}ForCausalLM")(config), tmp_path)
    with pytest.raises(ModelError, match=reason):
        load(str(folder), **OPTIONS)


def test_a_model_larger_than_a_macs_gpu(llama):
    machine = replace(this_machine(), gpus=(Gpu("mps", True, 1 << 20, limit=1 << 20),))
    with pytest.raises(NoRoom, match=r"takes .*, and the GPU can hold 1 MiB now: use the backend mlx"):
        load_at_once(engine, str(llama), machine, device="mps")


@needs_bitsandbytes
class TestNf4:
    def test_a_layer_by_its_definition(self):
        from edgespec.backends.torch.nf4 import NF4Linear

        torch.manual_seed(0)
        linear = torch.nn.Linear(128, 64).requires_grad_(False)
        packed = NF4Linear.quantised(linear)
        # Every weight is one of 16 levels times the largest magnitude of its 64.
        codes = packed.weight.flatten().to(torch.int64)
        levels = packed.levels[torch.stack([codes >> 4, codes & 15], 1).flatten()]
        weight = (levels.view(-1, 64) * linear.weight.abs().view(-1, 64).amax(1, keepdim=True)).view(64, 128)
        assert (weight - linear.weight).abs().max() < 0.16 * linear.weight.abs().max()  # half the widest gap of levels
        for rows in (1, 5):
            x = torch.randn(rows, 128)
            torch.testing.assert_close(packed(x), x @ weight.T + linear.bias, atol=1e-5, rtol=1e-5)

    @pytest.mark.covering(1)
    @pytest.mark.parametrize("check", [growth_layer_by_layer, several_sessions_in_one_forward])
    def test_trees_are_texts(self, llama, check):
        check(partial(load, str(llama), threads=1, dtype="nf4"))

    @pytest.mark.parametrize("family", ["llama", "lfm2"])
    def test_a_model_by_its_definition(self, family, tmp_path):
        """The same as with the matrices rounded beforehand; convolutions stay as they are."""
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        folder = save(tiny_model(family), tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for linear in [part for part in model.get_decoder().modules() if isinstance(part, torch.nn.Linear)]:
            linear.weight.data = dequantize_4bit(*quantize_4bit(linear.weight.data, quant_type="nf4", blocksize=64))
        packed = load(str(folder), **OPTIONS, dtype="nf4")
        rounded = load(str(save(model, tmp_path / "rounded")), **OPTIONS, dtype="bfloat16")
        rows = [np.stack(chain_rows(backend, [5, 9, 30, 7, 100, 50])) for backend in (packed, rounded)]
        assert rows[0].std() > 1
        np.testing.assert_allclose(*rows, atol=0.1)

    def test_it_is_streamed_in_4_bits(self, llama):
        text = [5, 9, 30, 7]
        backend, _, streamed = streaming(llama, 1, dtype="nf4")
        np.testing.assert_array_equal(
            chain_rows(backend, text), chain_rows(load(str(llama), **OPTIONS, dtype="nf4"), text)
        )
        weights = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48
        padding = 7 * 3 * 256 + 2 * 256  # codes, scales and levels of seven matrices; norms
        assert weights * 4.5 / 8 <= block_bytes(streamed[0]) <= weights * 4.5 / 8 + padding

    def test_fused_experts_are_refused(self, tmp_path):
        with pytest.raises(ModelError, match=r"experts' weights are fused \(mlp\.experts\..*: use a 16-bit dtype"):
            load(str(save(tiny_model("mixtral"), tmp_path)), dtype="nf4")


def store_nf4(folder, nested, dtype=torch.bfloat16, group=64):
    """Bring a folder to the form in which the hub has 4-bit folders of bitsandbytes."""
    from bitsandbytes.functional import quantize_4bit

    file, tensors = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        if tensor.ndim != 2 or "proj" not in name:
            tensors[name] = tensor.to(dtype)
            continue
        codes, state = quantize_4bit(tensor.to(dtype), quant_type="nf4", blocksize=group, compress_statistics=nested)
        tensors[name] = codes
        tensors |= {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["quantization_config"] = {
        "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@needs_bitsandbytes
class TestStoredNf4:
    """Folders that bitsandbytes has brought to 4 bits, as the hub has them."""

    @pytest.fixture
    def folder(self, tmp_path):
        return store_nf4(save(tiny_model("llama", num_hidden_layers=6), tmp_path / "stored"), nested=False)

    @pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
    def test_they_are_what_is_quantised_at_load(self, family, tmp_path):
        """Without nested scales they have the same bits."""
        plain = save(tiny_model(family).to(torch.bfloat16), tmp_path / "plain")
        text = [5, 9, 30, 7, 100, 50]
        expected = np.stack(chain_rows(load(str(plain), **OPTIONS, dtype="nf4"), text))
        backend = load(str(store_nf4(plain, nested=False)), **OPTIONS)
        np.testing.assert_array_equal(np.stack(chain_rows(backend, text)), expected)
        assert backend.computing["dtype"] == "nf4"
        assert backend.dtype == torch.bfloat16
        again = load(str(plain), **OPTIONS, dtype="nf4")
        np.testing.assert_array_equal(np.stack(chain_rows(again, text)), expected)

    @pytest.mark.parametrize("nested", [True, False])
    @pytest.mark.parametrize("group", [64, 128])
    def test_nested_scales_and_other_groups(self, nested, group, tmp_path):
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        model = tiny_model("llama").to(torch.bfloat16)
        stored = store_nf4(save(model, tmp_path / "stored"), nested, group=group)
        for linear in [part for part in model.get_decoder().modules() if isinstance(part, torch.nn.Linear)]:
            codes = quantize_4bit(linear.weight.data, quant_type="nf4", blocksize=group, compress_statistics=nested)
            linear.weight.data = dequantize_4bit(*codes)
        rounded = load(str(save(model, tmp_path / "rounded")), **OPTIONS)
        text = [5, 9, 30, 7, 100, 50]
        found, expected = (np.stack(chain_rows(one, text)) for one in (load(str(stored), **OPTIONS), rounded))
        assert expected.std() > 1
        np.testing.assert_allclose(found, expected, atol=0.1)

    def test_nested_scales_take_a_byte_each_and_are_the_expanded_ones(self, tmp_path):
        from bitsandbytes.functional import dequantize_blockwise, quantize_4bit
        from edgespec.backends.torch.nf4 import NF4Linear

        torch.manual_seed(0)
        linear = torch.nn.Linear(512, 1024, bias=False).requires_grad_(False)
        codes, state = quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=True)
        packed, expanded = NF4Linear(linear), NF4Linear(linear)
        packed.take({"weight": codes} | {f"weight.{part}": one for part, one in state.as_dict(packed=True).items()})
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
        expanded.weight, expanded.scales, expanded.levels = codes, scales, state.code
        groups = linear.weight.numel() // 64
        assert block_bytes(packed) == 32 * groups + groups + 256 + 256 + 1024 + 256
        for rows in (1, 5):
            x = torch.randn(rows, 512)
            assert torch.equal(packed(x), expanded(x))

    @pytest.mark.parametrize("nested", [True, False])
    def test_they_are_streamed(self, nested, tmp_path):
        sizes = {"num_hidden_layers": 6, "hidden_size": 128}
        folder = store_nf4(save(tiny_model("llama", **sizes), tmp_path / "stored"), nested)
        text = [5, 9, 30, 7]
        backend, _, streamed = streaming(folder, 1)
        np.testing.assert_array_equal(chain_rows(backend, text), chain_rows(load(str(folder), **OPTIONS), text))
        plain = load(str(save(tiny_model("llama", **sizes), tmp_path / "plain")), **OPTIONS, dtype="bfloat16")
        assert block_bytes(streamed[0]) < 0.6 * block_bytes(plain.model.get_decoder().layers[0])

    def test_other_4_bit_formats_are_refused(self, folder):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="quantised already, and not as bitsandbytes' nf4"):
            load(str(folder))

    def test_nothing_is_kept_of_them(self, folder):
        with pytest.raises(UsageError, match="this folder has 4 bits"):
            load(str(folder), dtype="nf4", keep_packed=True)


@needs_bitsandbytes
class TestKeptLayers:
    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path / "cache" / "edgespec" / "packed"

    def load(self, folder, **options):
        return load(str(folder), **OPTIONS, dtype="nf4", keep_packed=True, **options)

    def test_the_next_start_quantises_nothing(self, llama, cache, monkeypatch):
        from edgespec.backends.torch import nf4

        text = [5, 9, 30, 7]
        expected = chain_rows(load(str(llama), **OPTIONS, dtype="nf4"), text)
        first = self.load(llama)
        np.testing.assert_array_equal(chain_rows(first, text), expected)
        files = sorted(cache.rglob("*"))
        assert [file.name for file in files[1:]] == [f"layer-{i:05}.safetensors" for i in range(6)]
        assert f" of 4-bit layers are kept in {files[0]} (--keep-packed)" in first.notes[-1]
        monkeypatch.setattr(nf4, "quantize_4bit", None)  # a call would fail
        np.testing.assert_array_equal(chain_rows(self.load(llama), text), expected)
        np.testing.assert_array_equal(chain_rows(self.load(llama, gpu_layers=2, copies=Recorder), text), expected)

    def test_what_was_cut_short_is_finished(self, llama, cache, monkeypatch):
        from edgespec.backends.torch import nf4

        keep, kept = nf4.KeptLayers.keep, []

        def stop(self, layer):
            if len(kept) == 3:
                raise KeyboardInterrupt
            keep(self, layer)
            kept.append(layer)

        with monkeypatch.context() as patch:
            patch.setattr(nf4.KeptLayers, "keep", stop)
            with pytest.raises(KeyboardInterrupt):
                self.load(llama)
        written = {file: file.stat().st_mtime_ns for file in cache.rglob("*.safetensors")}
        assert len(written) == 3
        first = min(written)
        first.write_bytes(first.read_bytes()[:100])  # as a disk that was full
        text = [5, 9, 30, 7]
        expected = chain_rows(load(str(llama), **OPTIONS, dtype="nf4"), text)
        np.testing.assert_array_equal(chain_rows(self.load(llama), text), expected)
        assert {file for file in written if file.stat().st_mtime_ns == written[file]} == written.keys() - {first}
        assert len([*cache.rglob("*.safetensors")]) == 6

    def test_another_model_under_the_same_name(self, tmp_path, cache):
        folder = save(tiny_model("llama", num_hidden_layers=2), tmp_path / "model")
        self.load(folder)
        save(tiny_model("llama", num_hidden_layers=2, hidden_size=64), folder)
        expected = chain_rows(load(str(folder), **OPTIONS, dtype="nf4"), [5, 9])
        np.testing.assert_array_equal(chain_rows(self.load(folder), [5, 9]), expected)
        assert len([*cache.iterdir()]) == 2

    def test_kept_layers_of_other_modules_are_made_anew(self, llama, cache):
        """As another version of transformers may have them."""
        expected = chain_rows(load(str(llama), **OPTIONS, dtype="nf4"), [5, 9])
        self.load(llama)
        renamed, smaller, *_ = files = sorted(cache.rglob("*.safetensors"))
        tensors = {file: load_file(file) for file in files}
        save_file({f"inner.{name}": one for name, one in tensors[renamed].items()}, renamed)
        save_file({name: one[: len(one) // 2].clone() for name, one in tensors[smaller].items()}, smaller)
        np.testing.assert_array_equal(chain_rows(self.load(llama), [5, 9]), expected)
        assert {file: load_file(file).keys() for file in files} == {file: one.keys() for file, one in tensors.items()}

    def test_a_disk_without_room(self, llama, cache, monkeypatch):
        from edgespec.backends.torch import nf4

        monkeypatch.setattr(nf4.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(ModelError, match=r"--keep-packed writes 1 MiB of layers there, but only 0 MiB are free"):
            self.load(llama)
        assert not [*cache.rglob("*.safetensors")]

    def test_only_what_is_quantised_can_be_kept(self, llama):
        with pytest.raises(UsageError, match=r"--keep-packed \(keep_packed\) is for the dtype nf4"):
            load(str(llama), keep_packed=True)


def test_nf4_without_its_package(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "edgespec.backends.torch.nf4", raising=False)
    with pytest.raises(MissingPackage, match=r"pip install 'edgespec\[nf4\]'"):
        load(str(llama), dtype="nf4")


class TestRefusals:
    """One clear line each."""

    def refused(self, message, path, kind=ModelError, **options):
        with pytest.raises(kind, match=message) as caught:
            load(str(path), **options)
        assert "\n" not in str(caught.value)
        if kind is ModelError:
            assert str(caught.value).startswith(f"{path}: ")

    def edit_config(self, folder, **changes):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def test_folders(self, tmp_path):
        self.refused("there is no such folder", tmp_path / "none")
        self.refused(r"has no config\.json", tmp_path)

    def test_weights(self, tmp_path):
        folder = save(tiny_model("llama"), tmp_path)
        file = folder / "model.safetensors"
        data = file.read_bytes()
        file.unlink()
        self.refused("cannot be loaded: .*model.safetensors", folder)
        file.write_bytes(data[: len(data) // 2])
        self.refused("cannot be loaded: .", folder)
        file.write_bytes(b"hello")
        self.refused("cannot be loaded: .", folder)
        file.write_bytes(data)
        self.edit_config(folder, num_hidden_layers=4)
        self.refused(r"lack 9 of the model's tensors, such as model\.layers\.3\.", folder)
        self.edit_config(folder, num_hidden_layers=3, hidden_size=64)
        self.refused("cannot be loaded: .", folder)

    def test_architectures(self, tmp_path):
        folder = save(tiny_model("llama"), tmp_path)
        self.edit_config(folder, model_type="nonsense")
        self.refused(r"config\.json cannot be used: .*nonsense", folder)
        self.edit_config(folder, model_type="llama", quantization_config={"quant_method": "gptq", "bits": 4})
        self.refused("weights are quantised already, and not as bitsandbytes' nf4", folder)
        self.edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
        self.refused("weights are quantised already", folder)

    def test_models_that_cannot_hold_a_tree(self, tmp_path):
        small = {"vocab_size": 272, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 1}
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("bloom", **small))
        self.refused("computes attention in its own way", save(model, tmp_path))

    def test_positions_that_change_with_the_length(self, tmp_path):
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        folder = save(tiny_model("llama", max_position_embeddings=48, rope_parameters=rope), tmp_path)
        self.refused("positions change beyond 48: use at most that", folder, UsageError, context_length=64)
        tree_equals_chains(lambda **options: load(str(folder), **options | {"context_length": 48}))

    def test_positions_that_the_model_has_not(self, tmp_path):
        """OPT learns one vector for each; the context ends there."""
        names = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "bos_token_id",
            "eos_token_id",
        )
        small = {name: SMALL[name] for name in names}
        config = transformers.OPTConfig(
            **small, max_position_embeddings=48, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3
        )
        folder = save(transformers.OPTForCausalLM(config), tmp_path)
        backend = load(str(folder), **OPTIONS | {"context_length": 64})
        assert backend.capabilities.context_length == 48
        assert list(backend.notes) == ["the context is 48, not 64: this model has no further positions"]
        text = random_tokens(backend, 49, 1)
        assert len(chain_rows(backend, text[:48])) == 48
        with pytest.raises(ContextFull):
            chain_rows(backend, text)
        backend = load(str(folder), **OPTIONS | {"context_length": 0})
        assert (backend.capabilities.context_length, list(backend.notes)) == (48, [])

    def test_options(self, llama):
        absent = "cuda" if not torch.cuda.is_available() else "cuda:77"
        self.refused(f"device '{absent}' is not there: this PyTorch .* sees .*cpu", llama, UsageError, device=absent)
        self.refused("device 'toaster' is not there", llama, UsageError, device="toaster")
        self.refused("dtype is 'int3', but must be one of float32", llama, UsageError, dtype="int3")
        self.refused("budget is 0", llama, UsageError, budget=0)
        self.refused("sessions is 0", llama, UsageError, sessions=0)
        self.refused("gpu_memory is for GPUs", llama, UsageError, device="cpu", gpu_memory="1G")


def test_a_session_of_another_transformers_is_refused(tmp_path, monkeypatch):
    folder, library = str(save(tiny_model("llama"), tmp_path / "model")), backend_module.transformers
    contract.check_update_is_refused(
        lambda: load(folder, context_length=CONTEXT), tmp_path / "saved", library, "transformers", monkeypatch
    )
