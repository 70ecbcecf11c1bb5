"""Chat templates: programs in downloaded files, so they run in Jinja's sandbox, and their work is limited."""

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from edgespec.errors import ModelError, UsageError
from edgespec.loop.template_work import (
    CHANGE,
    COMPARISONS,
    COUNTED,
    FILTERS,
    ITEM,
    LOOKUP,
    METHODS,
    OBJECT,
    OPERATORS,
    PART,
    TESTS,
    Formats,
    Rendering,
    Work,
    as_format,
    as_json,
    counted,
    listed,
    made,
    pay,
)

MOST_CHARACTERS = 2**17  # of a template
MOST_SAID = 500  # characters of an error
BROKEN = "the model's chat template does not work"
NAMES_OF_DICT = frozenset(dir(dict))
OF_LOOPS = frozenset(["depth0", *(name for name in dir(LoopContext) if not name.startswith("_"))])


class Generation(Extension):
    """The tag `generation`, by which templates mark text to train on: its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """The content, as Jinja's parser reads it."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(message: Any) -> None:
    """The function `raise_exception`."""
    raise UsageError(f"the model's chat template refuses these messages: {in_a_line(message)}")


def now(form: str) -> str:
    """The function `strftime_now`."""
    return datetime.now().strftime(form)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja without what no chat template needs, and with counted work."""

    intercepted_binops = frozenset(OPERATORS)
    context_class = Rendering

    def __init__(self) -> None:
        # Nothing is computed while a template is compiled: its work would not be counted.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[LoopControlExtension, Generation]
        )
        self.globals = {name: self.globals[name] for name in ("dict", "namespace", "range")}
        self.globals |= {"raise_exception": refuse, "strftime_now": now}
        self.filters = {name: counted(self.filters[name], cost) for name, cost in FILTERS.items()}
        self.filters |= {"format": as_format, "tojson": as_json} | COUNTED
        self.tests = {name: counted(self.tests[name], cost) for name, cost in TESTS.items()} | COMPARISONS

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of values of Python's types only what `METHODS` has."""
        kind = type(obj)
        if kind in METHODS or kind.__module__ == "builtins":
            return attr in METHODS.get(kind, ())
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """`call` knows the method `format`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's, but without exceptions where templates read messages."""
        kind = type(obj)
        try:
            if kind is dict and attribute not in NAMES_OF_DICT:
                return obj[attribute]
            if (
                attribute in METHODS.get(kind, ())
                or (kind is LoopContext and attribute in OF_LOOPS)
                or (kind is Namespace and attribute[0] != "_")
            ):
                return getattr(obj, attribute)
        except (KeyError, AttributeError):
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Of `OPERATORS`."""
        return OPERATORS[operator](cast(Rendering, context).work, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of a macro, a function or a method."""
        kwargs.pop("_loop_vars", None)  # for functions that take the context
        kwargs.pop("_block_vars", None)
        rendering = cast(Rendering, context)
        if type(obj) in (Macro, LoopContext):
            rendering.work.take(OBJECT + ITEM * (len(args) + len(kwargs)))
            return context.call(obj, *args, **kwargs)
        owner = getattr(obj, "__self__", None)
        methods = METHODS.get(type(owner)) or next((METHODS[kind] for kind in METHODS if isinstance(owner, kind)), None)
        if args:
            args = tuple(map(listed, args))
        if methods is None:
            for one in args if obj is Namespace else (*args, *kwargs.values()):
                rendering.work.read(one)
            return super().call(context, obj, *args, **kwargs)
        name = obj.__name__
        if name not in methods:
            raise SecurityError(f"the method {name} is not for chat templates")
        if name in CHANGE and id(owner) in rendering.lists:
            raise SecurityError(f"the method {name} changes what the template was given")
        pay(rendering.work, methods[name], owner, args, kwargs)
        if name == "format":
            return Formats(rendering).vformat(cast(str, owner), args, kwargs)
        return made(rendering.work, obj(*args, **kwargs))


# Steps of nodes that take more than a part does.
STEPS: dict[type, int] = dict.fromkeys((nodes.Call, nodes.Filter, nodes.Getattr, nodes.Getitem, nodes.Test), LOOKUP)
STEPS |= dict.fromkeys((nodes.List, nodes.Tuple), OBJECT)
STEPS |= dict.fromkeys((nodes.Dict, nodes.For, nodes.Macro, nodes.CallBlock), 8 * OBJECT)
LONG = 512  # steps of a branch that counts them when it is taken
REFUSED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.ScopedEvalContextModifier)


class Counting(NodeTransformer):
    """Adds the counting of its work to a template.

    Attributes:
        steps: of the parts since the last loop, macro or long branch began.
    """

    def __init__(self) -> None:
        self.steps = 0

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            TemplateAssertionError: it is nothing for chat templates.
        """
        if isinstance(node, REFUSED):
            raise TemplateAssertionError(f"{type(node).__name__.lower()} is not for chat templates", node.lineno)
        text = getattr(node, "data", getattr(node, "value", None))
        self.steps += len(text) if isinstance(text, str) else STEPS.get(type(node), PART)
        if not isinstance(node, nodes.If | nodes.For | nodes.Macro | nodes.CallBlock):
            self.generic_visit(node)
            change = CHANGES.get(type(node))
            return change(node) if change else node
        blocks = {name: getattr(node, name) for name in ("body", "else_") if hasattr(node, name)}
        for name in blocks:
            setattr(node, name, [])
        before = self.steps
        self.generic_visit(node)
        own = self.steps - before
        for name, block in blocks.items():
            repeated = name == "body" and not isinstance(node, nodes.If)
            setattr(node, name, self._counted(block, node.lineno, own if repeated else None))
        if isinstance(node, nodes.For) and node.test:
            node.test = nodes.And(_count(own, node.lineno), node.test, lineno=node.lineno)
        return node

    def _counted(self, block: list[nodes.Node], lineno: int, more: int | None) -> list[nodes.Node]:
        """
        Args:
            block: statements.
            lineno: of what they are in.
            more: steps of each time that a block begins which is repeated; None: it is not.

        Returns:
            The block, which begins with the count of its steps if it is repeated or long.
        """
        before, self.steps = self.steps, more or 0
        block = list(map(self.visit, block))
        if more is None and self.steps < LONG:
            self.steps += before
            return block
        count, self.steps = _count(self.steps, lineno), before
        return [nodes.ExprStmt(count, lineno=lineno), *block]


def _count(steps: int, lineno: int) -> nodes.Filter:
    return applied("#", nodes.Const(steps, lineno=lineno))


def applied(name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Filter:
    """A function of `COUNTED`."""
    return nodes.Filter(first, name, list(others), [], None, None, lineno=first.lineno)


def is_literal(node: nodes.Node) -> bool:
    """The template has this value, which has no parts with parts."""
    parts = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return all(isinstance(part, nodes.Const | nodes.TemplateData) for part in parts)


def _sum(node: nodes.Add) -> nodes.Node:
    if isinstance(node.left, nodes.Filter) and node.left.name == "+":
        node.left.args.append(node.right)
        return node.left
    return applied("+", node.left, node.right)


def _written(node: nodes.Output) -> nodes.Node:
    for i, one in enumerate(node.nodes):
        if isinstance(one, nodes.Filter) and one.name == "+":
            one.name = "{+}"
        elif not is_literal(one) and not (isinstance(one, nodes.Filter) and one.name == "~"):
            node.nodes[i] = applied("{}", one)
    return node


def _looked_up(node: nodes.Getitem) -> nodes.Node:
    if isinstance(node.arg, nodes.Slice):
        return applied("[:]", node)
    node.arg = node.arg if is_literal(node.arg) else applied("[]", node.arg)
    return node


def _pair(node: nodes.Pair) -> nodes.Node:
    node.key = node.key if is_literal(node.key) else applied("[]", node.key)
    return node


def _compared(node: nodes.Compare) -> nodes.Node:
    left, found = node.expr, None
    for right in node.ops:
        one: nodes.Expr = nodes.Compare(left, [right], lineno=node.lineno)
        if not is_literal(right.expr) and not (is_literal(left) and not right.op.endswith("in")):  # else one is small
            name = {"lteq": "le", "gteq": "ge", "notin": "in"}.get(right.op, right.op)
            one = applied(f"?{name}", left, right.expr)
            one = nodes.Not(one, lineno=node.lineno) if right.op == "notin" else one
        left, found = right.expr, nodes.And(found, one, lineno=node.lineno) if found else one
    return cast(nodes.Node, found)


CHANGES: dict[type[nodes.Node], Any] = {
    nodes.Add: _sum, nodes.Compare: _compared, nodes.Concat: lambda node: applied("~", *node.nodes),
    nodes.Getitem: _looked_up, nodes.Output: _written, nodes.Pair: _pair,
}  # fmt: skip


@lru_cache(8)
def _compiled(template: str) -> Template | str:
    """A program, or why there is none."""
    if len(template) > MOST_CHARACTERS:
        return f"it has {len(template):,} characters, but may have {MOST_CHARACTERS:,} at most"
    environment = Sandbox()
    try:
        return environment.from_string(Counting().visit(environment.parse(template)))
    except Exception as error:  # also of Python, which compiles what Jinja makes of it
        return in_a_line(error)


def check_template(template: str, path: str) -> str:
    """Return the template that a file has. Raises UsageError: it is none."""
    if isinstance(program := _compiled(template), str):
        raise UsageError(f"{path}: is no chat template: {program}")
    return template


def rendered(template: str, variables: Mapping[str, Any], work: Work) -> str:
    """
    Raises:
        ModelError: the template is broken.
        UsageError: it refuses the messages, or they take too much work.
    """
    program = _compiled(template)
    if isinstance(program, str):
        raise ModelError(f"{BROKEN}: {program}")
    context = cast(Rendering, program.new_context(dict(variables)))
    context.work = work
    try:
        return "".join(program.root_render_func(context))
    except UsageError:
        raise
    except TemplateError as error:
        raise ModelError(f"{BROKEN}: {in_a_line(error)}") from error
    except Exception as error:  # the template's own, on odd messages
        raise UsageError(f"the model's chat template cannot show these messages: {in_a_line(error)}") from error


def in_a_line(said: Any) -> str:
    """What a template says, which may be anything."""
    return " ".join(str(said)[:MOST_SAID].split()) or type(said).__name__
