"""Which experts a mixture's tokens choose: recorded in llama.cpp's graph or read from a trace, and their statistics."""

import gzip
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from ctypes import c_char
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.engine import load, load_here, plan_here
from edgespec.backends.llamacpp.ggml.ggml_tensor import GgmlTensor
from edgespec.backends.llamacpp.memory.watch import Watch
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from edgespec.errors import ModelError
from edgespec.loop.backend import Vocab, Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.pass_times import choices
from edgespec.loop.sampling import Float32Array
from edgespec.loop.text import render_chat, user_messages
from edgespec.machine.this_machine import this_machine
from edgespec.models.convert.folder_from_gguf import read_gguf
from edgespec.weights.experts import Residents

INPUTS, CHOSEN = "ffn_norm", "ffn_moe_topk"  # operations: what a router reads, and what it chooses
TYPES: dict[str, Any] = {INPUTS: np.float32, CHOSEN: np.int32}
LONGEST = 512  # tokens of a prompt
TOGETHER = 16  # texts that are generated in the same passes
WINDOWS = (2, 4, 8, 16, 25)  # tokens
SLOTS = (1, 2, 3, 4)  # eighths of a layer's experts
GENERATED = 1  # phase of a trace
Values = NDArray[Any]  # [tokens, layers, n]


class Recorder(Watch):  # type: ignore[misc]
    """Takes the place of `Watch`, and copies what the operations of `TYPES` give in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[str, list[Values]] = {}

    def learn(self, context: Any) -> None:
        """Names are known."""

    def begin(self, *, prompt: bool, rows: int, padding: int) -> None:
        self._layers = defaultdict(list)

    def _called(self, tensor: int, ask: bool) -> bool:
        name, _, layer = self._name_of(tensor).decode().rpartition("-")
        if name not in TYPES or not layer.isdigit():  # views of it have a longer name
            return not ask
        if not ask:
            found = GgmlTensor.from_address(tensor)
            (width, rows), stride = found.ne[:2], found.nb[1]
            memory = (c_char * (stride * (rows - 1) + 4 * width)).from_address(found.data)
            values = np.frombuffer(memory, TYPES[name])
            self._layers[name].append(as_strided(values, (rows, width), (stride, 4)).copy())
        return True

    def taken(self) -> dict[str, Values]:
        """What the last pass gave, by operation."""
        return {name: np.stack(layers, 1) for name, layers in self._layers.items()}


@dataclass(slots=True)
class Text:
    """
    Attributes:
        prompt: tokens of it.
        token_ids: those that were read, first the prompt's.
        parts: what operations gave in each pass, by operation.
    """

    prompt: int
    token_ids: list[int] = field(default_factory=list)
    parts: list[dict[str, Values]] = field(default_factory=list)

    def values(self, operation: str) -> Values:
        """Of all tokens that were read."""
        return np.concatenate([part[operation] for part in self.parts])

    def answer(self, operation: str) -> Values:
        return self.values(operation)[self.prompt :]


def record(path: str, prompts: Sequence[str], tokens: int, progress: Callable[[int, int], None]) -> list[Text]:
    """Answer prompts greedily.

    Args:
        path: of a GGUF; all its experts are mapped.
        prompts: those longer than `LONGEST` are left out.
        tokens: of an answer, if it does not end before.
        progress: called with prompts done, and in all.

    Raises:
        ModelError: it cannot be loaded.
    """
    options = LoadOptions(
        context_length=LONGEST + tokens, budget=LONGEST, sessions=TOGETHER, exact="off", gpu_layers=0, resident=True
    )
    plan, recorder, found = plan_here(path, options, this_machine(path)), Recorder(), list[Text]()
    with closing(load_here(plan, plan.ways[-1], lambda done, total: None, recorder)) as backend:
        asked = [prompt_ids(backend.vocab, text) for text in prompts]
        asked = [ids for ids in asked if len(ids) <= LONGEST]
        for start in range(0, len(asked), TOGETHER):
            found += _answer(backend, recorder, asked[start : start + TOGETHER], tokens)
            progress(len(found), len(asked))
    return found


def prompt_ids(vocab: Vocab, text: str) -> list[int]:
    if vocab.chat_template:
        return render_chat(vocab, user_messages(text))
    return vocab.encode(text, add_bos=True, parse_special=False)


def _answer(backend: LlamaBackend, recorder: Recorder, asked: list[list[int]], tokens: int) -> list[Text]:
    found = [Text(len(ids), [*ids]) for ids in asked]
    sessions = [backend.open() for _ in asked]
    live = list[tuple[int, Any]]()  # number of a text and its next token
    for number, ids in enumerate(asked):
        nodes = np.arange(len(ids), dtype=np.int32)
        (logits,) = backend.forward([Work(sessions[number], np.array(ids, np.int32), nodes - 1, nodes)])
        sessions[number].commit(nodes.tolist())
        found[number].parts.append(recorder.taken())
        live.append((number, logits.row(len(ids) - 1).argmax()))
    root = np.zeros(1, np.int32)
    for _ in range(tokens):
        live = [(number, token) for number, token in live if token not in backend.vocab.eog_ids]
        if not live:
            break
        passed = backend.forward([Work(sessions[number], root + token, root - 1, root) for number, token in live])
        taken = recorder.taken()
        for row, (number, token) in enumerate(live):
            sessions[number].commit([0])
            found[number].token_ids.append(int(token))
            found[number].parts.append({name: values[row : row + 1] for name, values in taken.items()})
        live = [(number, logits.row(0).argmax()) for (number, _), logits in zip(live, passed, strict=True)]
    for session in sessions:
        session.close()
    return found


def read_rows(path: Path) -> tuple[dict[str, str], list[int], NDArray[np.int64]]:
    """
    Args:
        path: of a route trace of BigMoeOnEdge, version 1, gzipped.

    Returns:
        What its head says, bytes of an expert by layer, and rows of turn, phase, step, layer, slot and expert.

    Raises:
        OSError, EOFError, zlib.error, ValueError: it is another file, or damaged.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line for line in file if line.strip()]
    heads = [dict(pair.split("=", 1) for pair in line.split() if "=" in pair) for line in lines if line[0] == "#"]
    sizes = [int(head["expert_bytes"]) for head in heads if "expert_bytes" in head]
    rows = np.array([line.split(",")[:6] for line in lines if line[0].isdigit()]).astype(np.int64)
    return {name: value for head in heads for name, value in head.items()}, sizes, rows


def read_trace(path: Path) -> tuple[list[Values], int]:
    """
    Args:
        path: as for `read_rows`.

    Returns:
        Experts chosen in each text that was generated, [tokens, layers, used], and experts of a layer.

    Raises:
        ModelError: it is another file, or damaged.
    """
    try:
        head, _, rows = read_rows(path)
        layers, count, used = (int(head[key]) for key in ("n_layer", "n_expert", "n_expert_used"))
        turns, phases, experts = rows[:, 0], rows[:, 1], rows[:, 5]
        if not 0 <= experts.min() <= experts.max() < count:
            raise ValueError
        made = [experts[(turns == turn) & (phases == GENERATED)] for turn in np.unique(turns)]
        return [text.reshape(-1, layers, used) for text in made], count
    except (OSError, EOFError, zlib.error, LookupError, ValueError) as error:
        raise ModelError(f"{path}: is no gzipped route trace, or damaged") from error


def statistics(texts: Sequence[Values], count: int) -> dict[str, str]:
    """
    Args:
        texts: [tokens, layers, used] experts that the tokens of each text chose.
        count: experts of a layer.

    Returns:
        Figures by name. p: n tokens choose as many experts as n^p tokens that have nothing to do with each other.
    """
    used, found = texts[0].shape[2], dict[str, str]()
    marks = [np.zeros((*text.shape[:2], count), bool) for text in texts]
    for text, mark in zip(texts, marks, strict=True):
        np.put_along_axis(mark, text, True, axis=2)
    found["shared with the token before"] = _percent([(mark[1:] & mark[:-1]).sum(2).mean() / used for mark in marks])
    for n in WINDOWS:
        seen = [sliding_window_view(mark, n, axis=0).any(-1).mean() for mark in marks]
        power = np.log(choices(float(np.mean(seen)), count, used)) / np.log(n)
        found[f"chosen by {n} tokens (p)"] = f"{_percent(seen)} ({power:.2f})"
    uses = [np.sort(mark.sum(0), axis=1)[:, ::-1] for mark in marks]
    found["choices of the top quarter"] = _percent([use[:, : count // 4].sum() / use.sum() for use in uses])
    for eighths in SLOTS:
        slots = count * eighths // 8
        found[f"hits, {eighths}/8 in memory"] = _percent([_hits(text, count, slots) for text in texts])
    return found


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * np.mean(shares):.1f} %"


def _hits(text: Values, count: int, slots: int) -> float:
    """Of a pool for each layer, empty before the first token; the first quarter of the text does not count."""
    hits, start = 0, len(text) // 4
    for layer in range(text.shape[1]):
        residents = Residents(1, count, slots)
        for token, experts in enumerate(text[:, layer]):
            residents.use(0, experts.tolist())
            hits += int(np.count_nonzero(residents.slots_of(0)[experts] >= 0)) * (token >= start)
            residents.place(0, experts.tolist())
    return hits / text[start:].size


def routers_of(path: str) -> list[Values]:
    """[experts, width] of each layer of a GGUF; ModelError: it has none."""
    named = {tensor.name: tensor.data for tensor in read_gguf(Path(path)).tensors}
    found = [data for layer in range(len(named)) if (data := named.get(f"blk.{layer}.ffn_gate_inp.weight")) is not None]
    if not found:
        raise ModelError(f"{path}: is no mixture of experts")
    return found


def predictions(taken: Mapping[str, Values], routers: Sequence[Values]) -> Values:
    """[rows, layers, used] what routers choose of what the router before each read, best first; [0]: layers differ."""
    inputs, chosen = taken.get(INPUTS, np.zeros(0)), taken[CHOSEN]
    if not (inputs.shape[1:2] == chosen.shape[1:2] == (len(routers),)):
        return np.zeros(0, np.uint16)
    best = [np.argsort(-(inputs[:, max(0, layer - 1)] @ rows.T), axis=1) for layer, rows in enumerate(routers)]
    return np.stack(best, 1)[:, :, : chosen.shape[2]].astype(np.uint16)


def foreseen(texts: Sequence[Text], routers: Sequence[Float32Array]) -> str:
    """Choices that a layer's router makes also of what the router before it read."""
    shares = list[float]()
    for text in texts:
        chosen = text.answer(CHOSEN)
        best = predictions({INPUTS: text.answer(INPUTS), CHOSEN: chosen}, routers)
        shares.append((best[:, 1:, :, None] == chosen[:, 1:, None]).any(2).mean())
    return _percent(shares)


def agreement(draft: str, texts: Sequence[Text]) -> str:
    """Tokens of the answers that this model finds likeliest, too.

    Raises:
        ModelError: it cannot be loaded.
    """
    most, found = max(len(text.token_ids) for text in texts), list[bool]()
    with closing(load(draft, context_length=most, budget=most, exact="off")) as backend:
        for text in texts:
            ids, session = np.array(text.token_ids, np.int32), backend.open()
            nodes = np.arange(len(ids) - 1, dtype=np.int32)
            wanted = nodes[text.prompt - 1 :]
            (logits,) = backend.forward([Work(session, ids[:-1], nodes - 1, wanted)])
            found += [logits.row(node).argmax() == ids[node + 1] for node in wanted.tolist()]
            session.close()
    return _percent(found)
