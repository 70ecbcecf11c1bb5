"""The steps of `scripts/bench-gpu`: each tells what it finds at once, since it may be ended at any time."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from statistics import median
from time import perf_counter, sleep
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from edgespec.backends.torch import backend as torch_backend
from edgespec.backends.torch.loading import (
    NF4,
    decoder_layers,
    find_device,
    find_gpus,
    lacks_kernels,
    untied_embeddings,
    work_bytes,
)
from edgespec.backends.torch.offload import CudaCopies, HostCopies
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend

from benchmarks import gpu
from benchmarks.gpu import LLAMA_70B, Copies, make, random_model, time_trees, tree_of
from benchmarks.steps import Tell
from benchmarks.to_try import GPU, answers
from edgespec.errors import UsageError
from edgespec.loading.row_classes import tokens
from edgespec.loop.backend import Backend, Session, Work
from edgespec.loop.passes import prefill
from edgespec.loop.tree import is_leaf, path_to
from edgespec.machine.memory import available_memory, format_size

LLAMA_1B = {  # Llama 3.2 1B
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
TINY = {  # on a processor
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 12,
}
NODES, FEW_NODES = [1, 16, 64, 256, 512, 1024, 2048], [1, 64]
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
CELLS = 4000, 1025, 33, 5
TREE = 64  # nodes, where not several sizes are measured
LEAVES = 3  # of the tree, whose chains are compared
TIMED = 6  # passes
LEVELS, WIDTH = 8, 16  # passes of a draft for one pass of the target, and nodes of each
STREAMED = {"num_hidden_layers": 24}  # of the target with a draft: copies go on during all passes of the draft
STAY = 8  # of these layers
FULL_BUFFERS = 1.0  # seconds after which nothing is copied
CHUNK = 2048  # tokens of a prompt
LINK = 512 << 20  # bytes of a copy
SPARE = 10.0  # seconds that a step needs to end after its last pass


@dataclass(frozen=True, slots=True)
class Card:
    """
    Attributes:
        place: the device; with a processor, all shapes are tiny.
        memory: bytes of its memory to use.
        deadline: `perf_counter()` after which nothing more is begun.
    """

    place: Any
    memory: int
    deadline: float

    @classmethod
    def found(cls, device: str, memory: int, seconds: float) -> Self:
        """
        Raises:
            UsageError: there is none.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"bench-gpu needs a CUDA GPU, and this PyTorch ({torch.__version__}) sees none")
        place = torch.device(find_device(device, find_gpus(device)))
        return cls(place, memory, perf_counter() + seconds - SPARE)

    @property
    def tiny(self) -> bool:
        return bool(self.place.type == "cpu")

    @property
    def copies(self) -> Copies:
        found: Copies = HostCopies if self.tiny else CudaCopies
        return found

    @property
    def four_bits(self) -> str:
        """The type of the smallest layers that there are here."""
        return NF4 if find_spec("bitsandbytes") else "bfloat16"

    def shape(self, large: dict[str, Any], **fields: int) -> dict[str, Any]:
        return large | (TINY if self.tiny else {}) | fields


Step = Callable[[Tell, Card], None]


def step(run: Step) -> Callable[..., None]:
    """Let a step begin with what a process can be given."""

    @wraps(run)
    def begun(tell: Tell, *, device: str, memory: int, seconds: float) -> None:
        run(tell, Card.found(device, memory, seconds))

    return begun


@step
def card(tell: Tell, card: Card) -> None:
    about = {"torch": torch.__version__, "4 bits": card.four_bits, "host memory": format_size(available_memory())}
    if not card.tiny:
        free, total = torch.cuda.mem_get_info(card.place)
        about["name"], about["CUDA"] = torch.cuda.get_device_name(card.place), torch.version.cuda
        about["memory"] = f"{format_size(free)} of {format_size(total)} are free"
        about["capability"] = ".".join(map(str, torch.cuda.get_device_capability(card.place)))
        about["kernels"] = lacks_kernels(str(card.place)) or "there are some for it"
    for name, value in about.items():
        tell(name, value, f"{name}: {value}")


@step
def link(tell: Tell, card: Card) -> None:
    size = 1 << 20 if card.tiny else LINK
    ways: dict[str, dict[str, Any]] = {"pageable": {"pin": False}}
    if not card.tiny:
        ways = {"pinned": {"pin": True}, **ways, "pinned, in pieces": {"pin": True, "copies": card.copies}}
    for name, way in ways.items():
        rate = gpu.copy_rate(card.place, size, **way)
        tell(name, rate, f"{name}: {rate / 1e9:.1f} GB/s" if rate else f"{name}: CUDA refuses to pin memory")


@step
def questions(tell: Tell, card: Card) -> None:
    """The table of `to_try`, but for what `nf4` and `bfloat16` answer."""
    measures = gpu.measures(card.place, card.copies)
    for name in measures:
        [(about, seen, means)] = answers({name: GPU[name]}, measures, {})
        tell(name, [seen, means], f"{about}: {seen}; {means}")


@step
def trees(tell: Tell, card: Card) -> None:
    """Rows of a tree's leaves against those of their chains of ancestors, as the plain kernel computes these."""
    shape = gpu.small_shape(card.place) | {"max_position_embeddings": 8192} | ({} if card.tiny else {"head_dim": 128})
    model = random_model(shape, "bfloat16", card.place)
    context = max(CELLS) + gpu.ROOM + TREE
    backend = make(card.place, card.copies, model, context_length=context, budget=TREE)
    session = backend.open()
    prefill(backend, session, tokens(backend, max(CELLS), seed=9))
    for cells in CELLS:
        session.rewind(cells)
        with patch.object(torch_backend, "KERNELS", [SDPBackend.MATH]):
            right = rows_of_chains(backend, session)
        for name, kernel in KERNELS.items():
            at = f"{cells} cells, {name}"
            with patch.object(torch_backend, "KERNELS", [kernel]), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    far = [
                        apart(rows, right)
                        for rows in (rows_of_tree(backend, session), rows_of_chains(backend, session))
                    ]
                    new, same = (
                        1000 * time_trees(backend, session, TREE, passes=TIMED, grows=grows) for grows in (True, False)
                    )
                except RuntimeError as error:
                    why = [str(one).partition("\n")[0] for one in (error, *(one.message for one in said))]
                    tell(at, why, f"{at}: refused: {why[0]}")
                    continue
            about = {"tree": far[0], "chains": far[1], "ms at a new length": new, "ms at the same": same}
            wrong = "" if far[0] < 0.25 else "WRONG: "
            shown = f"tree {far[0]:.3f}, chains {far[1]:.3f} of the way to another row; {new:.2f} ms at a new length"
            tell(at, about, f"{at}: {wrong}{shown}, {same:.2f} ms at the same")
    backend.close()


def rows_of_tree(backend: Backend, session: Session) -> NDArray[np.float32]:
    """Logits [LEAVES, V] of the last leaves of a tree."""
    parents = tree_of(TREE)
    leaves = np.flatnonzero(is_leaf(parents))[-LEAVES:].astype(np.int32)
    return _rows(backend, session, tokens(backend, TREE, seed=1), parents, leaves)


def rows_of_chains(backend: Backend, session: Session) -> NDArray[np.float32]:
    """As `rows_of_tree`, by a pass for each leaf."""
    parents, ids, rows = tree_of(TREE), tokens(backend, TREE, seed=1), []
    for leaf in np.flatnonzero(is_leaf(parents))[-LEAVES:]:
        chain = np.arange(len(path := path_to(parents, int(leaf))), dtype=np.int32)
        rows.append(_rows(backend, session, [ids[node] for node in path], chain - 1, chain[-1:]))
    return np.concatenate(rows)


def _rows(backend: Backend, session: Session, ids: Sequence[int], parents: Any, wanted: Any) -> NDArray[np.float32]:
    [logits] = backend.forward([Work(session, np.array(ids, np.int32), parents, wanted)])
    rows = np.stack([logits.row(int(node)) for node in wanted])
    session.commit([])
    return rows


def apart(rows: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """Largest difference of logits, of that between one row and the next."""
    return float(np.abs(rows - right).max() / np.abs(right - np.roll(right, 1, 0)).max())


@step
def nf4(tell: Tell, card: Card) -> None:
    streamed(tell, card, NF4)


@step
def bfloat16(tell: Tell, card: Card) -> None:
    streamed(tell, card, "bfloat16")


def streamed(tell: Tell, card: Card, dtype: str) -> None:
    """Passes over trees of a 70 B model, against max(computation, bytes / bandwidth)."""
    shape, nodes = card.shape(LLAMA_70B), FEW_NODES if card.tiny else NODES
    memory = gpu.memory_for(shape, dtype, nodes, 3) if card.tiny else card.memory

    gpu.measure(
        tell, shape, dtype, card.place, memory, nodes, host_bytes=available_memory(), deadline=card.deadline,
        copies=card.copies,
    )  # fmt: skip


@step
def draft(tell: Tell, card: Card) -> None:
    """Passes of a draft on the same device, which come while the target's layers are copied."""
    context = gpu.TEXT + gpu.ROOM + LEVELS * WIDTH
    size = {"context_length": context, "budget": LEVELS * WIDTH}
    shape = card.shape(LLAMA_70B, **STREAMED)
    of_target = random_model(shape, card.four_bits, card.place)
    form = gpu.form_of(card.four_bits, card.place)
    target = make(card.place, card.copies, of_target, gpu_layers=STAY, form=form, **size)
    small = make(card.place, card.copies, random_model(card.shape(LLAMA_1B), "bfloat16", card.place), **size)
    text, drafted = gpu.open_text(target), gpu.open_text(small)

    def verify() -> float:
        return time_trees(target, text, LEVELS * WIDTH, passes=2)

    def propose() -> float:
        """Seconds of a pass of the draft, the median of a tree's levels."""
        seconds = []
        for level in range(LEVELS):
            first, count = (1 + (level - 1) * WIDTH, WIDTH) if level else (0, 1)
            nodes = np.arange(first, first + count, dtype=np.int32)
            parents = nodes - WIDTH if level > 1 else np.full(count, level - 1, np.int32)
            work = Work(drafted, np.array(tokens(small, count, level), np.int32), parents, nodes)
            started = perf_counter()
            small.forward([work])
            seconds.append(perf_counter() - started)
        drafted.commit([0, 1])
        return median(seconds)

    propose(), verify()
    sleep(0 if card.tiny else FULL_BUFFERS)
    found = {"draft alone": min(propose() for _ in range(3)), "target alone": min(verify() for _ in range(3))}
    waited, rounds = target.wait_seconds, [(propose(), verify()) for _ in range(5)]
    found["draft, copies under way"], found["target after drafts"] = (min(of) for of in zip(*rounds, strict=True))
    found["waited for copies"] = (target.wait_seconds - waited) / len(rounds)
    for name, seconds in found.items():
        tell(name, seconds, f"{name}: {1000 * seconds:.2f} ms")
    small.close()
    target.close()


@step
def peak(tell: Tell, card: Card) -> None:
    """Most memory against the plan: loading, a text whose last chunk is the largest, and a tree."""
    chunk = FEW_NODES[-1] if card.tiny else CHUNK
    options = {"context_length": 2 * chunk + gpu.ROOM, "budget": chunk - 1}
    for dtype, stay in (("bfloat16", -1), (card.four_bits, -1), ("bfloat16", 2)):
        model = random_model(card.shape(LLAMA_70B, num_hidden_layers=4), dtype, card.place, own=True)
        gpu.free(card.place)
        gpu.most_memory(card.place, reset=True)
        backend = make(card.place, card.copies, model, gpu_layers=stay, form=gpu.form_of(dtype, card.place), **options)
        session = backend.open()
        prefill(backend, session, tokens(backend, 2 * chunk, seed=9))
        time_trees(backend, session, TREE, passes=2)
        most = gpu.most_memory(card.place)
        planned = session.cells.nbytes + sum(map(gpu.form_of(dtype, card.place).size, decoder_layers(model)))
        planned += work_bytes(model, backend.capabilities, backend.capabilities.max_wanted)
        planned -= 0 if stay < 0 else untied_embeddings(model)  # they are in host memory then
        at = f"{dtype}, {'some layers streamed, all have a buffer' if stay > 0 else 'all layers stay'}"
        tell(at, [most, planned], f"{at}: {format_size(most)}, {format_size(planned)} planned")
        backend.close()
        del backend, session, model
