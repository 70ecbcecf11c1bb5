"""Row classes where a GPU has layers, on a device that is this processor by another name (`mapped_device.py`)."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

import mapped_device
from edgespec.backends.llamacpp import engine as engine_module
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.ggml.ggml_tensor import is_here, operation_at
from edgespec.backends.llamacpp.memory import attention
from edgespec.backends.llamacpp.memory.skip_padding import VIEWS, OneByOne
from mixture_files import mixtures

from edgespec.errors import NoRoom, UsageError
from edgespec.loading import row_classes
from edgespec.loading.exact import apply_row_class
from edgespec.loading.row_classes import tokens
from edgespec.loading.where import UP_TO_TIES, where
from edgespec.loop.engines import LoadOptions
from edgespec.loop.shapes import ALWAYS
from edgespec.machine import measurements
from edgespec.machine.this_machine import Gpu, this_machine

__all__ = ["mixtures"]

engine = engine_module.engine
CARD = Gpu(mapped_device.NAME.decode(), False, 1 << 40)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped_device.found(monkeypatch)
    monkeypatch.setattr(engine_module, "find_gpus", lambda: [CARD])
    monkeypatch.setattr(row_classes, "SIZES", (1, 4, 8))
    monkeypatch.setattr(row_classes, "CONTEXTS", (24,))


def planned(path: Path, asked: str | None, *gpus: Gpu, **options: Any) -> Any:
    sizes: dict[str, Any] = {"context_length": 1024, "threads": 2, "budget": 32, "gpu_layers": -1, "exact": asked}
    return engine.plan(str(path), LoadOptions(**sizes | options), this_machine(str(path), gpus or [CARD]))


@contextmanager
def loaded(path: Path, asked: str | None, **options: Any) -> Iterator[LlamaBackend]:
    with closing(engine.load(planned(path, asked, **options))) as backend:
        apply_row_class(backend, str(path), asked)  # type: ignore[arg-type]
        yield backend  # type: ignore[misc]


@contextmanager
def without_memory(path: str, *given: Any) -> Iterator[str]:
    raise NoRoom("no memory for it")
    yield path


def attends_here(path: Path, asked: str | None, *gpus: Gpu, **options: Any) -> bool:
    return attention.HERE.keys() <= planned(path, asked, *gpus, **options).ways[-1].keys()


@pytest.mark.parametrize("gpu_layers", [-1, 2])
def test_a_row_class_that_is_asked_for_is_found_where_the_processor_attends(
    gpu_layers: int, smollm2_tiny: Path
) -> None:
    with loaded(smollm2_tiny, "narrow", gpu_layers=gpu_layers) as backend:
        exact = backend.capabilities.exact
        assert exact
        assert exact.name in ("narrow", "any")
        assert "attention on the processor" in where(backend).line
        assert f"passes of up to {exact.trees.most} rows" in where(backend).line
        session, chain = backend.open(), tokens(backend, 3, 1)
        alone = [row_classes._rows(backend, session, chain[:count])[0] for count in (1, 3)]
        assert np.array_equal(*alone)


def test_cells_of_a_gpus_layers_lie_in_memory_with_their_attention(smollm2_tiny: Path) -> None:
    plan = planned(smollm2_tiny, "narrow")
    with engine.probe_model(str(smollm2_tiny), plan.ways[-1] | {"kv_type": "f16"}, watched=True) as probe:
        found = probe.watch.operations(probe.context, whole=True)  # type: ignore[attr-defined]
        places = {(operation_at(one).op, is_here(one)) for one in found}
    assert (b"FLASH_ATTN_EXT", False) not in places
    assert {(b"FLASH_ATTN_EXT", True), (b"SET_ROWS", True), (b"MUL_MAT", False)} <= places


def test_attention_that_llama_cpp_leaves_on_the_gpu_has_no_class(
    smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another product than `AFTER` follows it."""
    monkeypatch.setattr(engine_module, "AFTER", rb"nothing")
    with pytest.raises(UsageError, match=r"^--exact: no row class on .*, since llama.cpp leaves .* attention"):
        loaded(smollm2_tiny, "narrow").__enter__()


def test_a_gpus_layers_have_no_repacked_weights(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "without_amx", lambda information: False)
    assert [way.keys() & {"repacked", *attention.HERE} for way in planned(smollm2_tiny, "narrow").ways] == [
        attention.HERE.keys()
    ]


def test_without_being_asked_a_gpu_attends_and_nothing_is_tried(smollm2_tiny: Path) -> None:
    with loaded(smollm2_tiny, None) as backend:
        assert backend.capabilities.by_cell == ALWAYS
        assert backend.capabilities.exact is None
        assert not {"attention_on", "kept_off", "op_offload"} & backend.computing.keys()
        assert where(backend).line.endswith(UP_TO_TIES)


@pytest.mark.parametrize(
    ("why", "gpus", "options"),
    [
        ("several GPUs have layers", (CARD, replace(CARD, name="OTHER")), {}),
        ("memory does not hold .* twice, and its cells", (), {"memory": "4G"}),
        ("its experts", (), {}),
    ],
)
def test_a_class_that_a_gpu_cannot_have_is_refused_with_the_reason(
    why: str, gpus: tuple[Gpu, ...], options: dict[str, Any], smollm2_tiny: Path, mixtures: Any
) -> None:
    path = Path(mixtures["mixtral"]) if "experts" in why else smollm2_tiny
    with pytest.raises(UsageError, match=f"^--exact: no row class on .*, since {why}.*; --gpu-layers 0"):
        planned(path, "wide", *gpus, **options)
    assert not attends_here(path, None, *gpus, **options)


def test_a_gpu_attends_for_a_draft_whose_cells_have_no_order(smollm2_tiny: Path) -> None:
    assert attends_here(smollm2_tiny, "narrow")
    assert not attends_here(smollm2_tiny, "narrow", in_order=False)


def test_memory_must_hold_the_cells_of_a_gpus_layers(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = engine_module.MemoryPlanner.needs
    monkeypatch.setattr(engine_module.MemoryPlanner, "needs", lambda *given: [1 << 60 for _ in needs(*given)])
    assert planned(smollm2_tiny, None).plenty
    with pytest.raises(UsageError, match="memory does not hold"):
        planned(smollm2_tiny, "narrow")


def test_a_probe_model_of_a_gpu_that_cannot_be_made_is_told(
    smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no model whose rows depend on each other."""
    way = planned(smollm2_tiny, "narrow").ways[-1] | {"kv_type": "f16"}
    monkeypatch.setattr(engine_module, "probe_file", without_memory)
    monkeypatch.setattr(row_classes, "_known", {})
    with pytest.raises(NoRoom, match="no memory for it"):
        row_classes.find("llamacpp", "build", way, str(smollm2_tiny), remember=False, say=str)


def test_classes_of_a_gpu_are_not_kept_for_its_next_driver(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way, told = planned(smollm2_tiny, "narrow").ways[-1] | {"kv_type": "f16"}, list[str]()
    monkeypatch.setattr(measurements, "remember", lambda *given: pytest.fail("kept"))
    monkeypatch.setattr(row_classes, "_known", {})
    assert row_classes.find("llamacpp", "build", way, str(smollm2_tiny), remember=True, say=told.append)
    assert told == [row_classes.EACH_TIME]


def test_a_gpu_computes_one_operation_at_a_time(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it takes a kernel for several depends on where their operands lie, which no trial shows."""
    told, really = list[tuple[bytes, bool]](), OneByOne._called

    def called(self: OneByOne, tensor: int, ask: bool) -> bool:
        told.append((operation_at(tensor).op, ask))
        return really(self, tensor, ask)

    monkeypatch.setattr(OneByOne, "_called", called)
    with closing(engine.load(planned(smollm2_tiny, "narrow"))) as backend:
        told.clear()
        row_classes._rows(backend, backend.open(), [1, 2])  # type: ignore[arg-type]
    computed = [one for one in told if one[0] not in VIEWS]
    assert {op for op, _ in computed} >= {b"RMS_NORM", b"MUL", b"MUL_MAT", b"ADD", b"SWIGLU", b"ROPE"}
    assert computed[::2] == [(op, True) for op, _ in computed[1::2]]
    assert not any(ask for _, ask in computed[1::2])


def test_products_in_a_gpus_memory_are_compared(smollm2_tiny: Path) -> None:
    way = planned(smollm2_tiny, "narrow").ways[-1] | {"kv_type": "f16"}
    with engine.probe_model(str(smollm2_tiny), way, watched=True) as probe:
        width = probe.vocab.size + probe.state_width  # type: ignore[attr-defined]
        rows = row_classes._rows(probe, probe.open(), tokens(probe, 2, 1))
    assert rows.shape[1] == width + 2 * 8 + 1  # products and attention of two layers, and the output
    assert len(set(rows[0, width:].tolist())) == 2 * 8 + 1
