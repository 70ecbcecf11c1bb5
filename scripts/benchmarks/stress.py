"""A server under many clients at once, answers that must be JSON, and the largest bodies: what leaks, hangs or does
not parse."""

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import chain, cycle, islice
from threading import active_count
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from benchmarks.serving import JSON, closing_connection
from edgespec.errors import EdgespecError
from edgespec.loop.text import MOST_STOPS
from edgespec.model import Model
from edgespec.server.conversation import MOST_TURNS
from edgespec.server.tool_calls import MOST_TOOL_VALUES, MOST_TOOLS
from edgespec.server.wire import MOST_BIASES, MOST_BODY, MOST_VALUES


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


CHAT = "/v1/chat/completions"
LARGEST = ("messages", "tools", "schema", "stops")
Bodies = Sequence[tuple[str, bytes]]  # paths and bodies


def largest(kind: str, context_length: int) -> Bodies:
    """Bodies of a kind of `LARGEST`, as large as a server of this context takes, and some of which it refuses late."""
    pair = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    hello: dict[str, Any] = {"messages": pair[:1], "max_tokens": 4}

    def tools(parameters: dict[str, Any], number: int) -> list[Any]:
        return [
            {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}, "name": f"f{i}",
             "input_schema": parameters} for i in range(number)
        ]  # fmt: skip

    def properties(number: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(number)}}

    levels = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(70)}
    nested = properties(9) | {"$defs": levels | {"d70": {"enum": ["a"]}}, "anyOf": [{"$ref": "#/$defs/d0"}]}
    needed = properties(1200) | {"required": [f"p{i}" for i in range(1200)]}
    text = "It is so. " * (context_length * 8 // 10)
    found: dict[str, list[Any]] = {
        "messages": [
            (CHAT, {"messages": pair * (MOST_VALUES // 7)}),
            (CHAT, {"messages": pair * (MOST_TURNS // 2)}),
            (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 4}),
            (CHAT, {"messages": [{"role": "user", "content": "x" * (MOST_BODY - 100)}]}),
            (CHAT, hello | {"metadata": [{f"{i:x}": i for i in range(MOST_VALUES - 99)}]}),
            ("/v1/messages/count_tokens", {"messages": pair * (MOST_TURNS // 2 - 1) + pair[:1]}),
            ("/v1/responses", {"input": "x", "instructions": text, "max_output_tokens": 4}),
        ],
        "tools": [
            (CHAT, hello | {"tools": tools(properties(1000), MOST_TOOLS)}),
            (CHAT, hello | {"tools": tools(nested, MOST_TOOLS)}),
            (CHAT, hello | {"tools": tools(properties(1), 5000)}),
            (CHAT, hello | {"tools": tools(properties(MOST_TOOL_VALUES // MOST_TOOLS // 2 - 6), MOST_TOOLS)}),
            ("/v1/messages", hello | {"tools": tools(properties(1000), MOST_TOOLS)}),
        ],
        "schema": [
            (CHAT, hello | {"response_format": {"type": "json_object", "schema": schema}})
            for schema in (needed, properties(80_000), nested)
        ],
        "stops": [
            (CHAT, hello | {"stop": ["a" * (MOST_STOPS // 16)] * 16, "n": 8, "max_tokens": 32}),
            (CHAT, hello | {"stop": ["a"] * (MOST_VALUES - 99)}),
            ("/v1/completions", {"prompt": "x", "n": 8, "logit_bias": dict.fromkeys(range(MOST_BIASES), 1)}),
        ],
    }  # fmt: skip
    return [(path, json.dumps(body, separators=(",", ":")).encode()) for path, body in found[kind]]


def context_length(port: int) -> int:
    """Of the server's model. Raises EdgespecError."""
    try:
        with closing_connection(port) as connection:
            connection.request("GET", "/health")
            return int(json.load(connection.getresponse())["context_length"])
    except (OSError, HTTPException, ValueError, LookupError) as error:
        raise EdgespecError(f"127.0.0.1 port {port} has no server with a loaded model") from error


def flood(port: int, bodies: Bodies, clients: int, seconds: float) -> Counter[int]:
    """Count the statuses of answers while each client sends one body after the other."""
    found, until = Counter[int](), time.monotonic() + seconds

    def client(number: int) -> None:
        for path, body in islice(cycle(bodies), number, None):
            if time.monotonic() > until:
                return
            with closing_connection(port) as connection:
                try:
                    connection.request("POST", path, body, JSON)
                    answer = connection.getresponse()
                    answer.read()
                except OSError:  # refused before the end of the body
                    found[-1] += 1
                else:
                    found[answer.status] += 1

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return found


def probe(port: int, seconds: float) -> list[float]:
    """Seconds that a new connection and the answer of /health take, again and again."""
    found, until = list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.perf_counter()
        with closing_connection(port) as connection:
            connection.request("GET", "/health")
            connection.getresponse().read()
        found.append(time.perf_counter() - started)
        time.sleep(0.01)
    return found


def half_open(port: int, count: int) -> list[socket.socket]:
    found = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for sock in found:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
    return found
