"""The internal form of a conversation and of a request. All dialects translate to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.loop.grammar import Grammar
from edgespec.server.errors import Refused
from edgespec.server.tool_calls import Call, Tools

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the thought before the answer."""

    text: str


Piece = str | Thought | Call  # of an answer


@dataclass(frozen=True, slots=True)
class Turn:
    role: str  # system, user, assistant or tool
    text: str = ""
    thought: str | None = None  # of an assistant
    calls: Sequence[Call] = ()  # of an assistant; their arguments may be no JSON
    result_of: str | None = None  # of a tool: the call's id


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that a chat template shows."""

    turns: Sequence[Turn]
    tools: Tools | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # more variables of the template


@dataclass(frozen=True, slots=True)
class Question:
    """A request for answers, in no dialect."""

    sampling: Mapping[str, Any]  # fields of `SamplingParams` that the client names
    conversation: Conversation | None = None
    prompts: Sequence[str | Sequence[int]] = ()  # without a conversation: texts, or their token ids
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    choices: int = 1  # answers to each prompt
    log_probs: int | None = None  # report log-probabilities of tokens and of this number of alternatives
    plain: bool = False  # decode without drafts
    grammar: Grammar | None = None  # that the answer follows
    prediction: str = ""  # what the answer may be in large parts
    foresee: bool = False  # report the tokens that the draft predicts

    @property
    def tools(self) -> Tools | None:
        return self.conversation.tools if self.conversation else None


def text_of(content: Any, where: str) -> str:
    """The text of a message: a string, null, or text parts. Raises Refused for other parts, such as images."""
    if content is None or isinstance(content, str):
        return content or ""
    found = list[str]()
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            says = f"{where}: only text can be read here, not {kind or type(part).__name__!r}"
            raise Refused(400, says, param=where)
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise Refused(400, f"{where}: a text part has no text", param=where)
        found.append(text)
    return "".join(found)
