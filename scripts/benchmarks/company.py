"""Texts written in company, drafted, against the same texts written alone and plainly: are they equal to the bit?

A text is known by its prompt and sampling. What was written is kept in a file, line by line, so that a check of hours
can be stopped and taken up again.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any, Self
from zlib import crc32

from edgespec.errors import UsageError
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.text import user_messages
from edgespec.machine.measurements import identity
from edgespec.model import Model, load
from edgespec.models.registry import find_model, local_path

ALONE = "none"


@dataclass(frozen=True, slots=True)
class Written:
    """One text: who guessed, what was asked, how it was sampled, in which class of passes, and what came out."""

    planner: str
    about: str  # the target, and how many tokens at most
    prompt: str
    temperature: float
    top_p: float
    shapes: str
    passes: int
    token_ids: list[int]

    @property
    def key(self) -> tuple[str, str, float, float]:
        """What texts that must be equal have in common; the seed belongs to the prompt."""
        return self.about, self.prompt, self.temperature, self.top_p

    @classmethod
    def read(cls, path: Path) -> list[Self]:
        """The texts of a file; none if it is not there. A last line that was cut short is left out.

        Raises:
            UsageError: the file holds something else.
        """
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        try:
            return [cls(**json.loads(line)) for line in lines if line.endswith("\n")]
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is not a file of written texts: give another, or none that is there") from error


def write_texts(
    target: str,
    prompts: Sequence[str],
    samplings: Sequence[SamplingParams],
    path: Path,
    planners: Sequence[str],
    *,
    parallel: int = 6,
    max_tokens: int = 96,
    plain_in_company: bool = False,
    done: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Written]:
    """Write what is not in the file at `path` yet: plainly, each alone; then by each planner, `parallel` at once.

    The seed follows from the prompt. `plain_in_company` lets plain texts share passes, too, which is quicker where
    weights are streamed. `done` is called after every text; `options` go to `edgespec.load`.

    Returns:
        All texts of the file.

    Raises:
        EdgespecError: from loading; UsageError: the file holds other texts.
    """
    kept = Written.read(path)
    about = f"{identity(local_path(find_model(target).target))}, {max_tokens} tokens"
    # A text that was cut short by a stop is written again.
    path.write_text("".join(json.dumps(asdict(text)) + "\n" for text in kept))
    for planner in dict.fromkeys([ALONE, *planners]):
        there = {text.key for text in kept if text.planner == planner}
        wanted = [
            (prompt, params)
            for prompt in prompts
            for params in samplings
            if (about, prompt, params.temperature, params.top_p) not in there
        ]
        for _ in there:
            done()
        if not wanted:
            continue
        at_once = 1 if planner == ALONE and not plain_in_company else parallel
        with load(target, planner=planner, parallel=at_once, say=say, **options) as model, path.open("a") as file:
            for text in _texts(model, planner, about, wanted, max_tokens, at_once):
                file.write(json.dumps(asdict(text)) + "\n")
                file.flush()
                kept.append(text)
                done()
    return kept


def _texts(
    model: Model, planner: str, about: str, wanted: Sequence[tuple[str, SamplingParams]], max_tokens: int, at_once: int
) -> Iterator[Written]:
    shapes = model.target.capabilities.exact
    stopped = Event()

    def write(prompt: str, params: SamplingParams) -> Written | None:
        if stopped.is_set():
            return None
        sampling = {"temperature": params.temperature, "top_p": params.top_p, "seed": crc32(prompt.encode())}
        result = model.generate(user_messages(prompt, model.system), max_tokens=max_tokens, **sampling)
        return Written(
            planner, about, prompt, params.temperature, params.top_p, shapes.name if shapes else "",
            result.stats.passes, result.token_ids,
        )  # fmt: skip

    with ThreadPoolExecutor(at_once) as pool:
        try:
            yield from filter(None, pool.map(write, *zip(*wanted, strict=True)))
        finally:
            stopped.set()


def equal_texts(texts: Sequence[Written]) -> Mapping[tuple[str, float, float], tuple[int, int]]:
    """(planner, temperature, top_p) -> (texts equal to plain decoding's, texts), of those with a plain one.

    Raises:
        UsageError: texts that must be equal were written in different classes of passes.
    """
    plain = {text.key: text for text in texts if text.planner == ALONE}
    counts: dict[tuple[str, float, float], tuple[int, int]] = {}
    for text in texts:
        if text.planner == ALONE or not (other := plain.get(text.key)):
            continue
        if text.shapes != other.shapes:
            raise UsageError(
                f"{text.planner} wrote in {text.shapes or 'no'} passes, {ALONE} in {other.shapes or 'no'} ones: "
                "say which with --exact, and start with a new file"
            )
        key = text.planner, text.temperature, text.top_p
        equal, of = counts.get(key, (0, 0))
        counts[key] = equal + (text.token_ids == other.token_ids), of + 1
    return counts
