"""Bounds of the change of a logit between passes of different shapes."""

from ..context import kv_types
from ..ggml.files import FILE_TYPE_BF16, FILE_TYPE_F16, FILE_TYPE_F32

# Maximum change of a logit by the shape of its pass and the order of cells, by general.file_type. Kernels for quantised
# and 16-bit weights also round activations, so one flipped bit grows from layer to layer. Measured maxima: SmolLM2 Q4_1
# 1.31, BF16 0.43, F16 0.18, F32 (with a float32 cache) 6e-5; a small Gemma 3 in F32 1.6e-3 (GELU from a 16-bit table).
TOLERANCE_QUANTISED = 1.5
TOLERANCES = {FILE_TYPE_F32: 0.01, FILE_TYPE_F16: 0.3, FILE_TYPE_BF16: 0.8}
# By the type of keys and values: a quantised cache rounds a flipped bit up to a step of its own. Measured with
# SmolLM2 in float32: f16 0.03, bf16 0.18, q8_0 0.52, q5_1 2.4, q4_0 6.5; in Q4_1, a pass's shape moves nothing.
CACHE_TOLERANCES = {"f32": 0.0, "f16": 0.3, "bf16": 0.8, "q8_0": 1.0, "q5_1": 5.0, "q5_0": 5.0}
TOLERANCE_OF_4_BITS = 10.0


def tolerance(file_type: bytes, kv_type: str | None) -> float:
    weights = TOLERANCES.get(file_type, TOLERANCE_QUANTISED)
    types = kv_types(kv_type) if kv_type else ()
    return max([weights, *(CACHE_TOLERANCES.get(name, TOLERANCE_OF_4_BITS) for name in types)])
