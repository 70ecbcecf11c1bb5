"""Several GPUs hold more layers on PyTorch: what lies on which, and texts that stay the same to the bit."""
from cards import GIB, Cards, cards
import numpy as np, pytest, torch
from test_torch import OPTIONS
from contract import chain_rows
from hf_models import FAMILIES, HYBRIDS, save, tiny_model
from edgespec.backends.torch.backend import load
from edgespec.backends.torch import loading as loading_module
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_x(family, cards, monkeypatch, tmp_path):
    folder = str(save(tiny_model(family), tmp_path))
    mode = cards(8*GIB, 8*GIB, 8*GIB)
    monkeypatch.setattr(loading_module, "layers_by_device", lambda *_: [1,1,1])
    b = load(folder, **OPTIONS)
    print(b.placed, b.computing)
    rows = chain_rows(b, [5,9,30,7])
    b.close()
    plain = chain_rows(load(folder, **OPTIONS, device="cpu"), [5,9,30,7])
    np.testing.assert_array_equal(rows, plain)
