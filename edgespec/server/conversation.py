"""The internal form of conversations and requests, to which all dialects translate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.errors import shown
from edgespec.loop.grammar import Grammar
from edgespec.server.errors import Refused
from edgespec.server.gap import Gap
from edgespec.server.tool_calls import Call, Tools

UNLIMITED = -1  # max_tokens, as clients of llama.cpp write it
MOST_TURNS = 2**14  # messages, and their calls: to render one takes up to a tenth of a millisecond


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


Piece = str | Thought | Call
Prompt = str | Sequence[int] | Gap


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    text: str = ""
    thought: str | None = None
    calls: Sequence[Call] = ()  # of an assistant; their arguments may be invalid JSON
    result_of: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: Sequence[Turn]
    tools: Tools | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    sampling: Mapping[str, Any]
    conversation: Conversation | None = None
    prompts: Sequence[Prompt] = ()  # without a conversation: texts, or their token ids
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    choices: int = 1
    log_probs: int | None = None
    plain: bool = False
    grammar: Grammar | None = None
    prediction: str = ""  # likely output, to draft from

    @property
    def tools(self) -> Tools | None:
        return self.conversation.tools if self.conversation else None

    @property
    def begun(self) -> Turn | None:
        """The assistant's turn that ends the conversation: the answer continues it."""
        last = self.conversation.turns[-1] if self.conversation else None
        return last if last and last.role == "assistant" else None


def role_of(role: Any, roles: Sequence[str], where: str, param: str) -> str:
    if role not in roles:
        raise Refused(400, f"{where}.role is {shown(role)}, but must be one of {', '.join(roles)}", param=param)
    return "system" if role == "developer" else str(role)
