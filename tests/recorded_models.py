"""The models that texts are recorded of: made once into a folder, which recordings only read.

A kind is a target NAME.gguf and its draft NAME-draft.gguf. Weights are random with a fixed seed; a draft is a rougher
copy of its target, so some of its draft tokens are right and some are wrong. Real models are linked, where they are.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from hybrid_files import write_hybrid
from mixture_files import write_mixture
from window_files import write_windowed

Q4_0, Q2_K = 2, 10  # llama_ftype in llama.h
MADE_UP = ("mixture", "hybrid", "windowed")
REAL = {  # target, draft; without a draft one is made of the target
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", None),
    "pair": ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
}


def make_models(folder: Path, real: Path | None = None, kinds: Sequence[str] = MADE_UP) -> list[str]:
    """Make what the folder does not have; the kinds that are missing.

    Args:
        folder: where to.
        real: the folder of the files named in `REAL`; None: made-up models only.
        kinds: of made-up models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for kind in kinds:
        target, draft = folder / f"{kind}.gguf", folder / f"{kind}-draft.gguf"
        if not target.exists():
            _write(target, kind)
        if not draft.exists():
            _rougher(target, draft, Q4_0)
    for kind, (target_name, draft_name) in REAL.items() if real else ():
        assert real
        source, target, draft = real / target_name, folder / f"{kind}.gguf", folder / f"{kind}-draft.gguf"
        if not source.exists() or (draft_name and not (real / draft_name).exists()):
            missing.append(kind)
            continue
        if not target.exists():
            target.symlink_to(source.resolve())
        if draft.exists():
            continue
        if draft_name:
            draft.symlink_to((real / draft_name).resolve())
        else:
            _rougher(target, draft, Q2_K)
    return missing


def _write(path: Path, kind: str) -> None:
    part = path.with_suffix(".part")
    if kind == "mixture":
        write_mixture(part, "qwen3 moe", seed=1)
    elif kind == "hybrid":
        write_hybrid(part, "granitehybrid", seed=1)
    else:
        write_windowed(part, "gemma3", seed=1, layers=7)
    part.rename(path)


def _rougher(source: Path, target: Path, kind: int) -> None:
    """A copy with fewer bits in a weight."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = kind
    params.allow_requantize = True
    part = target.with_suffix(".part")
    if llama_cpp.llama_model_quantize(bytes(source), bytes(part), ctypes.byref(params)) != 0:
        raise RuntimeError(f"no rougher copy of {source} can be made")
    part.rename(target)
