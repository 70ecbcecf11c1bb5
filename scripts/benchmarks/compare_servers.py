"""Tokens per second and latency of requests: this server, and llama-server on the same questions, in turn.

Requests come a number at once, the next when one is answered, or at a rate, whatever is answered: Poisson arrivals. One
runs at a time, under a memory limit if one is given, and starts with the model's files evicted from the page cache.
"""

import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from time import perf_counter, sleep
from typing import Any

import numpy as np

from benchmarks import llama_server
from benchmarks.memory_group import Group, evict, memory_group
from benchmarks.serving import Streamed, stream_chat
from benchmarks.turns import turns
from edgespec.errors import EdgespecError
from edgespec.measure.tables import table

OURS = "edgespec"
TIMES: dict[str, Callable[[Streamed], float]] = {
    "first word": lambda answer: answer.first,
    "answer": lambda answer: answer.seconds,
    "per token": lambda answer: answer.seconds / max(answer.tokens, 1),
}
WARM_UP = "Say hello."


@dataclass(slots=True)
class Result:
    """
    Attributes:
        answers: by the number of the prompt.
        seconds: that requests took together.
    """

    answers: dict[int, Streamed] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers.values())

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds and not self.failed else 0.0


@dataclass(frozen=True, slots=True)
class Servers:
    """
    Attributes:
        program: llama-server; None: only this package's server.
        modes: of llama-server; empty: all.
        limit: bytes of memory for a process and what it caches.
        options: of this package's server; each text is a server of its own.
    """

    program: str | None
    model: str
    draft: str | None = None
    modes: Sequence[str] = ()
    threads: int | None = None
    context_length: int = 4096
    limit: int | None = None
    options: Sequence[str] = ("",)
    llama_options: Sequence[str] = ()

    def commands(self, parallel: int) -> dict[str, list[str]]:
        from edgespec.machine.system import compute_cores

        ours = [str(Path(sys.executable).with_name(OURS)), "serve", self.model, f"--parallel={parallel}"]
        ours += [f"--ctx={self.context_length}"]
        given = {"draft": self.draft, "threads": self.threads, "memory": self.limit}
        ours += [f"--{name}={value}" for name, value in given.items() if value]
        found = {f"{OURS} {text}".strip(): [*ours, *shlex.split(text)] for text in self.options}
        threads = self.threads or compute_cores()
        about = llama_server.options(self.model, parallel=parallel, context_length=self.context_length, threads=threads)
        for name, mode in llama_server.modes(self.draft).items() if self.program else ():
            if name in self.modes or not self.modes:
                found[f"llama-server, {name}"] = [str(self.program), *about, *mode, *self.llama_options]
        return found


@dataclass(frozen=True, slots=True)
class Load:
    """
    Attributes:
        at_once: sequences that a server has at once; without a rate also the number of concurrent requests.
        rate: mean of requests per second, whose times are Poisson arrivals; 0: the next one comes after an answer.
    """

    at_once: int
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_once} at once" + (f", {self.rate:g}/s" if self.rate else "")


def compare(
    servers: Servers, prompts: Sequence[str], loads: Sequence[Load], *, rounds: int, body: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[tuple[str, Load], Result]:  # fmt: skip
    """
    Args:
        servers: the servers to compare.
        prompts: questions; every server answers each, under each load.
        loads: the loads.
        rounds: parts of the prompts; servers alternate part by part.
        body: more fields of each request.
        say: called with a line about the measurement that starts.

    Returns:
        (server, load) -> result.

    Raises:
        EdgespecError: there is a limit, and no control group may be made here.
    """
    variants = {
        f"{load}, {name}": (load, command, Result(), name)
        for load in loads
        for name, command in servers.commands(load.at_once).items()
    }
    with memory_group() if servers.limit else nullcontext() as group:
        for _, (load, command, result, _), part in turns(variants, len(prompts), rounds, say):
            try:
                with _started(servers, command, group) as port:
                    ask(port, {0: WARM_UP}, Load(1), Result(), {**body, "max_tokens": 4})
                    ask(port, {at: prompts[at] for at in part}, load, result, body)
            except (EdgespecError, OSError) as error:
                result.failed = str(error) or type(error).__name__
            say(f"  {result.failed or f'{result.speed:.2f} tokens/s so far'}")
    return {(name, load): result for load, _, result, name in variants.values()}


@contextmanager
def _started(servers: Servers, command: Sequence[str], group: Group | None) -> Iterator[int]:
    if group and servers.limit:
        for path in filter(None, (servers.model, servers.draft)):
            evict(path)
        group.limit(servers.limit)
    with llama_server.started(command, group.enter if group else None) as port:
        yield port


def ask(port: int, prompts: Mapping[int, str], load: Load, result: Result, body: Mapping[str, Any]) -> None:
    """Have each prompt answered, with its number as seed, and add to `result`.

    Raises:
        EdgespecError: there is no answer.
    """
    # Times are equal for all servers; a rate changes only their scale.
    gaps, started = Random(min(prompts)), perf_counter()
    times = accumulate(gaps.expovariate(load.rate) for _ in prompts) if load.rate else [0.0] * len(prompts)

    def one(number: int, time: float) -> Streamed:
        sleep(max(0.0, started + time - perf_counter()))
        messages = [{"role": "user", "content": prompts[number]}]
        return stream_chat(port, {**body, "messages": messages, "seed": number})

    with ThreadPoolExecutor(len(prompts) if load.rate else load.at_once) as pool:
        answers = list(pool.map(one, prompts, times))
    result.seconds += perf_counter() - started
    result.answers |= zip(prompts, answers, strict=True)


def shown(found: dict[tuple[str, Load], Result]) -> str:
    """A table, and how often this package's servers agree."""
    loads, rows, notes = list(dict.fromkeys(load for _, load in found)), list[list[str]](), list[str]()
    for load in loads:
        of_it = {name: result for (name, of), result in found.items() if of == load}
        for name, result in sorted(of_it.items(), key=lambda row: -row[1].speed):
            if not result.speed:
                notes.append(f"{load}: {name} failed: {result.failed}")
                continue
            base = found[name, loads[0]].speed
            row = [str(load), name, f"{result.speed:.2f}", f"{result.speed / base:.2f}" if base else ""]
            for time in TIMES.values():
                middle, high = np.quantile([time(answer) for answer in result.answers.values()], [0.5, 0.95])
                row.append(f"{middle:.2f}, {high:.2f}")
            rows.append(row)
        speeds = {ours: [one.speed for name, one in of_it.items() if _is_ours(name) == ours] for ours in (True, False)}
        ours, best = (max(speeds[which], default=0.0) for which in (True, False))
        if ours and best:
            notes.append(f"{load}: {OURS} against the best mode of llama-server: {ours / best:.2f} x")
    texts = defaultdict[str, dict[int, set[str]]](lambda: defaultdict(set))  # budgets may have other row classes
    for (name, _), result in found.items():
        for number, answer in result.answers.items() if _is_ours(name) else ():
            texts[name][number].add(answer.text)
    for name, by_number in texts.items():
        same = sum(len(each) == 1 for each in by_number.values())
        notes.append(f"{same} of {len(by_number)} answers of {name} are always the same")
    headings = ("load", "server", "tokens/s", "x the first load", *TIMES)
    return "\n".join([table("seconds: median and 95th percentile of requests", headings, rows), *notes])


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)
