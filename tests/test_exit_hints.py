"""What a target's early layers say of where rounds end: read with its own norm and output matrix."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'edgespec[torch]'")

from edgespec.backends.torch.backend import load
from hf_models import perturbed, save, tiny_model

from benchmarks.exit_gain import Machine, draft_curve, gains, go_on, read_before, texts
from benchmarks.exit_report import hint_gains, hint_table
from benchmarks.exits import How, log_rounds, read_rounds
from benchmarks.hints import judge, log_hints, read_hints, reweighed, told_late
from edgespec.errors import UsageError
from edgespec.loop.passes import prefill
from edgespec.measure.replay import Recording

HOW = How(budget=8, keep=32, depth=6, beam=4, leaves=40, most_passes=40)
OPTIONS = {"context_length": 128, "budget": 64, "threads": 1}


def greedy(target, prompt, length):
    token_ids, session = list(prompt), target.open()
    for _ in range(length):
        logits, node = prefill(target, session, token_ids, want_last=True)
        token_ids.append(int(np.argmax(logits.row(node))))
    session.close()
    return Recording(list(prompt), token_ids[len(prompt) :])


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Target, recordings, rounds and hints of a tiny pair; the draft is the target with noise on its weights."""
    folder = tmp_path_factory.mktemp("pair")
    model = tiny_model("qwen2")
    target = load(str(save(model, folder / "target")), **OPTIONS)
    draft = load(str(save(perturbed(model, 0.3, 1), folder / "draft")), **OPTIONS)
    recordings = {("prose", i): greedy(target, [5 + i, 40, 9], 30) for i in range(2)}
    log_rounds(draft, recordings, HOW, folder / "rounds.jsonl")
    rounds = read_rounds(folder / "rounds.jsonl")[1]
    log_hints(target, recordings, rounds, folder / "hints.jsonl")
    return target, recordings, rounds, folder / "hints.jsonl"


def test_after_all_layers_the_lens_is_the_target(logged):
    _, _, rounds, path = logged
    hints = read_hints(path)
    assert len(hints) == len(rounds) - 2  # a text's last round has no exit that is known
    found = judge(rounds, hints, HOW.budget)["prose"]
    ranks = found["ranks"]
    assert ranks["first"]["3"] == ranks["among"] > 3
    assert ranks["first"]["draft"] < ranks["among"]
    assert found["by_layer"]["3"][0] >= found["own"]
    gained = hint_gains({"prose": found}, rounds, hints, HOW.beam, 1.0)
    assert set(gained["prose"]) == {"", *found["by_layer"]}
    assert "3 layers" in hint_table({"prose": found}, gained)
    late = hint_gains({"prose": found}, rounds, hints[:-1], HOW.beam, 1.0)  # of one text, some are not there
    assert late["prose"][""][0] in (pytest.approx(value) for value in text_gains(rounds))


def text_gains(rounds):
    draft = draft_curve(rounds)
    how = {"hidden": 1.0, "draft": lambda n: float(draft.seconds(n)), "beam": 4}
    return gains(rounds, Machine("", 1.0, 0.0, True), how["draft"], HOW.beam, partial(go_on, **how))["prose"]


def test_a_hint_that_comes_with_the_end_changes_nothing(logged):
    _, _, rounds, path = logged
    how = {"hidden": 0.2, "draft": lambda n: 0.1, "beam": 1}
    late, own = told_late(read_hints(path), "2", 1.0, 0.5, **how), partial(go_on, **how)
    early = told_late(read_hints(path), "2", 0.0, 1.0, **how)
    other = 0
    for text in texts(rounds):
        for round_ in text[:-1]:
            read = read_before(round_, round_.searched)
            assert late(round_, read) == own(round_, read)
            other += early(round_, read) != own(round_, read)
    assert other


def test_what_is_told_moves_shares_among_known_children(logged):
    _, _, rounds, path = logged
    there = {(one.text, one.start): one for one in rounds}
    for hint in read_hints(path):
        round_ = there[hint.text, hint.start]
        own, parents = np.array(round_.log_probs), np.array(round_.parents)
        np.testing.assert_allclose(reweighed(round_, hint.scores["2"], 0.0), own, atol=1e-6)
        told = np.array(reweighed(round_, hint.scores["2"], 1.0))
        for parent in {round_.parents[int(node)] for node in hint.scores["2"]}:
            children = np.flatnonzero(parents == parent)
            given = np.exp(told[children] - told[parent]), np.exp(own[children] - own[parent])
            assert given[0].sum() == pytest.approx(given[1].sum(), abs=1e-6)
            scores = [hint.scores["2"][str(child)] for child in children]
            assert np.argmax(given[0]) == np.argmax(scores)


def test_hints_go_on_where_they_were(logged):
    target, recordings, rounds, path = logged
    text, before, steps = path.read_text(), read_hints(path), []
    path.write_text(text[: text.index("\n") + 30])
    log_hints(target, recordings, rounds, path, done=lambda: steps.append(1))
    assert len(steps) == text.count("\n") - 1
    after = {(one.text, one.start): one for one in read_hints(path)}
    assert len(after) == len(before)
    for one in before:
        other = after[one.text, one.start]
        for layers, scores in one.scores.items():
            assert other.scores[layers] == pytest.approx(scores, abs=1e-3)
            assert other.candidates[layers] == pytest.approx(one.candidates[layers], abs=1e-3)
    path.write_text('{"no": "hint"}\n')
    with pytest.raises(UsageError, match="not a file of"):
        read_hints(path)
    path.write_text(text)
