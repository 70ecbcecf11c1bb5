"""Tokens per second of concurrent requests: this server, and llama-server on the same questions, interleaved.

One runs at a time, under a memory limit if one is given, and starts with the model's files evicted from the page cache.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from statistics import fmean
from time import perf_counter

from benchmarks import llama_server
from benchmarks.memory_group import Group, evict, memory_group
from benchmarks.serving import Streamed, stream_chat
from edgespec.errors import EdgespecError

OURS = "edgespec"
WARM_UP = "Say hello."


@dataclass(slots=True)
class Result:
    """
    Attributes:
        first: seconds until each answer's first word.
    """

    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    failed: str = ""

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
    """

    program: str | None
    model: str
    draft: str | None = None
    modes: Sequence[str] = ()
    threads: int | None = None
    context_length: int = 4096
    limit: int | None = None
    options: Sequence[str] = ()
    llama_options: Sequence[str] = ()

    def commands(self, parallel: int) -> dict[str, list[str]]:
        from edgespec.machine.system import compute_cores

        ours = [str(Path(sys.executable).with_name(OURS)), "serve", self.model, "--parallel", str(parallel)]
        ours += ["--ctx", str(self.context_length), *(["--draft", self.draft] if self.draft else [])]
        ours += ["--threads", str(self.threads)] if self.threads else []
        ours += ["--memory", str(self.limit)] if self.limit else []
        threads = self.threads or compute_cores()
        about = llama_server.options(
            self.model, parallel=parallel, context_length=self.context_length, threads=threads
        )  # fmt: skip
        found = {OURS: [*ours, *self.options]}
        for name, mode in llama_server.modes(self.draft).items() if self.program else ():
            if name in self.modes or not self.modes:
                found[f"llama-server, {name}"] = [str(self.program), *about, *mode, *self.llama_options]
        return found


def compare(
    servers: Servers, prompts: Sequence[str], at_once: Sequence[int], *, rounds: int, max_tokens: int,
    temperature: float, say: Callable[[str], None],
) -> dict[tuple[str, int], Result]:  # fmt: skip
    """
    Args:
        servers: the servers to compare.
        prompts: questions; every server answers each, at each concurrency.
        at_once: numbers of concurrent requests.
        rounds: parts of the prompts; servers alternate part by part.
        max_tokens: of an answer.
        temperature: of all.
        say: called with a line about the measurement that starts.

    Returns:
        (server, concurrent requests) -> result.

    Raises:
        EdgespecError: there is a limit, and no control group may be made here.
    """
    found: dict[tuple[str, int], Result] = {}
    rounds = min(rounds, len(prompts))
    with memory_group() if servers.limit else nullcontext() as group:
        for number in range(rounds):
            for k in at_once:
                for name, command in servers.commands(k).items():
                    result = found.setdefault((name, k), Result())
                    say(f"round {number + 1} of {rounds}, {k} at once, {name}")
                    try:
                        with _started(servers, command, group) as port:
                            ask(port, [WARM_UP], 1, Result(), max_tokens=4, temperature=temperature)
                            part = prompts[number::rounds]
                            ask(port, part, k, result, max_tokens=max_tokens, temperature=temperature)
                    except (EdgespecError, OSError, HTTPException) as error:
                        result.failed = str(error) or type(error).__name__
                    say(f"  {result.failed or f'{result.speed:.2f} tokens/s so far'}")
    return found


@contextmanager
def _started(servers: Servers, command: Sequence[str], group: Group | None) -> Iterator[int]:
    if group and servers.limit:
        for path in filter(None, (servers.model, servers.draft)):
            evict(path)
        group.limit(servers.limit)
    with llama_server.started(command, group.enter if group else None) as port:
        yield port


def ask(
    port: int, prompts: Sequence[str], at_once: int, result: Result, *, max_tokens: int, temperature: float
) -> None:
    """Have each prompt answered, `at_once` concurrently, and add to `result`.

    Raises:
        EdgespecError, OSError: there is no answer.
    """

    def one(number: int) -> Streamed:
        messages = [{"role": "user", "content": prompts[number]}]
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": temperature, "seed": number}
        return stream_chat(port, body)

    started = perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(one, range(len(prompts))))
    result.seconds += perf_counter() - started
    result.tokens += sum(answer.tokens for answer in answers)
    result.first += [answer.first for answer in answers]


def table(found: dict[tuple[str, int], Result]) -> str:
    concurrencies = list(dict.fromkeys(k for _, k in found))
    lines = [f"at once  server                        tokens/s  x at {concurrencies[0]}  first word, mean"]
    for k in concurrencies:
        rows = {name: result for (name, of), result in found.items() if of == k}
        for name, result in sorted(rows.items(), key=lambda row: -row[1].speed):
            base = found[name, concurrencies[0]].speed
            gain = f"{result.speed / base:6.2f}" if base else " " * 6
            figures = f"{result.speed:8.2f} {gain} {fmean(result.first):15.2f} s" if result.speed else ""
            lines.append(f"{k:7}  {name:28}  {figures or f'failed: {result.failed}'}")
        ours, best = rows[OURS].speed, max((one.speed for name, one in rows.items() if name != OURS), default=0.0)
        if ours and best:
            lines.append(f"{k:7}  {OURS} against the best of its modes: {ours / best:.2f} x")
    return "\n".join(lines)
