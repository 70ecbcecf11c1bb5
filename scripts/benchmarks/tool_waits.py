"""How much waiting for tools a draft could hide that foresees calls: recorded conversations, replayed.

The recorded model stands for the target. The draft writes on from where the target begins, and, if that is no call or
another, once more from where the target has written that a call begins, as the server has it look ahead after each
pass. If its first call is the recorded one, a tool that changes nothing could have started when the draft was done,
instead of when the target was.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import edgespec.scheduler.drive as asking
from edgespec.errors import UsageError
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.text import Message, render_chat
from edgespec.model import Model
from edgespec.scheduler.requests import Request, Wrote
from edgespec.server.call_formats import HERMES, Call, Form, form_of
from edgespec.server.parse_output import Regions
from edgespec.server.speculative_calls import same
from edgespec.server.tools import replayed


@dataclass(frozen=True, slots=True)
class Turn:
    """One recorded call, and what the draft made of it."""

    name: str
    named: bool  # the draft calls the same function …
    hit: bool  # … with the same arguments
    tokens: int  # of the recorded call that the target had still to write
    draft_seconds: float  # from there, reading what is new of the conversation included

    def hidden(self, wait: float, target_seconds: float) -> float:
        """Seconds of a tool's `wait` that pass before the target has written its call at so many seconds a token."""
        ahead = self.tokens * target_seconds - self.draft_seconds
        return min(wait, max(0.0, ahead)) if self.hit else 0.0


def read_conversations(path: Path) -> list[list[dict[str, Any]]]:
    """Messages of every second task of a tau-bench file, each task once.

    Raises:
        UsageError: it cannot be read, or is not of this form.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        tasks = {one["task_id"]: one["traj"] for one in reversed(json.loads(data))}
        return [tasks[task] for task in sorted(tasks) if task % 2 == 0]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: needs a JSON list of objects with `task_id` and `traj`: {error}") from error


def functions_of(conversations: Sequence[Sequence[dict[str, Any]]]) -> list[Message]:
    """Tools as far as they can be told from their calls: the recordings have no list of them."""
    seen: dict[str, dict[str, Any]] = {}
    for call in (call for talk in conversations for message in talk for call in message.get("tool_calls") or ()):
        arguments = json.loads(call["function"]["arguments"])
        seen.setdefault(call["function"]["name"], {}).update({key: {} for key in arguments})
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in sorted(seen.items())
    ]


def as_shown(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages as chat templates want them."""
    found = list[Message]()
    for message in messages:
        calls = [replayed(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        shown = {"role": message["role"], "content": message.get("content") or ""}
        found.append({**shown, **({"tool_calls": calls} if calls else {})})
    return found


def _first_call(draft: Model, form: Form, begun: str, ids: list[int]) -> Call | None:
    """What the draft calls first, if anything, where `begun` of its answer is already written."""
    regions, found = Regions(form), list[Call]()
    regions.push(begun)
    with closing(asking.events(draft.scheduler, Request(ids, SamplingParams(), 150))) as events:
        for event in events:
            text = "".join(chunk.text for chunk in event.chunks) if isinstance(event, Wrote) else ""
            found += [piece for piece in regions.push(text) if isinstance(piece, Call)] + regions.whole()
            if found:
                return found[0]
    return next((piece for piece in regions.finish() if isinstance(piece, Call)), None)


def replay(
    draft: Model, talk: Sequence[dict[str, Any]], tools: Sequence[Message], each: Callable[[], None] = lambda: None
) -> list[Turn]:
    """Every call of a conversation that the draft has room for.

    Args:
        draft: loaded by itself, as a target.
        talk: its messages.
        tools: what it may call.
        each: called after each.

    Raises:
        UsageError: the draft's calls are not known here.
    """
    vocab, turns = draft.target.vocab, list[Turn]()
    form = form_of(vocab)
    if form is None:
        raise UsageError("this draft's template shows no tools, or in no form that is known here")
    for number, message in enumerate(talk):
        if message["role"] != "assistant" or not message.get("tool_calls"):
            continue
        recorded = message["tool_calls"][0]["function"]
        true = Call(recorded["name"], recorded["arguments"])
        ids = render_chat(vocab, as_shown(talk[:number]), tools)
        if len(ids) + 160 > draft.target.capabilities.context_length:
            break
        written = json.dumps({"name": true.name, "arguments": json.loads(true.arguments)})
        named = hit = False
        for begun in ("", form.open[0]):
            head = vocab.encode(begun, add_bos=False, parse_special=True)
            started = perf_counter()
            guess = _first_call(draft, form, begun, [*ids, *head])
            seconds = perf_counter() - started
            named = named or (guess is not None and guess.name == true.name)
            if hit := guess is not None and same(guess, true):
                break
        whole = vocab.encode(f"{HERMES.open[0]}\n{written}\n{HERMES.close}", add_bos=False, parse_special=True)
        turns.append(Turn(true.name, named, hit, len(whole) - len(head), seconds))
        each()
    return turns
