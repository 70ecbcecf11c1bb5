"""The fuzz of exactness: it passes here, and it finds and shrinks what is wrong."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from conftest import Run, shared_folder

from benchmarks import fuzz
from benchmarks.fuzz import Call, Case, _plain, check, draw, in_child, script, shrunk
from edgespec.loop import generate
from edgespec.loop.verify import Walk

PAIR = {"model": "llama Q4_K_M", "draft": "llama Q4_0"}
SMALL = {"context_length": 200, "threads": 2, "kv_type": "f16"}


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    path = shared_folder(request.config) / "fuzz-exact"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    options = fuzz._options
    monkeypatch.setattr(fuzz, "_options", lambda *given, **more: options(*given, **more) | SMALL)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", range(9))
def test_texts_of_random_requests_are_those_of_plain_decoding(number: int, folder: Path) -> None:
    found = check(draw(0, number, **PAIR), folder)
    assert found.texts or found.refused  # as where no passes of all sizes agree
    assert not found.wrong


@pytest.mark.usefixtures("quick")
def test_the_program_runs_a_case_in_a_process_of_its_own(
    bench: Run, small: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "OMP_WAIT_POLICY", "XDG_CACHE_HOME"):  # which the program sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, shown, said = bench("fuzz", "--cases", 1, "--model", small, "--out", folder)
    assert (code, shown.splitlines()[-1].startswith("1 cases, 0 refused, ")) == (0, True), said
    assert shown.endswith(" 0 defects\n")


def test_a_case_is_a_function_of_seed_and_number() -> None:
    assert draw(1, 2) == draw(1, 2)
    assert len({repr(draw(1, number)) for number in range(50)}) == 50


def test_a_wrong_verification_is_found_and_shrunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = generate.walk

    def lenient(tree, sample):  # type: ignore[no-untyped-def]
        found = walk(tree, sample)
        return Walk(found.path, [*found.output[:-1], found.output[-1] ^ 1]) if len(found.path) > 1 else found

    monkeypatch.setattr(generate, "walk", lenient)
    options = {"max_tokens": 16, "logit_bias": {101: 30.0}, "log_probs": 3}  # a text that can be copied
    calls = [Call(prompt="the cat the", options={**options, "seed": seed}) for seed in (1, 2)]
    case = Case(PAIR["model"], PAIR["model"], SMALL | {"planner": "specexec", "budget": 4, "parallel": 2}, [calls])
    found = check(case, folder)
    assert found.exact
    assert {kind for kind, _ in found.wrong} == {"differs"}

    def still(one: Case) -> bool:  # with a budget no tree depends on how long passes take
        return "budget" in one.options and bool(check(one, folder, "differs").wrong)

    smaller = shrunk(case, still, seconds=600)
    assert [len(some) for some in smaller.rounds] == [1]
    assert "parallel" not in smaller.options
    assert smaller.options["planner"] == "sssd", "the simplest that still verifies"
    program = script(smaller, "a defect")
    namespace = {"__file__": str(folder / "defect.py")}
    exec(compile(program.replace("print(", "FOUND = ("), "defect", "exec"), namespace)
    assert namespace["FOUND"].wrong


def test_the_model_of_plain_texts_is_closed_before_its_engine(folder: Path) -> None:
    """Else a text that was left may still be computed by an engine that is freed."""
    with _plain(Case(PAIR["model"], options=SMALL), folder, "", {"kernels": "others"}) as alone:
        assert "closed" not in repr(alone)
    assert "closed" in repr(alone)


def test_a_case_that_does_not_end_is_killed(folder: Path) -> None:
    [(kind, _)] = in_child(draw(0, 0), folder, seconds=0.01).wrong
    assert kind == "hang"
