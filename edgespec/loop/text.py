"""Text in and out: chat templates, streaming detokenisation, stop strings."""

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from edgespec.errors import ModelError, UsageError
from edgespec.loop.backend import Vocab

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}


class TextStream:
    """Turns tokens into text that can be shown at once.

    Never lets out half a UTF-8 character, nor the beginning of what may become a stop string.
    """

    def __init__(self, vocab: Vocab, stop: Sequence[str] = (), shown: Collection[int] = ()) -> None:
        """
        Args:
            vocab: the tokenizer.
            stop: strings that end the text; they are not part of it.
            shown: control tokens whose names are part of it.

        Raises:
            UsageError: a stop string is empty.
        """
        if "" in stop:
            raise UsageError("a stop string is empty; give at least one character")
        self._vocab = vocab
        self._stop = tuple(stop)
        self._shown = {token: vocab.token_text(token).encode() for token in shown}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False  # a stop string was found: the text is complete
        self.stop_found: str | None = None  # which it was

    def push(self, token_id: int) -> str:
        """The text that is certain after one more token; may be empty."""
        return self._release(self._decoder.decode(self._shown.get(token_id) or self._vocab.token_bytes(token_id)))

    def finish(self) -> str:
        """End of the text, held back until now."""
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
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def user_messages(text: str, system: str | None = None) -> list[Message]:
    """Messages of a single question."""
    question: Message = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, question] if system else [question]


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson`, with the arguments that templates give it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> Any:
    """The tag `generation`, by which templates mark what is trained on: what is in it, as it is."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def render_chat(
    vocab: Vocab,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer; arguments and errors as for `chat_text`."""
    text = chat_text(vocab, messages, answer=True, tools=tools, more=more)
    return vocab.encode(text, add_bos=not _starts_with_bos(vocab, text), parse_special=True)


def _starts_with_bos(vocab: Vocab, text: str) -> bool:
    return vocab.bos_id is not None and text.startswith(vocab.token_text(vocab.bos_id))


def chat_text(
    vocab: Vocab,
    messages: Sequence[Message],
    *,
    answer: bool = False,
    tools: Sequence[Message] | None = None,
    more: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as a text, by the model's own chat template.

    The template is a program from a downloaded file, so it runs in Jinja's sandbox, with the globals
    that Hugging Face's `apply_chat_template` gives it.

    Args:
        vocab: the model's tokenizer.
        messages: who says what.
        answer: end with the beginning of the assistant's answer.
        tools: functions that the assistant may call, as JSON schemas.
        more: what else the template is told, such as enable_thinking.

    Raises:
        UsageError: the model has no chat template, these are no messages, or the template refuses them.
        ModelError: the template is broken.
    """
    if vocab.chat_template is None:
        raise UsageError("this model has no chat template: use --raw (in Python: generate with a text)")
    for message in messages:
        if not isinstance(message, Mapping):  # a template would show nothing of it, and say nothing
            raise UsageError(f"a message is {message!r}, but must be like {{'role': 'user', 'content': 'Hi'}}")
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise UsageError(f"the model's chat template refuses these messages: {message}")

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    bos = vocab.token_text(vocab.bos_id) if vocab.bos_id is not None else ""
    eos = vocab.token_text(vocab.eos_id) if vocab.eos_id is not None else ""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    try:
        template = environment.from_string(vocab.chat_template)
        known = {"messages": messages, "add_generation_prompt": answer, "bos_token": bos, "eos_token": eos}
        return template.render(dict(more or {}) | known | ({"tools": tools} if tools else {}))
    except jinja2.TemplateError as error:
        raise ModelError(f"the model's chat template does not work: {error}") from error
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # it goes through what it was told as it comes
        raise UsageError(f"the model's chat template cannot show these messages: {error}") from error
