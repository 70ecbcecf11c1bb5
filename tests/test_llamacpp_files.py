"""What is asked of llama.cpp when a file is loaded."""

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp.files import without_amx


def test_kernels_for_amx_are_left_out_where_llama_cpp_was_built_with_them() -> None:
    assert without_amx(b"CPU : AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1 | ") == {"use_extra_bufts": False}
    assert without_amx(b"CPU : AVX512 = 1 | REPACK = 1 | ") == {}
