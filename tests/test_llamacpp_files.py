"""What is asked of llama.cpp when a file is loaded."""

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp import engine
from edgespec.backends.llamacpp.ggml.files import without_amx

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
    monkeypatch.setattr(engine.MemoryPlanner, "plenty", True)
    monkeypatch.setattr(engine, "without_amx", lambda info: {})
    with pytest.raises(ModelError, match="enough"):
        engine.load(str(smollm2), wide=wide)
    assert asked["use_extra_bufts"] is not wide
