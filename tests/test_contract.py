"""Every backend against tests/contract.py."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import (
    TREE,
    Factory,
    Reused,
    by_check,
    by_main_check,
    chain_rows,
    loaded,
    nodes_below_a_commit,
    random_tokens,
    work,
)
from reference import backend as reference

from edgespec.errors import ModelError
from edgespec.loop.backend import Backend, KeepsNodes, Session
from edgespec.loop.passes import prefill
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.loop.tree import nodes_below, path_to


def reference_factory(folder: Path, **more: Any) -> Factory:
    path = str(folder / "model.npz")
    reference.random_model(7, vocab_size=258, **more).save(path)
    return partial(reference.load, path)


def llamacpp_factory(model: Path, **more: Any) -> Factory:
    from edgespec.backends.llamacpp import engine as llamacpp

    def load(**options: int) -> Backend:
        options["context_length"] = options["context_length"] or 1024  # 0: what it was trained for, which is long
        return llamacpp.load(str(model), threads=1, **options, **more)  # threads that wait for each other's cores crawl

    return load


def hybrid_factory(folder: Path) -> Factory:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from hybrid_files import write_hybrid

    return llamacpp_factory(write_hybrid(folder / "hybrid.gguf", "granitehybrid"))


def torch_factory(folder: Path, family: str = "llama") -> Factory:
    """A tiny model; one on SmolLM2 would take minutes."""
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
    from edgespec.backends.torch import backend as torch
    from hf_models import save, tiny_model

    return partial(torch.load, str(save(tiny_model(family), folder)), threads=1)


def mlx_factory(folder: Path, family: str = "llama-3") -> Factory:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    from edgespec.backends.mlx import backend as mlx
    from mlx_models import FAMILIES, HYBRIDS, write_model

    return partial(mlx.load, str(write_model(folder / "model", (FAMILIES | HYBRIDS)[family])))


def padded(factory: Factory) -> Factory:
    """The same with passes of at least 12 rows, as far as the engine rounds."""

    def load(**options: int) -> Backend:
        backend = factory(**options)
        found, shape = backend.capabilities, RowClass(12, 2 * backend.capabilities.max_nodes)
        backend.keep_to(BatchInvariance("wide", shape, shape))
        backend.capabilities = replace(backend.capabilities, logit_tolerance=found.logit_tolerance)
        return backend

    return load


ENGINES = ["reference", "recurrent", "torch", "mlx", "small_q4"]
PATHS = ["hybrid", "torch paths", "mlx paths"]
VARIANTS = ["torch padded", "mlx padded", "small", "q8_0"]
IN_FOLDERS: dict[str, Callable[[Path], Factory]] = {
    "reference": reference_factory, "recurrent": partial(reference_factory, layers=3, recurrent=True),
    "torch": torch_factory, "torch paths": partial(torch_factory, family="granite"),
    "torch padded": lambda folder: padded(torch_factory(folder)),
    "mlx": mlx_factory, "mlx paths": partial(mlx_factory, family="falcon-h1"),
    "mlx padded": lambda folder: padded(mlx_factory(folder)), "hybrid": hybrid_factory,
}  # fmt: skip


@pytest.fixture(scope="module")
def factory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reused]:
    if make := IN_FOLDERS.get(request.param):
        found = make(tmp_path_factory.mktemp("model"))
    elif request.param == "q8_0":
        found = llamacpp_factory(request.getfixturevalue("small_q4"), kv_type="q8_0")
    else:
        found = llamacpp_factory(request.getfixturevalue(request.param))
    reused = Reused(found)
    yield reused
    reused.close()


@by_check
@pytest.mark.parametrize("factory", ENGINES, indirect=True)
def test_contract(check, factory):
    check(factory)


@by_main_check
@pytest.mark.parametrize("factory", PATHS, indirect=True)
def test_contract_of_recurrent_models(check, factory):
    """All checks of these are made on the reference backend's, too."""
    check(factory)


@pytest.mark.covering(1)
@by_main_check
@pytest.mark.parametrize("factory", VARIANTS, indirect=True)
def test_contract_of_variants(check, factory):
    """Engines of above that pad their passes, or compute with other weights or another cache."""
    check(factory)


@pytest.mark.parametrize("name", ["reference", "torch", "mlx", "small_q4"])
def test_a_draft_keeps_what_lies_below_a_commit(name, tmp_path, request):
    """As drafts are loaded, the nodes do stay, beside another session's, and they and their ids are free at the end."""
    if name == "small_q4":
        load = llamacpp_factory(request.getfixturevalue(name), in_order=False)
    else:
        load = IN_FOLDERS[name](tmp_path)

    def checked(**options: int) -> Backend:
        backend = load(**options)
        opened = backend.open

        def keeping() -> Session:
            session = opened()
            assert isinstance(session, KeepsNodes)
            commit = session.commit_keeping

            def kept(path):
                expected = nodes_below(session._parents, path[-1] if path else -1)
                found = commit(path)
                assert found.tolist() == expected
                return found

            session.commit_keeping = kept
            return session

        backend.open = keeping
        return backend

    nodes_below_a_commit(checked)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels of other machines were not measured")
def test_a_fresh_tree_is_exact_on_smollm2(smollm2_tiny):
    """Nothing is rounded differently when the cache has no holes: a wrong mask or position would show at once."""
    with loaded(llamacpp_factory(smollm2_tiny)) as backend:
        text, tokens = random_tokens(backend, 9, 1), random_tokens(backend, len(TREE), 2)
        session = backend.open()
        prefill(backend, session, text)
        logits = backend.forward([work(session, tokens, TREE)])[0]
        rows = [logits.row(node) for node in range(len(TREE))]
        session.close()
        for node, row in enumerate(rows):
            expected = chain_rows(backend, text + [tokens[i] for i in path_to(TREE, node)])[-1]
            np.testing.assert_array_equal(row, expected)


class TestReference:
    @pytest.mark.parametrize("tied", [False, True])
    def test_save_and_load(self, tmp_path, tied):
        model = reference.random_model(3, vocab_size=40, layers=3, tied=tied)
        model.save(str(tmp_path / "model"))
        copy = reference.load(str(tmp_path / "model"))
        rows = [chain_rows(backend, [0, 7, 8])[-1] for backend in (reference.ReferenceBackend(model), copy)]
        np.testing.assert_array_equal(*rows)

    def test_what_is_not_a_model(self, tmp_path):
        good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
        with pytest.raises(ModelError, match="no such file"):
            reference.load(str(good))
        reference.random_model(3).save(str(good))
        np.savez(tmp_path / "other.npz", a=np.zeros(3))
        for data in (b"", b"hello", good.read_bytes()[:-2000], (tmp_path / "other.npz").read_bytes()):
            bad.write_bytes(data)
            with pytest.raises(ModelError, match="not a reference model"):
                reference.load(str(bad))

    def test_perturbed_is_near_but_not_equal(self):
        model = reference.random_model(5)
        rows = [
            chain_rows(reference.ReferenceBackend(reference.perturbed(model, scale, 1)), [0, 7, 8, 9])[-1]
            for scale in (0.0, 0.01, 1.0)
        ]
        near, far = (float(np.abs(row - rows[0]).mean()) for row in rows[1:])
        assert 0 < near < far / 10

    def test_every_token_matters(self):
        """Attention reaches the first token, and order counts."""
        backend = reference.ReferenceBackend(reference.random_model(5))
        texts = [[7, 8, 9, 10], [6, 8, 9, 10], [8, 7, 9, 10], [7, 9, 8, 10]]
        rows = [chain_rows(backend, text)[-1] for text in texts]
        assert all(np.abs(row - rows[0]).max() > 0.01 for row in rows[1:])

    def test_special_tokens_in_text(self):
        vocab = reference.ReferenceVocab(258)
        assert vocab.encode("a</s>", add_bos=True, parse_special=True)[::2] == [0, 1]
        plain = vocab.encode("a</s>é", add_bos=False, parse_special=False)
        assert b"".join(map(vocab.token_bytes, plain)).decode() == "a</s>é"
        with pytest.raises(ModelError, match="cannot encode"):
            reference.ReferenceVocab(30).encode("é", add_bos=False, parse_special=False)
