"""Several GPUs hold more layers on PyTorch: what lies on which, and texts that stay the same to the bit."""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

from cards import GIB, Cards
from cards import cards as cards
from conftest import few
from contract import by_main_check, chain_rows, work
from edgespec.backends.torch import attention
from edgespec.backends.torch import backend as backend_module
from edgespec.backends.torch import loading as loading_module
from edgespec.backends.torch.backend import TorchBackend, load
from edgespec.backends.torch.loading import (
    WORKSPACE,
    Host,
    choose_placement,
    spread,
    untied_embeddings,
    work_bytes,
)
from edgespec.backends.torch.offload import BUFFERS, PROBE, PROBES, Block, block_bytes, link_speeds, stored_tensors
from folder_texts import SAMPLINGS, write
from hf_models import FAMILIES, HYBRIDS, save, tiny_model, torch
from test_hybrids_torch import LAYERS
from test_torch import Recorder

from edgespec.errors import ContextFull, NoRoom, UsageError
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.weights.plan import layers_by_device, streams_by_device

OPTIONS: dict[str, Any] = {"context_length": 64, "budget": 16, "sessions": 3, "threads": 1}
PROMPT = [5, 9, 30, 7, 9, 30]
CLASSES = ["llama", "mixtral", "gpt-oss", "gemma3", "lfm2", "falcon-h1"]  # a family of each kind of layers
There = Callable[..., Cards]


@pytest.fixture
def divided(cards: There, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchBackend]:
    """Loads with so many layers on each card."""

    def load_divided(folder: Path, counts: Sequence[int], **options: Any) -> TorchBackend:
        cards(*[8 * GIB] * len(counts))
        with monkeypatch.context() as patch:
            patch.setattr(loading_module, "layers_by_device", lambda *about: list(counts))
            return load(str(folder), **OPTIONS | options)

    return load_divided


def everything(backend: TorchBackend, folder: Path) -> Any:
    """Logits of chains and trees, in several passes and sessions: batches, commits, cuts, copies and files."""
    rows = [*chain_rows(backend, PROMPT)]
    one, other = backend.open(), backend.open()

    def add(*works: Any) -> None:
        for logits, made in zip(backend.forward(works), works, strict=True):
            rows.extend(logits.row(node) for node in made.wanted.tolist())

    add(work(one, [5, 6, 7, 8], [-1, 0, 0, 2]), work(other, [9, 8], [-1, 0]))
    one.commit([0, 2, 3])
    add(work(one, [1, 2, 3], [-1, -1, 1]))
    one.commit([1, 2])
    other.close()
    other = one.fork()
    one.rewind(one.reusable_prefix(4))
    add(work(one, [4], [-1]), work(other, [4, 5], [-1, -1]))
    other.commit([1])
    other.save(folder / "session")
    one.load(folder / "session")
    add(work(one, [4, 8], [-1, 0]))
    return np.stack(rows)


@pytest.mark.covering(1)
@pytest.mark.parametrize("counts", [[1, 2], [1, 1, 1], [2, 0, 1]], ids=str)
@pytest.mark.parametrize("family", few([*FAMILIES, *HYBRIDS], *CLASSES))
def test_logits_are_those_of_one_device(
    family: str, counts: list[int], divided: Callable[..., TorchBackend], tmp_path: Path
) -> None:
    folder = save(tiny_model(family), tmp_path / "model")
    found = everything(divided(folder, counts), tmp_path)
    assert found.std() > 0.1
    np.testing.assert_array_equal(found, everything(load(str(folder), **OPTIONS, device="cpu"), tmp_path))


@pytest.mark.covering(1)
@pytest.mark.parametrize("gpu_layers", [None, 4], ids=["resident", "streamed"])
@pytest.mark.parametrize("counts", [[5], [3, 2], [3, 1, 1]], ids=str)
@pytest.mark.parametrize(
    "family", few(["llama", "mixtral", "mistral, window", "lfm2", "granite"], "mixtral", "mistral, window", "lfm2")
)
def test_texts_are_those_of_plain_decoding(
    family: str, counts: list[int], gpu_layers: int | None, divided: Callable[..., TorchBackend], tmp_path: Path
) -> None:
    changes = {"layer_types": LAYERS[family]} if family in LAYERS else {}
    folder = save(tiny_model(family, num_hidden_layers=5, **changes), tmp_path)
    alone, target = load(str(folder), **OPTIONS, device="cpu"), divided(folder, counts, gpu_layers=gpu_layers)
    assert sum(len(one.blocks) for one in target.streamers) == (2 if gpu_layers else 0)
    plain, _ = write(alone, NonePlanner(), PROMPT, SAMPLINGS[1], 12)
    for planner in (NonePlanner(), SpecExecPlanner(alone, depth=4, beam=2)):
        assert write(target, planner, PROMPT, SAMPLINGS[1], 12)[0] == plain


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "lfm2"])
@by_main_check
def test_contract(
    family: str, check: Callable[..., None], divided: Callable[..., TorchBackend], tmp_path: Path
) -> None:
    folder = save(tiny_model(family), tmp_path)
    check(
        lambda **options: divided(folder, [1, 1, 1], **options | {"context_length": options["context_length"] or 640})
    )


@pytest.mark.parametrize("family", ["llama", "falcon-h1"])
def test_weights_cells_and_states_lie_where_their_layer_is_computed(
    family: str, divided: Callable[..., TorchBackend], tmp_path: Path
) -> None:
    backend = divided(save(tiny_model(family), tmp_path), [1, 2])
    layers, (inner, *outer) = backend.model.get_decoder().layers, ["cuda:1", "cuda:0"]
    places = [{str(store[name].device) for _, store, name, _ in stored_tensors(layer)} for layer in layers]
    assert places == [{*outer}, {inner}, {inner}]
    inside = {id(parameter) for parameter in layers.parameters()}
    assert {str(one.device) for one in backend.model.parameters() if id(one) not in inside} == {*outer}
    cells = backend.open().cells
    assert [str(cells.by_layer[i].device) for i in range(3)] == [*outer, inner, inner]
    assert [len(group) for group in cells.groups] == [1, 2]
    if backend.cache:
        assert [str(state.device) for state in backend.cache.empty] == [*outer] * 2 + [inner] * 4
    assert backend.computing["device"] == "cuda:0, cuda:1"
    shares = ((1, "Card (cuda:0)"), (2, "Card (cuda:1)"))
    assert (backend.placed.on_device, backend.placed.shares) == (3, shares)


def test_only_borders_are_crossed(cards: There, divided: Callable[..., TorchBackend], tmp_path: Path) -> None:
    """Each further card gets the inputs once a pass, however many layers it has, and the output comes back."""
    folder, found = save(tiny_model("llama", num_hidden_layers=6), tmp_path), []
    for counts in ([5, 1], [1, 5], [2, 2, 2], [6, 0]):
        backend = divided(folder, counts)
        session, mode = backend.open(), cards(*[8 * GIB] * len(counts))
        mode.moves.clear()
        backend.forward([work(session, [5, 6, 7], [-1, 0, 0])])
        found.append([move for move in mode.moves if "cpu" not in move])
    assert found[0] == found[1]
    assert [[move for move in some if move[1] == "cuda:0"] for some in found[:3]] == [
        [("cuda:1", "cuda:0")], [("cuda:1", "cuda:0")], [("cuda:2", "cuda:0")],
    ]  # fmt: skip
    assert {*found[2]} == {("cuda:0", "cuda:1"), ("cuda:0", "cuda:2"), ("cuda:1", "cuda:2"), ("cuda:2", "cuda:0")}
    assert found[3] == []


def test_states_for_a_head_come_from_every_card(divided: Callable[..., TorchBackend], tmp_path: Path) -> None:
    folder, found = save(tiny_model("llama"), tmp_path), []
    for backend in (divided(folder, [1, 2]), load(str(folder), **OPTIONS, device="cpu")):
        decoder = backend.model.get_decoder()
        backend.keep_states([decoder.layers[0], decoder.layers[1], decoder.norm])
        logits: Any = backend.forward([work(backend.open(), [5, 6, 7], [-1, 0, 0])])[0]
        found.append(logits.states([2, 0]))
    np.testing.assert_array_equal(*found)


def test_layers_that_are_not_connected_fail(
    divided: Callable[..., TorchBackend], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The made-up cards notice it."""
    monkeypatch.setattr(backend_module, "connect", lambda layers, spans: None)
    with pytest.raises(Exception, match="tensors lie on cuda:0, cuda:1"):
        divided(save(tiny_model("llama"), tmp_path), [2, 1])


@pytest.mark.parametrize(
    ("memory", "rooms", "asked", "counts"),
    [
        (120, [50], None, [10, 0]),  # all fit on the first: 10 layers, 10 caches, and 10 for all else
        (119, [50], None, [9, 1]),
        (60, [70], None, [4, 6]),
        (60, [33, 33], None, [4, 3, 3]),
        (54, [99, 99], None, [4, 6, 0]),
        (53, [99, 99], None, [3, 7, 0]),
        (60, [5, 99], None, [4, 0, 6]),
        (60, [21], None, [9, 1]),  # layers are streamed, so that the second holds as many as it can
        (60, [], None, [10]),
        (60, [0], None, [10, 0]),
        (60, [99], 3, [7, 3]),
        (60, [99], 0, [10, 0]),
    ],
)
def test_layers_of_each_card(memory: int, rooms: list[int], asked: int | None, counts: list[int]) -> None:
    sizes, caches = [10] * 10, [1] * 10
    assert layers_by_device(sizes, memory, 20, rooms, caches, asked) == counts


def test_layers_of_several_sizes_and_caches() -> None:
    """Of a mixture with a dense first layer; recurrent layers have smaller caches."""
    assert layers_by_device([5, 20, 20, 20], 48, 4, [0], [0, 1, 0, 1]) == [4, 0]
    assert layers_by_device([5, 20, 20, 20], 48, 4, [21], [0, 1, 0, 1]) == [3, 1]
    assert layers_by_device([5, 20, 20, 20], 47, 4, [41], [0, 1, 0, 1]) == [2, 2]
    assert layers_by_device([5, 20, 20, 20], 47, 4, [40], [0, 1, 0, 1]) == [3, 1]


ALONE = [(0, range(7)), (1, range(7, 10))], [1, 2, 4, 5, 6]


def placed(
    links: tuple[float, Sequence[float]], host: Host | None = None, gpu_layers: int | None = None, memory: int = 57
) -> Any:
    """Of ten layers of ten bytes, with caches of a byte, on a card with 47 bytes for layers and one with 33."""
    sizes, caches = [10] * 10, [1] * 10
    alone = choose_placement(sizes, memory, 20, host, gpu_layers, [33], caches)
    return spread(alone, sizes, [memory - 10, 33], caches, links, host, gpu_layers)


@pytest.mark.parametrize(
    ("links", "runs", "streamed"),
    [
        # Copies alone at 2, together at 1 each, as behind one bridge: nothing is gained.
        ((2.0, [1.0, 1.0]), *ALONE),
        ((1.0, [1.0, 0.1]), *ALONE),  # the second card is in a slow slot
        (
            (1.0, [1.0, 1.0]),
            [(0, range(3)), (1, range(3, 5)), (0, range(5, 8)), (1, range(8, 10))],
            [1, 2, 3, 4, 6, 7, 8, 9],
        ),
    ],
    ids=["one bridge", "slow slot", "as fast"],
)
def test_all_cards_stream_where_that_is_faster(
    links: tuple[float, Sequence[float]], runs: list[tuple[int, range]], streamed: list[int]
) -> None:
    found = placed(links)
    assert (found.runs, found.streamed, found.buffers) == (runs, streamed, BUFFERS)


def test_layers_that_this_machines_memory_cannot_hold_are_the_first_cards(tmp_path: Path) -> None:
    together = (1.0, [1.0, 1.0])
    assert placed(together, Host(tmp_path, 80, 0, apart=True)).runs != ALONE[0]
    assert placed(together, Host(tmp_path, 79, 0, apart=True)).runs == ALONE[0]
    assert placed(together, Host(tmp_path, 49, 0, apart=True)).on_disk  # three layers of it are buffers


def test_layers_asked_for_stay_on_all_cards() -> None:
    found = placed((1.0, [1.0, 1.0]), gpu_layers=4, memory=157)
    assert (len(found.streamed), found.buffers) == (7, 3)
    with pytest.raises(NoRoom, match="with --gpu-layers 9 8 layers stay on the GPU, but 5 of 10 fit"):
        placed((1.0, [1.0, 1.0]), gpu_layers=9)


def test_links_are_measured_while_all_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copies of a link that was idle take ten times as long."""
    copies, now = list[str](), ["cpu"]

    class Event:
        def __init__(self, **options: Any) -> None:
            self.at, self.device = 0.0, ""

        def record(self) -> None:
            self.device, count = now[0], copies.count(now[0])
            each = {"cuda:0": 2.0, "cuda:1": 8.0}[self.device]
            self.at = each * (count + 9 * min(count, 3))

        def synchronize(self) -> None:
            assert len(copies) == 2 * PROBES  # none waits for another

        def elapsed_time(self, other: "Event") -> float:
            assert self.device == other.device
            return other.at - self.at

    @contextmanager
    def device(one: str) -> Iterator[None]:
        now[0] = one
        yield

    host = SimpleNamespace(copy_=lambda source, non_blocking: copies.append(now[0]))
    monkeypatch.setattr(torch, "empty", lambda size, **options: host)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    assert link_speeds(["cuda:0", "cuda:1"]) == [PROBE / 2e-3, PROBE / 8e-3]


@pytest.mark.parametrize(
    ("rooms", "speeds", "asked", "shares"),
    [
        ([200, 200], [1, 1], None, [(20, 2), (20, 2)]),  # 18 stay on each, besides two buffers
        ([200, 200], [2, 1], None, [(21, 3), (19, 1)]),
        ([200, 20], [1, 1], None, [(29, 11), (11, 11)]),  # none stays on the second
        ([200, 200], [1, 1], 30, [(23, 5), (17, 5)]),
        ([200, 200], [1, 1], 37, []),
        ([200, 10], [1, 1], None, []),  # no room for buffers
    ],
)
def test_streams_of_each_card(
    rooms: list[int], speeds: list[float], asked: int | None, shares: list[tuple[int, int]]
) -> None:
    assert streams_by_device(40, 10, 0, rooms, speeds, asked) == shares


class Counting(Recorder):
    """Counts the bytes that each card gets."""

    sent: ClassVar[dict[str, int]] = {}

    def __init__(self, device: Any, buffers: int) -> None:
        super().__init__(device, buffers)
        self._device = str(device)

    def fill(self, buffer: int, target: Any, source: Any) -> None:
        super().fill(buffer, target, source)
        self.sent[self._device] = self.sent.get(self._device, 0) + source.nbytes


@pytest.mark.parametrize("family", few([*FAMILIES, *HYBRIDS], "mistral, window", "lfm2"))
def test_cards_that_take_turns_write_the_text_of_one(
    family: str, cards: There, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of seven streamed layers one card gets seven in a pass, the two four and three."""
    config, folder = vars(tiny_model(family).config), tmp_path / "model"
    kinds = {key: 3 * config[key] for key in ("layer_types", "layers_block_type") if key in config}
    save(tiny_model(family, num_hidden_layers=9, **kinds), folder)
    monkeypatch.setattr(backend_module, "CudaCopies", Counting)
    monkeypatch.setattr(loading_module, "MOST_BUFFERS", BUFFERS)
    cards(8 * GIB, 8 * GIB)
    found, rows = list[dict[str, int]](), list[Any]()
    for device in ("cuda:0", "cuda"):
        backend = load(str(folder), **OPTIONS, gpu_layers=3, device=device)
        largest = max(block.size for streamer in backend.streamers for block in streamer.blocks)
        session = backend.open()
        backend.forward([work(session, [5, 6], [-1, 0])])
        Counting.sent.clear()
        session.commit([0, 1])
        backend.forward([work(session, [7, 8], [-1, -1])])
        found.append({card: round(size / largest) for card, size in Counting.sent.items()})
        session.close()
        rows.append(everything(backend, tmp_path))
    assert [some.keys() for some in found] == [{"cuda:0"}, {"cuda:0", "cuda:1"}]
    assert max(found[1].values()) <= found[0]["cuda:0"] / 7 * 4 + 1  # layers have two sizes in some families
    assert backend.notes[0].startswith("7 of 9 layers are streamed: ")
    assert backend.notes[0].endswith(" per pass, to 2 GPUs at the same time")
    assert [count for count, _ in backend.placed.shares] == [6, 3]
    np.testing.assert_array_equal(*rows)


def test_a_card_without_room_is_not_measured(cards: There, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy to it could fail; the others stream."""
    measured = list[list[str]]()
    monkeypatch.setattr(
        backend_module, "link_speeds", lambda some: measured.append([*map(str, some)]) or [1.0] * len(some)
    )
    cards(8 * GIB, GIB // 2, 8 * GIB)
    backend = load(str(save(tiny_model("llama", num_hidden_layers=9), tmp_path)), **OPTIONS, gpu_layers=3)
    assert measured == [["cuda:0"], ["cuda:0", "cuda:2"]]
    assert [str(one.device) for one in backend.streamers] == measured[1]


def test_a_twentieth_of_a_cards_free_memory_stays_free(
    cards: There, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What libraries need is part of it."""
    folder, found = str(save(tiny_model("llama"), tmp_path)), list[tuple[int, list[int]]]()
    choose = backend_module.choose_placement
    monkeypatch.setattr(
        backend_module, "choose_placement", lambda *args: found.append((args[1], args[5])) or choose(*args)
    )
    for free in ([20 * GIB, 24 * GIB], [8 * GIB, 8 * GIB]):
        cards(*free)
        load(folder, **OPTIONS)
    (more, [other]), (less, [few]) = found[0], found[-1]
    assert (more, less) == (19 * GIB + WORKSPACE, 8 * GIB)
    assert abs(other - few - (int(0.95 * 24 * GIB) + WORKSPACE - 8 * GIB)) < 2


def test_gpu_memory_is_for_each_card(cards: There, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, rooms = str(save(tiny_model("llama"), tmp_path)), list[int]()
    monkeypatch.setattr(
        loading_module, "layers_by_device", lambda sizes, memory, fixed, free, *_: rooms.extend(free) or [3, 0]
    )
    cards(8 * GIB, 6 * GIB)
    for memory in (None, 5 * GIB, 7 * GIB):
        load(folder, **OPTIONS, gpu_memory=memory).close()
    assert (list(dict.fromkeys(rooms)), rooms[-1]) == ([rooms[0], rooms[0] - GIB], rooms[0])


def test_cards_that_are_full_or_anothers_are_left_out(
    cards: There, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA makes no context there."""
    folder = str(save(tiny_model("llama"), tmp_path))
    cards(8 * GIB, 8 * GIB)
    really = torch.cuda.mem_get_info

    def looked_at(name: str) -> Any:
        if torch.device(name).index in full:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return really(name)

    monkeypatch.setattr(torch.cuda, "mem_get_info", looked_at)
    full = {0}
    assert [str(load(folder, **OPTIONS, device=name).device) for name in (None, "cuda")] == ["cuda:1"] * 2
    full = {0, 1}
    assert str(load(folder, **OPTIONS).device) == "cpu"
    for name in ("cuda", "cuda:0"):
        with pytest.raises(NoRoom, match="0 MiB of GPU memory cannot hold"):
            load(folder, **OPTIONS, device=name)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_memory_of_a_model_that_is_gone_is_free(kind: str, cards: There, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, device = list[str](), getattr(torch, kind)
    name = {"cuda": "memory_reserved", "mps": "driver_allocated_memory"}[kind]
    cards(*([8 * GIB] if kind == "cuda" else []))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 8 * GIB)
    monkeypatch.setattr(gc, "collect", lambda: steps.append("collect"))
    monkeypatch.setattr(device, "empty_cache", lambda: steps.append("empty"))
    monkeypatch.setattr(device, name, lambda *about: 0 if steps == ["collect", "empty"] else GIB)
    assert [gpu.used for gpu in loading_module.find_gpus(None)] == [0]
    loading_module.find_gpus(None)
    assert steps.count("collect") == 1  # a search takes as long as a small model's load: only where memory is in use


def test_the_free_memory_of_each_card_counts(cards: There, tmp_path: Path) -> None:
    folder = str(save(tiny_model("llama"), tmp_path))
    cards(8 * GIB, 8 * GIB)
    whole = load(folder, **OPTIONS)
    assert whole.placed.shares == ()  # the first card holds all
    cells, layer = whole.open().cells.nbytes * OPTIONS["sessions"], block_bytes(whole.model.get_decoder().layers[0])
    first = cells + work_bytes(whole.model, whole.capabilities, whole.capabilities.max_wanted) + 3 * layer - 1
    first -= untied_embeddings(whole.model)  # they are not on a card that streams
    second = cells // 3 + work_bytes(whole.model, whole.capabilities, None) + layer

    def placed(*free: int, **options: Any) -> tuple[Sequence[int], int]:
        cards(*free)
        found = load(folder, **OPTIONS | options).placed
        return [count for count, _ in found.shares], found.streamed

    assert placed(first, second) == placed(first, second, device="cuda") == ([2, 1], 0)
    assert placed(8 * GIB, 8 * GIB, gpu_memory=first) == ([2, 1], 0)
    assert placed(first, second - 1) == ([], 3)
    assert placed(first, second, device="cuda:0") == ([], 3)  # the only one


def test_only_trees_have_cells_beyond_the_context(cards: There, tmp_path: Path) -> None:
    cards(8 * GIB)
    backend = load(str(save(tiny_model("llama"), tmp_path)), **OPTIONS | {"context_length": 1000})
    session = backend.open()
    assert (backend.capabilities.max_nodes, session.cells.groups[0].shape[3]) == (2048, 1512)
    backend.forward([work(session, [5] * 1000, range(-1, 999), wanted=[])])  # a chunk of a prompt ends within it
    session.commit(range(998))
    backend.forward([work(session, [5] * 514, [-1] * 512 + [0, 1], wanted=[513])])
    with pytest.raises(ContextFull, match="1513 tokens and nodes; this session has 1512 cells"):
        backend.forward([work(session, [5], [2], 514, wanted=[])])
    with pytest.raises(ValueError, match="more than 512 leaves"):
        backend.forward([work(session, [5], [-1], 514, wanted=[])])


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_rows_of_an_input_embedding_are_sent_where_layers_stream(
    family: str, divided: Callable[..., TorchBackend], cards: There, tmp_path: Path
) -> None:
    """Tied embeddings are on the card, since the output's are."""
    folder = save(tiny_model(family, num_hidden_layers=3, tie_word_embeddings=family == "gemma3"), tmp_path / "model")
    _, streamed = found = [divided(folder, [3], gpu_layers=count) for count in (4, 2)]
    places = [str(one.model.get_input_embeddings().weight.device) for one in found]
    assert places == ["cuda:0", "cuda:0" if family == "gemma3" else "cpu"]
    mode, session = cards(8 * GIB), streamed.open()
    mode.moves.clear()
    mode.sizes.clear()
    streamed.forward([work(session, [5, 6, 7], [-1, 0, 0])])
    row = streamed.model.config.hidden_size * streamed.dtype.itemsize
    assert ({"llama": 3, "gemma3": 3, "lfm2": 4}[family] * row in mode.sizes) == (family != "gemma3")
    assert ("cuda:0", "cpu") not in mode.moves
    rows = [everything(one, tmp_path) for one in found]
    np.testing.assert_allclose(*rows, atol=1e-5)  # streamed recurrent layers read works together


@pytest.mark.parametrize("family", ["llama", "mistral, window", "lfm2"])
def test_a_pass_sends_numbers_and_what_nodes_see_of_each_other(family: str, cards: There, tmp_path: Path) -> None:
    """Each copy waits for weights on their way; a mask's part for committed tokens is made on the card."""
    mode = cards(8 * GIB)
    backend = load(str(save(tiny_model(family), tmp_path)), **OPTIONS)
    session = backend.open()
    backend.forward([work(session, range(5, 55), range(-1, 49), wanted=[])])
    session.commit(range(50))
    mode.moves.clear()
    mode.sizes.clear()
    backend.forward([work(session, [5, 6, 7], [-1, 0, 0])])
    sent = [size for size, (_, where) in zip(mode.sizes, mode.moves, strict=True) if where == "cuda:0"]
    if family == "lfm2":  # two paths of two tokens
        assert max(sent) <= 4 * 8
    else:
        assert sent == {"llama": [3 * 3], "mistral, window": [3 * 3, 3 * 8]}[family] + [3 * 3 * 8]


def test_zeros_are_not_sent_to_find_a_drafts_best_tokens(cards: There, tmp_path: Path) -> None:
    mode = cards(8 * GIB)
    backend = load(str(save(tiny_model("llama"), tmp_path)), **OPTIONS)
    logits = backend.forward([work(backend.open(), [5, 6, 7], [-1, 0, 0])])[0]
    size, rows = backend.vocab.size - 3, np.stack([logits.row(node) for node in range(3)])
    mode.moves.clear()
    zeros = np.zeros(size, np.float32)
    ids, _ = logits.top([0, 1, 2], 4, 1.0, [zeros] * 3)
    assert mode.moves == [("cuda:0", "cpu")]
    assert [row.tolist() for row in ids] == (-rows[:, :size]).argsort(1)[:, :4].tolist()
    logits.top([0, 1, 2], 4, 1.0, [zeros + 1, zeros, None])
    assert mode.moves[1:] == [("cpu", "cuda:0"), ("cuda:0", "cpu")]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_pass_computes_attention_without_cudnns_kernel(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel, seen = attention.scaled_dot_product_attention, list[bool]()

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return kernel(*args, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    backend = load(str(save(tiny_model(family), tmp_path)), **OPTIONS)
    backend.forward([work(backend.open(), [5, 6, 7], [-1, 0, 0])])
    assert {*seen} == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()


BUILT = ["sm_75", "sm_86", "sm_90a", "compute_120"]


@pytest.mark.parametrize(
    ("card", "runs"), [((6, 1), 0), ((7, 5), 1), ((8, 0), 0), ((8, 9), 1), ((9, 0), 1), ((10, 0), 0), ((12, 1), 1)]
)
def test_a_card_for_which_pytorch_has_no_kernels_is_left_out(
    card: tuple[int, int], runs: int, cards: There, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cards(8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILT)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    folder = str(save(tiny_model("llama").to(torch.bfloat16), tmp_path))
    said = (
        f"sm_{card[0]}{card[1]}, for which this PyTorch .* has no kernels, only for sm_75, sm_86, sm_90a, compute_120"
    )
    backend = load(folder, **OPTIONS)
    assert str(backend.device) == ("cuda:0" if runs else "cpu")
    assert len([note for note in backend.notes if re.search(said, note)]) == 1 - runs
    assert any("--dtype float16 is faster" in note for note in backend.notes) == (card == (7, 5))
    if not runs:
        with pytest.raises(UsageError, match=said):
            load(folder, **OPTIONS, device="cuda:0")


def test_host_memory_is_pinned_for_the_card_that_computes(cards: There, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for another card, CUDA would take hundreds of MB there."""
    cards(GIB, GIB)
    current = list[str]()

    class Runtime:
        def __getattr__(self, name: str) -> Any:
            return lambda *about: calls.append((name, current[-1])) or 0

    @contextmanager
    def chosen(device: Any) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    calls = list[tuple[str, str]]()
    current.append("cuda:0")
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", chosen)
    Block(torch.nn.Linear(8, 8), torch.device("cuda:1")).close()
    assert calls == [("cudaHostRegister", "cuda:1"), ("cudaHostUnregister", "cuda:1")]


@pytest.mark.parametrize("widest", [0, 1024])
def test_a_further_card_holds_layers_where_the_first_one_streams(widest: int, cards: There, tmp_path: Path) -> None:
    folder = str(save(tiny_model("llama", num_hidden_layers=6), tmp_path))
    cards(8 * GIB, 8 * GIB)
    whole = load(folder, **OPTIONS)
    limits, layer = whole.capabilities, block_bytes(whole.model.get_decoder().layers[0])
    cells = whole.open().cells.nbytes // 6 * OPTIONS["sessions"]
    first = 5 * cells + work_bytes(whole.model, limits, limits.max_wanted) + 5 * layer - 1
    first -= untied_embeddings(whole.model)
    cards(first, cells + work_bytes(whole.model, limits, None) + layer)
    found = load(folder, **OPTIONS, widest=widest).placed
    assert ([count for count, _ in found.shares], found.streamed) == ([5, 1], 3)
