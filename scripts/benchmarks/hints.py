"""Early-exit hints: does the target's state in the middle of its pass say where the round will end?

Mirror speculative decoding (arXiv 2510.13161) lets the draft see what the target makes of an earlier layer. Offline:
the trees of `exits.py` go through the target on PyTorch once more, and the states behind some layers of every node are
read with the model's own norm and output matrix (the "logit lens"), for the draft's candidates only. Then two questions
are put at the exits:

    rank        is the bonus the lens's best candidate of the last accepted node, and is it the draft's?
    h(2K)       is it among the K best nodes besides the tree, if all known nodes below the tree's are ordered by
                (1 - b) log q + b lens instead of log q?
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.exit_gain import Beside, found_after, gained, go_on, texts, tree_of
from benchmarks.exits import Searched, whole_lines
from edgespec.errors import UsageError
from edgespec.loop.backend import Backend, Work
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import log_sum_exp
from edgespec.measure.replay import Recording

PARTS = (1 / 2, 5 / 8, 3 / 4, 1)  # of the layers; after all of them the lens is the target itself: a check
WEIGHTS = tuple(round(0.1 * tenth, 1) for tenth in range(11))  # b
BAR = 0.15  # that h(2K) must rise by


@dataclass(frozen=True, slots=True)
class Hint:
    """What the lens says of one round, by layers computed."""

    kind: str
    text: int
    start: int
    scores: dict[str, dict[str, float]]  # layers -> node -> lens logit, of all known children of the tree's nodes
    candidates: dict[str, list[float]]  # layers -> lens logit of each of the round's `candidates`


@contextmanager
def states_of(target: Backend, layers: Sequence[int]) -> Iterator[dict[int, Any]]:
    """The rows behind so many layers of the last pass, [n, d] each."""
    model: Any = target.model  # type: ignore[attr-defined]
    found = dict[int, Any]()

    def keep(count: int) -> Callable[..., None]:
        def hook(module: Any, given: Any, out: Any) -> None:
            found[count] = (out[0] if isinstance(out, tuple) else out)[0].clone()

        return hook

    hooks = [model.model.layers[count - 1].register_forward_hook(keep(count)) for count in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def lens(target: Backend, states: Any, ids: Sequence[int]) -> list[float]:
    """Logits of these tokens, made of states [d] by the model's norm and output matrix."""
    import torch

    model: Any = target.model  # type: ignore[attr-defined]
    with torch.inference_mode():
        rows = model.lm_head.weight[torch.tensor(list(ids))]
        return [round(float(value), 4) for value in (rows @ model.model.norm(states)).float()]


def hint_text(
    target: Backend, recording: Recording, rounds: Sequence[Searched], layers: Sequence[int]
) -> Iterator[Hint]:
    """The rounds of a text, one pass of the target over each tree that was sent."""
    session = target.open()
    try:
        for round_ in rounds:
            prefill(target, session, [*recording.prompt_ids, *recording.output_ids[: round_.start]][:-1])
            place = {node: i for i, node in enumerate(round_.sent)}
            parents = [-1, *(place[round_.parents[node]] for node in round_.sent[1:])]
            tokens = [round_.token_ids[node] for node in round_.sent]
            last = np.array([len(tokens) - 1], np.int32)
            with states_of(target, layers) as states:
                target.forward([Work(session, np.array(tokens, np.int32), np.array(parents, np.int32), last)])
            below = dict[int, list[int]]()
            for node in range(1, len(round_.parents)):
                if round_.parents[node] in place:
                    below.setdefault(round_.parents[node], []).append(node)
            end = place[round_.path(place.__contains__)[-1]]
            scores, candidates = dict[str, dict[str, float]](), dict[str, list[float]]()
            for count in layers:
                one = scores[str(count)] = dict[str, float]()
                for node, children in below.items():
                    found = lens(target, states[count][place[node]], [round_.token_ids[child] for child in children])
                    one |= dict(zip(map(str, children), found, strict=True))
                candidates[str(count)] = lens(target, states[count][end], [token for token, _ in round_.candidates])
            yield Hint(round_.kind, round_.text, round_.start, scores, candidates)
    finally:
        session.close()


def log_hints(
    target: Backend,
    recordings: Mapping[tuple[str, int], Recording],
    rounds: Sequence[Searched],
    out: Path,
    limit: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Append a line for every round that `out` does not hold yet; texts by turns.

    Args:
        target: the model of the recordings, on PyTorch.
        recordings: by kind and number.
        rounds: of `exits.py`.
        out: JSONL.
        limit: most rounds of a text.
        done: called after every round.
    """
    there = {(one.kind, one.text, one.start) for one in read_hints(out)} if out.exists() else set()
    count = len(target.model.model.layers)  # type: ignore[attr-defined]
    layers = [round(part * count) for part in PARTS]
    with whole_lines(out).open("a", encoding="utf-8") as file:
        for text in sorted(texts(rounds), key=lambda text: text[0].text):
            wanted = [one for one in text[:-1][:limit] if (one.kind, one.text, one.start) not in there]
            if wanted:
                recording = recordings[wanted[0].kind, wanted[0].text]
                for hint in hint_text(target, recording, wanted, layers):
                    file.write(json.dumps(asdict(hint)) + "\n")
                    file.flush()
                    done()


def read_hints(path: Path) -> list[Hint]:
    """All lines but one that was cut short. Raises UsageError: the file cannot be read, or holds something else."""
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
        return [Hint(**json.loads(line)) for line in lines if line.endswith("\n")]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: is not a file of scripts/exit-log hints: {error}") from error


def reweighed(round_: Searched, scores: Mapping[str, float], weight: float) -> list[float]:
    """log-probabilities [n] of paths where the tree's nodes divide what they give their known children anew.

    Args:
        round_: a round.
        scores: child -> lens logit.
        weight: b.
    """
    own = np.array(round_.log_probs)
    parents = np.array(round_.parents)
    conditional = np.where(parents >= 0, own - own[parents], 0.0)
    told = np.array([int(node) for node in scores])
    for parent in np.unique(parents[told]) if len(told) else ():
        children = told[parents[told] == parent]
        q = conditional[children]
        hint = np.array([scores[str(child)] for child in children])
        mixed = (1 - weight) * q + weight * (hint - log_sum_exp(hint))
        conditional[children] = mixed - log_sum_exp(mixed) + log_sum_exp(q)  # what is not known keeps its share
    found = [0.0]
    for node in range(1, len(parents)):
        found.append(found[parents[node]] + float(conditional[node]))
    return found


def hit(round_: Searched, size: int, log_probs: Sequence[float] | None = None) -> bool:
    """Whether the exit is among the K' nodes that are best by these of all that the round's search has found."""
    nodes = found_after(round_, len(round_.passes))
    return gained(round_, tree_of(round_, size, nodes, log_probs)) > round_.written


def judge(rounds: Sequence[Searched], hints: Sequence[Hint], budget: int) -> dict[str, Any]:
    """By kind of text: ranks at the exits, and h(2K) by layers and b.

    `fitted` is h with the layers and the b that are best on all other texts, of all kinds; the last layers left out.
    """
    there = {(one.kind, one.text, one.start): one for one in rounds}
    pairs = [(there[hint.kind, hint.text, hint.start], hint) for hint in hints]
    layers = list(pairs[0][1].scores) if pairs else []
    settings = [(count, weight) for count in layers for weight in WEIGHTS]
    hits = np.array(
        [
            [hit(one, 2 * budget, reweighed(one, hint.scores[count], weight)) for count, weight in settings]
            for one, hint in pairs
        ]
    )
    early = [i for i, (count, _) in enumerate(settings) if count != layers[-1]][::-1]  # of equal ones the later layer
    text = np.array([f"{one.kind} {one.text}" for one, _ in pairs])
    found = dict[str, Any]()
    for kind in sorted({hint.kind for hint in hints}):
        mine = np.array([hint.kind == kind for hint in hints])
        fitted = list[bool]()
        for name in np.unique(text[mine]):
            chosen = max(early, key=lambda i: hits[text != name, i].sum())
            fitted += hits[text == name, chosen].tolist()
        means = dict(zip(settings, hits[mine].mean(0).tolist(), strict=True))
        found[kind] = {
            "rounds": int(mine.sum()),
            "ranks": _ranks([pair for pair, is_mine in zip(pairs, mine, strict=True) if is_mine], layers),
            "own": fmean(hit(one, 2 * budget) for one, hint in pairs if hint.kind == kind),
            "by_layer": {count: max((means[count, b], b) for b in WEIGHTS) for count in layers},
            "fitted": fmean(fitted),
        }
    return found


def told_late(hints: Sequence[Hint], layers: str, part: float, weight: float, **how: Any) -> Beside:
    """The draft goes on by its own order, and when a part of the target's pass is over by the re-weighed one.

    Args:
        hints: of the rounds; others go on by their own order.
        layers: of the hint.
        part: when it comes, of the time that there is.
        weight: b.
        how: as for `go_on`: hidden, draft, beam.
    """
    there = {(one.kind, one.text, one.start): one for one in hints}
    hidden = how.pop("hidden")

    def beside(round_: Searched, read: set[int]) -> set[int]:
        hint = there.get((round_.kind, round_.text, round_.start))
        if hint is None:
            return go_on(round_, read, hidden, **how)
        done = go_on(round_, read, part * hidden, **how)
        return go_on(round_, done, (1 - part) * hidden, **how, log_probs=reweighed(round_, hint.scores[layers], weight))

    return beside


def _ranks(pairs: Sequence[tuple[Searched, Hint]], layers: Sequence[str]) -> dict[str, Any]:
    """At exits: how often the bonus is among the candidates, and best of those not in the tree, by whom."""
    asked, among = 0, 0
    first = dict.fromkeys(["draft", *layers], 0)
    for round_, hint in pairs:
        if not round_.candidates:
            continue
        asked += 1
        path, sent, children = round_.path(set(round_.sent).__contains__), set(round_.sent), round_.children()
        bonus = round_.future[round_.written - 1]
        tokens = [token for token, _ in round_.candidates]
        open_ = [i for i, token in enumerate(tokens) if children.get((path[-1], token)) not in sent]
        if bonus not in tokens:
            continue
        among += 1
        first["draft"] += tokens[open_[0]] == bonus
        for count in layers:
            first[count] += tokens[max(open_, key=lambda i: hint.candidates[count][i])] == bonus
    return {"asked": asked, "among": among, "first": first}
