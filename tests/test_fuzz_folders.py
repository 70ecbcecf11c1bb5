"""Random operations on sessions of PyTorch and MLX, with windows and recurrent layers: they go on as fresh ones."""

import pytest
from fuzz import CONTEXT, FLOATS, SESSIONS, Fuzz

TORCH = ("llama", "mistral, window", "gemma3", "gpt-oss", "lfm2", "granite", "qwen3-next", "mamba2")
MLX = ("llama-3", "mistral-windows", "gemma3", "gpt-oss", "lfm2", "granite", "qwen3-next", "mamba")


def torch_model(family, folder):
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
    from edgespec.backends.torch.backend import load
    from hf_models import save, tiny_model

    return load, str(save(tiny_model(family), folder)), {"threads": 1}


def mlx_model(family, folder):
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    from edgespec.backends.mlx.backend import load
    from mlx_models import FAMILIES, HYBRIDS, write_model

    return load, str(write_model(folder / "model", (FAMILIES | HYBRIDS)[family])), {}


def interrupted(backend):
    return backend.stop


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("make", "family"), [*((torch_model, family) for family in TORCH), *((mlx_model, family) for family in MLX)]
)
def test_sessions_go_on_as_fresh_ones_whatever_was_done(make, family, tmp_path, whole_grid):
    load, path, options = make(family, tmp_path)
    backend = load(path, sessions=SESSIONS, context_length=CONTEXT, budget=32, **options)
    fresh = load(path, context_length=CONTEXT, budget=32, **options)
    fuzz = Fuzz(backend, fresh, FLOATS, 0, tmp_path)
    for _ in range(2000 if whole_grid else 20):
        fuzz.step()
    fresh.close()
    backend.close()
