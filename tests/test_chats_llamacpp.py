"""Chats of 25 turns on every kind of model, from memory, from files and from cells in order: as if each were alone."""

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from test_fuzz_llamacpp import EXACT, KINDS, written

import edgespec
from edgespec.scheduler import drive

TURNS, FEW_TURNS, RESUMED = 25, 8, (7, 18)  # the last: turns before which the program begins again
# A mixture with windows, three kinds of recurrent layers, and a plain model. Others: test_fuzz_llamacpp.
OFTEN = ("gpt-oss, 8 bits", "granitehybrid", "qwen35", "mamba", "quantised")


def letters(rng, count):
    return "".join(map(chr, rng.integers(97, 122, count)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.exhaustive) for kind in (*KINDS, *EXACT)]
)
def test_chats_go_on_as_if_alone(kind, parallel, tmp_path, whole_grid):
    """All chats of a turn are answered at once. The last words of each are written differently in the next turn."""
    path, rng, file = str(written(tmp_path, kind)), np.random.default_rng(1), tmp_path / "a.session"
    options = {"planner": "none", "threads": 1, "remember": False, "context_length": 500}
    chats = [letters(rng, 200) for _ in range(max(2, parallel))]
    alone, model = edgespec.load(path, **options), edgespec.load(path, parallel=parallel, **options)
    for turn in range(TURNS if whole_grid else FEW_TURNS):
        if turn in RESUMED:
            model.scheduler.save(file)
            model.close()
            model = edgespec.load(path, parallel=parallel, **options)
            model.scheduler.load(file)
        elif turn % 5 == 4:
            model.scheduler.save(file)
            model.scheduler.forget()
            model.scheduler.load(file)
        if turn % 7 == 6 and not model.target.capabilities.paths:
            model.target.cells.put_in_order(model.target.sessions)
        chats = [chat[: len(chat) - int(rng.integers(100))] + letters(rng, 40) for chat in chats]
        requests = [model.request(chat, max_tokens=4, temperature=1.0, seed=turn) for chat in chats]
        found = [[] for _ in chats]
        for number, event in drive.events_of(model.scheduler, requests):
            found[number] += [chunk.token_id for chunk in drive.chunks_in(event)]
        for number, (chat, tokens) in enumerate(zip(chats, found, strict=True)):
            if (turn + number) % 2 and not whole_grid:
                continue
            alone.scheduler.forget()
            assert tokens == alone.generate(chat, max_tokens=4, temperature=1.0, seed=turn).token_ids, turn
        chats = [f"{chat}the next words " for chat in chats]
    alone.close()
    model.close()
