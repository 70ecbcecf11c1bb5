"""Text in and out: chat templates, streaming detokenisation, stop strings."""

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edgespec.errors import UsageError, check_text, check_whole, must_be
from edgespec.loop.backend import Vocab
from edgespec.loop.message_forms import Message, Render, Tools, shown_whole
from edgespec.loop.passes import full

TEXT_PARTS = ("text", "input_text", "output_text")  # types
CHARACTERS = 16  # of a token at most, but for rare ones
MOST_STOPS = 4096  # characters of all stop strings
MARK = "here-the-answer-goes-on"  # behind the content of a message, so that templates strip no white space there


class TextStream:
    """Turns tokens into text that is final: no half of a character, no beginning of a stop string.

    Attributes:
        stopped: a stop string was found, and the output is complete.
        stop_found: this stop string.
    """

    def __init__(self, vocab: Vocab, stop: Sequence[str] = (), shown: Collection[int] = ()) -> None:
        """
        Args:
            vocab: the tokenizer.
            stop: strings that end the output and are not part of it.
            shown: control tokens whose names are part of the output.

        Raises:
            UsageError: a stop string is empty, or they are too long.
        """
        if "" in stop:
            raise UsageError("a stop string is empty; give at least one character")
        if (length := sum(map(len, stop))) > MOST_STOPS:
            raise UsageError(f"the stop strings have {length} characters in all, but at most {MOST_STOPS} may be given")
        self._vocab = vocab
        self._stop = tuple(stop)
        self._shown = {token: vocab.token_text(token).encode() for token in shown}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        self.stop_found: str | None = None

    def push(self, token_id: int) -> str:
        """Add a token.

        Returns:
            Text that is final now, perhaps none.
        """
        return self._release(self._decoder.decode(self._shown.get(token_id) or self._vocab.token_bytes(token_id)))

    def finish(self) -> str:
        """The rest of the output, held back until now."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop_found = min(found)
            self.stopped = True
            self._held = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def spelled(vocab: Vocab, token_ids: Sequence[int]) -> bytes:
    """The bytes of tokens, of control tokens their names; raises UsageError."""
    last = vocab.size - 1
    known = [check_whole("a token id", one, 0, last) for one in token_ids]
    return b"".join(vocab.token_bytes(one) or vocab.token_text(one).encode() for one in known)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def user_messages(text: str, system: str | None = None) -> list[Message]:
    """Messages of a single question."""
    question: Message = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, question] if system else [question]


def render_chat(
    vocab: Vocab,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    more: Mapping[str, Any] | None = None,
    context_length: int | None = None,
) -> list[int]:
    """
    Returns:
        Token ids of a conversation, ready for the assistant's answer, or for the rest of one that the assistant's last
        message begins; arguments and errors as for `chat_text`, and `check_length` of the messages and of the text.
    """
    messages = plain_messages(messages)
    check_length(vocab, sum(len(message["content"]) for message in messages), context_length)
    text = check_text("a message", chat_text(vocab, messages, answer=True, tools=tools, more=more))
    check_length(vocab, len(text), context_length)
    has_bos = vocab.bos_id is not None and text.startswith(vocab.token_text(vocab.bos_id))
    return vocab.encode(text, add_bos=not has_bos, parse_special=True)


def check_length(vocab: Vocab, characters: int, context_length: int | None) -> None:
    """Refuse a text that is certainly too long, before it is rendered or tokenized.

    Args:
        vocab: the tokenizer.
        characters: of the text.
        context_length: in tokens; None: any length is right.

    Raises:
        ContextFull: it would not fit into the context if all its tokens were the longest.
    """
    if context_length is None or characters < context_length * CHARACTERS:
        return
    tokens = characters // vocab.longest
    if tokens >= context_length:  # not in the form of a count: agents would take it for one
        raise full(f"at least {tokens} tokens, but {context_length - 1} is the maximum", context_length)


def chat_text(
    vocab: Vocab,
    messages: Sequence[Message],
    *,
    answer: bool = False,
    tools: Sequence[Message] | None = None,
    more: Mapping[str, Any] | None = None,
) -> str:
    """What the template refuses or drops is said in another of `message_forms.CHANGES`.

    Args:
        vocab: the model's tokenizer.
        messages: such as {"role": "user", "content": "Hi"}; as for `plain_messages`.
        answer: end with the beginning of the assistant's answer. If the last message is the assistant's, it is that.
        tools: functions that the assistant may call, as JSON schemas.
        more: further variables of the template, such as enable_thinking.

    Returns:
        A conversation as text, by the model's own chat template.

    Raises:
        UsageError: the model has no chat template, `messages` are no messages, the template refuses them or takes too
            much work for them, or the last one cannot be continued.
        ModelError: the template is broken.
    """
    if vocab.chat_template is None:
        raise UsageError("this model has no chat template: use --raw (in Python: generate with a text)")
    messages = plain_messages(messages)
    goes_on = bool(answer and messages and messages[-1]["role"] == "assistant")
    render = _renderer(vocab, {**(more or {}), "add_generation_prompt": answer and not goes_on})
    text = shown_whole(render, _begun(messages) if goes_on else messages, tools)
    if not goes_on:
        return text
    begun, shown, _ = text.rpartition(MARK)
    if not shown:
        raise UsageError("the model's chat template does not show the assistant's last message: leave it out")
    return begun


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages whose contents are texts: parts of text are joined, and none is "".

    Raises:
        UsageError: one is no message, or its content no text: a template would show Python's notation.
    """
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise must_be("a message", message, "like {'role': 'user', 'content': 'Hi'}")
    return [{**message, "content": content_text(message.get("content"))} for message in messages]


def content_text(content: Any) -> str:
    """A message's content as one text; raises UsageError."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = list(content) if isinstance(content, list | tuple) else [None]
    known = [one for one in parts if isinstance(one, Mapping) and one.get("type") in TEXT_PARTS]
    texts = [text for one in known if isinstance(text := one.get("text"), str)]
    if len(texts) < len(parts):
        raise must_be("a message's content", content, "a text, a list of text parts, or None")
    return "".join(texts)


def _begun(messages: Sequence[Message]) -> list[Message]:
    """Mark the end of the assistant's last message, to cut the rendered text there; raises UsageError."""
    *before, last = messages
    if last.get("tool_calls") or (before and before[-1].get("tool_calls")):
        raise UsageError("the assistant's last message calls a tool: give the tool's result after it")
    return [*before, {**last, "content": last["content"] + MARK}]


def _renderer(vocab: Vocab, variables: Mapping[str, Any]) -> Render:
    """Renders messages and tools in several forms, with one limit of work for all; errors as for `chat_text`."""
    from edgespec.loop.template_work import Work  # Jinja takes a while to import
    from edgespec.loop.templates import now, rendered

    work = Work()
    bos, eos = ("" if token is None else vocab.token_text(token) for token in (vocab.bos_id, vocab.eos_id))
    firefunction = {"functions": "", "datetime": now("%d %B %Y")}  # its template needs them
    known = {**firefunction, **variables, "bos_token": bos, "eos_token": eos}

    def render(messages: Sequence[Message], tools: Tools) -> str:
        template = (tools and vocab.tool_template) or vocab.chat_template or ""
        return rendered(template, known | {"messages": messages} | ({"tools": tools} if tools else {}), work)

    return render
