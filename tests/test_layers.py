"""Layers are chosen by what they are worth."""

from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

from gguf_files import small_llama

from edgespec.errors import UsageError
from edgespec.measure.layers import choose_layers


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


@pytest.mark.usefixtures("in_this_process")
def test_layers_that_add_nothing_are_found(tmp_path: Path) -> None:
    model = small_llama(tmp_path / "a.gguf", layers=4, idle=(1, 2))
    seen = list[tuple[str, int, int]]()
    layers, share = choose_layers(model, 2, per_task=1, progress=lambda *what: seen.append(what))
    assert layers == (1, 2)
    assert share == 1.0
    assert seen[-1] == ("trying layers", 7, 8)
    assert {file.name for file in tmp_path.iterdir()} == {"a.gguf", "home"}
    _, share = choose_layers(small_llama(tmp_path / "b.gguf", layers=2), 1, per_task=1)
    assert share < 1.0


@pytest.mark.parametrize("count", [0, 4, 9])
def test_some_layers_must_stay(tmp_path: Path, count: int) -> None:
    with pytest.raises(UsageError, match=r"a\.gguf has 4; keep at least one"):
        choose_layers(small_llama(tmp_path / "a.gguf"), count)
