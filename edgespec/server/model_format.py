"""How a model writes prompts, thoughts and calls, by its chat template."""

from collections.abc import Sequence

from edgespec.loop.backend import Vocab
from edgespec.loop.grammar import Grammar
from edgespec.loop.text import render_chat
from edgespec.server.call_formats import FORMATS, GENERIC, LOOK_ALIKES, CallFormat
from edgespec.server.channels import ANALYSIS, FINAL, MARKERS, MESSAGE, ChannelParser, Parser, comes_in_channels
from edgespec.server.constrained import ThoughtFirst, answer_or_call, call_grammar, control_tokens
from edgespec.server.conversation import MOST_TURNS, Conversation, Turn
from edgespec.server.errors import refuse_if
from edgespec.server.parse_output import OutputParser
from edgespec.server.prompts import calls_as_text, template_messages
from edgespec.server.tool_calls import Tools

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)
TAIL = 12  # tokens at a prompt's end that may open a thought


class ModelFormat:
    def __init__(self, vocab: Vocab, template: str, context_length: int | None = None) -> None:
        """
        Args:
            vocab: of the model.
            template: the chat template; "": prompts are raw, and all of an answer is content.
            context_length: most tokens of a prompt; None: any number.
        """
        self._vocab, self._context_length = vocab, context_length
        self._names_thinking = "message.thinking" in template
        self._in_channels = comes_in_channels(template)
        self.calls = call_format_of(template)
        self.thinking = ANALYSIS if self._in_channels else thinking_of(template)
        markers = [*(self.thinking or ()), *(MARKERS if self._in_channels else ())]
        self._shown = self._control(markers)
        self._shown_with_calls = self._shown | self._control(self.calls.markers)
        opening = FINAL if self._in_channels else ""
        self._thought_first = ThoughtFirst(vocab, self.thinking, opening) if self.thinking else None

    def _control(self, markers: Sequence[str]) -> frozenset[int]:
        return frozenset(token for marker in markers for token in control_tokens(self._vocab, marker).values())

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        parts = len(conversation.turns) + sum(len(turn.calls) for turn in conversation.turns)
        refuse_if(
            parts > MOST_TURNS,
            f"there are {parts} messages and calls, but at most {MOST_TURNS} may be given",
            "messages",
        )
        turns, tools = conversation.turns, conversation.tools
        if self.calls.is_generic:
            turns, tools = calls_as_text(turns, tools), None
        numbered = "{number}" in self.calls.call
        messages = template_messages(turns, names_thinking=self._names_thinking, numbered=numbered)
        shown = [tool.shown for tool in tools.all] if tools else None
        return render_chat(self._vocab, list(messages), shown, conversation.options, self._context_length)

    def begins_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        if self.thinking is None:
            return False
        vocab = self._vocab
        tail = [vocab.token_bytes(i).decode("utf-8", "replace") or vocab.token_text(i) for i in prompt_ids[-TAIL:]]
        return "".join(tail).rstrip().endswith(self.thinking[0])

    def shown(self, tools: Tools | None) -> frozenset[int]:
        """Control tokens that the parser must see by name."""
        return self._shown_with_calls if tools else self._shown

    def parser(
        self, tools: Tools | None, in_thought: bool, begun: Turn | None = None, *, unmarked: bool = True
    ) -> Parser:
        """
        Args:
            tools: that may be called.
            in_thought: the prompt has opened a thought.
            begun: the turn that the answer continues.
            unmarked: JSON without markers may be a call.
        """
        calls, parameters = (self.calls, tools.parameters) if tools else (None, None)
        if self._in_channels:
            return ChannelParser(calls, FINAL.removesuffix(MESSAGE) if begun else None, parameters)
        blank = not (begun and begun.text.strip())
        return OutputParser(
            calls, self.thinking, in_thought=in_thought, blank=blank, parameters=parameters, unmarked=unmarked
        )

    def grammar(self, wanted: Grammar | None, tools: Tools | None, in_thought: bool) -> Grammar | None:
        """The grammar of a whole answer; None: it is free.

        Args:
            wanted: the grammar that the request asks for; a call that may or must be made takes the place of JSON.
            tools: that may or must be called.
            in_thought: the prompt has opened a thought.

        Raises:
            Refused, UsageError: the request cannot be fulfilled.
        """
        is_call, call = tools is not None and bool(tools.required), None
        if tools and is_call:
            kind = wanted.kind if wanted else ""
            refuse_if(
                kind not in ("", "json_schema"), f"a {kind} and a tool that must be called cannot be had together"
            )
            wanted = call_grammar(self._vocab, self.calls, tools.required, several=tools.parallel)
        elif tools and wanted and wanted.kind == "json_schema":
            call = call_grammar(self._vocab, self.calls.marked(), tools.all, several=tools.parallel)
        if wanted and self._thought_first:
            return self._thought_first.before(wanted, in_thought=in_thought, is_call=is_call, call=call)
        return answer_or_call(wanted, call) if wanted and call else wanted


def call_format_of(template: str) -> CallFormat:
    if "tools" not in template or any(mark in template for mark in LOOK_ALIKES):
        return GENERIC
    return next((one for one in FORMATS if all(mark in template for mark in one.seen)), GENERIC)


def thinking_of(template: str) -> tuple[str, str] | None:
    return next((pair for pair in THINKING if pair[1] in template), None)
