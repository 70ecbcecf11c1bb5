"""How much Python one step runs, on the reference engine with made-up models.

    python tests/count_calls.py

Functions are those of the package and of the engine. The step is the median one of a text: plain, with the planner auto
without a draft, and with drafts. Figures of two versions of Python differ.
"""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import edgespec.backends
from reference import backend as reference

import edgespec
from edgespec.measure.tables import table
from edgespec.model import Model
from edgespec.planners.auto import new_auto_state
from edgespec.planners.choice import make_planner

OURS = tuple(str(Path(str(module.__file__)).resolve().parent) for module in (edgespec, edgespec.backends, reference))
VOCABULARY, BUDGET, TOKENS = 48, 8, 120
WARM = 4  # steps that are left out at both ends of a text

Call = tuple[int, CodeType]  # of a thread


@dataclass(frozen=True, slots=True, order=True)
class Counts:
    """
    Attributes:
        functions: distinct ones.
        files: in which these are.
        changes: how often the next call of a thread is in another file.
    """

    calls: int
    functions: int
    files: int
    changes: int


def counts_of(step: list[Call]) -> Counts:
    functions = {(one.co_filename, one.co_firstlineno) for _, one in step}
    by_thread = [[one.co_filename for owner, one in step if owner == thread] for thread in {owner for owner, _ in step}]
    changes = sum(len(list(groupby(files))) - 1 for files in by_thread)
    return Counts(len(step), len(functions), len({file for file, _ in functions}), changes)


@contextmanager
def watched(target: Any) -> Iterator[list[list[Call]]]:
    """Calls in all threads that begin within the context, from one pass of the target to the next."""
    found: list[list[Call]] = [[]]
    forward = inspect.unwrap(type(target).forward).__code__

    def hook(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            if code is forward and frame.f_locals["self"] is target:
                found.append([])
            found[-1].append((threading.get_ident(), code))

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def count(planner: str, *, drafts: bool) -> Counts:
    """The median step of a text; the draft is the target with a little noise."""
    made = reference.random_model(1, vocab_size=VOCABULARY)
    models = [made, reference.perturbed(made, 0.05, 1)][: 1 + drafts]
    target, *others = (reference.ReferenceBackend(one, context_length=4 * TOKENS) for one in models)
    target.vocab.eog_ids = frozenset()
    pace = new_auto_state(streams=False) if planner == "auto" else None
    with (
        watched(target) as steps,
        Model(target, make_planner(planner, [target, *others], state=pace), budget=BUDGET, pace=pace) as model,
    ):
        model.generate("abc", max_tokens=TOKENS)
    found = sorted(map(counts_of, steps[WARM:-WARM]))
    return found[len(found) // 2]


def main() -> None:
    """Print the table."""
    steps = {"plain": ("none", False), "auto": ("auto", False), f"specexec, budget {BUDGET}": ("specexec", True)}
    rows = [[name, *map(str, astuple(count(planner, drafts=drafts)))] for name, (planner, drafts) in steps.items()]
    print(table("one step", ("", "calls", "functions", "files", "changes of file"), rows))


if __name__ == "__main__":
    main()
