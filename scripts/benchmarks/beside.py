"""This server and llama-server on the same questions, by turns: tokens a second of all texts together.

Each is a process of its own, asked over HTTP by streamed chat requests; one runs at a time, inside a limit of memory if
there is one, started with the model's files out of the page cache.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from benchmarks import llama_server
from benchmarks.offload import Group, memory_group
from benchmarks.offload_worker import evict_model
from benchmarks.typing_ahead import closing_connection
from edgespec.errors import EdgespecError

OURS = "edgespec"
WARM_UP = "Say hello."


@dataclass(slots=True)
class Told:
    """What one server took for its texts."""

    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)  # seconds until each text's first word
    failed: str = ""

    @property
    def speed(self) -> float:
        """Tokens a second; 0: it failed."""
        return self.tokens / self.seconds if self.seconds and not self.failed else 0.0


@dataclass(frozen=True, slots=True)
class Servers:
    """What is compared."""

    program: str  # llama-server
    model: str  # a GGUF file
    draft: str | None = None
    modes: Sequence[str] = ()  # of llama-server; empty: all that it has
    threads: int | None = None
    context_length: int = 4096
    limit: int | None = None  # bytes of memory, of all that the process has and caches
    options: Sequence[str] = ()  # more, for `edgespec serve`
    llama_options: Sequence[str] = ()  # more, for llama-server

    def commands(self, parallel: int) -> dict[str, list[str]]:
        """How each is started, for so many texts at once."""
        from edgespec.backends.llamacpp.memory.threads import compute_cores

        ours = [str(Path(sys.executable).with_name(OURS)), "serve", self.model, "--parallel", str(parallel)]
        ours += ["--ctx", str(self.context_length), *(["--draft", self.draft] if self.draft else [])]
        ours += ["--threads", str(self.threads)] if self.threads else []
        ours += ["--memory", str(self.limit)] if self.limit else []
        threads = self.threads or compute_cores()
        about = llama_server.options(
            self.model, parallel=parallel, context_length=self.context_length, threads=threads
        )  # fmt: skip
        found = {OURS: [*ours, *self.options]}
        for name, mode in llama_server.modes(self.draft).items():
            if name in self.modes or not self.modes:
                found[f"llama-server, {name}"] = [self.program, *about, *mode, *self.llama_options]
        return found


def compare(
    servers: Servers, prompts: Sequence[str], at_once: Sequence[int], *, rounds: int, max_tokens: int,
    temperature: float, say: Callable[[str], None],
) -> dict[tuple[str, int], Told]:  # fmt: skip
    """(server, texts at once) -> what it took.

    Args:
        servers: what is compared.
        prompts: questions; every server answers each, for each number of texts at once.
        at_once: numbers of texts.
        rounds: the prompts are dealt into so many parts, as far as they reach; servers take turns part by part.
        max_tokens: of an answer.
        temperature: of all.
        say: told what is being done.

    Raises:
        EdgespecError: there is a limit, and no control group may be made here.
    """
    found: dict[tuple[str, int], Told] = {}
    rounds = min(rounds, len(prompts))
    with _limited(servers.limit) as group:
        for number in range(rounds):
            for k in at_once:
                for name, command in servers.commands(k).items():
                    told = found.setdefault((name, k), Told())
                    say(f"round {number + 1} of {rounds}, {k} at once, {name}")
                    try:
                        with _started(servers, command, group) as port:
                            write(port, [WARM_UP], 1, Told(), max_tokens=4, temperature=temperature)
                            part = prompts[number::rounds]
                            write(port, part, k, told, max_tokens=max_tokens, temperature=temperature)
                    except (EdgespecError, OSError, HTTPException) as error:
                        told.failed = str(error) or type(error).__name__
                    say(f"  {told.failed or f'{told.speed:.2f} tokens/s so far'}")
    return found


@contextmanager
def _limited(limit: int | None) -> Iterator[Group | None]:
    if not limit:
        yield None
        return
    with memory_group() as group:
        if group is None:
            raise EdgespecError("servers are compared under a memory limit, and no control group may be made here")
        yield group


@contextmanager
def _started(servers: Servers, command: Sequence[str], group: Group | None) -> Iterator[int]:
    def enter() -> None:
        assert group
        (group.folder / "cgroup.procs").write_text(str(os.getpid()))

    if group and servers.limit:
        for path in filter(None, (servers.model, servers.draft)):
            evict_model(path)
        group.limit(servers.limit)
    with llama_server.started(command, enter if group else None) as port:
        yield port


def write(port: int, prompts: Sequence[str], at_once: int, told: Told, *, max_tokens: int, temperature: float) -> None:
    """Have each prompt answered, so many at a time; adds to `told`. Raises EdgespecError, OSError."""

    def ask(number: int) -> tuple[int, float]:
        said = [{"role": "user", "content": prompts[number]}]
        body = {"messages": said, "max_tokens": max_tokens, "temperature": temperature, "seed": number}
        return streamed(port, body)

    started = perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    told.seconds += perf_counter() - started
    told.tokens += sum(tokens for tokens, _ in answers)
    told.first += [first for _, first in answers]


def streamed(port: int, body: dict[str, Any]) -> tuple[int, float]:
    """Tokens of an answer, and seconds until its first word. Raises EdgespecError: there is none."""
    started, first, tokens = perf_counter(), 0.0, 0
    sent = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    with closing_connection(port) as connection:
        connection.request("POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise EdgespecError(f"status {answer.status}: {answer.read().decode('utf-8', 'replace')[:200]}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise EdgespecError(f"the answer ended: {str(data['error'])[:200]}")
            said = any(choice["delta"].get("content") for choice in data["choices"])
            first = first or (perf_counter() - started if said else 0.0)
            tokens = (data.get("usage") or {}).get("completion_tokens", tokens)
    return tokens, first


def table(found: dict[tuple[str, int], Told]) -> str:
    """For a person: each server, and ours against the best of the other's modes."""
    lines = ["at once  server                        tokens/s  first word, mean"]
    for k in dict.fromkeys(k for _, k in found):
        rows = {name: told for (name, of), told in found.items() if of == k}
        for name, told in sorted(rows.items(), key=lambda row: -row[1].speed):
            figures = f"{told.speed:8.2f} {fmean(told.first):15.2f} s" if told.speed else f"failed: {told.failed}"
            lines.append(f"{k:7}  {name:28}  {figures}")
        ours, best = rows[OURS].speed, max((told.speed for name, told in rows.items() if name != OURS), default=0.0)
        if ours and best:
            lines.append(f"{k:7}  {OURS} against the best of its modes: {ours / best:.2f} x")
    return "\n".join(lines)
