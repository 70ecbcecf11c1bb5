"""The conversation of `edgespec run`, in a chat or for one prompt."""

import os
from bisect import bisect_left
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from edgespec.cli.terminal import show, write_answer
from edgespec.errors import SessionFileError, UsageError
from edgespec.loop.message_forms import SYSTEM, Message
from edgespec.loop.passes import check_room
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.session_files import check_replaceable, draft_file
from edgespec.model import Model
from edgespec.models.own_sampling import choose_seed
from edgespec.scheduler.events import GenerationResult
from edgespec.scheduler.scheduler import Scheduler
from edgespec.server.channels import comes_in_channels
from edgespec.server.conversation import UNLIMITED
from edgespec.server.model_format import ModelFormat, thinking_of

NUMBERS: dict[str, Any] = {  # name -> type
    one.name: type(one.default) for one in fields(SamplingParams) if one.name != "logit_bias"
}


class Said(BaseModel):
    """A message in a session's file."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str


SAID = TypeAdapter(list[Said])


@dataclass
class Conversation:
    """Messages with a model, and the session file that keeps them.

    Attributes:
        options: of every answer, as for `Model.stream`; `max_tokens` may be UNLIMITED.
        messages: all of them, also those that no longer fit into the context.
        file: saved after every answer.
        quiet: print no answers.
        tint: tint accepted tokens by source.
        last: the last answer.
    """

    model: Model
    options: dict[str, Any]
    messages: list[Message]
    file: Path | None = None
    quiet: bool = False
    tint: bool = False
    last: GenerationResult | None = None
    _left_out: int = field(default=0, init=False)  # oldest messages that are not sent
    _unanswered: list[Message] = field(default_factory=list, init=False)  # turns up to a question that got no text
    _told_of_left_out: bool = field(default=False, init=False)
    _made_with: Any = field(default=None, init=False)  # of the last answer: what decides it at temperature 0

    @property
    def system(self) -> list[Message]:
        return self.messages[:1] if self.messages and self.messages[0]["role"] in SYSTEM else []

    @property
    def turns(self) -> list[Message]:
        return self.messages[len(self.system) :]

    @property
    def sampling(self) -> SamplingParams:
        known = SamplingParams.__dataclass_fields__
        return replace(self.model.sampling, **{name: value for name, value in self.options.items() if name in known})

    def ask(self, question: str) -> GenerationResult:
        """Write the answer to a question.

        Raises:
            ContextFull: the question does not fit into the context.
            SessionFileError: the file cannot be written.
        """
        return self._answer([*self.messages, {"role": "user", "content": question}])

    def retry(self) -> GenerationResult:
        """Answer the last question again, with the next seed.

        Raises:
            UsageError: there is no question, or the same answer would come again.
        """
        if not self.turns and not self._unanswered:
            raise UsageError("there is no answer to retry")
        interrupted = self.last and self.last.finish_reason == "interrupted"
        if self.sampling.temperature == 0 and self._made_with == self._decisive() and not interrupted:
            raise UsageError("temperature is 0, so the same answer would come: /set temperature 0.7")
        self.options["seed"] = (self.sampling.seed + 1) % 2**64
        return self._answer([*self.system, *(self._unanswered or self.turns[:-1])])

    def continue_text(self, text: str) -> GenerationResult:
        """Write what follows a text, without the chat template."""
        try:
            return self._write(text)
        finally:
            self.save()

    def save(self) -> None:
        if self.file:
            self.model.scheduler.save(self.file, self.messages)

    def save_to(self, name: str) -> None:
        """
        Raises:
            UsageError, SessionFileError: the file cannot be written, or is there and is no session.
        """
        self.model.scheduler.save(self._session_file("/save", name), self.messages)

    def load(self, name: str) -> None:
        """Replace the conversation by the one saved in `name`.

        If answers are saved at all, later ones go to this file.

        Raises:
            UsageError, SessionFileError: the file has no conversation with this model.
        """
        path = self._session_file("/load", name)
        self.save()
        messages = load_messages(self.model, path)
        if not messages:
            raise UsageError(f"{path}: has no messages")
        self.messages, self._left_out, self._unanswered, self._made_with = messages, 0, [], None
        self.file = self.file and path

    def _session_file(self, command: str, name: str) -> Path:
        if not isinstance(self.model.decoder, Scheduler):
            raise UsageError(f"{command} does not go with --targets and --cluster: each copy has a session of its own")
        return session_file(name, command)

    def clear(self) -> None:
        self.messages, self._left_out, self._unanswered = self.system, 0, []
        self.save()

    def set(self, name: str, value: str) -> None:
        """
        Raises:
            UsageError: there is no such setting, or the value is wrong.
        """
        name = name.replace("-", "_")
        if name == "system":
            if not value:
                raise UsageError("system is empty: give at least one word")
            self.messages = [{"role": "system", "content": value}, *self.turns]
            return
        kinds = NUMBERS | {"max_tokens": int}
        if name not in kinds:
            raise UsageError(f"there is no setting {name!r}; there are: {', '.join(kinds)}, system")
        try:
            number: Any = kinds[name](value)
        except ValueError as error:
            kind = "a whole number" if kinds[name] is int else "a number"
            raise UsageError(f"{name} is {value!r}, but must be {kind}") from error
        if name == "max_tokens":
            check_max_tokens(number)
        else:
            number = choose_seed(number) if name == "seed" else number
            SamplingParams(**{name: number})
        self.options[name] = number

    def settings(self) -> str:
        lines = [f"{name} {getattr(self.sampling, name)}" for name in NUMBERS]
        lines += [f"max_tokens {self.options['max_tokens']}", *(f"system {one['content']}" for one in self.system)]
        return "\n".join(lines)

    def _answer(self, asked: list[Message]) -> GenerationResult:
        prompt = self._that_fit(asked)
        self.last, self._unanswered, self._made_with = None, asked[len(self.system) :], self._decisive()
        try:
            return self._write(prompt, self._form())
        finally:
            if self.last and self.last.text:
                self.messages, self._unanswered = [*asked, {"role": "assistant", "content": self.last.text}], []
                self.save()

    def _decisive(self) -> Any:
        return {name: value for name, value in self.options.items() if name != "seed"}, self.system

    def _form(self) -> ModelFormat | None:
        """Of a model whose template refuses an answer with its thoughts, or where a grammar is for the answer alone."""
        vocab = self.model.target.vocab
        template = vocab.chat_template or ""
        thinks = self.options.get("grammar") and thinking_of(template)
        return ModelFormat(vocab, template) if comes_in_channels(template) or thinks else None

    def _write(self, prompt: Any, form: ModelFormat | None = None) -> GenerationResult:
        limit = self.model.target.capabilities.context_length
        most = self.options["max_tokens"]
        options = self.options | {"max_tokens": limit if most == UNLIMITED else most}
        in_thought = form is not None and form.begins_in_thought(self.model.encode(prompt))
        if form and (grammar := options.get("grammar")):
            options["grammar"] = form.grammar(grammar, None, in_thought)
        self.last = GenerationResult()
        shown = {"quiet": self.quiet, "tint": self.tint}
        write_answer(self.model, prompt, self.last, options, form=form, in_thought=in_thought, **shown)
        return self.last

    def _that_fit(self, asked: list[Message]) -> list[Message]:
        """`asked`, without its oldest turns if it fills more than three quarters of the context: at most half stays.

        Then the next turns only add to the prompt, and nothing is prefilled twice. The last answer stays if three
        quarters hold it.
        """
        limit = self.model.target.capabilities.context_length
        first, left_out = len(self.system), self._left_out
        turns = len(asked) - first

        def length(left_out: int) -> int:
            return len(self.model.encode([*asked[:first], *asked[first + left_out :]]))

        def is_short(left_out: int) -> bool:
            sent = turns - left_out
            return sent <= 2 or length(left_out) <= (most if sent == 3 else limit // 2)

        most = limit * 3 // 4
        if length(left_out) > most:
            steps = range(left_out, turns, 2)  # a question and its answer
            left_out = steps[bisect_left(steps, True, key=is_short)]
            check_room(self.model.target, length(left_out))
            if left_out > self._left_out and not self._told_of_left_out:
                self._told_of_left_out = True
                note = f"the context is full (--ctx {limit}): from here on the oldest messages are left out"
                show(note, dim=True, err=True)
            self._left_out = left_out
        return [*asked[:first], *asked[first + left_out :]]


def load_messages(model: Model, path: Path) -> list[Message]:
    """Load a session, and return the messages that were saved with it.

    Raises:
        SessionFileError: as for `Scheduler.load`, or its note is something else.
    """
    note = model.scheduler.load(path)
    try:
        return [one.model_dump() for one in SAID.validate_python(note or [], strict=True)]
    except ValidationError as error:
        raise SessionFileError(f"{path}: was saved with something else than a conversation") from error


def check_max_tokens(number: int) -> None:
    """
    Raises:
        UsageError: it is no number of tokens.
    """
    if number < 1 and number != UNLIMITED:
        raise UsageError(f"max tokens is {number}, but must be at least 1, or -1 for no limit")


def session_file(name: str, option: str) -> Path:
    """
    Raises:
        UsageError: no file can have this name; the message begins with `option`.
        SessionFileError: a file with this name is not a saved session.
    """
    path = Path(os.path.expanduser(name))
    if not os.path.isdir(path.parent):  # unlike `is_dir`, also for a name that is too long
        raise UsageError(f"{option} {name}: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise UsageError(f"{option} {name}: is a folder; give the name of a file")
    for file in (path, draft_file(path)):
        check_replaceable(file)
    return path
