"""How a draft's search goes on beyond its tree: what is logged, what follows from it, and scripts/exit-log."""

import json
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
from edgespec.backends.reference.backend import ReferenceBackend, random_model

from benchmarks.exit_gain import (
    Machine,
    beyond,
    by_seconds,
    by_size,
    carried,
    draft_passes,
    found_after,
    gained,
    go_on,
    nothing,
    read_before,
    seconds,
    texts,
    tree_of,
    with_next,
)
from benchmarks.exits import How, log_rounds, read_rounds
from edgespec.errors import UsageError
from edgespec.loop.passes import prefill
from edgespec.loop.tree import make_tree
from edgespec.loop.verify import walk
from edgespec.measure.replay import Recording, replay
from edgespec.planners.specexec import SpecExecPlanner

SCRIPT = Path(__file__).parent.parent / "scripts" / "exit-log"
SIZE = 48
KEYS = (("prose", 0), ("prose", 1), ("code", 0))
HOW = How(budget=8, keep=32, depth=6, beam=4, leaves=40, most_passes=40)


@pytest.fixture(scope="module")
def draft():
    return ReferenceBackend(random_model(0, vocab_size=SIZE, sharpness=3.0), context_length=128)


def answer(draft, seed, length=40):
    """Mostly what the draft would write: now and then its second to fifth choice."""
    random, prompt = Random(seed), [seed + 1, 2, 3]
    token_ids, session = list(prompt), draft.open()
    for _ in range(length):
        logits, node = prefill(draft, session, token_ids, want_last=True)
        rank = random.choice([0, 0, 0, 0, 1, 2, 4])
        token_ids.append(int(np.argsort(-logits.row(node), kind="stable")[rank]))
    session.close()
    return Recording(prompt, token_ids[3:])


@pytest.fixture(scope="module")
def recordings(draft):
    return {(kind, number): answer(draft, seed) for seed, (kind, number) in enumerate(KEYS)}


@pytest.fixture(scope="module")
def rounds(draft, recordings, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "rounds.jsonl"
    log_rounds(draft, recordings, HOW, path)
    return read_rounds(path)[1]


def test_trees_sent_are_those_of_the_planner(draft, recordings, rounds):
    planner = SpecExecPlanner(draft, depth=HOW.depth, beam=HOW.beam)
    for key, recording in recordings.items():
        found = replay(planner, recording.prompt_ids, recording.output_ids, HOW.budget, SIZE)
        mine = [one.written for one in rounds if (one.kind, one.text) == key]
        assert len(mine) > 5
        assert (
            mine[:-3] == found.acceptance_lengths[: len(mine) - 3]
        )  # at its end the planner stops where the text does
    planner.close()


def test_an_exit_is_known_exactly_where_more_tokens_are_gained(rounds):
    hits, sizes = 0, [8, 12, 16, 24, 32]
    pairs = list(with_next(rounds))
    for round_, _ in pairs:
        for size in sizes:
            passes = round_.known.get(str(size), round_.searched)
            tree = sorted(tree_of(round_, size, found_after(round_, passes)))
            numbers = {node: i for i, node in enumerate(tree)}
            parents = [numbers[round_.parents[node]] if node else -1 for node in tree]
            shown = make_tree([round_.token_ids[i] for i in tree], parents, [round_.log_probs[i] for i in tree])
            future = [*round_.future, -1]
            length = len(walk(shown, lambda node, accepted, future=future: future[len(accepted)]).output)
            assert min(length, len(round_.future)) == gained(round_, set(tree))
            more = beyond(round_, size, passes)
            assert (more >= 1) == (round_.exit() in tree)
            hits += more >= 1
            if size == 8:
                assert more == 0
    assert 0 < hits < len(sizes) * len(pairs)
    rows = by_size(pairs, sizes[1:], HOW.beam)
    assert [row.hits for row in rows] == sorted(row.hits for row in rows)
    assert all(row.hits <= row.tokens for row in rows)
    assert rows[-1].tokens == pytest.approx(np.mean([beyond(one, 32, one.known["32"]) for one, _ in pairs]))


def test_what_is_carried_is_what_the_next_search_finds_there(rounds):
    seen = 0
    for round_, following in with_next(rounds):
        read, exit_ = read_before(round_, len(round_.passes)), round_.exit()
        kept = carried(round_, read, following)
        assert bool(kept) == (exit_ in read)
        children, same = round_.children(), {0: exit_}
        for node in sorted(kept - {0}):
            twin = same[node] = children[same[following.parents[node]], following.token_ids[node]]
            assert twin in read
            relative = round_.log_probs[twin] - round_.log_probs[exit_]
            assert relative == pytest.approx(following.log_probs[node], abs=1e-3)
            seen += 1
    assert seen > 10


def test_passes_read_every_node_once_below_a_read_parent(rounds):
    for round_ in rounds:
        wanted, done = read_before(round_, round_.searched), set()
        passes = list(draft_passes(round_, wanted, set(), HOW.beam, first=7))
        assert passes[0] == (7, [0])
        for count, batch in passes[1:]:
            assert count == len(batch) <= HOW.beam
            assert not done & set(batch)
            done |= {0, *batch}
            assert all(round_.parents[node] in done - set(batch) for node in batch)
        assert done | {0} == wanted
        assert len(passes) <= round_.searched


def test_hidden_drafting_saves_what_the_next_round_need_not_read(rounds):
    def cost(nodes):
        return 0.1 + 0.01 * nodes

    for text in texts(rounds):
        took = {}
        for hidden in (0.0, 0.2, 1.0, 100.0):
            machine = Machine("", 0.0, hidden, False)
            for mode, beside in (
                ("serial", None),
                ("re-rooted", nothing),
                ("ahead", partial(go_on, hidden=hidden, draft=cost, beam=HOW.beam)),
            ):
                pairs = len(text) - 1
                took[hidden, mode] = seconds(text, machine, cost, HOW.beam, beside) - pairs * hidden
        assert took[0.0, "ahead"] == pytest.approx(took[0.0, "re-rooted"])
        assert took[0.0, "re-rooted"] <= took[0.0, "serial"]
        assert took[100.0, "ahead"] < took[0.0, "serial"]
        assert took[1.0, "serial"] == pytest.approx(took[0.0, "serial"])
    pairs = list(with_next(rounds))
    none, some, all_ = by_seconds(pairs, [0.0, 0.3, 1000.0], cost, 2)
    assert none <= some <= all_
    assert all_[2] == pytest.approx(
        np.mean([gained(one, set(range(len(one.parents)))) - one.written for one, _ in pairs])
    )


def test_what_was_interrupted_goes_on_where_it_was(draft, recordings, tmp_path):
    def lines(path):
        """All but the seconds."""
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return rows[:1] + [row | {"passes": [nodes for nodes, _ in row["passes"]]} for row in rows[1:]]

    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    log_rounds(draft, recordings, HOW, whole)
    text = whole.read_text()
    ends = [i + 1 for i, sign in enumerate(text) if sign == "\n"]
    for length in (ends[0], ends[3] + 20, ends[len(ends) // 2], ends[-1]):
        part.write_text(text[:length])
        log_rounds(draft, recordings, HOW, part)
        assert lines(part) == lines(whole)
    with pytest.raises(UsageError, match="another search"):
        log_rounds(draft, recordings, replace(HOW, budget=4), part)
    assert lines(part) == lines(whole)


def test_a_tree_ends_where_more_would_not_pay(draft, recordings, tmp_path):
    slow, quick = tmp_path / "slow.jsonl", tmp_path / "quick.jsonl"
    for path, ms in ((slow, 1000.0), (quick, 0.1)):
        how = replace(HOW, target_ms=((1, 100.0), (9, 110.0)), draft_ms=((1, ms), (4, ms)))
        log_rounds(draft, {KEYS[0]: recordings[KEYS[0]]}, how, path)
    few, many = ([one.searched for one in read_rounds(path)[1]] for path in (slow, quick))
    assert set(few) == {1}
    assert max(many) > 3


@pytest.fixture
def script(monkeypatch, capfd):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        capfd.readouterr()
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as ended:
            return ended.code or 0, *capfd.readouterr()
        return 0, *capfd.readouterr()

    return call


def test_the_program(script, smollm2_tiny, tmp_path):
    answers, out, figures = tmp_path / "prose.jsonl", tmp_path / "rounds.jsonl", tmp_path / "all.json"
    plain = {"planner": "none", "prompt": "Why?", "temperature": 0.0, "token_ids": list(range(500, 524))}
    answers.write_text("".join(json.dumps(plain | more) + "\n" for more in ({}, {"temperature": 1.0})))
    arguments = "replay", smollm2_tiny, answers, "--out", out, "--budget", "4", "--keep", "12", "--ctx", "128"
    assert script(*arguments)[0] == 0
    there = out.read_text()
    assert sum(json.loads(line)["written"] for line in there.splitlines()[1:]) == 24
    assert script(*arguments)[0] == 0
    assert out.read_text() == there
    shown = ["--compute", "0.5", "--streamed", "2G", "--disks", "1,4", "--json", figures]
    code, text, _ = script("report", out, *shown)
    assert code == 0
    assert "h(K')" in text
    assert "draft apart, 4 GB/s" in text
    found = json.loads(figures.read_text())
    assert [row["size"] for row in found["kinds"]["prose"]["by_size"]] == [6, 8, 12]
    assert found["gain"]["same cores, 1 GB/s"]["wait"] == pytest.approx(2**31 / 1e9 - 0.5)
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'edgespec[bench]'")
    assert script("report", out, *shown, "--png", tmp_path / "h.png")[0] == 0
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_one_line(script, smollm2_tiny, tmp_path):
    answers, none = tmp_path / "prose.jsonl", tmp_path / "none.jsonl"
    answers.write_text(json.dumps({"prompt": "Why?", "output": "Because."}) + "\n")
    none.write_text("")
    replay_ = "replay", smollm2_tiny, answers, "--out", tmp_path / "rounds.jsonl"
    for arguments, named in (
        ((*replay_, "--budget", "64", "--keep", "64"), "--keep"),
        ((*replay_, "--target-ms", "1:20"), "--draft-ms"),
        ((*replay_, "--target-ms", "1-20"), "1-20"),
        (("replay", smollm2_tiny, none, "--out", tmp_path / "rounds.jsonl"), "no greedy answer"),
        ((*replay_[:3], "--out", answers), "not a file of"),
        (("report", answers, "--compute", "1", "--streamed", "0"), "not a file of"),
        (("report", answers, "--compute", "1", "--streamed", "0", "--disks", "x"), "--disks"),
        (("report", answers, "--compute", "1", "--streamed", "cows"), "cows"),
    ):
        code, _, err = script(*arguments)
        assert code == 2, arguments
        assert named in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "rounds.jsonl").exists()
