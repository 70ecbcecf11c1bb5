"""Several targets on llama.cpp: processes with a real model write what one writes."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.backend import Work
from edgespec.errors import Stopped, UsageError
from edgespec.targets.opening import check_targets, shares

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_two_processes_write_the_text_of_one(smollm2_tiny_f32: Path, run: Run, temperature: float) -> None:
    model, found = str(smollm2_tiny_f32), []
    common = ["run", model, "Say hello.", "--json", "--ctx", "128", "-n", "16", "--seed", "3", "-t", str(temperature)]
    for options in (["--planner", "none"], ["--draft", model, "--targets", "2", "--threads", "1"]):
        code, out, err = run(*common, *options)
        assert code == 0, err
        found.append(json.loads(out))
    plain, several = found
    assert several["tokens"] == plain["tokens"]
    assert several["stats"]["planner"] == "dsi"
    assert several["stats"]["backend"] == "2 x llamacpp"


def test_a_pass_is_left_and_nothing_of_it_stays(smollm2_tiny: Path) -> None:
    from edgespec.backends.llamacpp.backend import load

    model = load(str(smollm2_tiny), context_length=256, exact="off")
    session, nodes = model.open(), np.arange(64, dtype=np.int32)

    def work() -> Work:
        return Work(session, nodes + 5, nodes - 1, nodes[-1:])

    expected = model.forward([work()])[0].row(63)
    session.rewind(0)
    stopper = threading.Thread(target=model.stop)
    stopper.start()
    stopper.join()
    with pytest.raises(Stopped):
        model.forward([work()])
    model.resume()
    assert np.array_equal(model.forward([work()])[0].row(63), expected)
    model.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": None}, "--draft"),
        ({"count": 0}, "targets is 0"),
        ({"cluster": "tls://head:8786"}, "not both"),
        ({"planner": "specexec"}, "auto and chain"),
        ({"parallel": 2}, "parallel"),
        ({"options": {"datastore": "notes.store"}}, "datastore"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, object], message: str) -> None:
    usual = {"count": 2, "cluster": None, "draft": "small.gguf", "planner": "auto", "parallel": 1, "options": {}}
    check_targets(**usual)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        check_targets(**usual | given)  # type: ignore[arg-type]


def test_processes_share_memory_and_threads() -> None:
    assert shares(2, {"memory": "6G", "threads": 3}, folder=False) == {"memory": 3 << 30, "threads": 3}
    assert shares(64, {}, folder=True) == {"threads": 1}
