"""Choose layers that a model can do without: leave each out, and count the next tokens that stay.

The shorter model reads recorded answers of the whole one. The least missed layers go first, in a few rounds, since the
value of a layer depends on which others are left out.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from edgespec.errors import UsageError
from edgespec.loading.by_name import load_backend
from edgespec.loop.backend import Backend
from edgespec.measure.one_pass import best_tokens
from edgespec.measure.recording import questions, record, recording_file
from edgespec.measure.replay import Recording
from edgespec.models.convert.gguf_write import Recipe, check_drop, quantise
from edgespec.models.gguf_header import own_values

ROUNDS = 3
CONTEXT = 512  # tokens of a question and its answer, that are read together
MAX_TOKENS = 96


def choose_layers(
    path: Path,
    count: int,
    *,
    per_task: int = 2,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[tuple[int, ...], float]:
    """The layers to leave out, and the share of the model's own next tokens that it still finds without them.

    Args:
        path: a GGUF file.
        count: how many.
        per_task: recorded answers of each task.
        progress: called with what is done, how far and of how much.

    Raises:
        UsageError: it has fewer layers.
        ModelError: its layers are not alike.
    """
    layers = int(own_values(str(path)).get("block_count", 0))
    if not 0 < count < layers:
        raise UsageError(f"{count} layers are to be left out, but {path} has {layers}; keep at least one")
    check_drop(path, (0,))
    with closing(_load(path)) as whole:
        asked = questions(["prose", "code", "chat"], per_task)
        answers = record(
            whole, asked, recording_file(str(path), MAX_TOKENS), MAX_TOKENS,
            lambda done, total: progress("recording answers", done, total),
        )  # fmt: skip
    dropped, share = tuple[int, ...](), 1.0
    takes = [len(part) for part in np.array_split(range(count), min(ROUNDS, count))]
    tries, done = sum(layers - sum(takes[:i]) for i in range(len(takes))) + 1, 0
    with TemporaryDirectory(prefix="edgespec-") as folder:

        def without(those: Sequence[int]) -> float:
            nonlocal done
            progress("trying layers", done, tries)
            done += 1
            copy = Path(folder) / "copy.gguf"
            quantise(path, copy, Recipe(drop=tuple(sorted(those))))
            try:
                with closing(_load(copy)) as short:
                    return agreement(short, answers)
            finally:
                copy.unlink()

        for take in takes:
            scores = {layer: without((*dropped, layer)) for layer in range(layers) if layer not in dropped}
            dropped += tuple(sorted(scores, key=lambda layer: (-scores[layer], layer))[:take])
        share = without(dropped)
    return tuple(sorted(dropped)), share


def _load(path: Path) -> Backend:
    return load_backend(
        "llamacpp", str(path), context_length=2 * CONTEXT, budget=CONTEXT - 1, resident=True, exact="off"
    )


def agreement(model: Backend, answers: Sequence[Recording]) -> float:
    right = total = 0
    for answer in answers:
        token_ids = [*answer.prompt_ids, *answer.output_ids][:CONTEXT]
        first = len(answer.prompt_ids) - 1
        found = best_tokens(model, token_ids[:-1], 1, first=first)[:, 0].tolist()
        right += sum(token == wanted for token, wanted in zip(found, token_ids[first + 1 :], strict=True))
        total += len(found)
    return right / total if total else 0.0
