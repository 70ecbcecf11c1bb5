"""Drafted sequences in shared batches against plain decoding of single sequences: are the tokens equal?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from zlib import crc32

from edgespec.errors import UsageError
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.text import user_messages
from edgespec.machine.measurements import identity
from edgespec.measure.json_lines import append, resume
from edgespec.model import Model, load
from edgespec.models.registry import find_model, local_path
from edgespec.planners.choice import check_planner

PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Written:
    """
    Attributes:
        shapes: row class.
        options: that the drafted sequences and their batches depend on.
    """

    planner: str
    about: str
    prompt: str
    temperature: float
    top_p: float
    shapes: str
    passes: int
    token_ids: list[int]
    options: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, float, float]:
        return self.about, self.prompt, self.temperature, self.top_p


def generate_sequences(
    target: str,
    prompts: Sequence[str],
    samplings: Sequence[SamplingParams],
    path: Path,
    planners: Sequence[str],
    *,
    parallel: int = 6,
    max_tokens: int = 96,
    plain_batched: bool = False,
    done: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Written]:
    """Generate what the file at `path` lacks: by plain decoding, then by each planner, `parallel` in a batch.

    Args:
        target: the target model.
        prompts: questions.
        samplings: each prompt is answered with each.
        path: a file of `Written` as JSON lines, which is continued.
        planners: names.
        parallel: sequences in a batch.
        max_tokens: of a sequence.
        plain_batched: batch plain decoding, too, which is faster where weights are streamed.
        done: called after every sequence.
        say: as for `edgespec.load`.
        options: as for `edgespec.load`.

    Returns:
        All sequences that were asked for.

    Raises:
        EdgespecError: from loading.
        UsageError: the file is of another kind, or was made with other options; or a planner cannot be used.
    """
    made_with = {"parallel": parallel, "plain_batched": plain_batched, **options}
    kept = {(text.planner, *text.key): text for text in resume(path, Written, made_with)}
    entry, names = find_model(target), dict.fromkeys([PLAIN, *planners])
    for planner in names:
        check_planner(planner, bool(options.get("draft") or entry.draft), None, {})
    about = f"{identity(local_path(entry.target))}, {max_tokens} tokens"
    asked = {
        (about, prompt, params.temperature, params.top_p): (prompt, params)
        for prompt in prompts
        for params in samplings
    }
    for planner in names:
        wanted = [what for key, what in asked.items() if (planner, *key) not in kept]
        for _ in range(len(asked) - len(wanted)):
            done()
        if not wanted:
            continue
        at_once = 1 if planner == PLAIN and not plain_batched else parallel
        with load(target, planner=planner, parallel=at_once, say=say, **options) as model:
            for text in _generate(model, planner, about, wanted, max_tokens, at_once, made_with):
                append(path, text)
                kept[planner, *text.key] = text
                done()
    return [kept[planner, *key] for planner in names for key in asked]


def _generate(
    model: Model, planner: str, about: str, wanted: Sequence[tuple[str, SamplingParams]], max_tokens: int,
    at_once: int, options: dict[str, Any],
) -> Iterator[Written]:  # fmt: skip
    shapes = model.target.capabilities.exact
    stopped = Event()

    def write(prompt: str, params: SamplingParams) -> Written | None:
        if stopped.is_set():
            return None
        sampling = {"temperature": params.temperature, "top_p": params.top_p, "seed": crc32(prompt.encode())}
        result = model.generate(user_messages(prompt, model.system), max_tokens=max_tokens, **sampling)
        return Written(
            planner, about, prompt, params.temperature, params.top_p, shapes.name if shapes else "",
            result.stats.passes, result.token_ids, options,
        )  # fmt: skip

    with ThreadPoolExecutor(at_once) as pool:
        try:
            yield from filter(None, pool.map(write, *zip(*wanted, strict=True)))
        finally:
            stopped.set()


def count_equal(written: Sequence[Written]) -> Mapping[tuple[str, float, float], tuple[int, int]]:
    """
    Returns:
        (planner, temperature, top_p) -> (sequences equal to plain decoding's, sequences that have a plain one).

    Raises:
        UsageError: sequences to compare were generated with different row classes.
    """
    plain = {text.key: text for text in written if text.planner == PLAIN}
    counts: dict[tuple[str, float, float], tuple[int, int]] = {}
    for text in written:
        if text.planner == PLAIN or not (other := plain.get(text.key)):
            continue
        if text.shapes != other.shapes:
            raise UsageError(
                f"{text.planner} has the row class {text.shapes or 'none'}, {PLAIN} {other.shapes or 'none'}: "
                "choose one with --exact, and start with a new file"
            )
        key = text.planner, text.temperature, text.top_p
        equal, of = counts.get(key, (0, 0))
        counts[key] = equal + (text.token_ids == other.token_ids), of + 1
    return counts
