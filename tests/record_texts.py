"""Record what the program writes, and compare two recordings token for token.

    python tests/record_texts.py OUT.json --models DIR [--python PATH] [--real DIR] [--only NAME …]
    python tests/record_texts.py --compare A.json B.json

A change that must not change any text is recorded before and after. Only what users see is used: the Python API, the
command `edgespec run --json`, and the server, which is asked for five texts at once. So one copy of this script records
any version of the program: `--python` names the Python of an environment where that version is installed.

Models are made once into a folder (`recorded_models.py`) and only read afterwards. Nothing that earlier runs measured
is used: the cache folder is a new one. Which passes agree to the bit, and which of them suit, the default may choose
otherwise on another day; so texts are also recorded with a fixed choice, and the class of each text is kept.

Comparing ends with code 1 where tokens differ. Who drafted a token may differ, where planners go by time; it is told.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

VERSION = 1
REAL = Path("~/.cache/edgespec/models")
TIMEOUT = 1200  # seconds that a command may take: far more than it should
SEEDS = (11, 12, 13, 14, 15)
QUESTION = "Why is the sky blue? Answer in two sentences."
STORY = "The fox and the crow. One day a crow found a piece of cheese, and a fox saw it. The crow"
TURNS = ("Write the numbers from one to nine in words.", "Now backwards, please.", "Which of them is the largest?")
AT_ONCE = (  # of different lengths, and one as long as several blocks of a prompt
    "Hello!",
    "Name three colours of the rainbow.",
    "Write a line of Python that adds two numbers.",
    "The weather is fine today. " * 12 + "What did I say about the weather?",
    "What is the capital of France, and on which river does it lie?",
)
OPENER = build_opener(ProxyHandler({}))  # the server is on this machine

Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Texts of one model, loaded in one way."""

    name: str
    way: str  # "api", "run" or "serve"
    target: str
    load: dict[str, Any] = field(default_factory=dict)  # arguments of `edgespec.load`; options of the command
    max_tokens: int = 24
    temperatures: tuple[float, ...] = (0.0, 0.7)

    @property
    def fixed(self) -> bool:
        """Whether the class of shapes is fixed: what is chosen by default may go by what passes cost on that day."""
        return "exact" in self.load


def cases(models: Path) -> Iterator[Case]:
    """All that is recorded of the models in a folder."""
    for kind in ("mixture", "hybrid", "windowed", "smollm2", "pair"):
        target, draft = models / f"{kind}.gguf", models / f"{kind}-draft.gguf"
        if not target.exists():
            continue
        for name, way, load in _pair() if kind == "pair" else _usual(kind in ("mixture", "smollm2")):
            more = {"draft": str(draft.absolute())} if load["planner"] in ("auto", "specexec") else {}
            case = Case(f"{kind}, {name}", way, str(target.absolute()), {"context_length": 1024, **load, **more})
            streamed = "memory" in load
            yield replace(case, max_tokens=12, temperatures=(0.7,)) if streamed else case


def _usual(has_classes: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """With a budget trees do not depend on time, so it can be said who drafted a token."""
    ways: list[tuple[str, dict[str, Any]]] = [
        ("auto", {"planner": "auto"}),
        ("none", {"planner": "none"}),
        ("specexec", {"planner": "specexec", "budget": 8}),
        ("sssd", {"planner": "sssd", "budget": 8}),
    ]
    for name, load in ways:
        yield f"api, {name}", "api", load
    for name, load in ways[::2]:
        yield f"run, {name}", "run", load
        yield f"serve, {name}", "serve", load
    if has_classes:
        for name, load in ways:
            yield f"api, {name}, narrow", "api", load | {"exact": "narrow"}
        name, load = ways[0]
        yield f"run, {name}, narrow", "run", load | {"exact": "narrow"}
        yield f"serve, {name}, narrow", "serve", load | {"exact": "narrow"}


def _pair() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A real pair takes long, so these are few."""
    drafted = {"planner": "specexec", "budget": 2, "exact": "narrow"}
    yield "api, specexec, narrow", "api", drafted
    yield "run, auto", "run", {"planner": "auto"}
    yield "run, none, narrow", "run", {"planner": "none", "exact": "narrow"}
    yield (
        "run, specexec, wide, streamed",
        "run",
        {"planner": "specexec", "budget": 8, "exact": "wide", "memory": "1.4G"},
    )
    yield "serve, specexec, narrow", "serve", drafted


# What is asked, in the three ways. Each gives its answers in an order that is always the same.


def ask_api(case: Case) -> list[Answer]:
    """By the Python API of this process: a text streamed, one at once, and a chat of three turns."""
    import edgespec

    found = []
    with edgespec.load(case.target, **case.load) as model:
        for temperature in case.temperatures:
            options: dict[str, Any] = {"max_tokens": case.max_tokens, "temperature": temperature, "seed": SEEDS[0]}
            stats = edgespec.GenerationStats()
            chunks = list(model.stream(STORY, stats=stats, **options))
            answer = _answer("".join(chunk.text for chunk in chunks), stats.as_dict())
            written = [chunk for chunk in chunks if chunk.token_id is not None]
            answer["tokens"] = [chunk.token_id for chunk in written]
            answer["sources"] = [chunk.source.name.lower() for chunk in written]
            found.append(answer)
            result = model.generate(STORY, **options | {"seed": SEEDS[1]})
            found.append(_answer(result.text, result.stats.as_dict(), result.token_ids))
            messages: list[dict[str, str]] = []
            for turn in TURNS:
                messages.append({"role": "user", "content": turn})
                result = model.chat(messages, **options)
                found.append(_answer(result.text, result.stats.as_dict(), result.token_ids))
                messages.append({"role": "assistant", "content": result.text})
    return found


def ask_run(case: Case, command: str, env: dict[str, str]) -> list[Answer]:
    """By the command line, a process for each text."""
    found = []
    for temperature in case.temperatures:
        options = ["--json", "-n", str(case.max_tokens), "-t", str(temperature), "--seed", str(SEEDS[0])]
        done = subprocess.run(
            [command, "run", case.target, QUESTION, *options, *_options(case.load)], capture_output=True, text=True,
            env=env, timeout=TIMEOUT, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(_last_line(done.stderr))
        answer = json.loads(done.stdout)
        found.append(_answer(answer["text"], answer["stats"], answer["tokens"]))
    return found


def ask_serve(case: Case, command: str, env: dict[str, str]) -> list[Answer]:
    """By the server: five requests at once, of which the second and the fourth want log-probabilities, too."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        arguments = [command, "serve", case.target, "--port", "0", *_options(case.load)]
        server = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, env=env, text=True, stdin=subprocess.DEVNULL
        )
        assert server.stdout
        try:
            lines = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stdout)
            place = next(filter(None, lines), None)
            if place is None:
                errors.seek(0)
                raise RuntimeError(_last_line(errors.read()))
            _wait_for(f"{place[0]}/health", server)
            found = []
            for temperature in case.temperatures:
                bodies = [
                    {
                        "messages": [{"role": "user", "content": prompt}], "max_tokens": case.max_tokens,
                        "temperature": temperature, "seed": seed, "logprobs": seed % 2 == 0,
                    }
                    for prompt, seed in zip(AT_ONCE, SEEDS, strict=True)
                ]  # fmt: skip
                with ThreadPoolExecutor(len(bodies)) as pool:
                    url = f"{place[0]}/v1/chat/completions"
                    found += list(pool.map(_post, [url] * len(bodies), bodies))
            return found
        finally:
            server.terminate()
            server.wait(timeout=TIMEOUT)
            server.stdout.close()


def _wait_for(url: str, server: subprocess.Popen[str]) -> None:
    """The address is told a moment before the server listens there."""
    while server.poll() is None:
        try:
            OPENER.open(url, timeout=TIMEOUT).close()
            return
        except URLError:
            sleep(0.02)
    raise RuntimeError("the server ended before it listened")


def _post(url: str, body: dict[str, Any]) -> Answer:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with OPENER.open(request, timeout=TIMEOUT) as reply:
        told = json.load(reply)
    (choice,), (stats,) = told["choices"], told["edgespec"]["stats"]
    answer = _answer(choice["message"]["content"] or "", stats)
    if choice.get("logprobs"):
        answer["tokens"] = [bytes(token["bytes"]).hex() for token in choice["logprobs"]["content"]]
    return answer | {"finish": choice["finish_reason"], "seed": told["edgespec"]["seed"]}


def _answer(text: str, stats: dict[str, Any], tokens: Sequence[Any] | None = None) -> Answer:
    """What is kept. `tokens`: ids; bytes, from the server; None where they are not told. `sources`: as told."""
    return {
        "text": text, "tokens": None if tokens is None else list(tokens), "count": stats["tokens"],
        "finish": stats["finish_reason"], "seed": stats["seed"], "class": stats["exact"],
        "prompt": stats["prompt_tokens"], "sources": None, "by_source": stats["tokens_by_source"],
        "acceptance": stats["acceptance_length"], "passes": stats["passes"], "drafted": stats["drafted"],
    }  # fmt: skip


def _options(load: dict[str, Any]) -> list[str]:
    named = {"context_length": "ctx"}
    return [part for name, value in load.items() for part in (f"--{named.get(name, name)}", str(value))]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without a word"])[-1]


# Recording.


def record(
    wanted: Sequence[Case], python: str = sys.executable, say: Callable[[str], None] = print
) -> dict[str, dict[str, Any]]:
    """The answers of all cases by their names, each with the seconds it took, or with an `error`.

    Args:
        wanted: the cases.
        python: of the environment whose program is recorded; the command `edgespec` stands beside it.
        say: told, as a line, what is done.
    """
    command = str(Path(python).with_name("edgespec"))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        env = _environment(folder)
        for case in wanted:
            began, told = perf_counter(), dict[str, Any](fixed=case.fixed)
            try:
                if case.way == "api":
                    told["answers"] = _in_process(case, python, env, Path(folder))
                else:
                    told["answers"] = (ask_run if case.way == "run" else ask_serve)(case, command, env)
                result = "class " + (", ".join(sorted({answer["class"] for answer in told["answers"]})) or "none")
            except Exception as error:  # whatever it is, the other cases are recorded
                told["error"] = result = f"{type(error).__name__}: {error}"
            told["seconds"] = round(perf_counter() - began, 1)
            say(f"{case.name}: {told['seconds']} s, {result}")
            found[case.name] = told
    return found


def _environment(folder: str) -> dict[str, str]:
    """This one, with an empty cache folder in which what is measured is remembered from case to case."""
    env = {name: value for name, value in os.environ.items() if name != "EDGESPEC_NO_MEMORY_OF_COSTS"}
    env.pop("EDGESPEC_API_KEY", None)
    env.pop("PYTHONPATH", None)  # it would name another version than `python` has
    env |= {"XDG_CACHE_HOME": folder, "LOCALAPPDATA": folder}
    if sys.platform == "darwin":
        env["HOME"] = folder
    return env | {"OMP_WAIT_POLICY": env.get("OMP_WAIT_POLICY", "passive")}


def _in_process(case: Case, python: str, env: dict[str, str], folder: Path) -> list[Answer]:
    """`ask_api` in a process of that Python, which finds no module beside this file."""
    out = folder / "answers.json"
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [python, "-P", str(Path(__file__).absolute()), "--ask", str(out)], input=json.dumps(asdict(case)),
        capture_output=True, text=True, env=env, cwd=folder, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(_last_line(done.stderr))
    answers: list[Answer] = json.loads(out.read_text("utf-8"))
    return answers


# Comparing.


def compare(old: dict[str, Any], new: dict[str, Any], say: Callable[[str], None] = print) -> bool:
    """Whether the texts of two recordings are equal. Says what differs, a line each.

    Not compared are texts of different classes where the class was left to the program, and that is said.
    """
    equal = True
    counts = {"equal": 0, "other sources": 0, "not compared": 0}

    def differs(line: str) -> None:
        nonlocal equal
        equal = False
        say(f"DIFFERENT: {line}")

    if missing := sorted(old.keys() ^ new.keys()):
        differs(f"only in one recording: {'; '.join(missing)}")
    for name in [name for name in old if name in new]:
        one, other = old[name], new[name]
        if "error" in one or "error" in other:
            differs(f"{name}: not recorded: {one.get('error') or other.get('error')}")
            continue
        if len(one["answers"]) != len(other["answers"]):
            differs(f"{name}: {len(one['answers'])} and {len(other['answers'])} texts")
            continue
        for number, (a, b) in enumerate(zip(one["answers"], other["answers"], strict=True)):
            where = f"{name}, text {number}"
            if a["class"] != b["class"] and not (one["fixed"] or other["fixed"]):
                counts["not compared"] += 1
                say(f"note: {where}: not compared, the classes differ: {a['class']!r} and {b['class']!r}")
            elif found := _difference(a, b):
                differs(f"{where}: {found}")
            else:
                counts["equal"] += 1
                if found := _other_sources(a, b):
                    counts["other sources"] += 1
                    say(f"note: {where}: equal tokens, {found}")
    say(", ".join(f"{count} texts {what}" for what, count in counts.items()) + ("" if equal else "; NOT EQUAL"))
    return equal


def _difference(a: Answer, b: Answer) -> str:
    """What of the text differs; "": nothing."""
    if (a["tokens"] is None) != (b["tokens"] is None):
        return "tokens are told in one recording only"
    for part in ("tokens", "text"):
        one, other = a[part] or "", b[part] or ""
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            at = next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))
            what = "token" if part == "tokens" else "character"
            return f"{what} {at}: {one[at : at + 5]!r} and {other[at : at + 5]!r}"
    changed = [part for part in ("count", "finish", "seed", "class", "prompt") if a[part] != b[part]]
    return ", ".join(f"{part}: {a[part]!r} and {b[part]!r}" for part in changed)


def _other_sources(a: Answer, b: Answer) -> str:
    """How differently the tokens were drafted; "": alike."""
    if a["sources"] != b["sources"]:
        pairs = enumerate(zip(a["sources"] or (), b["sources"] or (), strict=False))
        return next((f"token {at} was drafted by {x} and {y}" for at, (x, y) in pairs if x != y), "other sources")
    changed = [part for part in ("by_source", "passes", "drafted", "acceptance") if a[part] != b[part]]
    return ", ".join(f"{part}: {_short(a[part])} and {_short(b[part])}" for part in changed)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items() if count)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="the recording to write")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    parser.add_argument("--models", type=Path, default=Path("build/recorded-models"), help="folder of the models")
    parser.add_argument("--real", type=Path, default=REAL, help="folder of real models, linked when models are made")
    parser.add_argument("--python", default=sys.executable, help="of the environment whose program is recorded")
    parser.add_argument("--only", action="append", default=[], help="cases whose names begin so; repeatable")
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)  # a process of `record`'s own
    chosen = parser.parse_args(arguments)
    if chosen.ask:
        given = json.load(sys.stdin)
        case = Case(**given | {"temperatures": tuple(given["temperatures"])})
        chosen.ask.write_text(json.dumps(ask_api(case)), "utf-8")
        return 0
    if chosen.compare:
        old, new = (json.loads(path.read_text("utf-8"))["cases"] for path in chosen.compare)
        return 0 if compare(old, new) else 1
    if chosen.out is None:
        parser.error("name the recording to write, or --compare two")
    _make(chosen.models, chosen.real.expanduser())
    wanted = [case for case in cases(chosen.models) if not chosen.only or case.name.startswith(tuple(chosen.only))]
    began = perf_counter()
    found = record(wanted, chosen.python, say=lambda line: print(line, flush=True))
    about = {
        "version": VERSION, "python": platform.python_version(), "machine": platform.platform(),
        "processors": os.cpu_count(), "seconds": round(perf_counter() - began, 1),
    }  # fmt: skip
    chosen.out.write_text(json.dumps({"about": about, "cases": found}, indent=1), "utf-8")
    failed = [name for name, case in found.items() if "error" in case]
    print(f"{chosen.out}: {len(found)} cases in {about['seconds']} s, {len(failed)} failed")
    return 1 if failed or not found else 0


def _make(models: Path, real: Path) -> None:
    """Make the models unless a former call did: what makes them may have changed meanwhile."""
    done = models / "complete"
    if done.exists():
        return
    from recorded_models import make_models

    if missing := make_models(models, real):
        print(f"not recorded, since {real} does not have them: {', '.join(missing)}")
    done.touch()


if __name__ == "__main__":
    sys.exit(main())
