"""How a draft's search would have gone on beyond the tree that was sent, on recorded text, without the target.

While the target computes, the draft could guess on, and the next round begin with what it has found below the exit: the
last accepted node and the bonus. At temperature 0 a text does not depend on how it was guessed, so a recorded answer
says where every exit is. Each round's search is that of `specexec.py`, cut at the budget, then continued until it knows
`keep` nodes. What it had found after each of its draft passes goes to a file, one JSON line a round; `exit_gain.py`
reads from it what would have been gained.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UsageError
from edgespec.loop.backend import Backend, Logits, Vocab
from edgespec.loop.pass_times import Curve
from edgespec.loop.planner import Context
from edgespec.loop.sampling import IdArray, Noise, SamplingParams, Scores
from edgespec.loop.tree import ranked
from edgespec.measure.replay import MAX_LEAVES, Recording, read_recordings
from edgespec.planners.ahead import AheadSearch
from edgespec.planners.cost import best_size, worth_reading
from edgespec.planners.drafting import ChildScores, Drafter
from edgespec.planners.search import COMMITTED, MOST_DEPTH, Search
from edgespec.planners.specexec import SpecExecPlanner

Nodes = list[tuple[int, float]]  # of passes: how many each read, and its seconds


@dataclass(frozen=True, slots=True)
class How:
    """How the draft searches."""

    budget: int = 64  # most nodes of the tree that is sent
    keep: int = 512  # most nodes that are known: the search goes on for so many
    depth: int = 32  # most passes before the tree is sent
    beam: int = 16  # most nodes of a pass
    leaves: int = 96  # most leaves of what the draft has read
    most_passes: int = 96  # of a round
    target_ms: tuple[tuple[int, float], ...] = ()  # (nodes, ms) of the target's passes: only what pays is read and sent
    draft_ms: tuple[tuple[int, float], ...] = ()  # of the draft's; both or none


@dataclass(frozen=True, slots=True)
class Searched:
    """One round: the whole search, and what the target then wrote. Node 0 is the root."""

    kind: str  # of text
    text: int  # which of them
    start: int  # tokens of the answer before this round's
    token_ids: list[int]  # [n]
    parents: list[int]  # [n]
    log_probs: list[float]  # [n] of the whole path
    read: list[int]  # [n] the pass in which the draft read the node; -1: in none. It finds the node's children
    passes: Nodes  # all of the round; the first reads the root and what the draft lacked of the text
    searched: int  # passes before the tree was sent
    sent: list[int]  # its nodes, rising
    known: dict[str, int]  # K' -> passes after which the best K' nodes are found
    future: list[int]  # the answer from here on
    written: int  # tokens of it that this round gained, the bonus included
    ended: bool  # the answer ends where `future` does; else the recording was cut there
    candidates: list[tuple[int, float]]  # the draft's children of the last accepted node, best first; []: not read
    usual: float  # cutoff of the search, which the next one starts from

    @property
    def last(self) -> bool:
        """Nothing of the recording is left for a next round."""
        return self.written >= len(self.future)

    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node."""
        return {pair: node for node, pair in enumerate(zip(self.parents, self.token_ids, strict=True)) if node}

    def path(self, nodes: Callable[[int], bool] = lambda node: True) -> list[int]:
        """The answer's nodes, root first, as far as they are known and `nodes` has them."""
        children, path = self.children(), [0]
        for token in self.future:
            node = children.get((path[-1], token))
            if node is None or not nodes(node):
                break
            path.append(node)
        return path

    def exit(self) -> int:
        """The node of the bonus, below the last accepted one; -1: it is not known."""
        path = self.path()
        return path[self.written] if len(path) > self.written else -1


def stages(how: How) -> list[int]:
    """Numbers of known nodes that are looked at."""
    grown = (how.budget * part // 2 for part in (3, 4, 6, 8, 12, 16))
    return sorted({*(size for size in grown if size < how.keep), how.keep})


@dataclass(slots=True)
class _Log:
    """A search as it goes on."""

    search: Search
    scores: ChildScores
    told: list[tuple[IdArray, Scores]]  # children of every node read, and their log q
    passes: Nodes
    reads: list[int]  # nodes, in the order of reading
    read_in: list[int]  # the pass of each
    known: dict[str, int]  # as in `Searched`
    sent: NDArray[np.bool_]  # [n]
    searched: int = 0
    usual: float = -np.inf  # cutoff when the tree was sent


def search_round(drafter: Drafter, recording: Recording, start: int, how: How, usual: float) -> Searched:
    """Search, cut, search on, and walk the recorded text.

    Args:
        drafter: it has read the text before the last round's output.
        recording: prompt and answer.
        start: tokens of the answer that are written.
        how: the search.
        usual: the last round's cutoff.
    """
    token_ids, draft = recording.prompt_ids + recording.output_ids[:start], drafter.draft
    noise = Noise(0, draft.vocab.size)  # the draft guesses no token beyond it
    context = Context(token_ids, len(recording.prompt_ids), SamplingParams(), noise, how.keep, MAX_LEAVES)
    log, future = _begin(drafter, context, how, usual), recording.output_ids[start:]
    search = log.search
    search.most_depth = min(how.depth, drafter.room(context))
    _search_on(drafter, log, how, search.most_depth)
    log.sent, log.searched = _best(search, _size(log, how), MAX_LEAVES), len(log.passes)
    log.usual = search.cutoff(how.budget)
    path = _walk(search, log.sent, future)
    if len(path) < len(future):  # the text goes on, and so does the search
        search.usual, search.most_depth = -np.inf, MOST_DEPTH
        _search_on(drafter, log, how, how.most_passes)
    for size in stages(how):
        log.known.setdefault(str(size), len(log.passes))
    candidates = list[tuple[int, float]]()
    if path[-1] in log.reads:
        ids, values = log.told[log.reads.index(path[-1])]
        candidates = list(zip(ids.tolist(), values.tolist(), strict=True))
    reads = np.full(len(search.parents), -1)
    reads[log.reads] = log.read_in
    # What was read beside the target's pass is lost again: each round's search is a fresh one.
    early = takewhile(lambda node: 0 <= reads[node] < log.searched, search.follow(future[: len(path)]))
    drafter.commit(search.place[list(early)].tolist())
    sent = np.pad(log.sent, (0, len(reads) - len(log.sent)))
    kept = _best(search, how.keep, len(reads)) | sent | (reads >= 0)
    numbers = np.cumsum(kept) - 1
    log_probs = [round(value, 6) for value in search.log_probs[kept].tolist()]
    return Searched(
        "", 0, start, search.token_ids[kept].tolist(), [-1, *numbers[search.parents[kept][1:]].tolist()], log_probs,
        reads[kept].tolist(), log.passes, log.searched, numbers[sent].tolist(), log.known, list(future), len(path),
        recording.output_ids[-1] in draft.vocab.eog_ids, candidates, float(log.usual),
    )  # fmt: skip


def _best(search: Search, size: int, max_leaves: int) -> NDArray[np.bool_]:
    """Which nodes are the root or among the best `size`: shape [n]."""
    kept = np.zeros(len(search.parents), np.bool_)
    kept[0] = kept[ranked(search.parents, search.log_probs, size, max_leaves)] = True
    return kept


def _begin(drafter: Drafter, context: Context, how: How, usual: float) -> _Log:
    """Read the root."""
    search = AheadSearch(context.token_ids[-1], how.budget)
    search.usual, search.known = usual, how.keep
    log = _Log(search, ChildScores(context, None, True), [], [], [], [], {}, np.zeros(0, np.bool_))
    lacking, before = max(1, drafter.behind(context.token_ids)), drafter.seconds
    logits, root = drafter.read(context.token_ids)
    _add(log, logits, np.array([0]), [root], [COMMITTED], (lacking, drafter.seconds - before))
    return log


def _add(
    log: _Log, logits: Logits, batch: IdArray, nodes: Sequence[int], places: Sequence[int], took: tuple[int, float]
) -> None:
    """A pass is over: nodes of the search that are `nodes` in its logits, and stay at `places`."""
    search = log.search
    children = log.scores.children(
        logits, nodes, search.depth[batch].tolist(), min(SpecExecPlanner.children, search.most_known)
    )
    search.add_children(batch, places, *children)
    log.told += zip(*children, strict=True)
    log.reads += batch.tolist()
    log.read_in += [len(log.passes)] * len(batch)
    log.passes.append(took)


def _search_on(drafter: Drafter, log: _Log, how: How, most_passes: int) -> None:
    """Read until nothing is left that is worth it: for the tree, or where that was sent, for what is to be known."""
    search, limits, sending = log.search, drafter.draft.capabilities, not log.searched
    leaves = min(how.leaves, limits.leaves(1))
    while len(log.passes) < most_passes:
        search.budget = how.budget if sending else how.keep  # what lies beyond it is not read
        unread, beam = search.unread(), min(how.beam, limits.max_wanted)
        if how.target_ms and sending:
            costs = curve(how.target_ms), curve(how.draft_ms)
            values = search.log_probs[unread[:beam]]
            beam = worth_reading(search.best(), values, how.budget, _spent(log, how), *costs, search.child)
        batch = search.take(unread, beam, leaves, limits.max_nodes)
        if len(batch) == 0:
            break
        before = drafter.seconds
        logits, nodes = drafter.evaluate(search.token_ids[batch], search.place[search.parents[batch]])
        _add(log, logits, batch, nodes.tolist(), nodes.tolist(), (len(batch), drafter.seconds - before))
        if not sending:
            _note_known(log, how)
    search.budget = how.budget


def _note_known(log: _Log, how: How) -> None:
    """For which K' nothing is left to read."""
    for size in stages(how):
        if str(size) not in log.known:
            log.search.budget = size
            if len(log.search.unread()):
                return
            log.known[str(size)] = len(log.passes)


def _spent(log: _Log, how: How) -> float:
    return sum(float(curve(how.draft_ms).seconds(nodes)) for nodes, _ in log.passes)


def _size(log: _Log, how: How) -> int:
    """Nodes to send: the budget, or what pays."""
    if not how.target_ms:
        return how.budget
    return best_size(log.search.best(), _spent(log, how), curve(how.target_ms))[0]


def _walk(search: Search, sent: NDArray[np.bool_], future: Sequence[int]) -> list[int]:
    """The nodes of the tree that the answer goes along, the root first; at most as many as it has tokens."""
    above, tokens, path = search.parents.tolist(), search.token_ids.tolist(), [0]
    children = {(above[node], tokens[node]): node for node in np.flatnonzero(sent).tolist()}
    while len(path) < len(future) and (child := children.get((path[-1], future[len(path) - 1]))) is not None:
        path.append(child)
    return path


def curve(points: Sequence[tuple[int, float]]) -> Curve:
    """Seconds of passes, from (nodes, ms): straight lines between them, and beyond the last two."""
    sizes, took = (np.array(part, np.float64) for part in zip(*sorted(points), strict=True))
    took = np.array(list(accumulate(took, max))) / 1000
    slope = (took[-1] - took[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
    return Curve(sizes, took, float(slope))


def read_kinds(paths: Sequence[Path], vocab: Vocab, max_tokens: int) -> dict[tuple[str, int], Recording]:
    """Recorded answers by kind of text, which is the file's name, and number; errors as for `read_recordings`.

    Raises:
        UsageError: there are none, or two files have one name.
    """
    if len({path.stem for path in paths}) < len(paths):
        raise UsageError("two files of answers have one name, which tells kinds of text apart; rename one")
    found = {
        (path.stem, number): recording
        for path in paths
        for number, recording in enumerate(read_recordings(path, vocab, max_tokens))
    }
    if not found:
        raise UsageError(f"{', '.join(map(str, paths))}: no greedy answer of plain decoding in it")
    return found


def log_rounds(
    draft: Backend,
    recordings: Mapping[tuple[str, int], Recording],
    how: How,
    out: Path,
    done: Callable[[int], None] = lambda tokens: None,
    origin: str = "",
) -> None:
    """Replay what `out` does not hold yet; a line is appended when a round is over.

    Args:
        draft: no session of it is open.
        recordings: by kind of text, and number.
        how: the search.
        out: begins with a line of `how` and `origin`.
        done: told how many more tokens of the answers are behind.
        origin: the draft.

    Raises:
        UsageError: the file holds something else, or rounds of another search.
    """
    settings = json.dumps({"draft": origin, **asdict(how)})
    rounds = list[Searched]()
    if out.exists() and out.stat().st_size:
        there, rounds = read_rounds(out)
        if there != json.loads(settings):
            raise UsageError(f"{out}: holds rounds of another search ({json.dumps(there)}); give another file")
    reached = {(round_.kind, round_.text): round_ for round_ in rounds}
    drafter = Drafter(draft, None)
    try:
        with whole_lines(out).open("a", encoding="utf-8") as file:
            if not rounds and not out.stat().st_size:
                file.write(settings + "\n")
            # Kinds by turns, so that what is stopped early has of each.
            for (kind, number), recording in sorted(recordings.items(), key=lambda item: item[0][1]):
                last = reached.get((kind, number))
                start = last.start + last.written if last else 0
                done(start)
                usual = last.usual if last else -np.inf
                drafter.begin(_held(recording, last), True)
                while start < len(recording.output_ids):
                    found = search_round(drafter, recording, start, how, usual)
                    file.write(json.dumps({**asdict(found), "kind": kind, "text": number}) + "\n")
                    file.flush()
                    start, usual = start + found.written, found.usual
                    done(found.written)
    finally:
        drafter.close()


def _held(recording: Recording, last: Searched | None) -> list[int]:
    """What the draft has read after the last round, and a token."""
    tokens = recording.prompt_ids
    if last:
        read = len(last.path(lambda node: 0 <= last.read[node] < last.searched)) - 1
        tokens = tokens + recording.output_ids[: last.start + min(read, last.written) + 1]
    return tokens


def whole_lines(path: Path) -> Path:
    """The file without a last line that was cut short."""
    if path.exists():
        text = path.read_bytes()
        path.write_bytes(text[: text.rfind(b"\n") + 1])
    return path


def read_rounds(path: Path) -> tuple[dict[str, Any], list[Searched]]:
    """How it was searched, and all rounds; a last line that was cut short is left out.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if not rows or "budget" not in rows[0]:
            raise ValueError("no first line that says how it was searched")
        return rows[0], [Searched(**row) for row in rows[1:]]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: is not a file of scripts/exit-log replay: {error}") from error
