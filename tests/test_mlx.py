"""The MLX backend: families of models, what is refused, and its own behaviour. Models are tiny and random."""

import gc
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import contract
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import mlx.core as mx
from conftest import few
from edgespec.backends.mlx import backend as backend_module
from edgespec.backends.mlx import loading as loading_module
from edgespec.backends.mlx import memory as memory_module
from edgespec.backends.mlx.backend import MlxEngine, device_top, load, load_vocab
from edgespec.backends.mlx.tree import Pass, TreeCache, TreeRope, takes_array
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache, make_prompt_cache
from mlx_lm.utils import load_model
from mlx_models import FAMILIES, SHARED, write_model

from edgespec.errors import ModelError, UsageError, pip_install
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import top_of_rows
from edgespec.machine.this_machine import this_machine

CHECKS = [
    contract.tree_equals_chains,
    contract.a_tree_with_several_tops,
    contract.commit_any_path,
    contract.growth_layer_by_layer,
    contract.several_sessions_in_one_forward,
    contract.only_what_is_wanted,
    contract.prefill_in_pieces,
]
VARIANTS = {name: {"config": config} for name, config in FAMILIES.items()} | {
    "llama, 4 bits": {"config": FAMILIES["llama-3"], "bits": 4},
    "mixtral, 4 bits": {"config": FAMILIES["mixtral"], "bits": 4},
    "qwen2, float16": {"config": FAMILIES["qwen2"], "dtype": mx.float16},
    "gemma2, bfloat16": {"config": FAMILIES["gemma2"], "dtype": mx.bfloat16},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mlx") / "llama", FAMILIES["llama-3"])


def own_rows(folder, text):
    """Logits after every token by mlx-lm alone, with its own caches."""
    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    return [np.array(model(mx.array([[token]]), cache=cache)[0, 0].astype(mx.float32)) for token in text]


# Of each of these a variant runs: mixtral of 4 bits, gemma2 in bfloat16, qwen3, gemma3, mistral with windows.
SELDOM = ("llama, 4 bits", "qwen2, float16", "mixtral", "gemma2", "qwen2", "gemma", "mistral")


@pytest.mark.parametrize("name", few(VARIANTS, *VARIANTS.keys() - {*SELDOM}))
def test_family(name, tmp_path, whole_grid):
    folder = write_model(tmp_path / "model", **VARIANTS[name])
    windows = "sliding_window" in (folder / "config.json").read_text()  # what else a cache does, it does for all alike
    some = CHECKS[list(VARIANTS).index(name) % len(CHECKS)]
    more = [contract.commit_any_path, contract.growth_layer_by_layer] if windows else []
    for check in [*CHECKS, contract.random_growth] if whole_grid else {contract.tree_equals_chains, some, *more}:
        check(partial(load, str(folder)))
    backend = load(str(folder), context_length=64)
    mixture = "num_experts_per_tok" in VARIANTS[name]["config"]
    assert backend.capabilities.experts == ((4, 2) if mixture else None)
    text = contract.random_tokens(backend, 30, 1)  # longer than the windows
    rows, expected = contract.chain_rows(backend, text), own_rows(folder, text)
    for row, own in zip(rows, expected, strict=True):
        contract.close_enough(backend, row, own)
    # A mistake would show: the logits are far apart compared with the tolerance.
    assert rows[-1].std() > 2 * backend.capabilities.logit_tolerance or "bfloat16" in name
    backend.close()


class Recorder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.shapes = inner, []

    def __call__(self, x):
        self.shapes.append(x.shape)
        return self.inner(x)


def test_the_head_sees_wanted_nodes_only(llama):
    backend = load(str(llama), context_length=64)
    recorder = backend._model.lm_head = Recorder(backend._model.lm_head)
    session = backend.open()
    backend.forward([contract.work(session, [5, 6, 7, 8], [-1, 0, 0, 1], wanted=[3, 1])])
    assert recorder.shapes == [(1, 2, SHARED["hidden_size"])]
    backend.close()


def test_a_model_whose_layers_are_not_a_module_of_their_own(llama, monkeypatch):
    """Then the head computes all nodes, and the wanted ones are taken from its logits."""
    monkeypatch.setattr(backend_module, "cut_rows", lambda model, rows: False)
    contract.only_what_is_wanted(partial(load, str(llama)))

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(2, 2)]

    monkeypatch.undo()
    assert not backend_module.cut_rows(Flat(), lambda: None)


@pytest.mark.parametrize(("name", "together"), [("llama-3", True), ("llama-yarn", True), ("llama-dynamic", False)])
def test_ropes_by_position(name, together, tmp_path):
    """One call for all nodes where the rope allows it, else one for each depth: equal to a call for each node."""
    model, _ = load_model(write_model(tmp_path / "model", FAMILIES[name]))
    rope = model.layers[0].self_attn.rope
    assert takes_array(rope) == together
    parents = [-1, 0, 0, 1, -1, 2, 5, 5]
    for first in (0, 3):
        here = Pass(parents, first, length=21)
        x = mx.random.normal((1, 4, len(parents) - first, 8))
        turned = TreeRope(rope)(x, offset=here)
        for i, position in enumerate([21, 22, 22, 23, 21, 23, 24, 24][first:]):
            alone = rope(x[:, :, i : i + 1], offset=position)
            np.testing.assert_allclose(np.array(turned[:, :, i : i + 1]), np.array(alone), atol=1e-5)


def test_positions_may_not_leak():
    """A model that computes with the cache's offset fails instead of computing with a wrong one."""
    here = Pass([-1, 0], 0, length=3)
    uses = [lambda x: x + 1, lambda x: x > 0, lambda x: x == 0, lambda x: x != 0, bool, int, mx.arange]
    for use in uses:
        with pytest.raises(TypeError):
            use(here)


def test_a_commit_leaves_the_prefix_where_it_is(llama):
    """No pass, commit or rewind needs memory of the size of the cache."""
    backend = load(str(llama), context_length=200_000)
    session = backend.open()
    prefill(backend, session, [5, 6, 7])
    buffer = session.caches[0].keys.nbytes
    mx.clear_cache()
    for path in ([0, 2, 5], [1, 4], [0], []):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        backend.forward([contract.work(session, range(5, 11), [-1, -1, 0, 0, 1, 2])])
        session.commit(path)
        assert mx.get_peak_memory() - before < buffer / 4
    backend.close()


def test_a_fork_copies_when_it_is_written(llama):
    backend = load(str(llama), context_length=50_000, sessions=2)
    session = backend.open()
    prefill(backend, session, [5, 6, 7])
    buffer, before = session.caches[0].keys.nbytes, mx.get_active_memory()
    other = session.fork()
    assert mx.get_active_memory() - before < buffer
    prefill(backend, other, [5, 6, 7, 8])
    assert mx.get_active_memory() - before >= 4 * buffer  # keys and values of two layers
    backend.close()
    assert mx.get_active_memory() < before


def test_closing_frees_the_model(llama):
    backend = load(str(llama), context_length=50_000)
    session = backend.open()
    prefill(backend, session, [5, 6, 7])
    before, buffer = mx.get_active_memory(), session.caches[0].keys.nbytes
    session.close()
    assert mx.get_active_memory() <= before - 4 * buffer
    backend.close()
    backend.close()
    session.close()


def test_a_session_of_another_mlx_lm_is_refused(llama, tmp_path, monkeypatch):
    contract.check_update_is_refused(
        lambda: load(str(llama), context_length=64), tmp_path / "saved", backend_module.mlx_lm, "mlx-lm", monkeypatch
    )


@pytest.mark.parametrize("size", [5, 200, 5000])
@pytest.mark.parametrize("k", [1, 3, 40, 6000])
def test_candidates_on_the_device(size, k):
    """The two ways to find them agree; the one for GPUs is correct on any device."""
    generator = np.random.default_rng(size)
    rows = generator.normal(0, 4, (6, size)).astype(np.float32)
    noise = [None, *generator.gumbel(size=(2, size)).astype(np.float32), np.zeros(size - 2, np.float32)]
    noise[2][rows[1].argmax()] = -np.inf
    noise += [noise[1], np.zeros(size + 9, np.float32)]
    index = [0, 4, 1, 2, 3, 5]
    ids, values = device_top(mx.array(rows), index, k, 0.7, noise)
    expected_ids, expected_values = top_of_rows(rows[index], k, 0.7, noise)
    for found, right in zip(ids, expected_ids, strict=True):
        assert sorted(found.tolist()) == sorted(right.tolist())
    for found, right in zip(values, expected_values, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-4)
    for found, value, right, expected in zip(ids, values, expected_ids, expected_values, strict=True):
        np.testing.assert_allclose(value[found.argsort()], expected[right.argsort()], rtol=1e-5, atol=1e-4)


def test_candidates_that_tie_on_the_device():
    """Any of the tied ones, but none twice and none that is worse."""
    rows = np.zeros((1, 700), np.float32)
    rows[0, [3, 699]] = 1
    (ids,), _ = device_top(mx.array(rows), [0], 5, 1.0, [None])
    assert ids[:2].tolist() == [3, 699]
    assert len(set(ids.tolist())) == 5


def test_memory_limits(monkeypatch):
    seen = []
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: seen.append(("wired", size)))
    monkeypatch.setattr(mx, "set_cache_limit", lambda size: seen.append(("cache", size)))
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "no Mac's"})
    for gpu, limits in ((True, []), (False, [("cache", 32 << 20)])):
        monkeypatch.setattr(memory_module, "on_gpu", lambda gpu=gpu: gpu)
        assert backend_module.set_memory_limits(10**12, memory_module.find_gpus()) == []
        assert seen == limits
    seen.clear()
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 16 * 10**9})
    assert backend_module.set_memory_limits(9 * 10**9, memory_module.find_gpus()) == []
    (offer,) = backend_module.set_memory_limits(14 * 10**9, memory_module.find_gpus())
    assert "EDGESPEC_WIRE=1" in offer
    assert seen == [("cache", 10**9)] * 2  # nothing is wired, with which Macs have panicked
    monkeypatch.setenv("EDGESPEC_WIRE", "1")
    for weights, wired in ((9, 0), (14, 1)):
        seen.clear()
        assert backend_module.set_memory_limits(weights * 10**9, memory_module.find_gpus()) == []
        assert seen == [("cache", 10**9), *[("wired", 16 * 10**9)] * wired]
    (note,) = backend_module.set_memory_limits(15 * 10**9, memory_module.find_gpus())
    assert "15.0 GB" in note
    assert "16.0 GB" in note


def test_weights_are_read_one_by_one_before_the_first_pass(llama, monkeypatch):
    """In a pass, commands of a GPU would wait for the files, and a slow disk would end them."""
    gc.collect()  # what other tests have left must not go meanwhile
    seen, engine, before = [], MlxEngine(), mx.get_active_memory()
    monkeypatch.setattr(backend_module, "_check_tree", lambda *_: seen.append("pass"))
    plan = engine.plan(str(llama), LoadOptions(context_length=64), this_machine())
    backend = engine.load(plan, progress=lambda *far: seen.append((*far, mx.get_active_memory() - before)))
    *read, last = seen
    assert last == "pass"
    assert len(read) == len(tree_flatten(backend.model.parameters()))
    assert read[-1][0] == memory_module.parameter_bytes(backend.model)
    assert all(done <= total == read[-1][0] and done <= held for done, total, held in read)
    backend.close()


def test_weights_that_cannot_be_read_are_one_line(llama, monkeypatch):
    monkeypatch.setattr(mx, "eval", mock.Mock(side_effect=RuntimeError("[read] Unable to read 65536 bytes from file.")))
    with pytest.raises(ModelError, match=r"its weights cannot be read: \[read\] Unable"):
        load(str(llama))


def test_a_gpu_is_taken_to_be_less_exact(llama, monkeypatch):
    exact = load(str(llama), context_length=64)
    monkeypatch.setattr(backend_module, "on_gpu", lambda: True)
    rough = load(str(llama), context_length=64)
    assert rough.capabilities.logit_tolerance > exact.capabilities.logit_tolerance
    contract.top_is_a_full_softmax(partial(load, str(llama)))  # now by device_top
    exact.close()
    rough.close()


# What is refused


def test_layers_that_cannot_branch(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model", FAMILIES["llama"])
    monkeypatch.setattr(loading_module, "make_prompt_cache", lambda model: [ChunkedKVCache(8)])
    with pytest.raises(ModelError, match="keep their past in a ChunkedKVCache, which cannot branch into a tree"):
        load(str(folder))


def test_positions_that_are_not_rotary(tmp_path):
    folder = write_model(
        tmp_path / "gpt2",
        {
            "model_type": "gpt2", "n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
            "layer_norm_epsilon": 1e-5,
        },
    )  # fmt: skip
    with pytest.raises(ModelError, match="gpt2 models cannot read a tree on MLX"):
        load(str(folder))


@pytest.mark.skipif(backend_module.on_gpu(), reason="a GPU can run it")
def test_what_mlx_cannot_compute(tmp_path):
    folder = write_model(tmp_path / "model", FAMILIES["mixtral"], dtype=mx.bfloat16)
    with pytest.raises(
        ModelError, match=r"mixtral models cannot read a tree on MLX: \[GatherMM::eval\] Currently only supports"
    ):
        load(str(folder))


def forgetful(self, keys, values, really=TreeCache.update_and_fetch):
    every, others = really(self, keys, values)
    return every, mx.zeros_like(others)


FAULTS = {
    "mask": (Pass, "mask", lambda self, window, as_array: "causal"),
    "positions": (TreeRope, "__call__", lambda self, x, offset=0: self.rope(x, offset=offset.start)),
    "no ancestor": (TreeCache, "update_and_fetch", forgetful),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_with_its_own_ideas(llama, monkeypatch, fault):
    """What does not follow mask and positions, or depends on no ancestor, is noticed by its logits."""
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(ModelError, match="a node sees more than its ancestors, or its position"):
        load(str(llama))


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def index_of_two(folder):
    names = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def lose_a_tensor(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["model.norm.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


BAD_FOLDERS = {
    "config.json missing": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config.json damaged": (lambda f: (f / "config.json").write_text("{"), "config.json: is damaged"),
    "config.json a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: is damaged: it is not a JSON"),
    "config.json deep": (lambda f: (f / "config.json").write_text(9999 * "["), "config.json: is damaged: it is nested"),
    "unknown architecture": (
        lambda f: change(f / "config.json", model_type="nonesuch"), "Model type nonesuch not supported"
    ),
    "incomplete config": (lambda f: change(f / "config.json", hidden_size=None), "mlx-lm cannot load it"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there is no file model*.safetensors"),
    "a file of two missing": (index_of_two, "1 of 2 weight files are missing, first model-00002-of-00002.safetensors"),
    "damaged index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json is damaged"),
    "deep index": (
        lambda f: (f / "model.safetensors.index.json").write_text(9999 * "["), "index.json: is damaged: it is nested"
    ),
    "an index of numbers": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'), "is damaged: the name of"
    ),
    "an index that is a folder": (lambda f: (f / "model.safetensors.index.json").mkdir(), "cannot be read: Is a"),
    "a tensor missing": (lose_a_tensor, "Missing 1 parameters"),
    "weights cut off": (lambda f: cut_in_half(f / "model.safetensors"), "mlx-lm cannot load it"),
    "weights empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "mlx-lm cannot load it"),
    "other shapes": (lambda f: change(f / "config.json", intermediate_size=40), "mlx-lm cannot load it"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "a program of its own": (lambda f: change(f / "config.json", model_file="x.py"), "custom module"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_FOLDERS)
def test_bad_folders(what, tmp_path):
    folder = write_model(tmp_path / "model", FAMILIES["llama-3"])
    spoil, message = BAD_FOLDERS[what]
    spoil(folder)
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    text = str(caught.value)
    assert text.startswith(str(folder))
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("call", [load, load_vocab])
def test_what_is_not_a_folder(call, tmp_path, llama):
    with pytest.raises(ModelError, match="there is no such folder"):
        call(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="is a file"):
        call(str(llama / "config.json"))


@pytest.mark.parametrize("options", [{"context_length": -1}, {"budget": 0}, {"sessions": 0}])
def test_options_out_of_range(llama, options):
    with pytest.raises(UsageError, match="but must be from"):
        load(str(llama), **options)


def test_without_mlx():
    script = (
        "import sys; sys.modules['mlx_lm'] = None\n"
        "from edgespec.loading.by_name import load_backend\n"
        "from edgespec.errors import MissingPackage\n"
        "try: load_backend('mlx', 'folder')\n"
        "except MissingPackage as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.strip() == f"running models on MLX needs the package 'mlx-lm': {pip_install('edgespec[mlx]')}"
