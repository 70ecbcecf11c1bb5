"""Models with recurrent layers on MLX: all architectures write what plain decoding writes, however guessed."""

import gc
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import mlx.core as mx
from conftest import few
from contract import work
from edgespec.backends.mlx.backend import load
from folder_texts import HYBRID_PROMPT as PROMPT
from folder_texts import SAMPLINGS, check_grid, check_lossless, check_unread
from mlx_models import HYBRIDS, write_model
from test_mlx_streaming import load_streamed, small_parts  # noqa: F401, fixtures

from edgespec.loading.exact import apply_row_class
from edgespec.loop.passes import prefill
from edgespec.machine.this_machine import this_machine
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.weights import ring


@pytest.mark.parametrize(("number", "family"), list(enumerate(HYBRIDS)), ids=HYBRIDS)
def test_the_grid(number: int, family: str, tmp_path: Path, whole_grid: bool) -> None:
    """With a draft that is right now and then, and is recurrent itself."""
    good, bad = (
        write_model(tmp_path / name, HYBRIDS[family], damage=noise) for name, noise in (("a", 0.0), ("b", 0.1))
    )
    target, draft = (load(str(path), context_length=128, budget=16, sessions=2) for path in (good, bad))
    apply_row_class(target, str(good), remember=False)
    assert target.capabilities.exact is None  # passes have the shape of their paths, which belong to no class
    assert check_grid(target, draft, number, whole_grid) > 1.3  # guesses were right at all
    target.close()
    draft.close()


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_session_is_loaded_by_another_thread_than_computes(family: str, tmp_path: Path) -> None:
    """MLX computes what is not yet computed only in the thread that asked for it."""
    backend = load(str(write_model(tmp_path / "model", HYBRIDS[family])), context_length=64, sessions=2)
    session, other = backend.open(), backend.open()
    prefill(backend, session, PROMPT)
    session.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    rows = list[Any]()

    def compute() -> None:
        rows.append(backend.forward([work(other, [3], [-1])])[0].row(0))

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(rows, [backend.forward([work(session, [3], [-1])])[0].row(0)])
    backend.close()


@pytest.mark.parametrize("family", HYBRIDS)
def test_kept_states_hold_no_passes_in_memory(family: str, tmp_path: Path) -> None:
    """A model may leave a view of all its tokens as its state."""
    backend = load(str(write_model(tmp_path / "model", HYBRIDS[family])), context_length=512)
    session = backend.open()
    gc.collect()  # what other tests have left must not go meanwhile
    before = mx.get_active_memory()
    prefill(backend, session, PROMPT * 12)
    backend.forward([work(session, [3], [-1])])  # then masks of the prompt are gone
    session.commit([0])
    mx.clear_cache()
    kept = [array for state in session.states.text.kept.values() for array in state if array is not None]
    held = sum(array.nbytes for array in [*session.state, *kept])
    assert mx.get_active_memory() - before < held + (32 << 10)  # MLX may share a buffer that is not much larger
    backend.close()


STREAMED = {"lfm2": 32, "falcon-h1": 32, "recurrent-gemma": 10}  # tokens


@pytest.mark.skipif(not ring.can_stream(this_machine()), reason="weights are streamed on Linux and macOS")
@pytest.mark.parametrize("family", few(STREAMED, "lfm2", "recurrent-gemma"))
def test_streamed_weights(family: str, tmp_path: Path, load_streamed: Any) -> None:  # noqa: F811
    """Steps bring states on; texts are those of weights in memory, or part where rounding decides."""
    more = {"num_hidden_layers": 6} | (
        {"layer_types": [*["conv"] * 2, "full_attention"] * 2} if family == "lfm2" else {}
    )
    folder, bad = (write_model(tmp_path / n, HYBRIDS[family] | more, damage=d) for n, d in (("a", 0.0), ("b", 0.1)))
    memory, target = load(str(folder), context_length=128), load_streamed(folder, context_length=128, sessions=2)
    draft = load(str(bad), context_length=128, budget=16)
    prompt = PROMPT[: STREAMED[family]]  # a step could begin where a short one begins
    check_lossless(target, [SpecExecPlanner(draft, depth=6, beam=4)], prompt, SAMPLINGS[1], 20)
    check_unread(target, memory, prompt, 0.01)
    memory.close()
    draft.close()
