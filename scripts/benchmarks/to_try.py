"""Questions that only a GPU can answer, what was seen, and what that means for the program."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.loading.exact import exactness_line
from edgespec.loading.row_classes import probe, tokens
from edgespec.loop.backend import Backend, Work
from edgespec.measure.tables import table

FASTER = 1.05  # least ratio of speeds that counts


@dataclass(frozen=True, slots=True)
class Seen:
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """
    Attributes:
        about: what is tried.
        holds: by the value that was seen.
        then: what it means that it holds.
        otherwise: what it means that it does not.
    """

    about: str
    holds: Callable[[Any], bool]
    then: str
    otherwise: str


MAC = {
    "streamed bits": Question(
        "streamed layers have the bits of resident ones", bool, "slots are not refilled early",
        "streaming is wrong here",
    ),
    "row classes, llama.cpp": Question(
        "passes of some sizes agree to the bit on Metal", bool, "the text is exactly that of plain decoding",
        "the text is that of plain decoding up to rounding ties",
    ),
    "row classes, MLX": Question(
        "passes of some sizes agree to the bit on MLX's GPU", bool, "streamed models should be probed, too",
        "right: streamed models are not probed",
    ),
    "equal sizes, MLX": Question(
        "a row keeps its bits in passes of equal size, by gathered ancestors", bool,
        "padding to one size and gathering ancestors would make texts exact", "padding would not make texts exact",
    ),
    "probing": Question(
        "seconds that looking for row classes takes with streamed layers", lambda value: value < 10,
        "cheap enough for the first start", "a probe model is needed",
    ),
    "MLX or llama.cpp": Question(
        "pass over 64 nodes of a dense model larger than memory: llama.cpp's time / MLX's",
        lambda value: value > FASTER, "MLX folders are the better default here", "GGUF stays the default here",
    ),
    "op_offload": Question(
        "pass over 64 nodes, partly on Metal: time without op_offload / with", lambda value: value > FASTER,
        "op_offload stays on", "op_offload should be off on Macs",
    ),
    "exit": Question(
        "exit code of a program that leaves without close()", lambda value: value == 0, "nothing aborts",
        "Metal's destructors abort: models must be closed at exit",
    ),
    "free memory": Question(
        "memory taken as free / what memory_pressure says", lambda value: 0.8 <= value <= 1.2,
        "models stream when they must", "the figures of free memory are wrong here",
    ),
    "GPU limit": Question(
        "share of the memory that the GPU can hold", lambda value: value >= 0.6,
        "most layers of a large model stay", "sudo sysctl iogpu.wired_limit_mb=N would let more layers stay",
    ),
    "2 GiB": Question(
        "arrays of 2 GiB and more are right on the GPU", bool, "large embeddings and mixtures load",
        "MLX cannot hold such weights here",
    ),
    "page size": Question(
        "reads to whole pages: speed / speed of reads to blocks of 4096", lambda value: value > FASTER,
        "alignment to pages pays", "alignment to pages changes nothing",
    ),
    "memory over time": Question(
        "passes leave memory as it is", bool, "nothing leaks", "memory grows, or pages are written out"
    ),
}  # fmt: skip

GPU = {
    "512 draft tokens": Question(
        "pass over 512 nodes / over 1, weights streamed", lambda value: value < 2,
        "wide trees are nearly free: the default up to 1,024 is right",
        "trees stay narrow by themselves: passes are bound by computation",
    ),
    "pinned memory": Question(
        "pinned memory's copies are faster than pageable ones", lambda value: value > FASTER, "pinning pays",
        "pinning changes nothing here",
    ),
    "more buffers": Question(
        "pass after a pause: time with 2 buffers / with 8", lambda value: value > FASTER,
        "buffers fill while the draft works", "two buffers are enough",
    ),
    "capped scores": Question(
        "most memory of a pass with capped scores / planned", lambda value: value <= 1, "the plan holds",
        "the plan counts too little",
    ),
    "row classes": Question(
        "passes of some sizes agree to the bit", bool, "PyTorch should be probed on this GPU",
        "right: texts are those of plain decoding up to rounding ties",
    ),
    "equal sizes": Question(
        "a row keeps its bits in passes of equal size, by gathered ancestors", bool,
        "padding to one size and gathering ancestors would make texts exact", "padding would not make texts exact",
    ),
    "two GPUs": Question(
        "pass over 64 nodes: time with half of the layers on a second GPU / on one", lambda value: value < 1.2,
        "crossing GPUs costs little", "a layer on a second GPU should be compared with a streamed one",
    ),
}  # fmt: skip


def answers(
    questions: Mapping[str, Question], measures: Mapping[str, Callable[[], Seen]], seen: Mapping[str, Seen]
) -> list[tuple[str, str, str]]:
    """
    Args:
        questions: `MAC` or `GPU`.
        measures: for what is not known.
        seen: what is known.

    Returns:
        What was tried, what was seen, and what it means, of each question.
    """
    rows = list[tuple[str, str, str]]()
    for name, question in questions.items():
        try:
            found = seen.get(name) or (measures[name]() if name in measures else None)
        except Exception as error:  # what fails here is an answer, too
            text = str(error).strip().splitlines() or [type(error).__name__]
            rows.append((question.about, f"failed: {text[0]}", ""))
            continue
        if found is None:
            rows.append((question.about, "not tried", ""))
        else:
            means = question.then if question.holds(found.value) else question.otherwise
            rows.append((question.about, found.text, means))
    return rows


def answer_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of `answers`."""
    return table("To try", ("tried", "seen", "means"), rows, justify="left")


def seen_with(load: Callable[[], Any], measure: Callable[[Any], Seen]) -> Seen:
    """What is measured with a backend, which is closed then."""
    with closing(load()) as backend:
        return measure(backend)


def row_classes(backend: Backend) -> Seen:
    """Those that trying does not refuse, also where attention is known to add up cells."""
    backend.capabilities = replace(backend.capabilities, by_cell=())
    found = probe(backend)
    return Seen(bool(found), exactness_line(found, None))


def equal_sizes(backend: Backend, size: int = 32) -> Seen:
    """Compare a chain's first rows in two passes of one size with different other rows, at different places."""
    session, chain = backend.open(), tokens(backend, size, 1)
    found = []
    for other in (tokens(backend, size, 2), tokens(backend, size, 3)):
        nodes = [*chain[: size // 2], *other[size // 2 :]]
        numbers = np.arange(size, dtype=np.int32)
        parents = np.where(numbers < size // 2, numbers - 1, -1).astype(np.int32)
        logits = backend.forward([Work(session, np.array(nodes, np.int32), parents, numbers)])[0]
        found.append(np.stack([logits.row(node) for node in range(size // 2)]))
        session.commit([])
    session.close()
    wrong = int((found[0] != found[1]).sum())
    return Seen(wrong == 0, f"{wrong} of {found[0].size} logits differ")
