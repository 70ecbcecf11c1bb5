"""What is asked of llama.cpp when a file is loaded."""

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp import engine
from edgespec.backends.llamacpp.ggml.files import loaded_tensors, without_amx

from edgespec.errors import ModelError


def test_kernels_for_amx_are_left_out_where_llama_cpp_was_built_with_them() -> None:
    assert without_amx(b"CPU : AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1 | ") == {"use_extra_bufts": False}
    assert without_amx(b"CPU : AVX512 = 1 | REPACK = 1 | ") == {}


@pytest.mark.parametrize("wide", [False, True])
def test_weights_are_repacked_for_narrow_passes_only(wide, smollm2, monkeypatch) -> None:
    asked = {}

    def stop(path, **params):
        asked.update(params)
        raise ModelError("enough was seen")

    monkeypatch.setattr(engine, "load_model", stop)
    monkeypatch.setattr(engine.MemoryPlanner, "plenty", lambda self, size: True)
    monkeypatch.setattr(engine, "without_amx", lambda info: {})
    with pytest.raises(ModelError, match="enough"):
        engine.load(str(smollm2), wide=wide)
    assert asked["use_extra_bufts"] is not wide


@pytest.mark.parametrize(("arch", "sizes"), [("qwen35", [64, 0]), ("gemma4-assistant", [64, 64])])
def test_a_head_is_not_loaded_where_llama_cpp_skips_it(arch, sizes, tmp_path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [tensor.size for tensor in loaded_tensors(str(tmp_path / "model.gguf"))] == sizes
