"""The planner easyspec: layers of the draft in groups, and the pass that repairs its cache."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

from edgespec.backends.reference.backend import ReferenceBackend, random_model
from edgespec.backends.torch.backend import load
from hf_models import SMALL, save, tiny_model, transformers
from test_torch import Recorder, memory_for

from edgespec.errors import Interrupted, UsageError
from edgespec.lab.easyspec import EasySpecPlanner
from edgespec.loop.backend import Work
from edgespec.loop.draft_passes import Wanted, run_one, run_shared
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.planners.auto import AutoState
from edgespec.planners.choice import make_planner

OPTIONS = {"context_length": 128, "budget": 16, "threads": 1}
TEXT = [5, 9, 30, 7, 9, 30]


@pytest.fixture
def draft(tmp_path):
    folder = save(tiny_model("llama", num_hidden_layers=6), tmp_path)
    backend = load(str(folder), **OPTIONS, sessions=2)
    yield backend
    backend.close()


def last_row(backend, tokens=TEXT):
    session, nodes = backend.open(), np.arange(len(tokens), dtype=np.int32)
    row = backend.forward([Work(session, np.array(tokens, np.int32), nodes - 1, nodes[-1:])])[0].row(nodes[-1])
    session.close()
    return np.array(row)


def test_groups_of_several_layers_approximate_the_model(draft):
    exact = last_row(draft)
    rows = []
    for layers in (1, 2, 4):
        draft.group_layers(layers)
        rows.append(last_row(draft))
    draft.group_layers(1)
    assert (last_row(draft) == exact).all()
    assert (rows[0] == exact).all()
    assert (rows[1] != exact).any()
    assert (rows[2] != rows[1]).any()


def test_accepted_tokens_are_read_again_exactly(draft):
    planner, text, vocab = EasySpecPlanner(draft, depth=6, beam=4), list(TEXT), draft.vocab.size
    planner.begin(text)
    for _ in range(4):
        tree = run_one(planner.propose(Context(text, 3, SamplingParams(), Noise(0, vocab), 32, 64), 12)).tree
        assert len(tree) > 2
        accepted = tree.token_ids[1:3].tolist()  # the last is the bonus
        planner.observe(accepted, 0.0)
        assert planner.draft_session.token_ids == text  # no node of a grouped pass
        text += accepted
    logits, node = planner._drafter.read(text)
    assert logits.row(node) == pytest.approx(last_row(draft, text), abs=1e-4)
    planner.close()


def propose(planner, vocab):
    planner.begin(TEXT)
    return planner.propose(Context(TEXT, 3, SamplingParams(), Noise(0, vocab.size), 32, 64), 12)


def test_passes_after_a_failed_one_are_exact(draft, monkeypatch):
    """The first pass of a step reads the root, and the second one is of nodes."""
    planner, exact, groups = EasySpecPlanner(draft, depth=6, beam=4), last_row(draft), []
    forward = draft.forward

    def failing(batch):
        groups.append(draft._groups.size)
        if len(groups) == 2:
            raise Interrupted("the pass was interrupted")
        return forward(batch)

    monkeypatch.setattr(draft, "forward", failing)
    with pytest.raises(Interrupted):
        run_one(propose(planner, draft.vocab))
    assert groups == [1, 4]
    assert (last_row(draft) == exact).all()
    planner.close()


def test_other_sequences_passes_are_exact(draft):
    """As those that a cascade makes meanwhile."""
    planner, exact, rows = EasySpecPlanner(draft, depth=6, beam=4), last_row(draft), []

    def other():
        session, nodes = draft.open(), np.arange(len(TEXT), dtype=np.int32)
        for _ in range(4):
            work = Work(session, np.array(TEXT, np.int32), nodes - 1, nodes[-1:])
            rows.append(np.array((yield Wanted(draft, work)).logits.row(nodes[-1])))
            session.rewind(0)
        session.close()

    run_shared([propose(planner, draft.vocab), other()])
    assert planner.stats.draft_passes >= 2  # so some of the others came between
    for row in rows:
        assert row == pytest.approx(exact, abs=1e-4)
    planner.close()


def test_other_engines_and_layers_are_refused(tmp_path):
    with pytest.raises(UsageError, match="needs a draft on PyTorch"):
        EasySpecPlanner(ReferenceBackend(random_model(0, vocab_size=48)))
    granite = transformers.GraniteConfig(**SMALL, residual_multiplier=0.22)  # its layers have Llama's parts
    for model in (tiny_model("gemma2"), transformers.GraniteForCausalLM(granite)):
        other = load(str(save(model, tmp_path / model.config.model_type)), **OPTIONS)
        with pytest.raises(UsageError, match="as in Llama"):
            EasySpecPlanner(other)
        other.close()
    folder = save(tiny_model("llama", num_hidden_layers=5), tmp_path / "long")
    streamed = load(str(folder), **OPTIONS, gpu_memory=memory_for(folder, 1, **OPTIONS), copies=Recorder)
    with pytest.raises(UsageError, match="is streamed"):
        EasySpecPlanner(streamed)
    streamed.close()


def test_its_draft_never_goes_ahead(draft):
    """Else the planner would wait for a draft that waits, and would not learn the times of its passes."""
    planner = make_planner("easyspec", [draft, draft], state=AutoState(), ahead=True)
    assert [one.goes_ahead for one in planner._candidates] == [False]
    planner.close()
