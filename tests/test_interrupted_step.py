"""A step that an exception ends, wherever it falls: all other requests go on with the tokens of plain decoding."""

import sys
from linecache import getline
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Reader, Recording, backend, planners, run

import edgespec
from edgespec.scheduler.requests import Ended, Handle
from edgespec.scheduler.scheduler import Scheduler

SOURCES = Path(edgespec.__file__).parent
INTERRUPTED = [str(SOURCES / room) for room in ("scheduler", "loop", "planners")]
STEPS = (Scheduler.step, Scheduler.end_cancelled)
KINDS = ["none", "sssd", "specexec"]


class Interrupts:
    """Raises KeyboardInterrupt at a line of a step, counted over all steps; `told`: within the report of an event."""

    def __init__(self, at):
        self.left, self.told = at, False
        self._inside = 0

    def __call__(self, frame, event, argument):
        if event == "call" and frame.f_code in [step.__code__ for step in STEPS]:
            self._inside += 1
        if not self._inside or not frame.f_code.co_filename.startswith(tuple(INTERRUPTED)):
            return self if self._inside else None
        if event == "return" and frame.f_code in [step.__code__ for step in STEPS]:
            self._inside -= 1
        # CPython looks for signals after it has released a lock, and the tracer before: that line is left out.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                self.told = frame.f_code is Handle.tell.__code__
                raise KeyboardInterrupt
        return self


def write(name, at, shape="two classes"):
    """Three requests in two sessions, then another; KeyboardInterrupt comes at one line, and again after as many."""
    target = backend(shape, sessions=2, kind=Recording)
    scheduler = Scheduler(target, planners(name, 2), budget=8)
    readers = [Reader(scheduler, prompt, 0.7, prompt, 12) for prompt in (3, 1, 2)]
    interrupts, fell, told = Interrupts(at), 0, 0
    for _ in range(3000):
        sys.settrace(interrupts)
        try:
            scheduler.step()
        except KeyboardInterrupt:
            fell += 1
            told += interrupts.told
            interrupts = Interrupts(at if fell < 2 else 0)
        finally:
            sys.settrace(None)
        if not scheduler.waiting and not scheduler.active:
            break
    run(scheduler)
    readers.append(Reader(scheduler, 1, 0.7, 1, 12))
    run(scheduler)
    scheduler.close()
    assert target.open_sessions == 0
    return readers, fell, told


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6000))
def test_an_interrupt_at_any_line_changes_no_tokens(name, at):
    readers, _, told = write(name, at)
    assert sum(reader.ended.error is not None for reader in readers) <= told
    for reader in readers:
        ends = [event for event in reader.events if isinstance(event, Ended)]
        reader.events = [event for event in reader.events if event not in ends] + ends[:1]
        reader.check()


BOUNDARIES = [
    (ReferenceSession, "commit"), (ReferenceSession, "rewind"), (ReferenceSession, "fork"), (SessionPool, "assign"),
    (Constraint, "accept"),
    (Handle, "write"), (Handle, "begin"), (Handle, "end"), (SessionPool, "release"), (SessionPool, "empty"),
]  # fmt: skip
