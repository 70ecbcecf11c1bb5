"""JSON schemas of tools' parameters, resolved once for grammars and parsers."""

import json
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from edgespec.errors import UsageError, shown
from edgespec.loop.lenient import NOWHERE, followed, is_reference

TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), type(None): ("null",),
    dict: ("object",), list: ("array",),
}  # fmt: skip
KNOWN = frozenset(name for names in TYPES.values() for name in names)
SPACES = " \t\n\r"
MOST_LISTED = 2**17  # characters of all values that the schemas of a tool list


class Unfinished(ValueError):
    """The text ends within a string."""


class Schema:
    """One sub-schema; all references to it give the same object."""

    def __init__(self) -> None:
        self.types: frozenset[str] | None = frozenset()  # None: any type
        self.values: list[Any] = []
        self.by_text: dict[str, Any] = {}  # the values, by what markup writes
        self.properties: dict[str, Schema] = {}
        self.required: frozenset[str] = frozenset()
        self.items: Schema | None = None
        self.node: dict[str, Any] = {}  # its JSON
        self.root: dict[str, Any] = {}  # which references of `node` point into
        self.strict = False  # keywords that cannot be enforced are refused

    @classmethod
    def anything(cls) -> "Schema":
        found = cls()
        found.types = None
        return found

    def json(self, count: Callable[[], None]) -> dict[str, Any]:
        """Its JSON; of the root's definitions only those that it refers to; calls `count` before it copies a part."""
        if self.node is self.root:
            return self.node
        definitions, names = dict[str, Any](), dict[int, str]()

        def copied(node: Any) -> Any:
            count()
            if isinstance(node, list):
                return [copied(one) for one in node]
            if not isinstance(node, dict):
                return node
            copy = {key: copied(value) for key, value in node.items()}
            if is_reference(node):
                with suppress(*NOWHERE):
                    target = followed(self.root, node["$ref"])
                    if id(target) not in names:
                        names[id(target)] = name = f"d{len(names)}"
                        definitions[name] = copied(_without_id(target) if target is self.root else target)
                    copy["$ref"] = f"#/$defs/{names[id(target)]}"
            return copy

        found: dict[str, Any] = copied(self.node)
        return {**found, "$defs": definitions} if definitions else found

    @property
    def is_text(self) -> bool:
        """True if any string is a value: markup writes it without quotation marks."""
        return not self.values and (self.types is None or "string" in self.types)

    def value_of(self, text: str) -> Any:
        """The value that markup writes as `text`: a string if it may be one and no other listed type fits."""
        if text in self.by_text:
            return self.by_text[text]
        if self.types is None or self.types == {"string"}:
            return text
        try:
            found = json_or_literal(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return text
        fits = not isinstance(found, str) and not self.types.isdisjoint(TYPES[type(found)])
        return found if fits or "string" not in self.types else text


def strict_json(text: str) -> Any:
    """Raises ValueError or RecursionError; also for what Python reads, but no other reader of JSON need."""
    found, end = json_at(text, 0)
    if text[end:].strip(SPACES):
        raise ValueError("there is more behind the JSON")
    return found


def json_at(text: str, at: int) -> tuple[Any, int]:
    """What begins here, and where it ends; raises as `strict_json`, and Unfinished within a string."""
    at = len(text) - len(text[at:].lstrip(SPACES))
    try:
        found, end = json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Unfinished(str(error)) if error.msg.startswith("Unterminated string") else error from None
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no 1e999, no half a surrogate pair
    return found, end


def json_or_literal(text: str) -> Any:
    """A value in JSON, or as Python writes it: so the templates of Qwen3-Coder and Seed-OSS show None, True and lists.

    Raises:
        ValueError, TypeError, SyntaxError, MemoryError, RecursionError: it is neither.
    """
    try:
        return strict_json(text)
    except ValueError:
        if text not in ("None", "True", "False") and not text.startswith(("[", "{")):
            raise
        return strict_json(json.dumps(literal_eval(text)))


def levels(value: Any) -> Iterator[list[Any]]:
    """A value, the values in it, those in these, and so on."""
    level = [value]
    while level:
        yield level
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def resolve(root: Any, name: str = "", *, strict: bool = False) -> Schema:
    """Resolve the parameters of the tool `name`.

    Raises:
        UsageError: they are no JSON schema of an object, or list too many values.
    """
    if not isinstance(root, dict) or root.get("type", "object") != "object":
        raise UsageError(f"tools: the parameters of {name!r} are no object's schema")
    root = {"type": "object", **root}
    try:
        return _Resolver(root, strict).made(root)
    except (*NOWHERE, RecursionError) as error:
        raise UsageError(f"tools: the parameters are no JSON schema: {error!r}") from error


class _Resolver:
    def __init__(self, root: dict[str, Any], strict: bool) -> None:
        self._root, self._strict = root, strict
        self._known: dict[int, Schema] = {}
        self._targets: dict[int, Any] = {}  # of references
        self._room = MOST_LISTED

    def schema_of(self, node: Any) -> Schema:
        return self.made(self._target(node))

    def made(self, node: Any) -> Schema:
        """`node` as it stands, without following references; what is no object, as true or null, allows anything."""
        if id(node) not in self._known:
            self._known[id(node)] = found = Schema()
            self._fill(found, node if isinstance(node, dict) else {})
        return self._known[id(node)]

    def _target(self, node: Any) -> Any:
        """Follow references; one that leads nowhere allows anything. Raises UsageError where all must be enforced."""
        passed = set[int]()
        while is_reference(node) and id(node) not in self._targets:
            reference = node["$ref"]
            try:
                if id(node) in passed:
                    raise ValueError("it refers to itself")
                passed.add(id(node))
                node = followed(self._root, reference)
            except NOWHERE as error:
                if self._strict:
                    raise UsageError(f"tools: the reference {shown(reference)} leads nowhere") from error
                return {}
        node = self._targets.get(id(node), node)
        self._targets |= dict.fromkeys(passed, node)
        return node

    def _fill(self, schema: Schema, node: dict[str, Any]) -> None:
        schema.node, schema.root, schema.strict = node, self._root, self._strict
        for value in self._values(node):
            text = spelled(value)
            self._room -= len(text) + 1
            if self._room < 0:
                raise UsageError(f"tools: the values that a schema lists have more than {MOST_LISTED} characters")
            schema.values.append(value)
            schema.by_text.setdefault(text, value)
        schema.properties = {key: self.schema_of(value) for key, value in node.get("properties", {}).items()}
        schema.required = frozenset(key for key in node.get("required", ()) if key in schema.properties)
        schema.items = self.schema_of(node["items"]) if "items" in node else None
        schema.types = self._types(schema, node)

    def _values(self, node: dict[str, Any]) -> Iterable[Any]:
        if "const" in node:
            return [node["const"]]
        if isinstance(listed := node.get("enum"), list):
            return listed
        branches = [self.schema_of(branch) for branch in node.get("anyOf") or node.get("oneOf") or ()]
        if all(branch.values or branch.types == frozenset(["null"]) for branch in branches):
            return (value for branch in branches for value in branch.values or [None])
        return []

    def _types(self, schema: Schema, node: dict[str, Any]) -> frozenset[str] | None:
        if "type" in node:
            return KNOWN.intersection([node["type"]] if isinstance(node["type"], str) else node["type"])
        if schema.values:
            return frozenset(name for value in schema.values for name in TYPES[type(value)])
        if branches := node.get("anyOf") or node.get("oneOf"):
            found = [self.schema_of(branch).types for branch in branches]
            return None if None in found else frozenset[str]().union(*filter(None, found))
        if known := [types for part in node.get("allOf", ()) if (types := self.schema_of(part).types) is not None]:
            return frozenset.intersection(*known)
        if schema.properties or schema.items:
            return frozenset(["object" if schema.properties else "array"])
        return None


def _without_id(root: dict[str, Any]) -> dict[str, Any]:
    """Within another schema, an id would make references be looked up in `root` itself."""
    return {key: value for key, value in root.items() if key not in ("$id", "id")}
