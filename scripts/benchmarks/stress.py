"""A server under many clients at once, and answers that must be JSON: what leaks, hangs or does not parse."""

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import active_count
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from benchmarks.serving import JSON, closing_connection
from edgespec.model import Model


class Pet(BaseModel, strict=True, extra="forbid"):
    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=120)]
    kind: Literal["cat", "dog", "bird"]
    tags: Annotated[list[Annotated[str, Field(max_length=8)]], Field(max_length=3)]


SCHEMA = Pet.model_json_schema()
KINDS = ("whole", "stream", "schema", "two choices", "leaves", "reads slowly")


class Found(NamedTuple):
    """
    Attributes:
        parsed: answers by `SCHEMA` that were not cut, and hold what it says.
    """

    answers: Counter[str]
    wrong: list[str]
    parsed: int
    seconds: float


class Told(NamedTuple):
    """A request's kind, the status of its answer, and what is wrong; status 0: the client has left."""

    kind: str
    status: int
    wrong: str = ""
    parsed: bool = False


def request(port: int, kind: str, seed: int, max_tokens: int) -> Told:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"Tell me of number {seed % 7}."}], "seed": seed}
    body |= {"max_tokens": max_tokens, "temperature": 0.8, "stream": kind in ("stream", "leaves", "reads slowly")}
    if kind == "schema":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if kind == "two choices":
        body["n"] = 2
    with closing_connection(port) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        if kind == "leaves":
            time.sleep(random.Random(seed).random() * 0.2)
            return Told(kind, 0)
        answer = connection.getresponse()
        if kind == "reads slowly":
            time.sleep(0.5)
        data = answer.read()
    wrong = "" if answer.status in (200, 429) else data.decode("utf-8", "replace")[:200]
    parsed = False
    if answer.status == 200 and body["stream"] and not data.endswith(b"data: [DONE]\n\n"):
        wrong = "the stream does not end"
    elif answer.status == 200 and not body["stream"]:
        told = json.loads(data)
        if len(told["choices"]) != body.get("n", 1) or not told["usage"]["completion_tokens"]:
            wrong = "choices or tokens are missing"
        if kind == "schema" and told["choices"][0]["finish_reason"] != "length":
            parsed = is_pet(told["choices"][0]["message"]["content"])
            wrong = "" if parsed else f"is not by the schema: {told['choices'][0]['message']['content']!r}"
    return Told(kind, answer.status, wrong, parsed)


def load(
    port: int, clients: int, each: int, max_tokens: int, kinds: tuple[str, ...] = KINDS,
    progress: Callable[[], None] = lambda: None,
) -> Found:  # fmt: skip
    def client(number: int) -> list[Told]:
        told = list[Told]()
        for seed in range(number * each, (number + 1) * each):
            kind = kinds[seed % len(kinds)]
            try:
                told.append(request(port, kind, seed, max_tokens))
                while told[-1].status == 429:
                    time.sleep(0.05)
                    told.append(request(port, kind, seed, max_tokens))
            except Exception as error:
                told.append(Told(kind, -1, repr(error)))
            progress()
        return told

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        every = list(chain.from_iterable(pool.map(client, range(clients))))
    answers = Counter(f"{one.kind} {one.status}" for one in every if one.status)
    wrong = [f"{one.kind}: {one.wrong}" for one in every if one.wrong]
    return Found(answers, wrong, sum(one.parsed for one in every), time.perf_counter() - started)


def left_over(model: Model, threads: int, patience: float = 30.0) -> list[str]:
    until = time.monotonic() + patience
    while (model.scheduler.active or model.scheduler.waiting) and time.monotonic() < until:
        time.sleep(0.05)
    found = [f"{model.scheduler.active} texts"] if model.scheduler.active else []
    found += [f"{model.scheduler.waiting} requests wait"] if model.scheduler.waiting else []
    return found + (
        [f"{active_count() - threads} threads"] if active_count() > threads + 12 else []
    )  # workers of asyncio are allowed


def is_pet(text: str) -> bool:
    try:
        Pet.model_validate_json(text)
        return True
    except ValidationError:
        return False


def half_open(port: int, count: int) -> list[socket.socket]:
    found = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for sock in found:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
    return found
