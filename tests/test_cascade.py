"""Speculative cascades: texts of another distribution, which no tree and no planner changes, and which say so."""

import json
from time import sleep

import numpy as np
import pytest
from alone import Generation, before_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.backend import ReferenceBackend, perturbed, random_model
from test_lossless_reference import PLANNERS, drafts_of, samplings, tokens, write

import edgespec
from edgespec.errors import ContextFull, UsageError
from edgespec.lab.cascade import CascadePlanner, mixture
from edgespec.loop.draft_passes import run_one, run_shared
from edgespec.loop.passes import Ran, prefill
from edgespec.loop.sampling import Noise, SamplingParams, adjust, candidates, sample
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.loop.stats import GenerationStats
from edgespec.loop.tree import Proposal, chain_of
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner

TARGET = random_model(1, vocab_size=48, sharpness=3.0)
DRAFT = perturbed(TARGET, 0.4, 1)
PROMPT = [5, 9, 7]
SAMPLED = SamplingParams(temperature=0.8, seed=3)
PLAIN = {"stop_ids": frozenset[int](), "max_tokens": 24, "budget": 12}


def pair(**options):
    return ReferenceBackend(TARGET), ReferenceBackend(DRAFT, sessions=2, **options)


def cascade(kind, draft, alpha=0.5):
    return CascadePlanner(NonePlanner() if kind is NonePlanner else kind(draft), draft, alpha)


def probabilities(logits, sampling):
    """The filtered softmax, written out."""
    ids = candidates(logits, sampling)
    kept = np.arange(len(logits)) if ids is None else ids
    found = np.zeros(len(logits))
    found[kept] = np.exp((logits[kept].astype(np.float64) - logits.max()) / sampling.temperature)
    return found / found.sum()


def by_definition(models, prompt, sampling, alpha, count):
    """Both models read the text anew for each token."""
    noise, output = Noise(sampling.seed, 48), []
    while len(output) < count:
        rows = []
        for model in models:
            backend = ReferenceBackend(model)
            logits, node = prefill(backend, backend.open(), [*prompt, *output], want_last=True)
            rows.append(adjust(logits.row(node), sampling, prompt, output))
        p, q = rows
        near = np.exp(p.astype(np.float64) - p.max()) >= 1 - alpha
        if sampling.temperature == 0:
            output.append(int(q.argmax() if near[q.argmax()] else p.argmax()))
            continue
        of_p, of_q = probabilities(p, sampling), probabilities(q, sampling)
        pi = np.where(near, of_q, 0) + of_q[~near].sum() * of_p
        with np.errstate(divide="ignore"):
            output.append(int(np.argmax(np.log(pi) + noise.row(len(prompt) + len(output)))))
    return output


@pytest.mark.parametrize(
    "alpha", [0.5, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (0.25, 0.95, 1.0))]
)
@settings(max_examples=3, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=6), samplings)
def test_the_text_is_the_one_of_the_definition(alpha, prompt, sampling):
    target, draft = pair()
    planner = cascade(SpecExecPlanner, draft, alpha)
    output, _ = write(target, planner, prompt, sampling, **PLAIN | {"max_tokens": 10})
    assert output == by_definition([TARGET, DRAFT], prompt, sampling, alpha, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in PLANNERS if name not in ("pearl", "specbranch")])
@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["equal", "perturbed", "random"]),
    st.lists(tokens, min_size=1, max_size=12),
    samplings,
    st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    st.integers(1, 40),
    st.data(),
)
def test_the_text_depends_on_no_planner(name, kind, prompt, sampling, alpha, budget, data):
    """Planner `none`, both models token by token, is the reference; the draft's limits change no text."""
    limits = {
        "context_length": data.draw(st.sampled_from([14, 40]), "draft's context"),
        "max_nodes": data.draw(st.sampled_from([6, 64]), "draft's nodes"),
        "max_leaves": data.draw(st.sampled_from([1, 64]), "draft's leaves"),
        "spare_leaves": data.draw(st.sampled_from([None, 2]), "draft's leaves of all sessions"),
    }
    target = ReferenceBackend(TARGET, context_length=40)
    draft = ReferenceBackend(drafts_of(TARGET, kind), sessions=2, **limits)
    options = {"budget": budget, "max_tokens": 16}
    plain, _ = write(target, cascade(NonePlanner, draft, alpha), prompt, sampling, **options)
    for session in draft.opened.copy():
        session.close()
    inner = PLANNERS[name](draft, lambda low, high: data.draw(st.integers(low, high)))
    planner = CascadePlanner(inner, draft, alpha)
    assert write(target, planner, prompt, sampling, **options)[0] == plain
    planner.close()
    assert draft.open_sessions == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_more_draft_tokens_are_accepted_the_larger_alpha_is(temperature):
    passes = []
    for alpha in (0.0, 0.5, 0.95):
        target, draft = pair()
        planner = cascade(ChainPlanner, draft, alpha) if alpha else ChainPlanner(draft)
        sampling = [SamplingParams(temperature=temperature, seed=seed) for seed in range(8)]
        passes.append(sum(write(target, planner, [seed], sampling[seed], **PLAIN)[1].passes for seed in range(8)))
    assert passes[0] > passes[1] > passes[2]


def test_a_pass_of_the_draft_reads_several_tokens_that_are_sampled_from():
    target, draft = pair()
    planner = cascade(ChainPlanner, draft, 0.95)
    passes = before_passes(draft, lambda batch: (batch[0].session is planner._session, len(batch[0].token_ids)))
    output, _ = write(target, planner, PROMPT, SamplingParams(), **PLAIN)
    rows = [count for mixes, count in passes if mixes]
    assert len(rows) < len(output)
    assert max(rows) > 2


def narrow_pair():
    """A pair whose draft has row classes, its works by pass (a prompt's, where they start, nodes), and a prompt."""
    target, draft = pair(context_length=200)
    draft.keep_to(BatchInvariance("narrow", RowClass(1, 7), RowClass(16, 20)))
    passes = before_passes(
        draft, lambda batch: [(one.prompt, len(one.session.token_ids), len(one.token_ids)) for one in batch]
    )
    return target, draft, passes, [3 + i % 40 for i in range(25)]


def test_the_draft_reads_prompt_and_output_in_their_row_classes():
    """Else a row of q would depend on what was drafted. Also the session that drafts keeps what it has read."""
    target, draft, passes, prompt = narrow_pair()
    output, _ = write(target, cascade(SpecExecPlanner, draft), prompt, SAMPLED, **PLAIN)
    seen = [work for works in passes for work in works]
    assert {(start, count) for is_prompt, start, count in seen if is_prompt} == {(0, 20), (20, 4), (20, 5)}
    assert min(start for is_prompt, start, _ in seen if not is_prompt) == 24
    assert sum(is_prompt for is_prompt, *_ in seen) == 4  # two sessions read it once
    plain = ReferenceBackend(DRAFT, sessions=2, context_length=200)
    assert output == write(target, cascade(NonePlanner, plain), prompt, SAMPLED, **PLAIN)[0]


def test_after_an_interruption_output_is_read_as_output():
    """The planner begins again, and knows only the prompt."""
    _, draft, passes, prompt = narrow_pair()
    planner = cascade(NonePlanner, draft)
    planner.begin(prompt)
    planner.mix(np.zeros(48, np.float32), SAMPLED, [*prompt, *range(5, 14)], [], None)
    assert passes == [[(True, 0, 20)], [(True, 20, 4)], [(False, 24, 7)], [(False, 31, 2)], [(False, 33, 1)]]


def test_a_grammar_and_penalties_act_on_both_distributions():
    class Even:
        def masked(self, row):
            return np.where(np.arange(len(row)) % 2 == 0, row, -np.inf).astype(np.float32)

    _, draft = pair()
    planner, output = cascade(NonePlanner, draft, 0.9), [6, 6, 8]
    planner.begin(PROMPT)
    alone = ReferenceBackend(DRAFT)
    logits, node = prefill(alone, alone.open(), [*PROMPT, *output], want_last=True)
    q, p = logits.row(node), np.linspace(0, 1, 48, dtype=np.float32)
    sampling = SamplingParams(temperature=0.8, frequency_penalty=0.7, logit_bias={10: 2.0})
    row, drawn = planner.mix(Even().masked(p), sampling, [*PROMPT, *output[:2]], output[2:], Even())
    both = [adjust(Even().masked(one), sampling, PROMPT, output) for one in (p, q)]
    assert np.exp(row) == pytest.approx(mixture(*both, 0.9, sampling), abs=1e-6)
    assert np.exp(row[::2]).sum() == pytest.approx(1, abs=1e-5)
    assert (drawn.temperature, drawn.has_penalties, drawn.logit_bias) == (1.0, False, {})


P = np.log(np.array([0.02, 0.2, 0.42, 0.1, 0.08, 0.04, 0.03, 0.11], np.float32))
Q = np.log(np.array([0.2, 0.3, 0.1, 0.2, 0.05, 0.05, 0.05, 0.05], np.float32))
MOST = 29.9  # chi square with six degrees of freedom, which chance exceeds once in 25,000 times


@pytest.mark.parametrize(
    ("sampling", "alpha"),
    [(SamplingParams(temperature=1.0), 0.5),
     (SamplingParams(temperature=0.7, top_p=0.9), 0.6)],
)  # fmt: skip
def test_draws_have_the_distribution_pi(sampling, alpha, whole_grid):
    draws = 100_000 if whole_grid else 6000
    of_p, of_q = probabilities(P, sampling), probabilities(Q, sampling)
    near = np.exp(P) >= (1 - alpha) * np.exp(P).max()
    pi = np.where(near, of_q, 0) + of_q[~near].sum() * of_p
    with np.errstate(divide="ignore"):
        row = np.log(mixture(P, Q, alpha, sampling)).astype(np.float32)
    noise = Noise(1, len(P))
    drawn = [sample(row, position, SamplingParams(temperature=1.0), noise) for position in range(draws)]
    counts = np.bincount(drawn, minlength=len(P))
    assert counts[pi == 0].sum() == 0
    seen, expected = counts[pi > 0], draws * pi[pi > 0]
    assert ((seen - expected) ** 2 / expected).sum() < MOST
    assert (((counts - draws * of_p)[pi > 0] ** 2) / expected).sum() > 2 * MOST  # it is not the target's


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, and a draft that is near to it."""
    folder = tmp_path_factory.mktemp("cascade")
    target = random_model(2, vocab_size=258, sharpness=3.0)
    target.unembedding[1] = 0
    paths = [str(folder / "target.npz"), str(folder / "draft.npz")]
    target.save(paths[0])
    perturbed(target, 0.4, 1).save(paths[1])
    return paths


@pytest.fixture
def load(files, monkeypatch):
    monkeypatch.setenv("EDGESPEC_NO_MEMORY_OF_COSTS", "1")

    def call(**options):
        return edgespec.load(files[0], **{"draft": files[1]} | options, backend="reference", context_length=256)

    return call


@pytest.mark.exhaustive
def test_alpha_0_is_exact_to_the_bit(load):
    """And another alpha is not, so that this can fail."""
    found = {}
    for alpha in (None, "0", "0.0", "0.9"):
        with load(approximate=alpha and f"cascade:{alpha}", planner="specexec", budget=8) as model:
            results = [model.generate("a b a", temperature=0.9, seed=seed, max_tokens=30) for seed in range(3)]
            found[str(alpha)] = [result.token_ids for result in results]
            assert {result.stats.approximate for result in results} == {"cascade 0.9" if alpha == "0.9" else ""}
            assert model.where.exact == (alpha != "0.9")
    assert found["None"] == found["0"] == found["0.0"] != found["0.9"]


@pytest.mark.parametrize(
    "planner",
    [
        pytest.param("specexec"),
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("none", "sssd", "chain", "auto")),
    ],
)
def test_every_planner_writes_the_same_alone_and_with_others(load, planner):
    grammar = edgespec.regex("[a-e ]{12,16}")
    with load(approximate="cascade:0.7", planner="none") as model:
        plain = [one.text for one in model.branch("a b", 4, temperature=0.9, max_tokens=20, seed=0)]
        matched = model.generate("a b", grammar=grammar, temperature=0.9, max_tokens=20, seed=1).text
        punished = model.generate("a b", temperature=0.9, frequency_penalty=0.5, max_tokens=20, seed=0).text
    with load(approximate="cascade:0.7", planner=planner, parallel=3) as model:
        assert [one.text for one in model.branch("a b", 4, temperature=0.9, max_tokens=20, seed=0)] == plain
        assert model.generate("a b", grammar=grammar, temperature=0.9, max_tokens=20, seed=1).text == matched
        assert model.generate("a b", temperature=0.9, frequency_penalty=0.5, max_tokens=20, seed=0).text == punished
    assert set(matched) <= set("abcde ")


@pytest.mark.exhaustive
def test_a_chat_goes_on_as_a_new_session_would(load):
    with load(approximate="cascade:0.7", planner="specexec", budget=8) as model:
        first = model.generate("one two", temperature=0.9, max_tokens=12, seed=0)
        longer = "one two" + first.text + " three"
        again = model.generate(longer, temperature=0.9, max_tokens=12, seed=0).text
    with load(approximate="cascade:0.7", planner="none") as model:
        assert model.generate(longer, temperature=0.9, max_tokens=12, seed=0).text == again


def test_run_says_that_the_text_is_approximate(run, files):
    where = ["--draft", files[1], "--backend", "reference", "--raw", "-n", "8"]
    code, _, said = run("run", files[0], "a b", *where, "--approximate", "cascade:0.5")
    assert code == 0
    assert said.splitlines()[-1].count("approximate: cascade 0.5") == 1
    assert "approximate (cascade 0.5): not the text of plain decoding" in said
    code, printed, _ = run("run", files[0], "a b", *where, "--approximate", "cascade:0.5", "--json")
    assert json.loads(printed)["stats"]["approximate"] == "cascade 0.5"
    assert json.loads(printed)["where"]["exact"] is False
    code, _, said = run("run", files[0], "a b", *where, "--approximate", "cascade:0")
    assert code == 0
    assert "approximate" not in said


@pytest.mark.exhaustive
def test_bench_compares_the_planners_of_one_alpha(run, files, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b a b"}\n{"prompt": "one two"}\n')
    options = ["--model", files[0], "--draft", files[1], "--backend", "reference", "--raw", "-n", "12", "-t", "0.8"]
    code, printed, said = run(
        "bench", str(prompts), *options, "--planners", "sssd,specexec", "--approximate", "cascade:0.6", "--json"
    )
    assert code == 0, said
    report = json.loads(printed)
    assert report["approximate"] == "cascade 0.6"
    assert [row["ties"] + row["unexplained"] for row in report["planners"].values()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--approximate", "cascade:1.5", "--draft", "DRAFT"],
            "the value of approximate cascade is '1.5', but must be from 0 to 1",
        ),
        (
            ["--approximate", "cascade:0.5"],
            "--approximate cascade needs a draft model of its own: name one with --draft (draft=…)",
        ),
        (
            ["--approximate", "cascade:0.5", "--draft", "head"],
            "--approximate cascade needs a draft model of its own, and head is none: name one with --draft (draft=…)",
        ),
        (["--approximate", "cascade:0.5", "--draft", "DRAFT", "--exact", "narrow"], "--exact narrow asks for the text"),
        (
            ["--approximate", "cascade:0.5", "--draft", "DRAFT", "--planner", "pearl"],
            "the planner pearl does not go with --approximate cascade",
        ),
        (
            ["--approximate", "cascade:0.5", "--draft", "DRAFT", "--targets", "2"],
            "several targets have no option 'approximate'",
        ),
    ],
)
def test_what_a_cascade_cannot_do_is_one_line(run, files, arguments, line):
    arguments = [files[1] if one == "DRAFT" else one for one in arguments]
    code, printed, said = run("run", files[0], "a b", "--backend", "reference", "--raw", *arguments)
    assert (code, printed) == (2, "")
    assert line in said
    assert len(said.strip().splitlines()) == 1


def test_exact_off_goes_with_a_cascade(load):
    with load(approximate="cascade:0.5", exact="off") as model:
        assert model.approximate == "cascade 0.5"


def test_old_names_work_and_say_what_to_write(run, files, load):
    where = ["--draft", files[1], "--backend", "reference", "--raw", "-n", "8"]
    code, _, said = run("run", files[0], "a b", *where, "--cascade", "0.5", "--no-ahead")
    assert code == 0
    assert "approximate: cascade 0.5" in said
    assert said.splitlines()[:2] == [
        "note: --cascade goes with the next version; write --approximate cascade:ALPHA",
        "note: --ahead/--no-ahead goes with the next version; in Python: edgespec.load(…, ahead=…)",
    ]
    says = "cascade= goes with the next version: write approximate='cascade:0.5'"
    with pytest.warns(DeprecationWarning, match=says), load(cascade=0.5) as model:
        assert model.approximate == "cascade 0.5"


def test_more_texts_at_once_than_a_draft_has_sessions_for_are_refused(load):
    with pytest.raises(UsageError, match="parallel is 65; 64 are the most with cascade: it needs two sessions each"):
        load(approximate="cascade:0.5", parallel=65)


@pytest.mark.exhaustive
def test_answers_of_the_server_say_so(load, tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    from edgespec.server.app import make_app
    from edgespec.server.service import Service

    other, fingerprints = str(tmp_path / "draft.npz"), set()
    perturbed(random_model(2, vocab_size=258), 0.9, 7).save(other)
    for alpha, draft in ((0.5, {}), (0.6, {}), (0.6, {"draft": other})):
        with (
            load(approximate=f"cascade:{alpha}", **draft) as model,
            testclient.TestClient(make_app(Service(model, "m")), base_url="http://127.0.0.1") as client,
        ):
            assert client.get("/health").json()["approximate"] == f"cascade {alpha}"
            asked = {"model": "m", "prompt": "a b", "max_tokens": 3}
            answer = client.post("/v1/completions", json=asked).json()
            assert answer["edgespec"]["stats"][0]["approximate"] == f"cascade {alpha}"
            fingerprints.add(answer["system_fingerprint"])
            parts = client.post("/v1/completions", json=asked | {"stream": True}).text.split("\n\n")
            told = [json.loads(part.removeprefix("data: ")) for part in parts if part.startswith("data: {")]
            assert len(told) > 1
            assert {part["edgespec"]["approximate"] for part in told} == {f"cascade {alpha}"}
            model.target.vocab.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
            asked = {"model": "m", "max_tokens": 3, "stream": True, "messages": [{"role": "user", "content": "a"}]}
            started = client.post("/v1/messages", json=asked).text.split("data: ")[1].splitlines()[0]
            assert json.loads(started)["message"]["edgespec"] == {"approximate": f"cascade {alpha}"}
    assert len(fingerprints) == 3


@pytest.mark.exhaustive
def test_a_step_that_is_given_up_changes_no_text():
    """As where the target's pass was interrupted, or had no room."""
    found = []
    for given_up in (False, True):
        target, draft = pair()
        generation = Generation(
            target, target.open(), cascade(SpecExecPlanner, draft), PROMPT, SAMPLED, **PLAIN, stats=GenerationStats()
        )
        generation.read_prompt()
        while not generation.finished:
            if given_up:
                run_one(generation.propose())
                generation.give_up()
            pass_ = generation.cut(run_one(generation.propose()))
            generation.accept(pass_, target.forward([pass_.work])[0])
        found.append(generation.token_ids)
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_passes_of_the_draft_that_mix_makes_are_time_of_the_draft():
    target, draft = pair()
    before_passes(draft, lambda batch: sleep(0.002))
    planner = cascade(NonePlanner, draft)
    planner.propose = planner._planner.propose  # so that `mix` reads all
    _, stats = write(target, planner, PROMPT, SAMPLED, **PLAIN)
    assert stats.draft_seconds >= 0.002 * stats.passes > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("full", [False, True])
def test_sequences_share_passes_of_the_draft_and_a_full_one_is_read_alone(full):
    target, draft = ReferenceBackend(TARGET, sessions=3), ReferenceBackend(DRAFT, sessions=3)
    alone = [write(target, cascade(NonePlanner, draft), [5, 9, seed], SAMPLED, **PLAIN)[0] for seed in range(3)]
    for backend in (target, draft):
        for session in backend.opened.copy():
            session.close()

    def count(batch):
        if full and len(batch) > 1:
            raise ContextFull("the cache is full")
        return len(batch)

    sizes = before_passes(draft, count)
    steps = [
        Generation(target, target.open(), cascade(NonePlanner, draft), [5, 9, seed], SAMPLED, **PLAIN | {"budget": 1},
                   stats=GenerationStats())
        for seed in range(3)
    ]  # fmt: skip
    for each in steps:
        each.read_prompt()
    for _ in range(23):
        proposed = run_shared([each.propose(sequences=3) for each in steps])
        passes = [each.cut(one) for each, one in zip(steps, proposed, strict=True)]
        logits = target.forward([one.work for one in passes])
        for each, one, found in zip(steps, passes, logits, strict=True):
            each.accept(one, found, Ran(sequences=3))
    assert [each.token_ids[3:] for each in steps] == alone
    assert sizes.count(1 if full else 3) >= 23
    assert full or steps[0].stats.draft_seconds > 0


class Copying(NonePlanner):
    """Proposes the same likely tokens in each step, as from another text."""

    def __init__(self, token_ids):
        self._token_ids = token_ids

    def propose(self, context, budget):
        yield from ()
        return Proposal(chain_of([context.token_ids[-1], *self._token_ids]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("draft", "planner"),
    [
        ({"recurrent": True}, SpecExecPlanner),
        *(({"vocab_size": 40, "sharpness": 3.0}, lambda draft, copied=copied: Copying(copied))
          for copied in ([44, 3], [3, 44])),
    ],
    ids=["recurrent layers", "a token that it lacks first", "a token that it lacks last"],
)  # fmt: skip
def test_no_draft_s_kind_changes_a_text(draft, planner):
    draft = ReferenceBackend(random_model(1, **{"vocab_size": 48} | draft), sessions=2)
    plain = cascade(NonePlanner, draft)
    expected, _ = write(ReferenceBackend(TARGET), plain, PROMPT, SAMPLED, **PLAIN)
    plain.close()
    assert write(ReferenceBackend(TARGET), cascade(planner, draft), PROMPT, SAMPLED, **PLAIN)[0] == expected
