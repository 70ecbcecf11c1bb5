"""Where llama.cpp puts tensors: `weights/plan.py` against what llama.cpp logs at load, for every made-up model."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import hybrid_files
import window_files
from conftest import quantised
from edgespec.backends.llamacpp.context import ContextSize, make_context, settle_attention
from edgespec.backends.llamacpp.ggml.files import llama_cpp, loaded_tensors, logged
from edgespec.backends.llamacpp.memory.gpu import NO_LAYERS
from edgespec.backends.llamacpp.memory.planning import rehearse
from gguf_files import small_llama
from mapped_device import caches, loaded
from mixture_files import KINDS, write_mixture

from edgespec.models.shapes import file_of
from edgespec.weights.plan import EXPERTS, count_layers, divide, places, spans

MIB = 1 << 20
PER_LAYER = {  # 20 layers are the least
    "architecture": "gemma3n", "type": "Q4_0", "tied": True, "block_count": 22, "embedding_length": 256,
    "feed_forward_length": 512, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
    "attention.value_length": 64, "attention.sliding_window": 64, "vocab_size": 512,
    "embedding_length_per_layer_input": 256,
}  # fmt: skip
ROPE = {
    "architecture": "llama", "type": "Q8_0", "tied": True, "block_count": 4, "embedding_length": 256,
    "feed_forward_length": 512, "attention.head_count": 4, "attention.head_count_kv": 4, "vocab_size": 512,
    "rope_freqs": True,
}  # fmt: skip
MODELS = (
    "converted", "quantised", "in parts", "tied with rope_freqs", "per-layer embeddings", "with a head",
    *hybrid_files.ARCHITECTURES, *window_files.ARCHITECTURES[:3], *KINDS,
)  # fmt: skip


@pytest.fixture
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name: str = request.param
    path = tmp_path / "model.gguf"
    with ExitStack() as stack:
        if name in ("converted", "quantised"):
            small_llama(path)
            path = quantised(path, tmp_path / "quantised.gguf", 1) if name == "quantised" else path
        elif name == "in parts":
            path = min(small_llama(path, split=15).parent.glob("model-*"))
        elif name in ("tied with rope_freqs", "per-layer embeddings"):
            path = Path(stack.enter_context(file_of(ROPE if "rope" in name else PER_LAYER)))
        elif name == "with a head":
            hybrid_files.write_with_head(path)
        elif name in KINDS:
            write_mixture(path, name)
        elif name in hybrid_files.ARCHITECTURES:
            hybrid_files.write_hybrid(path, name)
        else:
            window_files.write_windowed(path, name)
        yield str(path)


@pytest.mark.parametrize("file", MODELS, indirect=True)
def test_each_device_maps_what_the_table_says(file: str, whole_grid: bool) -> None:
    tensors = loaded_tensors(file)
    count = count_layers(tensors)
    mapped, experts = dict[tuple[int, Any], list[float]](), EXPERTS.pattern.encode()
    grid = [*product((0, 1, 2, 3, count, -1), ((), (NO_LAYERS,), (experts,), (NO_LAYERS, experts)))]
    needed = {(0, ()), (3, ()), (3, (NO_LAYERS,)), (-1, ())}  # below; of the others each second, of every file others
    for i, (gpu_layers, kept_off) in enumerate(grid):
        if not (whole_grid or (i + count + i // 4) % 2 or (gpu_layers, kept_off) in needed):
            continue
        with loaded(file, gpu_layers, kept_off) as (_, found):
            pass
        for name, there in zip(("CPU_Mapped", "MAPPED"), divide(tensors, gpu_layers, kept_off), strict=True):
            expected = [span.size / MIB for span in spans(there)]
            assert found.get(name, []) == pytest.approx(expected, abs=0.006), f"{gpu_layers} {kept_off} {name}"
        mapped[gpu_layers, kept_off] = found.get("MAPPED", [])
    assert not mapped[0, ()]
    assert sum(mapped[-1, ()]) >= sum(mapped[3, ()]) > sum(mapped[3, (NO_LAYERS,)]) > 0


@pytest.mark.parametrize("file", MODELS, indirect=True)
def test_a_cache_lies_with_its_layer(file: str) -> None:
    count, size = count_layers(loaded_tensors(file)), ContextSize(2048, 8, 1, 32)
    [buffers] = rehearse(file, [size], 1 << 60)[1]
    assert len(buffers.caches) == count
    for gpu_layers in (0, 2, 3, count, -1):
        there, found = buffers.caches_on_gpu(gpu_layers), caches(file, gpu_layers, size)
        assert found.get("MAPPED", 0) == pytest.approx(there / MIB, abs=0.02)
        assert found.get("CPU", 0) == pytest.approx((sum(buffers.caches) - there) / MIB, abs=0.02)
    assert sum(buffers.caches) > 0


@pytest.mark.parametrize("file", ["tied with rope_freqs"], indirect=True)
def test_flash_attention_stays_where_a_gpu_computes_some_layers(file: str) -> None:
    """Without it a pass needs memory for all scores."""
    size = ContextSize(256, 64, 1, 64)
    with loaded(file, 3, (), own=True) as (model, _):
        params = size.params(model)
        params.op_offload = True
        settle_attention(file, model, size, params)
        with logged() as lines:
            llama_cpp.llama_free(make_context(file, model, size, params))
            assert not any("disabled" in line for line in lines)


def test_a_tensor_occurs_once_for_each_copy() -> None:
    with file_of(ROPE) as path:
        found = places(loaded_tensors(path), 4)
    assert [place for place, tensor in found if tensor.name == "token_embd.weight"] == [-1, 4]
    assert [place for place, tensor in found if tensor.name == "rope_freqs.weight"] == [0, 1, 2, 3]
