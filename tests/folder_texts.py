"""What tests of engines share: texts that must be those of plain decoding, and models with recurrent layers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from alone import written
from contract import chain_rows, work

import edgespec
from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.measure.lossless import explain, replay
from edgespec.planners.auto import new_auto_state
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.choice import make_planner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, seed=2),
]
by_temperature = pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=0.7", "T=1"])
HYBRID_PROMPT = [*range(5, 25), *range(5, 17)]  # with something to copy
PROMPTS = [[5, 9, 30, 7, 9, 30, 11, 5, 9], [100, 3, 100, 3], HYBRID_PROMPT]
PLANNERS = ("auto", "chain", "specexec")  # by sampling: greedily, random heads are seldom right
HYBRID_MAKERS = [
    lambda draft: SpecExecPlanner(draft, depth=6, beam=4),
    lambda draft: ChainPlanner(draft, depth=4),
    lambda draft: SssdPlanner(depth=5),
    lambda draft: LookaheadPlanner(depth=5),
]


def write(
    target: Any, planner: Any, prompt: Sequence[int], sampling: SamplingParams, count: int, budget: int = 16
) -> tuple[list[int], GenerationStats]:
    session = target.open()
    options: dict[str, Any] = {"max_tokens": count, "budget": budget, "stop_ids": frozenset[int]()}
    found = written(target, planner, prompt, sampling, session=session, **options)
    session.close()
    return found


def check_lossless(
    target: Any, planners: Iterable[Any], prompt: Sequence[int], sampling: SamplingParams, count: int, budget: int = 16
) -> list[float]:
    """Every token is what plain decoding samples after the same text, or ties with it; the runs' acceptance lengths."""
    plain, _ = write(target, NonePlanner(), prompt, sampling, count, budget)
    assert replay(target, prompt, plain, sampling) == []  # plain decoding can be repeated to the bit
    lengths = []
    for planner in planners:
        output, stats = write(target, planner, prompt, sampling, count, budget)
        found = explain(target, prompt, plain, output, sampling)
        if found is not None:  # what follows can only be checked along the other text
            bad = [other for other in (found, *replay(target, prompt, output, sampling)) if not other.tie]
            assert not bad, f"{planner.name}, {sampling}: " + "; ".join(map(str, bad))
        planner.close()
        lengths.append(stats.acceptance_length)
    return lengths


def check_head(target: Any, head: Any, whole: bool) -> list[tuple[float, int]]:
    """Texts with a head are those of plain decoding, to the bit.

    Args:
        target: any.
        head: of it.
        whole: all prompts, samplings and planners.

    Returns:
        Acceptance length and draft passes of each text, but for those that depend on time.
    """
    limits, found = target.capabilities, list[tuple[float, int]]()
    for number, sampling in enumerate(SAMPLINGS):
        for prompt in PROMPTS if whole else PROMPTS[:1]:
            plain, _ = write(target, NonePlanner(), prompt, sampling, 12)
            for name in PLANNERS if whole else PLANNERS[number:][:1]:
                state = new_auto_state(limits.streams, limits.experts) if name == "auto" else None
                planner = make_planner(name, [target, head], state=state)
                text, stats = write(target, planner, prompt, sampling, 12)
                planner.close()
                assert text == plain, f"{name}, {sampling}, {prompt}"
                found += [(stats.acceptance_length, stats.draft_passes)] if state is None else []
    return found


def check_head_over_pools(targets: Iterable[Any], load_head: Callable[[Any], Any], whole: bool) -> None:
    """A head drafts for a mixture in pools as for the same one in memory.

    Args:
        targets: that in memory, then that in pools.
        load_head: of a target.
        whole: as for `check_head`.
    """
    found = []
    for target in targets:
        head = load_head(target)
        found.append(check_head(target, head, whole))
        head.close()
    assert found[0] == found[1]
    assert max(length for length, _ in found[0]) > 1
    assert 0 < target.mixture.memory.hits < target.mixture.memory.wanted


def check_wrong_text(target: Any, prompt: Sequence[int], count: int) -> None:
    """`check_lossless` can fail: another seed's text is no tie, however rough the target."""
    texts = [write(target, NonePlanner(), prompt, SamplingParams(temperature=1.0, seed=s), count)[0] for s in (1, 2)]
    sampling = SamplingParams(temperature=1.0, seed=1)
    found = [explain(target, prompt, *texts, sampling), *replay(target, prompt, texts[1], sampling)]
    assert any(divergence is not None and not divergence.tie for divergence in found)


def check_grid(target: Any, draft: Any, number: int, whole: bool) -> float:
    """Planners with a recurrent model; returns the best acceptance length.

    Args:
        target: with recurrent layers.
        draft: the same, but right now and then.
        number: of the family; the sampling, and which planners, depend on it.
        whole: all samplings and planners.
    """
    assert (target.capabilities.paths, target.capabilities.max_leaves) == (True, 8)
    gained = list[float]()
    for sampling in SAMPLINGS if whole else [SAMPLINGS[number % 3]]:
        makers = HYBRID_MAKERS if whole else HYBRID_MAKERS[number % 2 :: 2]  # one that drafts, one that copies
        gained += check_lossless(target, (make(draft) for make in makers), HYBRID_PROMPT, sampling, 24 if whole else 16)
    return max(gained)


def check_unread(target: Any, memory: Any, prompt: Sequence[int], atol: float) -> Any:
    """Passes of a streamed recurrent model bring its states on; returns a session.

    Args:
        target: streamed.
        memory: the same model in memory.
        prompt: tokens.
        atol: most that logits may differ.
    """
    session, chain, owed = target.open(), range(-1, 5), list[int]()
    prefill(target, session, prompt)
    for number in range(12):  # a chain of which three are right
        owed.append(session.unread_committed)
        target.forward([work(session, range(7 * number, 7 * number + 6), chain)])
        session.commit([0, 1, 2])
    assert sorted(owed)[6] == 3  # usually what the pass before has accepted
    row = target.forward([work(session, [0], [-1])])[0].row(0)
    np.testing.assert_allclose(row, chain_rows(memory, [*session.token_ids, 0])[-1], atol=atol)
    return session


def states_of(target: Any, tokens: Sequence[int]) -> Any:
    """What a target gives a head, of each token."""
    session, found = target.open(), list[Any]()
    prefill(target, session, tokens, saw=lambda work, logits: found.append(logits.states(range(len(work.token_ids)))))
    session.close()
    return np.concatenate(found)


def rows_of(backend: Any, prompt: Sequence[int]) -> Any:
    """Logits after a prompt, and of a tree below it."""
    session = backend.open()
    logits, node = prefill(backend, session, prompt, want_last=True)  # type: ignore[misc]
    first = logits.row(node)
    tree = backend.forward([work(session, [1, 2, 3, 4], [-1, -1, 0, 1])])[0]
    found = np.stack([first, *(tree.row(node) for node in range(4))])
    session.close()
    return found


def check_layers_by_name(folder: Any, backend: str) -> None:
    """The user names the target's own layers as its draft: the text is that of plain decoding."""
    options = {"context_length": 128, "backend": backend, "exact": "off", "budget": 8, "remember": False}
    texts = []
    for more in ({"planner": "none"}, {"draft": "layers", "planner": "specexec"}, {"draft": "layers"}):
        with edgespec.load(str(folder), **options, **more) as model:
            texts.append(model.generate("abc", max_tokens=12).text)
    assert len(set(texts)) == 1
