"""The type of keys and values in llama.cpp's cache: what it saves, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from conftest import Run

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp.context import KV_TYPES, ContextSize
from edgespec.backends.llamacpp.engine import load
from edgespec.backends.llamacpp.ggml.files import ggml_base
from edgespec.backends.llamacpp.memory.planning import MIN_NODES, memory_needs

from edgespec.errors import ModelError, UsageError
from edgespec.loop.passes import prefill
from edgespec.machine.this_machine import this_machine

TEXT = list(range(5, 45))


def last_row(path: Path, kv_type: str | None) -> np.ndarray:
    backend = load(str(path), context_length=128, threads=1, kv_type=kv_type)
    try:
        found = prefill(backend, backend.open(), TEXT, want_last=True)
        assert found is not None
        return found[0].row(found[1])
    finally:
        backend.close()


def test_types_are_known_to_ggml_by_the_same_names() -> None:
    import ctypes

    named = ggml_base().ggml_type_name
    named.restype, named.argtypes = ctypes.c_char_p, [ctypes.c_int]
    assert {named(number).decode() for number in KV_TYPES.values()} == set(KV_TYPES)


@pytest.mark.parametrize("weights", ["small_q4", "small"])
def test_every_type_computes_nearly_the_same(weights: str, request: pytest.FixtureRequest) -> None:
    """And not just the same: the type has reached the cache, and flash attention does not turn f32 into f16."""
    path = request.getfixturevalue(weights)
    rows = {kv_type: last_row(path, kv_type) for kv_type in KV_TYPES}
    plain = last_row(path, None)
    assert np.array_equal(plain, rows["f32" if weights == "small" else "f16"])
    for kv_type, row in rows.items():
        assert np.corrcoef(row, plain)[0, 1] > 0.9, kv_type
    assert len({row.tobytes() for row in rows.values()}) == len(KV_TYPES)


def test_the_plan_counts_what_the_type_takes(smollm2_tiny: Path) -> None:
    """Of 3 heads with 64 numbers, keys and values, in 6 layers: 2 bytes each, or 34 for 32."""
    cells = 4096 + MIN_NODES
    f16, q8_0 = (
        memory_needs(str(smollm2_tiny), ContextSize(4096, 16, 1, MIN_NODES, kv_type), this_machine())
        for kv_type in ("f16", "q8_0")
    )
    saved = 2 * 6 * 3 * 64 * cells * (2 - 34 / 32)
    assert f16 - q8_0 == pytest.approx(saved, rel=0.2)  # other buffers differ a little


def test_the_drafts_cache_is_counted_with_its_type(smollm2_tiny: Path) -> None:
    path = str(smollm2_tiny)
    alone, pair = (
        [
            memory_needs(path, ContextSize(4096, 16, 1, MIN_NODES, kv_type), this_machine(), beside)
            for kv_type in ("f16", "q8_0")
        ]
        for beside in ([], [path])
    )
    assert pair[0] - pair[1] == pytest.approx(2 * (alone[0] - alone[1]), rel=0.2)


def test_an_unknown_type_is_refused(run: Run, small: Path) -> None:
    for command in (["run", str(small), "hi"], ["doctor", str(small)]):
        status, out, err = run(*command, "--kv-type", "q9")
        assert (status, out) == (2, "")
        *measured, line = err.splitlines()
        assert line.startswith("edgespec: kv_type is 'q9', but must be one of f16, q8_0, ")
        assert all(one.startswith("measuring: ") for one in measured)
    with pytest.raises(UsageError, match="kv_type is 'Q8_0'"):
        load(str(small), kv_type="Q8_0")


def test_heads_that_do_not_fit_the_types_blocks_are_refused(tmp_path: Path) -> None:
    from window_files import write_windowed

    path = write_windowed(tmp_path / "tiny.gguf", "cohere2")
    for asked, length in ((64, 64), (0, 2048)):
        line = f"no context of {length} tokens can be made: .*K cache type q8_0 with block size 32 does not divide"
        with pytest.raises(ModelError, match=line):
            load(str(path), context_length=asked, kv_type="q8_0")


def test_a_run_and_a_bench_with_8_bits(run: Run, small: Path, tmp_path: Path) -> None:
    options = ["--draft", str(small), "--kv-type", "q8_0", "-n", "12", "--ctx", "128", "--budget", "8"]
    status, out, err = run("run", str(small), "Say hello.", *options, "--json")
    assert status == 0, err
    assert '"draft": ' in out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Count to ten."}\n')
    status, _, err = run("bench", str(prompts), "--model", str(small), "--planners", "specexec", *options)
    assert status == 0, err
