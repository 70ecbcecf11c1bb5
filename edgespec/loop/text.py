"""Text in and out: chat templates, streaming detokenisation, stop strings."""

import codecs
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from edgespec.errors import ModelError, UsageError, check_text, must_be
from edgespec.loop.backend import Vocab
from edgespec.loop.passes import full

Message = Mapping[str, Any]  # {"role": "user", "content": "Hi"}
SYSTEM = ("system", "developer")  # roles
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
    """System messages that the template refuses or drops become parts of their neighbours.

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
    variables = dict(more or {}) | ({"tools": tools} if tools else {})
    if not (answer and messages and messages[-1].get("role") == "assistant"):
        return _with_systems(_renderer(vocab, variables | {"add_generation_prompt": answer}), messages)
    text = _with_systems(_renderer(vocab, variables | {"add_generation_prompt": False}), _marked(messages))
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


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Mark the end of the assistant's last message, to cut the rendered text there; raises UsageError."""
    *before, last = messages
    if before and before[-1].get("role") == "assistant":
        raise UsageError("the last two messages are the assistant's, but only one can be continued: join them")
    if last.get("tool_calls"):
        raise UsageError("the assistant's last message calls a tool: give the tool's result after it")
    return [*before, {**last, "content": last["content"] + MARK}]


Render = Callable[[Sequence[Message]], str]  # errors as for `chat_text`


def _renderer(vocab: Vocab, variables: Mapping[str, Any]) -> Render:
    """Renders a conversation's messages in several forms, with one limit of work for all."""
    from edgespec.loop.template_work import Work  # Jinja takes a while to import
    from edgespec.loop.templates import now, rendered

    template, work = (variables.get("tools") and vocab.tool_template) or vocab.chat_template or "", Work()
    bos, eos = ("" if token is None else vocab.token_text(token) for token in (vocab.bos_id, vocab.eos_id))
    firefunction = {"functions": "", "datetime": now("%d %B %Y")}  # its template needs them
    known = {**firefunction, **variables, "bos_token": bos, "eos_token": eos}
    return lambda messages: rendered(template, known | {"messages": messages}, work)


def _with_systems(render: Render, messages: Sequence[Message]) -> str:
    """Render the messages as they are, else with later system messages joined to neighbours, else with all joined.

    The first that shows every system message is taken, else the last that renders.
    """
    if not any(map(_is_system, messages)):
        return render(messages)
    refused: UsageError | ModelError | None = None
    text: str | None = None
    for kept in (len(messages), 1, 0):
        try:
            one = _with_fewer_systems(messages, kept) if kept < len(messages) else messages
            text = render(one)
            if _shows_systems(render, one):
                return text
        except (UsageError, ModelError) as error:
            refused = refused or error
    if text is None and refused:
        raise refused
    return text or ""


def _with_fewer_systems(messages: Sequence[Message], kept: int) -> Sequence[Message]:
    """Messages whose system messages, but those among the first `kept` messages, are parts of their neighbours.

    Many templates know system messages at the beginning only. The message before takes the text, so that the rendered
    beginning of a conversation stays as it was. If the assistant wrote that one, the message after takes it.
    """
    found = list[tuple[Message, list[str]]]()  # with the texts of those that take some
    waiting = list[str]()
    for number, message in enumerate(messages):
        takes = _takes_text(message)
        if number >= kept and _is_system(message):
            texts = found[-1][1] if found and _takes_text(found[-1][0]) else waiting
            texts.append(message["content"])
            continue
        if waiting and not takes:
            found.append(({"role": "user"}, waiting))
            waiting = []
        found.append((message, [*waiting, message["content"]] if takes else []))
        waiting = []
    found += [({"role": "user"}, waiting)] if waiting else []
    return [{**message, "content": "\n\n".join(texts)} if texts else message for message, texts in found]


def _is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM and isinstance(message.get("content"), str)


def _takes_text(message: Message) -> bool:
    return message.get("role") in (*SYSTEM, "user", "tool") and isinstance(message.get("content"), str)


def _shows_systems(render: Render, messages: Sequence[Message]) -> bool:
    """False if the template drops a system message, found by other texts in their place."""
    numbers = [i for i, message in enumerate(messages) if message.get("role") in SYSTEM]
    marked = [*messages]
    for i in numbers:
        marked[i] = {**messages[i], "content": f"system-message-{i}."}
    shown = set(re.findall(r"system-message-(\d+)\.", render(marked)))
    return shown.issuperset(map(str, numbers))
