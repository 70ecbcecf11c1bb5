"""The closed forms of plain decoding, SI and DSI, and the program that measures the real thing."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from benchmarks.dsi import (
    LOOKAHEADS,
    TABLE_2,
    TOKENS,
    best_dsi,
    dsi_round,
    dsi_round_as_released,
    enough,
    expected,
    expected_si,
    figure_2,
    least_lookahead,
    seconds_of,
    si_round_as_released,
    speedups,
)
from benchmarks.dsi_chain import acceptance_rate, accepted_lengths, closed_forms
from benchmarks.dsi_wall import PROMPT, SIZE, Recorded
from edgespec.measure.replay import Recording

SCRIPT = Path(__file__).parent.parent / "scripts" / "simulate-dsi"


def rounds(random: Random, acceptance: float) -> list[int]:
    """Right guesses between wrong ones, more than a text has."""
    found = []
    for _ in range(TOKENS):
        right = 0
        while random.random() < acceptance and right < TOKENS:
            right += 1
        found.append(right)
    return found


@pytest.mark.parametrize("round_", [dsi_round, dsi_round_as_released, si_round_as_released])
def test_expectations_are_means(round_: object) -> None:
    random, cost = Random(1), partial(round_, 1.0, 0.2, 3)  # type: ignore[call-overload]
    runs = [seconds_of(rounds(random, 0.7), TOKENS, cost) for _ in range(2000)]
    assert expected(0.7, cost) == pytest.approx(sum(runs) / len(runs), rel=0.02)


def test_si_is_simulated_as_it_is_computed() -> None:
    random, runs = Random(2), list[float]()
    for _ in range(2000):
        tokens, spent = TOKENS, 0.0
        while tokens > 0:
            right = 0
            while right < 3 and random.random() < 0.7:
                right += 1
            tokens, spent = tokens - right - 1, spent + 3 * 0.2 + 1.0
        runs.append(spent)
    assert expected_si(0.7, 1.0, 0.2, 3) == pytest.approx(sum(runs) / len(runs), rel=0.02)


def test_limits() -> None:
    """A perfect draft hides all passes but the last; a useless one costs nothing."""
    assert expected(1.0, partial(dsi_round, 1.0, 0.1, 1)) == pytest.approx((TOKENS - 1) * 0.1 + 1.0)
    assert expected(0.0, partial(dsi_round, 1.0, 0.1, 1)) == pytest.approx(TOKENS)
    assert expected_si(0.0, 1.0, 0.1, 1) == pytest.approx(TOKENS * 1.1)
    # Proposition 1 of the paper: at most t p (N - 1) + T ((1 - p)(N - 1) + 1).
    bound = 0.1 * 0.8 * (TOKENS - 1) + 0.2 * (TOKENS - 1) + 1
    assert expected(0.8, partial(dsi_round, 1.0, 0.1, 1)) <= bound + 1e-9
    assert [least_lookahead(1.0, 0.1, copies) for copies in (1, 3, 5, 10, 20)] == [10, 4, 2, 1, 1]
    assert (enough(1.0, 0.1, 1, 10), enough(1.0, 0.1, 1, 9), enough(1.0, 0.1, 2, 5)) == (True, False, True)


def test_several_targets_are_never_slower_in_figure_2() -> None:
    cells = list(figure_2(0.25))
    assert len(cells) == 25
    assert all(cell.dsi <= cell.plain + 1e-9 for cell in cells)
    assert any(cell.si > cell.plain for cell in cells)


def test_table_2() -> None:
    """The closed form gains less than the paper says, its program's counting as much or more, but for one row."""
    for row in TABLE_2:
        closed, released = speedups(row)
        assert 1.0 < closed < row.speedup
        assert closed < released


def test_recorded_guesses_know_their_rounds() -> None:
    text = [*PROMPT, *range(2, 42)]
    guesser, rights = Recorded(text, 0.6), list[int]()
    right = 0
    for position, token in enumerate(guesser.after(text[: len(PROMPT)]), len(PROMPT)):
        if token == text[position]:
            right += 1
        else:
            assert 0 <= token < SIZE
            rights, right = [*rights, right], 0
    assert guesser.rounds() == [*rights, right]
    assert len(rights) > 5


def test_accepted_lengths_are_those_of_the_paper() -> None:
    """Draft tokens that are right from the prompt on, then after each wrong one; the answer's end cuts the last one."""
    text = list(range(2, 42))
    guesser = Recorded([*PROMPT, *text], 0.6)
    *complete, cut = guesser.rounds()
    assert cut > 0
    assert accepted_lengths(guesser, Recording(list(PROMPT), text)) == [*complete, cut]
    assert accepted_lengths(Recorded([*PROMPT, *text], 1.0), Recording(list(PROMPT), text)) == [40]
    assert accepted_lengths(Recorded([], 1.0), Recording(list(PROMPT), text)) == []  # its context is full
    assert accepted_lengths(Recorded([*PROMPT, *text], 0.0), Recording(list(PROMPT), text)) == [0] * len(text)


def test_the_acceptance_rate_is_found_again() -> None:
    assert acceptance_rate(rounds(Random(3), 0.8)) == pytest.approx(0.8, abs=0.06)
    assert (acceptance_rate([8]), acceptance_rate([0, 0]), acceptance_rate([])) == (1 - 1 / 9, 0.0, 0.0)
    assert closed_forms(0.8, 1.0, 0.1)[1] <= best_dsi(0.8, 1.0, 0.1, LOOKAHEADS)
    assert max(closed_forms(0.8, 10.0, 0.001)) < TOKENS * 10.0  # no lookahead of the grid suffices for seven copies


def call(*arguments: str, **instead: object) -> str:
    loader = SourceFileLoader("simulate_dsi", str(SCRIPT))
    script = module_from_spec(ModuleSpec("simulate_dsi", loader))
    loader.exec_module(script)
    vars(script).update(instead)
    done = CliRunner().invoke(script.cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_acceptance_of_an_own_pair(tmp_path: Path, smollm2_tiny: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(
        json.dumps({"prompt_ids": [1, 2], "output_ids": [9, 9, 9], "category": "", "question": ""}) + "\n"
    )
    found = call("acceptance", str(smollm2_tiny), str(answers), "--target-ms", "100")
    assert "as the paper  1 lengths" in found
    assert "all steps" in found
    assert found.count("plain / DSI") == 2


def test_reading_the_prompt_is_no_draft_pass(tmp_path: Path, smollm2_tiny: Path) -> None:
    answers, now, read = tmp_path / "answers.jsonl", [0.0], list[list[int]]()
    answers.write_text(json.dumps({"prompt_ids": [1, 2], "output_ids": [9, 9, 9]}) + "\n")

    class Timed(Recorded):
        def __init__(self, *_: object) -> None:
            super().__init__([1, 2, 8, 8, 8], 1.0)  # always wrong

        def after(self, token_ids: Sequence[int]) -> Iterator[int]:
            for token in super().after(token_ids):
                now[0] += 0.002 if read else 5.0
                read.append([*token_ids])
                yield token

    found = call("acceptance", str(smollm2_tiny), str(answers), DraftProposer=Timed, perf_counter=lambda: now[0])
    assert len(read) == 4
    assert found.strip().endswith("a draft pass took 2.0 ms")


def test_the_program_runs() -> None:
    assert "Starcoder" in call("table2")
    assert "25 cells" in call("figure2", "--step", "0.25")
    found = call("models", "--ms", "1,2,4")
    assert found.count("plain / DSI") == 3
    assert "1 ms -> 2 ms -> 4 ms" in found
    found = call("wall", "--target-ms", "1", "--shares", "0.5", "--acceptances", "0.8", "--copies", "2")
    assert "all sequences equal" in found
    bad = subprocess.run(
        [sys.executable, str(SCRIPT), "wall", "--by", "cows", "--target-ms", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
