"""scripts/bench-curve: tokens per pass against the budget, on the target's own texts."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.curve import BeamPlanner, rows
from edgespec.loading.pair import close_all, open_backends
from edgespec.loop.draft_passes import run_one
from edgespec.loop.engines import LoadOptions
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams, log_sum_exp
from edgespec.loop.tree import only
from edgespec.model import Model
from edgespec.models.registry import find_model
from edgespec.planners.choice import make_planner

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench-curve"
QUESTIONS = [{"prompt": "Count from one to ten."}, {"question": "Why?"}, {"turns": ["Say it again and again."]}]
BUDGETS = 2, 4, 16


@pytest.fixture
def asked(smollm2_tiny, smollm2_tiny_q2k, tmp_path):
    """The arguments of a run, and where its lines go."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "curve.jsonl"
    prompts.write_text("\n".join(map(json.dumps, QUESTIONS)))
    fixed = "-n", "16", "--ctx", "512", "--budgets", ",".join(map(str, BUDGETS))
    return (smollm2_tiny, smollm2_tiny_q2k, prompts, out, *fixed), out


def lines(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_line_a_problem_a_table_and_a_cut_file_goes_on(script, asked):
    run, out = asked
    code, shown, _ = script(*run)
    assert code == 0
    for method in ("specexec", "uncoupled", "chain", "beam"):
        assert f"{method} " in shown
        assert all(isinstance(each[""], int) for line in lines(out) for each in line["passes"][method].values())
    found = lines(out)
    assert [line["question"] for line in found] == ["Count from one to ten.", "Why?", "Say it again and again."]
    for line in found:
        for by_budget in line["passes"].values():
            for budget in BUDGETS:
                assert all(
                    line["tokens"] / (budget + 1) <= each <= line["tokens"] for each in by_budget[str(budget)].values()
                )
        assert line["passes"]["specinfer"]["2"]["1 x 2"] == pytest.approx(line["passes"]["leviathan"]["2"]["1 x 2"])
        assert line["passes"]["leviathan"]["16"]["1 x 16"] <= line["passes"]["leviathan"]["4"]["1 x 4"]
        assert line["coverage"]["target"] == sorted(line["coverage"]["target"])
        assert all(np.greater_equal(line["coverage"]["target"], line["coverage"]["draft"]))
    whole = out.read_text()
    out.write_text(whole[: len(whole) - 60])  # the last line was cut short
    assert script(*run)[0] == 0
    untimed = [{key: value for key, value in line.items() if key != "seconds"} for line in lines(out)]
    assert untimed == [{key: value for key, value in line.items() if key != "seconds"} for line in found]
    before = out.read_text()
    assert before[: len(whole) // 2] == whole[: len(whole) // 2]  # what was whole stays, with its seconds
    assert script(*run)[0] == 0
    assert out.read_text() == before
    code, shown, err = script(*run, "--temperature", "1", "--memory", "1K")  # before models are loaded
    assert (code, shown, err.count("\n")) == (2, "", 1)
    assert "curve.jsonl: was made with other sampling" in err
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--methods", "specexec,medusa"), "medusa"), (("--budgets", "8,many"), "'8,many'"),
        (("--budgets", "8,0"), "--budgets is '8,0', but must be whole numbers of at least 1, with commas in between"),
        (("--top-p", "0"), "top_p"), (("--limit", "0"), "limit is 0"), (("--png", "curve.jpg"), "png"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line_before_the_models_are_loaded(script, asked, monkeypatch, more, says):
    if "--png" in more:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'edgespec[bench]'")
    monkeypatch.setattr("edgespec.loading.pair.open_backends", lambda *_, **__: pytest.fail("loaded"))
    code, shown, err = script(*asked[0], *more)
    assert (code, shown, err.count("\n")) == (2, "", 1)
    assert says in err
    assert not asked[1].exists()


def test_an_out_that_cannot_be_written_is_one_line(script, asked, tmp_path):
    for out, says in ((tmp_path / "missing" / "curve.jsonl", "there is no folder"), (tmp_path, "is not a file")):
        code, shown, err = script(*asked[0][:3], out)
        assert (code, shown, err.count("\n")) == (2, "", 1)
        assert says in err


@pytest.mark.parametrize("content", ['{"question": "1"}\n', "[1]\n", "{\n", "notes"])
def test_a_file_of_something_else_is_one_line_and_stays(script, asked, content):
    run, out = asked
    out.write_text(content)
    code, _, err = script(*run)
    assert code == 2
    assert err.splitlines()[-1].endswith("holds something else: name another file, or a new one")
    assert out.read_text() == content


def test_replayed_passes_are_those_of_a_run(script, asked, smollm2_tiny, smollm2_tiny_q2k):
    run, out = asked
    assert script(*run, "--methods", "specexec,uncoupled,chain", "--limit", "1")[0] == 0
    options = LoadOptions(context_length=512, budget=16, exact="off")
    backends = open_backends(find_model(str(smollm2_tiny)), str(smollm2_tiny_q2k), None, options)
    sampling, [line] = SamplingParams(temperature=0.6, top_p=0.9), lines(out)
    try:
        for name, method, more in (("specexec",) * 2 + ({},), ("uncoupled", "specexec", {"coupling": False}),
                                   ("chain",) * 2 + ({},)):  # fmt: skip
            for budget in BUDGETS:
                planner = make_planner(method, backends, **more)
                with Model(backends[0], planner, budget=budget, sampling=sampling) as model:
                    stats = model.chat(QUESTIONS[0]["prompt"], max_tokens=16, seed=0).stats
                assert line["passes"][name][str(budget)][""] == stats.passes
                assert line["tokens"] == stats.tokens
    finally:
        close_all(backends)


def test_at_temperature_0_one_draft_token_agrees_in_every_method(script, asked):
    run, out = asked
    assert script(*run, "--temperature", "0", "--budgets", "1,8")[0] == 0
    for line in lines(out):
        passes = line["passes"]
        assert passes["chain"]["8"][""] == pytest.approx(passes["leviathan"]["8"]["1 x 8"])
        single = {passes[name]["1"][""] for name in ("specexec", "uncoupled", "chain", "beam")}
        assert max(single) == min(single) == pytest.approx(passes["leviathan"]["1"]["1 x 1"])


def test_rows_and_beams_are_those_of_the_model(smollm2_tiny):
    options = LoadOptions(context_length=256, budget=24, exact="off")
    [backend] = open_backends(find_model(str(smollm2_tiny)), None, None, options)
    try:
        token_ids = backend.vocab.encode("Why is the sky blue? " * 6, add_bos=True, parse_special=True)
        wide = np.stack([row.copy() for row in rows(backend, token_ids, 5)])
        assert len(wide) == len(token_ids) - 5
        for end in (5, 6, 30, len(token_ids) - 1):
            [narrow] = [row.copy() for row in rows(backend, token_ids[: end + 1], end)]
            assert wide[end - 5] == pytest.approx(narrow, abs=1e-2)

        def log_probs(path):
            [row] = [row.copy() for row in rows(backend, [*token_ids, *path, 0], len(token_ids) + len(path))]
            return row / 0.7 - log_sum_exp(row / 0.7)

        beams = {(): 0.0}
        for _ in range(3):
            longer = {(*path, int(token)): value + float(of_path[token])
                      for path, value in beams.items()
                      for of_path in [log_probs(path)] for token in np.argsort(-of_path)[:32]}  # fmt: skip
            beams = dict(sorted(longer.items(), key=lambda one: -one[1])[:4])
        planner = BeamPlanner(backend, depth=3, coupling=False)
        planner.begin(token_ids)
        context = Context(token_ids, len(token_ids), SamplingParams(), Noise(0, backend.vocab.size), 40, 256)
        while reading := planner.unread(token_ids):
            reading.read(reading.work())
        proposal = run_one(planner.propose(context, 12))
        planner.close()
        tree = only(proposal.tree, proposal.nodes)
        paths = [()]
        for parent, token in zip(tree.parents[1:], tree.token_ids[1:], strict=True):
            paths.append((*paths[parent], int(token)))
        assert {path for path in paths if len(path) == 3} == set(beams)
        assert len(paths) == len({path[:n] for path in beams for n in range(4)})
    finally:
        close_all([backend])


def test_the_curves_are_drawn(script, asked, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'edgespec[bench]'")
    png = tmp_path / "curve.png"
    assert script(*asked[0], "--limit", "1", "--methods", "chain,leviathan", "--png", png)[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG")
