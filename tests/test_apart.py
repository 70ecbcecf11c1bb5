"""A model in a process of its own, as borrowed layers need it, is a backend like any other; here nobody lends."""

import pickle
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import contract
import pytest

from edgespec.errors import ModelError, UsageError
from edgespec.loop.backend import Backend
from edgespec.loop.engines import LoadOptions
from edgespec.machine.this_machine import this_machine

pytest.importorskip("llama_cpp")

CHECKS = [  # which call everything at least once
    contract.forks_are_independent,
    contract.top_is_a_full_softmax,
    contract.a_broken_work_changes_nothing,
    contract.closed_sessions_come_back,
    contract.a_saved_session_goes_on,
    contract.an_interrupted_pass_leaves_the_text,
]


@pytest.fixture(scope="module")
def apart(small_q4: Path) -> Iterator[contract.Reused]:
    """A process starts in a second, so the checks share one."""
    reused = contract.Reused(partial(load, small_q4))
    yield reused
    reused.close()


def load(model: Path, **options: int) -> Backend:
    from edgespec.backends.llamacpp.lending.child_process import load_in_child

    given = {"context_length": 256, "threads": 1, "exact": "off"}
    given |= {name: value for name, value in options.items() if value}
    return load_in_child(str(model), LoadOptions(**given), lambda done, total: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: object, apart: contract.Reused) -> None:
    check(apart)  # type: ignore[operator]


def test_a_process_that_is_gone_is_an_error_and_frees_what_it_had(small_q4: Path) -> None:
    backend = load(small_q4)
    session = backend.open()
    work = contract.work(session, [5, 6], [-1, 0])
    backend.forward([work])
    backend.child._process.kill()  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="is gone"):
        backend.forward([work])
    session.rewind(0)
    session.close()
    backend.close()


def test_ctrl_c_before_an_answer_does_not_shift_the_next(small_q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load(small_q4)
    session = backend.open()
    poll, pressed = Connection.poll, [True]

    def ctrl_c(connection: Connection, seconds: float | None) -> bool:
        if pressed and pressed.pop():
            raise KeyboardInterrupt
        return poll(connection, seconds)

    monkeypatch.setattr(Connection, "poll", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        session.reusable_prefix(0)
    logits = backend.forward([contract.work(session, [5, 6], [-1, 0])])[0]
    assert logits.row(1).shape == (backend.vocab.size,)
    backend.close()


def test_ctrl_c_ends_the_pass(small_q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next call would wait for all of it; a stop that comes after the pass does not end the next one."""
    backend = load(small_q4)
    session = backend.open()
    work = contract.work(session, [5, 6], [-1, 0])
    poll, ask, calls = Connection.poll, backend.stop.ask, list[str]()

    def ctrl_c(connection: Connection, seconds: float | None) -> bool:
        found = poll(connection, seconds)
        calls.append("poll")
        if len(calls) == 1:
            raise KeyboardInterrupt
        return found

    def told() -> None:
        calls.append("interrupt")
        ask()

    monkeypatch.setattr(Connection, "poll", ctrl_c)
    monkeypatch.setattr(backend.stop, "ask", told)
    with pytest.raises(KeyboardInterrupt):
        backend.forward([work])
    assert calls[:3] == ["poll", "interrupt", "poll"]
    session.rewind(0)
    assert backend.forward([work])[0].row(1).shape == (backend.vocab.size,)
    backend.close()


def test_what_a_lender_does_not_take_is_refused(small_q4: Path) -> None:
    with pytest.raises(UsageError, match="gpu_layers"):
        load(small_q4, gpu_memory=1 << 30)


def test_every_option_reaches_the_process_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.backends.llamacpp import engine as engine_module

    told = list[LoadOptions]()
    monkeypatch.setattr(engine_module, "check_target", lambda path: None)
    monkeypatch.setattr(engine_module, "load_in_child", lambda path, options, progress: told.append(options))
    options = LoadOptions(budget=7, lenders=("127.0.0.1:50052",), kv_type="q8_0", draft_files=("small.gguf",))
    engine_module.engine.load(engine_module.engine.plan("big.gguf", options, this_machine()))
    assert told == [options]
    assert pickle.loads(pickle.dumps(options)) == options
