"""Draft trees over mixtures, replayed: figures that can be computed by hand, the oracle, and traces as files."""

import gzip
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routes import Route, read_by_pools

from benchmarks.tree_replay import (
    ORACLES,
    WAYS,
    Costs,
    Decoding,
    Figures,
    Text,
    Trace,
    Way,
    best,
    oracle,
    oracle_beside,
    plain,
    read_trees,
    replay,
    replays,
    write_trace,
)
from edgespec.errors import ModelError, UsageError

COSTS = Costs(fixed=100, row=10, expert=1, miss=5, draft=8)
SIZE, ROOM = 1 << 20, 1 << 30


def text(
    ids: list[int], prompt: list[Any], trees: list[list[tuple[int, int, float, Any]]], predicted: Any = ()
) -> Text:
    """Nodes of trees are token, parent, probability, and experts by layer."""
    tokens, parents, likely, chosen = zip(*(node for tree in trees for node in tree), strict=True)
    return Text(
        np.array(ids, np.int32),
        np.array(prompt, np.uint16),
        np.array([len(tree) for tree in trees], np.int32),
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.log(likely),
        np.array(chosen, np.uint16),
        np.array(predicted, np.uint16),
    )


def small() -> Trace:
    """One layer of four experts. The prompt uses expert 0, the tokens 2, 3 and 4 use 0, 1 and 1."""
    nodes = (2, -1, 1.0, [[0]]), (3, 0, 0.6, [[1]]), (9, 0, 0.3, [[3]]), (4, 1, 0.5, [[1]]), (5, 3, 0.4, [[2]])
    trees = [[*nodes], [(3, -1, 1.0, [[1]]), (4, 0, 0.9, [[1]])], [(4, -1, 1.0, [[1]]), (5, 0, 0.9, [[2]])]]
    return Trace([text([1, 2, 3, 4, 5], [[[0]]], trees)], [SIZE], 4, 1)


def test_figures_by_hand() -> None:
    """The text ends with its last tree's token, so what is drafted after it is in vain."""
    found = replays(small(), ROOM, 0, COSTS, lambda done, total: None)
    one = {"tokens": 3, "read": SIZE, "waiting": 5}
    assert found["plain"] == Figures(steps=3, rows=3, experts=3, computing=3 * 111, **one)
    two = {"tokens": 3, "read": 2 * SIZE, "waiting": 10}
    assert found["chain of 1"] == Figures(steps=2, rows=4, experts=4, computing=2 * 122, drafting=16, **two)
    assert found["chain of 2"] == Figures(steps=1, rows=3, experts=2, computing=132, drafting=16, **one)
    assert found["tree of 4"] == Figures(
        tokens=3, steps=1, rows=5, experts=4, read=3 * SIZE, computing=154, waiting=15, drafting=24
    )
    assert found["oracle"] == found["chain of 2"]
    assert found["oracle, reads hidden"] == Figures(
        steps=1, rows=3, experts=2, computing=132, drafting=16, **one | {"waiting": 0}
    )


def random_trace(seed: int, size: int = SIZE) -> Trace:
    """Experts of tokens of the text are the same in every tree; all others are random."""
    rng, layers, count, used, steps = np.random.default_rng(seed), 3, 8, 2, 12
    ids = rng.integers(0, 5, 4 + 1 + steps).tolist()
    experts = [[rng.permutation(count)[:used].tolist() for _ in range(layers)] for _ in ids]
    trees = []
    for at in range(steps):
        tree, on_path = [(ids[4 + at], -1, 1.0, experts[4 + at])], {0: 0}  # node of the text -> its depth
        while len(tree) < 9:
            parent = int(rng.integers(len(tree)))
            token = int(rng.integers(5))
            if any((token, parent) == node[:2] for node in tree):
                continue
            deeper, chosen = on_path.get(parent, len(ids)) + 1, experts[rng.integers(len(ids))]
            if 4 + at + deeper < len(ids) and token == ids[4 + at + deeper]:
                on_path[len(tree)], chosen = deeper, experts[4 + at + deeper]
            tree.append((token, parent, tree[parent][2] * rng.uniform(0.3, 1), chosen))
        trees.append(tree)
    predicted = [[rng.permutation(count)[:used] for _ in range(layers)] for _ in range(9 * steps)]
    return Trace([text(ids, experts[:4], trees, predicted)], [size] * layers, count, 1)


@pytest.mark.parametrize("seed", range(6))
def test_where_all_experts_have_room_the_search_of_the_oracle_finds_the_fastest_way(seed: int) -> None:
    trace = random_trace(seed)
    whole, rng = trace.texts[0], np.random.default_rng(seed)

    def some(now: Decoding, tree: Any, chosen: Any) -> Any:
        nodes = [0]
        for node in range(1, len(tree)):
            if tree.parents[node] in nodes and rng.random() < 0.6:
                nodes.append(node)
        return np.array(nodes[1:], int), COSTS.draft * max(tree.depth[nodes])

    fastest = oracle(whole, Decoding(trace, ROOM, COSTS)).seconds
    for way in [*(way for way in WAYS.values() if not way.ahead), *[Way(some)] * 20]:
        found = replay(whole, way, Decoding(trace, ROOM, COSTS))
        assert found.tokens == 12
        assert found.seconds >= fastest - 1e-9


@pytest.mark.parametrize("seed", [25, 32, 37, 42])
def test_no_policy_is_faster_than_the_oracle_where_experts_leave(seed: int) -> None:
    """There its own search does not always find the fastest way."""
    trace, reading = random_trace(seed), Costs(fixed=1, row=1, expert=1, miss=50, draft=1)
    found = replays(trace, 12 * SIZE, 2 * SIZE, reading, lambda done, total: None)
    assert set(found) == {*WAYS, *ORACLES}
    for name, one in found.items():
        assert one.seconds >= found[oracle_beside(name)].seconds, name


def test_bytes_are_those_that_the_pools_read() -> None:
    trace = random_trace(0)
    whole = trace.texts[0]
    alone = np.stack([chosen[0] for _, chosen, _ in whole.steps])
    for room in (10 * SIZE, 16 * SIZE, ROOM):
        found = replay(whole, Way(plain), Decoding(trace, room, COSTS))
        route = Route(trace.count, trace.sizes, whole.prompt, alone)
        assert found.read / found.tokens == read_by_pools(route, room, 1)
        assert found.waiting == COSTS.miss * found.read / SIZE
    with pytest.raises(UsageError, match=r"^1 MiB for experts are too little: the smallest pools take 1"):
        Decoding(trace, SIZE, COSTS)


def test_what_is_read_ahead_costs_no_waiting_and_counts_as_used_or_not() -> None:
    now = Decoding(Trace([], [SIZE, SIZE], 8, 1), ROOM, COSTS)
    now.read_ahead([np.array(experts) for experts in ([[1, 2], [3, 3]], [[4, 4], [5, 5]])], 4)
    found = now.passed(np.array([[[1, 2], [5, 6]]]))
    assert (found.ahead, found.used, found.read, found.waiting) == (4 * SIZE, 2 * SIZE, 6 * SIZE, 2 * COSTS.miss)
    # Only slots of layer 1 are free for layer 0, but what is read ahead stays until its layer has had its turn.
    full = Decoding(Trace([], [2 * SIZE] * 2, 4, 1), 10 * SIZE, COSTS)
    full.passed(np.array([[[0, 1], [0, 1]]]))
    full.read_ahead([np.array([[0, 1], [2, 2]])], 9)
    found = full.passed(np.array([[[2, 2], [2, 2]]]))
    assert (found.ahead, found.used, found.read) == (2 * SIZE, 2 * SIZE, 4 * SIZE)
    # The first layer is computed in 57 seconds, and a read of the next takes less.
    found = now.passed(np.array([[[1, 2], [0, 1]]]), np.array([[[7, 7], [0, 1]]]))
    assert (found.ahead, found.used, found.waiting) == (SIZE, SIZE, COSTS.miss)
    now.costs = replace(COSTS, miss=60)
    assert now.passed(np.array([[[1, 2], [2, 2]]]), np.array([[[7, 7], [2, 0]]])).waiting == 60 - 57


def test_experts_of_tokens_that_were_seen_are_read_while_the_draft_works() -> None:
    """Token 7 uses expert 2 in both layers, which leaves for those of token 2. The draft's 8 s suffice for one read."""
    here, other, seven = [[1], [1]], [[0], [0]], [[2], [2]]
    trees = [[(2, -1, 1.0, here), (8, 0, 0.9, here)], [(7, -1, 1.0, seven), (8, 0, 0.9, here)]]
    trace = Trace([text([7, 1, 2, 7, 3], [seven, other], trees)], [2 * SIZE] * 2, 4, 1)
    found = replay(trace.texts[0], Way(best(1, 1), "table"), Decoding(trace, 10 * SIZE, COSTS))
    assert (found.read, found.ahead, found.used, found.waiting) == (8 * SIZE, 2 * SIZE, 2 * SIZE, 3 * COSTS.miss)
    late = replay(trace.texts[0], Way(best(1, 1)), Decoding(trace, 10 * SIZE, COSTS))
    assert (late.read, late.ahead, late.waiting) == (8 * SIZE, 0, 4 * COSTS.miss)


def test_a_trace_that_is_written_is_read_and_a_damaged_one_is_one_line(tmp_path: Path) -> None:
    path, whole = tmp_path / "trace.npz", random_trace(3)
    write_trace(path, whole)
    read = read_trees(path)
    assert (read.sizes, read.count, read.draft) == (whole.sizes, whole.count, whole.draft)
    for (tree, *experts), (wanted, *chosen) in zip(read.texts[0].steps, whole.texts[0].steps, strict=True):
        assert [tree.token_ids.tolist(), tree.parents.tolist()] == [wanted.token_ids.tolist(), wanted.parents.tolist()]
        np.testing.assert_array_equal(experts, chosen)
    data = path.read_bytes()
    for bad in (b"", b"no zip", data[:-200], data[:300] + b"\xff" * 40 + data[340:]):
        path.write_bytes(bad)
        with pytest.raises(ModelError, match=r"trace.npz: is no trace of trees, or damaged$"):
            read_trees(path)
    for at in range(0, len(data), 101):
        path.write_bytes(data[:at] + b"\xff" * 40 + data[at + 40 :])
        with suppress(ModelError):
            read_trees(path)
    one = whole.texts[0]
    for wrong in (
        {"parents": one.parents[::-1]},
        {"chosen": one.chosen + 8},
        {"ids": one.ids[::-1]},
        {"predicted": one.prompt},
    ):
        write_trace(path, replace(whole, texts=[replace(one, **wrong)]))
        with pytest.raises(ModelError, match="is no trace of trees"):
            read_trees(path)


def test_a_trace_is_recorded_and_replayed(bench: Any, tmp_path: Path) -> None:
    """The model drafts for itself, so its tokens are accepted, and a node chooses what it chooses as a root."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")
    from mixture_files import write_mixture

    model, prompts, out = write_mixture(tmp_path / "m.gguf", "qwen3 moe"), tmp_path / "p.jsonl", tmp_path / "t.npz"
    prompts.write_text('{"prompt": "hello you there"}\n{"prompt": "another text"}\n')
    asked = (model, "--draft", model, "--prompts", prompts, "-n", 12, "--nodes", 6, "--write", out)
    assert bench("trees", *asked)[0] == 0
    trace, alike = read_trees(out), list[Any]()
    assert (len(trace.texts), trace.count, trace.draft) == (2, 8, model.stat().st_size)
    for one in trace.texts:
        for at, (tree, chosen, predicted) in enumerate(one.steps):
            path = one.accepted(at, range(len(tree)))
            alike += [chosen[node] == one.steps[at + deep][1][0] for deep, node in enumerate(path)]
            assert predicted.shape == chosen.shape
    assert len(alike) > 40
    assert np.mean(alike) > 0.95
    code, shown, _ = bench("trees", out, "--memory", "1G", "--draft-memory", "1M", "--costs", "9,2,1,1,4")
    assert code == 0
    assert all(name in shown for name in [*WAYS, *ORACLES])
    out.write_text("hello")
    code, _, said = bench("trees", *asked)
    assert (code, out.read_text()) == (2, "hello")
    assert "exists and is not such a trace, so it is not replaced" in said.splitlines()[-1]
    code, _, said = bench("trees", out)
    assert (code, said.splitlines()[-1].endswith("is no trace of trees, or damaged")) == (1, True)


def test_of_a_route_trace_bytes_are_told(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    head = ["# route_trace v1", "# n_layer=2 n_expert=8 n_expert_used=1"]
    sizes = [f"# layer={layer} expert_bytes={SIZE}" for layer in range(2)]
    rows = [f"0,1,{i // 2},{i % 2},0,{i % 8},1.0" for i in range(40)]
    path = tmp_path / "t.route.csv.gz"
    path.write_bytes(
        gzip.compress("\n".join([*head, *sizes, "turn,phase,step,layer,slot,expert,weight", *rows]).encode())
    )
    code, shown, said = bench("trees", path, "--memory", "1G")
    assert (code, "last pass's ahead" in shown, "plain's" in shown) == (0, True, False), said
    path.write_bytes(gzip.compress("\n".join([*head, *rows]).encode()))
    assert "does not say the bytes of an expert for each layer" in bench("trees", path)[2]
    path.write_bytes(path.read_bytes()[:-30])
    code, _, said = bench("trees", path)
    assert (code, said.splitlines()[-1].endswith("is no gzipped route trace, or damaged")) == (1, True)
