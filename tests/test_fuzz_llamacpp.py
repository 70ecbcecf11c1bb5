"""Random operations on sessions that share llama.cpp's cells: whatever they did, they go on as fresh ones."""

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import hybrid_files
import mixture_files
import window_files
from conftest import quantised
from edgespec.backends.llamacpp.engine import load
from fuzz import CONTEXT, FLOATS, SESSIONS, Fuzz
from gguf_files import small_llama

from edgespec.loading.exact import apply_row_class

Q4_1 = 3  # llama_ftype of llama.h
ROUNDED = 0.2  # quantised weights: rounding alone
PLAIN = ("llama", "qwen2")
OF_8_BITS = tuple(f"{kind}, 8 bits" for kind in mixture_files.KINDS)
EXACT = ("quantised", *OF_8_BITS)  # passes are kept to row classes, rows are equal to the bit
KINDS = [*PLAIN, *mixture_files.KINDS, *window_files.ARCHITECTURES[:3], *hybrid_files.ARCHITECTURES]
# Without row classes, rounding lets a row of a quantised mixture choose other experts: differences have no bound.
CASES = [(kind, in_order) for in_order in (True, False) for kind in (*KINDS, *EXACT[: None if in_order else 1])]


def written(folder, kind):
    path = folder / "tiny.gguf"
    if kind in hybrid_files.ARCHITECTURES:
        return hybrid_files.write_hybrid(path, kind)
    if kind in (*mixture_files.KINDS, *OF_8_BITS):
        return mixture_files.write_mixture(path, kind.split(",")[0], bits=8 if kind in OF_8_BITS else 32)
    if kind == "quantised":
        return quantised(small_llama(path, layers=2), folder / "q4.gguf", Q4_1)
    if kind in PLAIN:
        return small_llama(path, layers=2, kind=kind)
    return window_files.write_windowed(path, kind)


def fuzz_of(path, kind, seed, folder, in_order=True):
    exact = kind in EXACT and in_order
    options = {"context_length": CONTEXT, "budget": 32, "threads": 1}
    backend = load(str(path), sessions=SESSIONS, share=0.5, in_order=in_order, **options)
    fresh = load(str(path), **options)
    for one in (backend, fresh) if exact else ():
        apply_row_class(one, str(path), "narrow")
    enough = 0.0 if exact else ROUNDED if kind in EXACT else FLOATS
    return LlamaFuzz(backend, fresh, enough, seed, folder)


class LlamaFuzz(Fuzz):
    def order(self, held):
        if self.backend.in_order and not self.limits.paths and not any(one.tokens for one in self.held):
            self.backend.cells.put_in_order([one.session for one in self.held])


# Of those with recurrent layers, and of mixtures that are compared to the bit, some always run.
SELDOM = ("falcon-h1", "qwen3next", "nemotron_h", "mamba", *OF_8_BITS[:-1])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("kind", "in_order"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if case[0] in SELDOM else ()) for case in CASES],
)
def test_sessions_go_on_as_fresh_ones_whatever_was_done(kind, in_order, tmp_path, whole_grid):
    fuzz = fuzz_of(written(tmp_path, kind), kind, 0, tmp_path, in_order)
    for _ in range(3000 if whole_grid else 60):
        fuzz.step()
    fuzz.fresh.close()
    fuzz.backend.close()
