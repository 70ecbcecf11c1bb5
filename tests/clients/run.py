"""Real agents and SDKs against edgespec's server with a scripted model: `make test-clients`.

Each client does each task in a folder of its own, in a network of its own that has only loopback. A task ends well if
its effect is there: a file was written, the last text holds what a tool returned.
"""

import argparse
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from socket import create_server
from typing import Any, BinaryIO

from conftest import smollm2_path
from scripted import Reply, answering, scripted, turns
from words import WORD

from edgespec.loop.engines import load_vocab

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "clients"
CASES = Path(tempfile.gettempdir()) / "edgespec-clients"  # outside this repository, which agents would look at
CONTEXT = 60_000  # tokens; agents' own instructions have up to 20,000
PATIENCE = 8  # seconds without an event after which clients give up, where they can be told
SILENCE = 16.0  # seconds before the first token of the task `slow`
MOST_TEXT = 40  # characters of a text in what is recorded
LONGEST = 300  # seconds of one run of a client
MARK = "TASK-4711"  # in the user's message: other requests, as for a title, are answered otherwise


@dataclass
class Case:
    """One client at one task: where, and how the model is reached."""

    client: "Client"
    task: "Task"
    folder: Path
    port: int = 0
    wrong: str = ""

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The path and the body of each that was made."""
        return [json.loads(file.read_text("utf-8")) for file in sorted(self.folder.glob("request-*.json"))]

    @property
    def words(self) -> list[str]:
        """The command of the MCP server."""
        return [sys.executable, str(HERE / "words.py")]

    def write(self, name: str, data: object) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data, indent=1), encoding="utf-8")
        return path


Call = tuple[str, Mapping[str, object]]  # a tool's name and arguments


@dataclass(frozen=True, eq=False)
class Client:
    """A program and how it is told what to do.

    Attributes:
        packages: with versions; of npm, or of PyPI if `python` is true.
        program: its path in the folder of its packages.
        command: (case, message, whether it continues the last session) -> arguments.
        prepare: writes its settings, and returns variables.
        write, look, run: its tools, to write a file, to look at an image, to run a command.
        cannot: tasks that it has no means for, and why.
    """

    name: str
    packages: Sequence[str]
    program: str
    command: Callable[[Case, str, bool], Sequence[str]]
    prepare: Callable[[Case], Mapping[str, str]]
    write: Callable[[Path, str], Call] | None = None
    look: Callable[[Path], Call] | None = None
    run: Callable[[str], Call] | None = None
    python: bool = False
    cannot: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return BUILD / self.name.lower().replace(" ", "-")

    def install(self) -> None:
        done = self.folder / "packages"
        wanted = " ".join(self.packages)
        if done.exists() and done.read_text(encoding="utf-8") == wanted:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.python:
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
            subprocess.run([self.folder / "bin/pip", "install", "--quiet", *self.packages], check=True)
        else:
            (self.folder / "package.json").write_text('{"private": true}', encoding="utf-8")
            quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
            subprocess.run(
                ["npm", "install", *quiet, *self.packages], cwd=self.folder, check=True, stdin=subprocess.DEVNULL
            )
        done.write_text(wanted, encoding="utf-8")


def says(call: Call) -> str:
    name, arguments = call
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@dataclass(frozen=True, eq=False)
class Task:
    """What is asked, answered and looked for.

    Attributes:
        messages: of the user; a second one continues the session.
        answer: (case, prompt, number of results of tools in it) -> what the model writes.
        check: (case, what the client printed) -> what is wrong, or "".
        told: the client's settings say how much the context holds.
    """

    name: str
    messages: Sequence[str]
    answer: Callable[[Case, str, int], Reply | str]
    check: Callable[[Case, str], str]
    told: bool = True


def script(case: Case) -> Callable[[str], Reply | str]:
    def answer(prompt: str) -> Reply | str:
        found = turns(prompt, "<|im_start|>", "<|im_end|>")
        last = next((text for role, text in reversed(found) if role == "user"), "")
        if SUMMARISE.search(last) or SUMMARISE.search(found[-1][1][-3000:]):
            return f"<analysis>Short.</analysis>\n<summary>\nSUMMARY-MADE of {MARK}: the big file was read.\n</summary>"
        if MARK not in prompt or (case.client.write and "<tools>" not in prompt):
            return "A short title"
        return case.task.answer(case, prompt, sum(role == "tool" for role, _ in found))

    return answer


SUMMARISE = re.compile(
    r"(detailed|handoff|compact|structured|concise|anchored)[^.]{0,60} summar|summar[^.]{0,40} (conversation|session)",
    re.I,
)


def png(path: Path) -> None:
    """A green square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\x10\xa0\x40" * 64) * 64
    head = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def printed(*words: str) -> Callable[[Case, str], str]:
    def check(case: Case, text: str) -> str:
        return "".join(f"{word!r} was not printed; " for word in words if word not in text)

    return check


def wrote(**files: str) -> Callable[[Case, str], str]:
    def check(case: Case, text: str) -> str:
        missing = ""
        for name, expected in files.items():
            path = case.work / f"{name}.txt"
            found = path.read_text(encoding="utf-8") if path.exists() else "nothing"
            missing += "" if found.strip() == expected else f"{name}.txt holds {found[:40]!r}; "
        return missing + printed("ALL-DONE")(case, text)

    return check


def answer_tool(case: Case, prompt: str, results: int) -> str:
    thought = "<think>\nThey want a file.\n</think>\n\n"
    if not case.client.write:  # aider: an edit is a text
        return f"{thought}hello.txt\n```\nhello there\n```\nALL-DONE"
    call = says(case.client.write(case.work / "hello.txt", "hello there"))
    return "ALL-DONE" if results else f"{thought}I write it.\n{call}"


def answer_parallel(case: Case, prompt: str, results: int) -> str:
    assert case.client.write
    both = [says(case.client.write(case.work / f"{name}.txt", text)) for name, text in (("a", "one"), ("b", "two"))]
    return "\n".join(both) if not results else "ALL-DONE"


def answer_mcp(case: Case, prompt: str, results: int) -> str:
    if results:
        return f"It is {''.join(re.findall('quillon-[0-9]+', prompt)[-1:])}. ALL-DONE"
    names = re.findall(r'"name": "(\w*secret_word)"', prompt)
    return says((names[0], {})) if names else "There is no such tool."


def answer_image(case: Case, prompt: str, results: int) -> str:
    assert case.client.look
    assert case.client.run
    if not results:
        return says(case.client.look(case.work / "square.png"))
    return says(case.client.run("echo seen > seen.txt")) if results == 1 else "ALL-DONE"


def answer_overflow(case: Case, prompt: str, results: int) -> str:
    """Reads the file until the client has made a summary."""
    assert case.client.run
    if "SUMMARY-MADE" not in prompt:
        return says(case.client.run(f"tail -c +{24_000 * results + 1} big.txt | head -c 24000"))
    return says(case.client.run("echo over > over.txt")) if '"echo over' not in prompt else "ALL-DONE"


def check_slow(case: Case, text: str) -> str:
    bodies = [request["body"] for request in case.requests]
    asked = sum(MARK in json.dumps(body) and bool(body.get("tools") or not case.client.write) for body in bodies)
    return printed("SLOWLY")(case, text) + (f"{asked} requests instead of one; " if asked > 1 else "")


def answer_resume(case: Case, prompt: str, results: int) -> str:
    return "BLUE-again" if "BLUE-first" in prompt else "BLUE-first"


TASKS = [
    Task("chat", [f"{MARK}: say hello."], lambda *_: "HELLO-FROM-MODEL", printed("HELLO-FROM-MODEL")),
    Task("tool", [f"{MARK}: write hello.txt."], answer_tool, wrote(hello="hello there")),
    Task("parallel", [f"{MARK}: write a.txt and b.txt."], answer_parallel, wrote(a="one", b="two")),
    Task("mcp", [f"{MARK}: which is the secret word?"], answer_mcp, printed(WORD, "ALL-DONE")),
    Task("image", [f"{MARK}: look at square.png."], answer_image, wrote(seen="seen")),
    Task("overflow", [f"{MARK}: read big.txt."], answer_overflow, wrote(over="over"), told=False),
    Task("compact", [f"{MARK}: read big.txt."], answer_overflow, wrote(over="over")),
    Task("slow", [f"{MARK}: think for long."], lambda *_: Reply("SLOWLY", SILENCE), check_slow),
    Task("resume", [f"{MARK}: name a colour.", f"{MARK}: which colour was it?"], answer_resume, printed("BLUE-again")),
]


# Clients: how each is set up, and its tools.


def claude_settings(case: Case) -> dict[str, str]:
    case.write("mcp.json", {"mcpServers": {"words": {"command": case.words[0], "args": case.words[1:]}}})
    return {
        "ANTHROPIC_BASE_URL": case.url, "ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CONFIG_DIR": str(case.home / "claude"),
        **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(CONTEXT)} if case.task.told else {}),
    }  # fmt: skip


def claude_command(case: Case, message: str, again: bool) -> list[str]:
    tools = "Write,Read,Bash,mcp__words__secret_word"
    more = ["--allowedTools", tools, "--mcp-config", str(case.home / "mcp.json"), "--strict-mcp-config"]
    return ["--print", *(["--continue"] if again else []), message, *more]


def codex_settings(case: Case) -> dict[str, str]:
    patience = PATIENCE if case.task.name == "slow" else 60
    told = f"model_context_window = {CONTEXT}" if case.task.told else ""
    case.write("config.toml", f"""\
model = "tiny"
model_provider = "edgespec"
{told}
[model_providers.edgespec]
name = "edgespec"
base_url = "{case.url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = {patience}000
[mcp_servers.words]
command = "{case.words[0]}"
args = ["{case.words[1]}"]
""")  # fmt: skip
    return {"CODEX_HOME": str(case.home)}


def codex_command(case: Case, message: str, again: bool) -> list[str]:
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["exec", *(["resume", "--last"] if again else []), *flags, message]


def opencode_settings(case: Case) -> dict[str, str]:
    patience = {"chunkTimeout": PATIENCE * 1000} if case.task.name == "slow" else {}
    model: dict[str, object] = {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
    if case.task.told:
        model["limit"] = {"context": CONTEXT, "output": 4000}
    options = {"baseURL": f"{case.url}/v1", "apiKey": "none", **patience}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"tiny": model}}
    words = {"type": "local", "command": case.words, "enabled": True}
    case.write("opencode.json", {"provider": {"edgespec": provider}, "mcp": {"words": words}, "autoupdate": False})
    return {"OPENCODE_CONFIG": str(case.home / "opencode.json"), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def opencode_command(case: Case, message: str, again: bool) -> list[str]:
    return ["run", *(["--continue"] if again else []), "--auto", "-m", "edgespec/tiny", message]


def cline_settings(case: Case) -> dict[str, str]:
    case.write("mcp.json", {"mcpServers": {"words": {"command": case.words[0], "args": case.words[1:]}}})
    settings: dict[str, object] = {"provider": "openai-compatible", "apiKey": "none", "model": "tiny"}
    settings["baseUrl"] = f"{case.url}/v1"
    if case.task.told:
        settings["contextWindow"] = CONTEXT
    known = {"openai-compatible": {"settings": settings, "updatedAt": "2026-01-01T00:00:00Z", "tokenSource": "manual"}}
    case.write("cline/data/settings/providers.json", {"version": 1, "providers": known, "modes": {}})
    return {"CLINE_DIR": str(case.home / "cline"), "CLINE_MCP_SETTINGS_PATH": str(case.home / "mcp.json")}


def cline_command(case: Case, message: str, again: bool) -> list[str]:
    return ["-P", "openai-compatible", "-m", "tiny", message]


def continue_settings(case: Case) -> dict[str, str]:
    model: dict[str, object] = {
        "name": "tiny", "provider": "openai", "model": "tiny", "apiBase": f"{case.url}/v1", "apiKey": "none",
        "capabilities": ["tool_use", "image_input"],
    }  # fmt: skip
    if case.task.told:
        model["defaultCompletionOptions"] = {"contextLength": CONTEXT, "maxTokens": 4000}
    words = {"name": "words", "command": case.words[0], "args": case.words[1:]}
    about = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [model], "mcpServers": [words]}
    case.write("config.yaml", about)  # JSON is YAML
    return {"CONTINUE_GLOBAL_DIR": str(case.home / "continue"), "CONTINUE_TELEMETRY_ENABLED": "0"}


def continue_command(case: Case, message: str, again: bool) -> list[str]:
    resume = ["--resume"] if again else []
    return ["--config", str(case.home / "config.yaml"), "--auto", "--print", *resume, message]


def aider_settings(case: Case) -> dict[str, str]:
    return {"OPENAI_API_BASE": f"{case.url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def aider_command(case: Case, message: str, again: bool) -> list[str]:
    patience = ["--timeout", str(PATIENCE)] if case.task.name == "slow" else []
    quiet = ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    quiet += ["--no-pretty", "--edit-format", "whole"]
    restore = ["--restore-chat-history"] if again else []
    return ["--model", "openai/tiny", *quiet, *patience, *restore, "--message", message]


def ai_command(case: Case, message: str, again: bool) -> list[str]:
    shutil.copy(HERE / "ai.mjs", case.client.folder)  # beside its packages
    return [str(case.client.folder / "ai.mjs"), f"{case.url}/v1", message]


def of_ollama(name: str, library: str, *packages: str) -> Client:
    """A Python library that speaks Ollama's API."""

    def command(case: Case, message: str, again: bool) -> list[str]:
        return [str(HERE / "local.py"), library, case.url, message, str(case.home / "kept.json")]

    return Client(
        name, packages, "bin/python", command, lambda case: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        lambda path, text: ("write", {"path": str(path), "text": text}),
        python=True, cannot=dict.fromkeys(["mcp", "image", "overflow", "compact", "slow"], NO_PROGRAM),
    )  # fmt: skip


NO_LIMIT = {"slow": "its limit ends with the head of an answer, which is sent at once"}
NO_AGENT = "it has no tools and no MCP: it writes edits as text"
NO_PROGRAM = "a library: its programs do that"
CLIENTS = [
    Client(
        "Claude Code", ["@anthropic-ai/claude-code@2.1.197"], "claude", claude_command, claude_settings,
        lambda path, text: ("Write", {"file_path": str(path), "content": text}),
        lambda path: ("Read", {"file_path": str(path)}),
        lambda command: ("Bash", {"command": command}),
        cannot=NO_LIMIT,
    ),
    Client(
        "Codex", ["@openai/codex@0.171.0"], "codex", codex_command, codex_settings,
        lambda path, text: ("exec_command", {"cmd": f"printf '%s' '{text}' > '{path}'"}),
        lambda path: ("view_image", {"path": str(path)}),
        lambda command: ("exec_command", {"cmd": command}),
        cannot={"overflow": "it compacts only by the size it was told"},
    ),
    Client(
        "opencode", ["opencode-ai@1.18.33"], "opencode", opencode_command, opencode_settings,
        lambda path, text: ("write", {"filePath": str(path), "content": text}),
        lambda path: ("read", {"filePath": str(path)}),
        lambda command: ("bash", {"command": command, "description": "Do it"}),
    ),
    Client(
        "Cline", ["cline@3.0.65"], "cline", cline_command, cline_settings,
        lambda path, text: ("run_commands", {"commands": [f"printf '%s' '{text}' > '{path}'"]}),
        lambda path: ("read_files", {"files": [{"path": str(path)}]}),
        lambda command: ("run_commands", {"commands": [command]}),
        cannot=NO_LIMIT | {"resume": "without a terminal it begins a new session"},
    ),
    Client(
        "Continue", ["@continuedev/cli@1.5.45"], "cn", continue_command, continue_settings,
        lambda path, text: ("Write", {"filepath": str(path), "content": text}),
        lambda path: ("Read", {"filepath": str(path)}),
        lambda command: ("Bash", {"command": command}),
        cannot=NO_LIMIT | {"overflow": "it compacts only by the size it was told"},
    ),
    Client(
        "aider", ["aider-chat==0.86.2"], "bin/aider", aider_command, aider_settings, python=True,
        cannot=dict.fromkeys(["parallel", "mcp", "image", "overflow", "compact"], NO_AGENT),
    ),
    Client(
        "AI SDK", ["ai@6.0.325", "@ai-sdk/openai@3.0.141"], "node", ai_command, lambda case: {},
        lambda path, text: ("write", {"path": str(path), "text": text}),
        cannot=NO_LIMIT | dict.fromkeys(["mcp", "image", "overflow", "compact", "resume"], NO_PROGRAM),
    ),
    of_ollama("ollama-python", "ollama", "ollama==0.6.3"),
    of_ollama("LiteLLM", "litellm", "litellm==1.110.2"),
    of_ollama("LangChain", "langchain", "langchain-ollama==1.1.0"),
]  # fmt: skip


@contextmanager
def served(case: Case, port: int = 0) -> Iterator[None]:
    """The model for a case, in a new folder that gets all that is asked."""
    shutil.rmtree(case.folder, ignore_errors=True)
    case.work.mkdir(parents=True)
    case.home.mkdir()
    png(case.work / "square.png")
    (case.work / "big.txt").write_text("".join(f"{i} is a number in words that fill\n" for i in range(20_000)), "utf-8")
    vocab = load_vocab("llamacpp", str(smollm2_path()))
    with (
        scripted(script(case), vocab, CONTEXT, slots=4) as model,
        answering(model, create_server(("127.0.0.1", port)), lambda app: recording(app, case.folder)) as case.port,
    ):
        yield
        for number, prompt in enumerate(model.target.asked):
            (case.folder / f"prompt-{number}.txt").write_text(prompt, "utf-8")


def run_case(case: Case) -> str:
    """What is wrong; "" if nothing is."""
    printed = case.folder / "printed.txt"
    with served(case), printed.open("ab") as out:
        settings = case.client.prepare(case)
        for number, message in enumerate(case.task.messages):
            run_client(case, case.client.command(case, message, number > 0), settings, out)
    text = printed.read_text("utf-8", "replace")
    wrong = case.task.check(case, text)
    return f"{wrong}{hint(text)}" if wrong else ""


def recording(app, folder: Path):
    """An ASGI layer that writes the bodies as they come into a folder."""
    numbers = count()

    async def around(scope, receive, send):
        if scope.get("method") != "POST":
            await app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        asked = {"path": scope["path"], "body": json.loads(body)}
        (folder / f"request-{next(numbers)}.json").write_text(json.dumps(asked, indent=1), "utf-8")
        whole = [{"type": "http.request", "body": body}]

        async def again():
            return whole.pop() if whole else await receive()

        await app(scope, again, send)

    return around


def run_client(case: Case, arguments: Sequence[str], settings: Mapping[str, str], out: BinaryIO) -> None:
    folder = case.client.folder if case.client.python else case.client.folder / "node_modules/.bin"
    program = folder / case.client.program
    known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = {**known, "HOME": str(case.home), "TMPDIR": str(case.home), "DISABLE_TELEMETRY": "1",
                   "DO_NOT_TRACK": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1", **settings}  # fmt: skip
    process = subprocess.Popen(
        [program if program.exists() else program.name, *arguments],
        cwd=case.work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code: int | str = process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        code = f"none, ended after {LONGEST} seconds"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what it has started
    process.wait()
    out.write(f"\n(exit code {code})\n".encode())
    out.flush()


def hint(text: str) -> str:
    """The line that most looks like an error."""
    lines = [line.strip() for line in text.splitlines() if re.search("(?i)^(?!warning).*(error|fail|too long)", line)]
    return lines[-1][:160] if lines else " ".join(text.split())[-160:]


def record(path: Path, cases: Sequence[Case]) -> None:
    """Write the longest request of each case, short, and without what is of this machine."""
    found = {}
    for case in cases:
        longest = max(case.requests, key=lambda request: len(json.dumps(request["body"])))
        body = longest["body"]
        said, kinds = json.dumps(body.get("messages", body.get("input"))), set()
        tools, body["tools"] = body["tools"], []
        for tool in tools:  # those called, that of the MCP server, and one of each kind
            name, kind = tool.get("function", tool).get("name"), tool.get("type")
            if f'"{name}"' in said or "secret_word" in json.dumps(tool) or kind not in kinds:
                body["tools"].append(tool)
            kinds.add(kind)
        found[case.client.name] = shortened(longest)
    lines = [f"{json.dumps(name)}: {json.dumps(request, ensure_ascii=False)}" for name, request in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def shortened(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: shortened(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    value = re.sub(f"{re.escape(str(CASES))}/[\\w-]*", "/home/user", value)
    value = re.sub("[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32,}", "0" * 8, value)
    is_whole = value.startswith("data:image") or key in ("data", "arguments")
    return value if is_whole or len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]}…"


def table(cases: Sequence[Case]) -> str:
    tasks = [task.name for task in TASKS if any(case.task is task for case in cases)]
    found, notes = dict[str, dict[str, str]](), list[str]()
    for case in cases:
        why = case.client.cannot.get(case.task.name)
        row = found.setdefault(f"{case.client.name} ({' '.join(case.client.packages)})", {})
        row[case.task.name] = "—" if why else "FAIL" if case.wrong else "pass"
        notes += [f"- {case.client.name}, {case.task.name}: {why or case.wrong}"] if why or case.wrong else []
    rows = [["client", *tasks], ["---"] * (len(tasks) + 1)]
    rows += [[name, *(row.get(task, "") for task in tasks)] for name, row in found.items()]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *notes]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a client, a task, or CLIENT/TASK; several times")
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    parser.add_argument("--record", type=Path, help="write the requests of the task image to this file")
    parser.add_argument("--listen", type=int, help="serve the model of the first case at this port, and run no client")
    options = parser.parse_args()
    cases = [
        Case(client, task, CASES / f"{client.name}-{task.name}".lower().replace(" ", "-"))
        for client in CLIENTS
        for task in TASKS
        if not options.only or {client.name, task.name, f"{client.name}/{task.name}"} & set(options.only)
    ]
    if options.listen:
        with served(cases[0], options.listen):
            input(f"{cases[0].url}: a message with {MARK} gets the answers of {cases[0].task.name}; Enter ends ")
        return 0
    if "ALONE" not in os.environ:
        for client in dict.fromkeys(case.client for case in cases):
            client.install()
        return alone()
    able = [case for case in cases if case.task.name not in case.client.cannot]
    for case in able:
        begun = time.monotonic()
        case.wrong = run_case(case)
        took = time.monotonic() - begun
        print(f"{case.client.name}, {case.task.name} ({took:.0f} s): {'FAIL ' + case.wrong if case.wrong else 'pass'}")
    print(table(cases))
    if options.write:
        options.write.write_text(table(cases), "utf-8")
    if options.record:
        record(options.record, [case for case in able if case.task.name == "image"])
    return any(case.wrong for case in able)


def alone() -> int:
    """Run this program again with a network and processes of its own, which end with it, if the system allows that."""
    again = [sys.executable, *sys.argv]
    apart = ["unshare", "-rnpf", "--kill-child", "--mount-proc"]
    apart += ["sh", "-c", 'ip link set lo up && "$@"', "sh"]  # the shell also waits for what others have left
    can = shutil.which("unshare") and not subprocess.run([*apart, "true"], check=False, capture_output=True).returncode
    environment = {**os.environ, "ALONE": "1"}
    return subprocess.run([*apart * bool(can), *again], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
