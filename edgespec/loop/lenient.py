"""JSON schemas without keywords that cannot be enforced: patterns with look-around, references that lead nowhere."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
DATA = ("enum", "const", "default", "examples")  # no schemas
NOWHERE = (TypeError, ValueError, AttributeError, LookupError)  # raised by references that lead nowhere


def without(text: str, kind: str, usable: Callable[[str], bool], *, multiples: bool) -> str:
    """A grammar without the keywords of its lenient JSON schemas that cannot be enforced.

    Args:
        text: of the grammar.
        kind: json_schema or lark.
        usable: says whether the engine can read a pattern.
        multiples: `multipleOf` can be enforced.
    """

    def weaker(schema: str) -> str:
        try:
            root = json.loads(schema)
            guidance = root.get("x-guidance") if isinstance(root, dict) else None
            is_lenient = isinstance(guidance, dict) and guidance.get("lenient") is True
            return json.dumps(_Weaker(root, usable, multiples).of(root)) if is_lenient else schema
        except (ValueError, RecursionError):  # the first line of a longer one, or too deep for a schema
            return schema

    def of_line(line: str) -> str:
        before, mark, schema = line.partition("%json ")
        return before + mark + weaker(schema) if mark else line

    return "\n".join(map(of_line, text.split("\n"))) if kind == "lark" else weaker(text)


class _Weaker:
    def __init__(self, root: Any, usable: Callable[[str], bool], multiples: bool) -> None:
        self._root, self._text, self._usable, self._multiples = root, json.dumps(root), usable, multiples

    def of(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.of(one) for one in node]
        if not isinstance(node, dict):
            return node
        found = {key: self._member(key, value) for key, value in node.items() if self._counts(key, value)}
        names = found.get("patternProperties")
        if isinstance(names, dict) and len(names) < len(node["patternProperties"]):
            found.pop("additionalProperties", None)  # it would forbid what those allow
        return found

    def _member(self, key: str, value: Any) -> Any:
        if key in DATA:
            return value
        if key in NAMED and isinstance(value, dict):
            usable = self._usable if key == "patternProperties" else lambda name: True
            return {name: self.of(one) for name, one in value.items() if usable(name)}
        return self.of(value)

    def _counts(self, key: str, value: Any) -> bool:
        if key == "pattern" and isinstance(value, str):
            return self._usable(value)
        if key == "$ref" and isinstance(value, str):
            return self._leads_somewhere(value)
        return key != "multipleOf" or self._multiples

    def _leads_somewhere(self, reference: str) -> bool:
        file, _, place = reference.partition("#")
        if file:
            return '"$id": ' in self._text  # perhaps to the schema with this id
        if place and not place.startswith("/"):
            return f'"$anchor": {json.dumps(place)}' in self._text
        try:
            followed(self._root, reference)
        except NOWHERE:
            return False
        return True


def followed(root: Any, reference: str) -> Any:
    """The schema to which a reference within `root` leads; raises `NOWHERE`."""
    for key in unquote(reference).split("/")[1:]:
        root = root[int(key)] if isinstance(root, list) else root[key.replace("~1", "/").replace("~0", "~")]
    return root


def is_reference(node: Any) -> bool:
    """True if the schema refers to a place in its own root."""
    reference = node.get("$ref") if isinstance(node, dict) else None
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
