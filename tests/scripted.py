"""A model whose answers are a script: a request gets the text that a function of its prompt returns.

All else is edgespec's own: tokenizer, template, loop, scheduler, and the server's code.
"""

import re
import socket
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import numpy as np
from edgespec.backends.common.row_logits import RowLogits
from reference.backend import ReferenceBackend, ReferenceSession, random_model

from benchmarks.serving import running
from edgespec.loop.tree import path_to
from edgespec.model import Model
from edgespec.planners.sssd import SssdPlanner
from edgespec.server.app import make_app
from edgespec.server.service import Service

# As Hermes and Qwen write it, in the control tokens of any vocabulary.
TEMPLATE = """\
{%- if tools %}{{ bos_token }}system
<tools>{% for tool in tools %}
{{ tool.function | tojson }}{% endfor %}
</tools>{{ eos_token }}
{% endif %}
{%- for message in messages %}{{ bos_token }}{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}{{ bos_token }}assistant
{% endif %}"""
SURE = 1000.0  # the logit of the token that the script wants; the others are 0


@dataclass(frozen=True)
class Reply:
    """An answer, and the seconds before its first token."""

    text: str
    after: float = 0.0


Script = Callable[[str], Reply | str]  # of the whole prompt


class ScriptedSession(ReferenceSession):
    _start: int | None = None  # of the answer; None: not known
    _reply: Sequence[int] = ()

    def add(self, work, positions):
        self._add_nodes(work, positions)
        if len(work.wanted) and (work.prompt or self._start is None):  # draft tokens may hold anything
            self._start, self._reply = self._backend.reply(self.token_ids + self._tokens[: None if work.prompt else 1])
        rows = {}
        for node in work.wanted.tolist():
            at = len(self.token_ids) + len(path_to(self._parents, node)) - (self._start or 0)
            known = self._start is not None and at < len(self._reply)
            rows[node] = np.zeros(self._backend.vocab.size, np.float32)
            rows[node][self._reply[at] if known else self._backend.vocab.eos_id] = SURE
        return RowLogits(rows)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        if self._start is not None and length < self._start:
            self._start = None

    def _copy_cells(self, other) -> None:
        other._start, other._reply = self._start, self._reply


class ScriptedBackend(ReferenceBackend):
    """
    Attributes:
        asked: the prompts of all answers, as texts.
    """

    def __init__(self, script: Script, vocab=None, context_length: int = 4000, sessions: int = 2) -> None:
        """
        Args:
            script: writes the answers.
            vocab: any model's tokenizer; None: each byte is a token.
            context_length: of each session.
            sessions: most at once.
        """
        weights = random_model(1, vocab_size=258, width=2, heads=1, layers=1, hidden=1)
        super().__init__(weights, context_length=context_length, max_nodes=512, sessions=sessions)
        self.vocab = vocab or self.vocab
        self.vocab.chat_template = TEMPLATE
        self.script, self.asked, self._closing = script, list[str](), Event()

    def open(self):
        self._check_open()
        session = ScriptedSession(self)
        self.opened.append(session)
        return session

    def reply(self, ids: list[int]) -> tuple[int | None, list[int]]:
        """Where the answer begins that follows `ids`, and its tokens; None if they are no whole prompt."""
        head = [self.vocab.bos_id, *self.vocab.encode("assistant\n", add_bos=False, parse_special=False)]
        start = len(ids) - 1 - ids[::-1].index(self.vocab.bos_id) + len(head)
        if ids[start - len(head) : start] != head:
            return None, []
        names = [self.vocab.token_bytes(token) or self.vocab.token_text(token).encode() for token in ids[:start]]
        prompt = b"".join(names).decode("utf-8", "replace")
        self.asked.append(prompt)
        found = self.script(prompt)
        reply = Reply(found) if isinstance(found, str) else found
        self._closing.wait(reply.after)
        return start, self.vocab.encode(reply.text, add_bos=False, parse_special=True)

    def embed(self, token_ids, start):
        return super().embed([token % len(self.model.embedding) for token in token_ids], start)

    def close(self) -> None:
        self._closing.set()
        super().close()


@contextmanager
def scripted(script: Script, vocab=None, context: int = 4000, slots: int = 2):
    """A `Model` that follows a script; `model.target.asked` has the prompts."""
    target = ScriptedBackend(script, vocab, context, slots)
    with Model(target, [SssdPlanner() for _ in range(slots)], budget=8) as model:
        yield model


@contextmanager
def answering(model: Model, sock: socket.socket | None = None, around=lambda app: app, service=(), **guard):
    """The port of a server of `model` in a thread, on a socket of its own or a given one.

    `around` puts a layer around the application; `service` has further fields of a `Service`.
    """
    with running(around(make_app(Service(model, "tiny", **dict(service)), **guard)), sock) as port:
        yield port


@contextmanager
def asking(script: Script, context: int = 4000, template: str = TEMPLATE):
    """A client of a server in this process; `client.asked` has the prompts."""
    from starlette.testclient import TestClient

    with scripted(script, context=context) as model:
        model.target.vocab.chat_template = template
        with TestClient(make_app(Service(model, "tiny")), "http://127.0.0.1:8080") as client:
            client.asked = model.target.asked
            yield client


def turns(prompt: str, bos: str, eos: str) -> list[tuple[str, str]]:
    """(role, text) of all turns of a prompt in `TEMPLATE`, without the answer's head."""
    found = re.findall(f"{re.escape(bos)}(\\w+)\n(.*?){re.escape(eos)}", prompt, re.DOTALL)
    return [(role, text.strip()) for role, text in found]
