"""Draws small mistakes at random, puts each into a copy of the sources, and runs the tests that reach its line.

    python tests/mutate.py --learn [TEST...]      once: which test reaches which line; of all tests, an hour
    python tests/mutate.py 60 edgespec/loop/verify.py edgespec/planners --seed 1

A mistake is chosen by its function, its line's text and what is changed. So one seed gives two commits the same ones,
as far as both have these lines.

    caught        the first test that failed
    SURVIVED      every test that reaches the line passed: one is missing, or too weak
    NO END        within --limit seconds: of a loop that never ends, or of many tests
"""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import pytest

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "mutate"
LINES, SECONDS = KEPT / "lines", KEPT / "seconds.json"
OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "//", ast.BitOr: "&", ast.BitAnd: "|", ast.And: "or", ast.Or: "and",
}  # fmt: skip
NOT_LOOKED_INTO = (ast.JoinedStr, ast.Raise, ast.Assert, ast.arguments)  # messages, types and defaults


@dataclass(frozen=True)
class Mistake:
    path: Path  # below the root
    where: tuple[int, int, int, int]  # line, column, last line, its column
    old: str
    new: str
    about: str  # function, text of the line, and which one of equal ones

    def key(self, seed: int) -> str:
        return hashlib.sha256(f"{seed} {self.about} {self.old} {self.new}".encode()).hexdigest()

    def put_into(self, root: Path) -> str:
        """The whole text before."""
        path, (line, column, last, end) = root / self.path, self.where
        whole = path.read_text("utf-8")
        lines = whole.encode().splitlines(keepends=True)
        before, after = lines[line - 1][:column], lines[last - 1][end:]
        path.write_bytes(b"".join([*lines[: line - 1], before, self.new.encode(), after, *lines[last:]]))
        return whole


def changed(node: ast.AST) -> Iterator[str]:
    """What a node may become."""
    match node:
        case ast.Compare(left, [operator], [right]):
            yield f"({ast.unparse(left)} {OTHER[type(operator)]} {ast.unparse(right)})"
        case ast.BinOp(left, operator, right) if type(operator) in OTHER:
            yield f"(({ast.unparse(left)}) {OTHER[type(operator)]} ({ast.unparse(right)}))"
        case ast.BoolOp(operator, values):
            yield f"({f' {OTHER[type(operator)]} '.join(f'({ast.unparse(value)})' for value in values)})"
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value)):
            yield from (f"({value + 1})", f"({value - 1})")
        case ast.UnaryOp(ast.Not(), operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.Call(function, [first, second, *others], keywords) if not isinstance(first, ast.Starred):
            yield ast.unparse(ast.Call(function, [second, first, *others], keywords))
        case ast.AugAssign() | ast.Break() | ast.Continue() | ast.Expr(ast.Call()):
            yield "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "pass"


def mistakes(path: Path, reached: set[int]) -> Iterator[Mistake]:
    """All that a file may have in lines of functions that tests reach."""
    text, seen = (ROOT / path).read_text("utf-8"), Counter[str]()

    def visit(node: ast.AST, function: str) -> Iterator[Mistake]:
        if isinstance(node, NOT_LOOKED_INTO):
            return
        found = [(node, new) for new in changed(node)] if function else []
        if function and isinstance(node, ast.If | ast.While | ast.IfExp):
            found.append((node.test, f"(not ({ast.unparse(node.test)}))"))
        for part, new in found:
            line, *others = part.lineno, part.col_offset, part.end_lineno, part.end_col_offset  # type: ignore[attr-defined]
            about = f"{function} {text.splitlines()[line - 1].strip()}"
            seen[about + new] += 1
            if line in reached:
                yield Mistake(path, (line, *others), ast.unparse(part), new, f"{about} {seen[about + new]}")
        inner = f"{function}.{node.name}" if isinstance(node, ast.FunctionDef) else function
        for name, child in ast.iter_fields(node):
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                    yield from visit(one, inner)

    yield from visit(ast.parse(text), "")


@dataclass(eq=False)
class Learning:
    """A plugin of pytest: notes the lines that each test reaches."""

    coverage: object
    seconds: dict[str, float] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)  # type: ignore[attr-defined]
        began = perf_counter()
        found = yield
        self.seconds[item.nodeid] = perf_counter() - began
        return found


def learn(tests: list[str]) -> int:
    import coverage

    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    os.chdir(ROOT)
    found = coverage.Coverage(LINES, source=["edgespec", "backends"], config_file=False)
    found.start()
    plugin = Learning(found)
    status = pytest.main(["-q", "-p", "no:randomly", *tests], plugins=[plugin])
    found.stop()
    found.save()
    SECONDS.write_text(json.dumps(plugin.seconds))
    return int(status)


def copy_to(root: Path) -> None:
    """The sources, so that `root` alone in the import path finds all packages."""
    left_out = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, root, ignore=left_out)
    (root / "edgespec" / "backends").symlink_to(root / "backends", target_is_directory=True)


def verdict(root: Path, one: Mistake, tests: list[str], limit: float) -> str:
    """What the tests say of a mistake, after which the copy is whole again."""
    path, ids = root / one.path, root / "ids"
    ids.write_text("\n".join(tests), "utf-8")
    whole, compiled = one.put_into(root), Path(cache_from_source(str(path)))
    compiled.unlink(missing_ok=True)
    options = ["-xq", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly", f"@{ids}"]
    command = [sys.executable, "-m", "pytest", *options]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"NO END   of {len(tests)} tests"
    finally:
        path.write_text(whole, "utf-8")
        compiled.unlink(missing_ok=True)
    if not done.returncode:
        return f"SURVIVED {len(tests)} tests"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return f"caught   {failed[1] if failed else done.stderr[-200:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", nargs="*", metavar="TEST", help="files of tests, default all, and options of pytest")
    parser.add_argument("count", nargs="?", type=int, help="of mistakes")
    parser.add_argument("places", nargs="*", type=Path, help="files and folders of the sources")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a run")
    given = parser.parse_args()
    if given.learn is not None:
        return learn(given.learn)
    import coverage

    data, seconds = coverage.CoverageData(LINES), json.loads(SECONDS.read_text())
    data.read()
    reached, every = dict[Path, dict[int, list[str]]](), list[Mistake]()
    for place in given.places:
        for path in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]:
            name, found = path.relative_to(ROOT), data.contexts_by_lineno(str(path))
            reached[name] = {line: sorted({*tests} & seconds.keys(), key=seconds.get) for line, tests in found.items()}
            every += mistakes(name, {line for line, tests in reached[name].items() if tests})
    counts = Counter[str]()
    with TemporaryDirectory(prefix="edgespec-mutate-") as folder:
        copy_to(root := Path(folder).resolve() / "edgespec")
        for one in sorted(every, key=lambda one: one.key(given.seed))[: given.count]:
            found = verdict(root, one, reached[one.path][one.where[0]], given.limit)
            counts[found[:8].strip()] += 1
            print(f"{one.path}:{one.where[0]}: {one.old} -> {one.new}: {found}", flush=True)
    print(f"of {len(every)} mistakes:", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
