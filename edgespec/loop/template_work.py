"""Operators, filters, tests and methods of chat templates, which count their work before they do it.

Work is counted in steps: a character that is read or made is one, a part of the template that is evaluated a few.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from operator import attrgetter, eq, ge, gt, le, lt, ne
from typing import Any, cast

from jinja2 import Undefined, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedFormatter
from markupsafe import Markup

MOST_STEPS = 2**29  # ten seconds, a gigabyte
MOST_BITS = 2**15  # of a whole number
MOST_WIDTH = 999  # of an indent, a number in a format, and the like
WIDER = re.compile(r"\d{4}")
PART, ITEM, LOOKUP, OBJECT = 4, 8, 16, 64  # steps of other things, by their time and bytes

LISTS: tuple[type, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()), range)
PLAIN = frozenset([bool, int, float, type(None), Undefined])
NO_ITERATORS = PLAIN | {str, list, dict}


class Work:
    """The steps that are left."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MOST_STEPS

    def take(self, steps: int) -> None:
        """
        Raises:
            OverflowError: fewer are left.
        """
        self.left -= steps
        if self.left < 0:
            raise OverflowError(f"it takes more than {MOST_STEPS:,} steps")

    def read(self, value: Any, width: int = 0, indent: int = 0) -> None:
        """Count all parts of a value, and their characters.

        Args:
            value: a text, number, list and so on.
            width: characters by which parts are indented.
            indent: of `value`.

        Raises:
            TypeError: a part is no value, such as a function.
        """
        kind, steps = type(value), 1
        if kind is str:
            steps += len(value)
        elif kind is dict or kind is list or kind is tuple:
            indent += width
            steps += ITEM + (ITEM + indent) * len(value)
            for part in chain(value, value.values()) if kind is dict else value:
                if type(part) is str:
                    steps += len(part)
                elif type(part) not in PLAIN:
                    self.read(part, width, indent)
        elif kind not in PLAIN:
            self._read(value)
        self.left -= steps
        if self.left < 0:
            self.take(0)

    def _read(self, value: Any) -> None:
        """Of a rarer type."""
        if isinstance(value, str):
            self.take(len(value))
        elif isinstance(value, Mapping):
            self.read(dict(value))
        elif isinstance(value, LISTS):
            self.read(list(cast(Iterable[Any], value)))
        elif type(value).__module__.startswith(("builtins", "jinja2")) and not isinstance(value, Undefined):
            raise TypeError(f"a {type(value).__name__} is no value")  # its text would have its address


class Rendering(Context):
    """The variables of a template, and the work that it may do."""

    work: Work

    @cached_property
    def given(self) -> Collection[int]:
        """Ids of the caller's tools and of their parts: as text they are about as long as the request."""
        level, found = [self.parent.get("tools")], list[Any]()
        for _ in range(4):
            found += level
            inner: list[Any] = [
                one.values() if type(one) is dict else one for one in level if type(one) in (dict, list)
            ]
            level = [*chain.from_iterable(inner)]
        return set(map(id, found))

    @cached_property
    def lists(self) -> Collection[int]:
        """Ids of all lists that the caller gave."""
        waiting, found = list(self.parent.values()), set[int]()
        while waiting:
            one = waiting.pop()
            if type(one) is list:
                found.add(id(one))
            waiting += one.values() if type(one) is dict else one if type(one) in (list, tuple) else ()
        return found


def listed(value: Any) -> Any:
    """A list in place of an iterator, which could wait for another, and that for another."""
    return value if type(value) in NO_ITERATORS or not isinstance(value, Iterator) else list(value)


def number(value: Any) -> Any:
    """
    Raises:
        TypeError: it is none.
        OverflowError: it has too many digits.
    """
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise OverflowError(f"a number has more than {MOST_BITS:,} bits")
    elif not isinstance(value, float):
        if isinstance(value, Undefined):
            return +value  # Jinja's error, which names it
        raise TypeError(f"a {type(value).__name__} is used as a number")
    return value


def width_of(*args: Any) -> int:
    """Of numbers and texts by which something becomes wider.

    Raises:
        OverflowError: it is too wide.
    """
    width = sum(len(one) if isinstance(one, str) else abs(one) for one in args if isinstance(one, int | str))
    if width > MOST_WIDTH:
        raise OverflowError(f"a width is more than {MOST_WIDTH}")
    return width


# Operators, as functions of the values. Those of COUNTED are put into templates.


@pass_context
def stepped(context: Rendering, steps: int) -> bool:
    """Count a loop's or macro's parts."""
    work = context.work
    work.left -= steps
    if work.left < 0:
        work.take(0)
    return True


@pass_context
def key(context: Rendering, value: Any) -> Any:
    """What is looked up: its hash is computed."""
    context.work.read(value)
    return value


@pass_context
def cut(context: Rendering, value: Any) -> Any:
    """A slice."""
    context.work.take(len(value))
    return value


@pass_context
def written(context: Rendering, value: Any) -> str:
    """The text of a value."""
    context.work.read(value)
    return value if type(value) is str else str(value)


@pass_context
def joined(context: Rendering, *values: Any) -> str:
    """The operator ~."""
    texts = [value if type(value) is str else written(context, value) for value in values]
    context.work.take(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def added(context: Rendering, first: Any, *others: Any) -> Any:
    """The operator +, of all values that it stands between."""
    if type(first) is str:
        steps = len(first)
        for other in others:
            if type(other) is not str:
                break
            steps += len(other)
        else:
            context.work.take(steps)
            return "".join((first, *others))
    for other in others:
        if type(first) not in PLAIN and isinstance(other, Sequence):
            context.work.take(ITEM * (len(first) + len(other)))
        first = first + other
    return first


@pass_context
def added_text(context: Rendering, *values: Any) -> str:
    """As `added`, and written."""
    text = added(context, *values)
    return text if type(text) is str else written(context, text)


@pass_context
def contained(context: Rendering, value: Any, parts: Any) -> bool:
    """The operator `in`."""
    context.work.read(value)
    if type(parts) is not dict:
        parts = listed(parts)
        context.work.read(parts)
    return value in parts


def comparison(compare: Callable[[Any, Any], Any]) -> Any:
    """An operator such as ==."""

    @pass_context
    def call(context: Rendering, left: Any, right: Any) -> Any:
        context.work.read(left)
        context.work.read(right)
        return compare(left, right)

    return call


COMPARISONS = {
    name: comparison(compare)
    for compare, names in {
        eq: "== eq equalto", ne: "!= ne", lt: "< lt lessthan", le: "<= le", gt: "> gt greaterthan", ge: ">= ge",
    }.items()
    for name in names.split()
} | {"in": contained}  # fmt: skip
COUNTED = {"#": stepped, "[]": key, "[:]": cut, "{}": written, "~": joined, "+": added, "{+}": added_text}
COUNTED |= {f"?{name}": compare for name, compare in COMPARISONS.items()}


def times(work: Work, left: Any, right: Any) -> Any:
    """The operator *."""
    if isinstance(right, Sequence):
        left, right = right, left
    if not isinstance(left, Sequence):
        return number(number(left) * number(right))
    work.take((1 if isinstance(left, str) else ITEM) * len(left) * max(int(number(right)), 0))
    return left * right


def power(work: Work, left: Any, right: Any) -> Any:
    """The operator **."""
    if isinstance(number(left), int) and isinstance(number(right), int):
        number(1 << min(left.bit_length() * max(right, 0), MOST_BITS))
    return left**right


def minus(work: Work, left: Any, right: Any) -> Any:
    """The operator -, of numbers alone: the order of a set changes from run to run."""
    return number(left) - number(right)


def modulo(work: Work, left: Any, right: Any) -> Any:
    """The operator %; of a text it is a format."""
    if not isinstance(left, str):
        return number(left) % number(right)
    if "*" in left or WIDER.search(left):
        raise OverflowError(f"the width in a format is more than {MOST_WIDTH}, or not in it")
    before = work.left
    work.read(right)
    work.take(left.count("%") * (before - work.left + MOST_WIDTH) + len(left))
    return left % right


OPERATORS = {"*": times, "**": power, "-": minus, "%": modulo}


class Formats(SandboxedFormatter):
    """The method `format`."""

    def __init__(self, context: Rendering) -> None:
        super().__init__(context.environment)
        self._work = context.work

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """What !r and !s make of a value."""
        self._work.read(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """The text of a value."""
        if WIDER.search(format_spec):
            raise OverflowError(f"the width in a format is more than {MOST_WIDTH}")
        self._work.read(value)
        return super().format_field(value, format_spec)


@pass_context
def as_format(context: Rendering, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The filter `format`."""
    return modulo(context.work, written(context, value), kwargs or args)


@pass_context
def as_json(
    context: Rendering, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """The filter `tojson`, with the arguments that templates pass."""
    value, width = listed(value), width_of(indent, *(separators or ()))
    if width or id(value) not in context.given:
        context.work.read(value, width)
    text = _encoder(ensure_ascii, indent, separators and tuple(separators), sort_keys).encode(value)
    context.work.take(len(text))
    return text


@lru_cache
def _encoder(ensure_ascii: bool, indent: Any, separators: Any, sort_keys: bool) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# The work of filters, tests and methods, besides reading their arguments: by the value that they are of, and arguments.

Cost = Callable[..., None]


def _nothing(work: Work, value: Any, *args: Any, **kwargs: Any) -> None: ...


def _read(work: Work, value: Any, *args: Any, **kwargs: Any) -> None:
    work.read(value)


def _list(work: Work, value: Any, *args: Any, **kwargs: Any) -> None:
    work.take((OBJECT if isinstance(value, str) else ITEM) * len(value or ()))


def _fill(work: Work, value: Any, *args: Any, **kwargs: Any) -> None:
    work.take(ITEM * (len(value or ()) + width_of(*args, *kwargs.values())))


def _indent(work: Work, value: Any, *args: Any, **kwargs: Any) -> None:
    work.read(value)
    work.take(len(str(value)) * width_of(*args, *kwargs.values()))


def _number(work: Work, value: Any, *args: Any, **kwargs: Any) -> None:
    """Of a text, Jinja's % would be a format."""
    number(value)


def _round(work: Work, value: Any, *args: Any, **kwargs: Any) -> None:
    number(value)
    width_of(*args, *kwargs.values())


def _sum(work: Work, value: Any, attribute: Any = None, start: Any = 0) -> None:
    work.read(value)
    number(start)


def _join(work: Work, value: Any, between: Any = "", attribute: Any = None) -> None:
    work.read(value)
    work.take(len(value) * len(between))


def _join_by(work: Work, between: str, value: Any) -> None:
    _join(work, value, between)


def _replace(work: Work, value: Any, old: Any, new: Any, count: Any = None) -> None:
    work.read(value)
    work.take(str(value).count(str(old)) * len(str(new)))


def _split(work: Work, value: str, by: Any = None, *args: Any, **kwargs: Any) -> None:
    work.take(len(value) + OBJECT * (value.count(by) if isinstance(by, str) and by else len(value) // 2))


def _costs(names: dict[Cost, str]) -> dict[str, Cost]:
    return {name: cost for cost, some in names.items() for name in some.split()}


# All that there are.
FILTERS = _costs({
    _nothing: "count d default first items last length",
    _list: "list map reject rejectattr reverse select selectattr",
    _read: "capitalize dictsort e escape float groupby int lower max min safe sort string title trim truncate unique "
           "upper wordcount",
    _number: "abs", _round: "round", _fill: "batch slice", _indent: "indent", _sum: "sum", _join: "join",
    _replace: "replace",
})  # fmt: skip
TESTS = _costs({
    _nothing: "boolean callable defined escaped false float integer iterable mapping none number sameas sequence "
              "string true undefined",
    _read: "lower upper", _number: "divisibleby even odd",
})  # fmt: skip
METHODS: dict[type, dict[str, Cost]] = {
    str: _costs({
        _read: "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit "
               "isidentifier islower isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix "
               "removesuffix rfind rindex rpartition rstrip startswith strip swapcase title upper",
        _split: "rsplit split splitlines", _join_by: "join", _replace: "replace",
    }),
    Markup: _costs({
        _read: "endswith lower lstrip rstrip startswith strip title upper", _split: "split", _join_by: "join",
        _replace: "replace",
    }),
    dict: _costs({_nothing: "get items keys values", _list: "copy"}),
    list: _costs({_nothing: "append", _read: "count index", _list: "copy pop"}),
    tuple: _costs({_read: "count index"}),
}  # fmt: skip
CHANGE = ("append", "pop")  # their list
MADE: dict[type, int] = {str: 1, Markup: 1, list: ITEM, dict: OBJECT}  # steps of a part
PASSED: dict[str, Callable[[Any], Any]] = {
    "context": lambda context: context, "environment": attrgetter("environment"),
    "eval_context": attrgetter("eval_ctx"),
}  # fmt: skip


def pay(work: Work, cost: Cost, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Count the work of a call."""
    for one in chain(args, kwargs.values()) if args or kwargs else ():
        work.read(one)
    cost(work, value, *args, **kwargs)


def made(work: Work, value: Any) -> Any:
    """Count what a call has made."""
    if steps := MADE.get(type(value)):
        work.take(steps * len(value))
    return number(value) if type(value) is int else value


def counted(function: Any, cost: Cost) -> Any:
    """A filter or test of Jinja's that counts its work."""
    if cost is _nothing:
        return function
    passed = PASSED.get(getattr(getattr(function, "jinja_pass_arg", None), "name", ""))

    @pass_context
    def call(context: Rendering, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = listed(value)
        if args:
            args = tuple(map(listed, args))
        pay(context.work, cost, value, args, kwargs)
        first = (passed(context), value) if passed else (value,)
        return made(context.work, function(*first, *args, **kwargs))

    return call
