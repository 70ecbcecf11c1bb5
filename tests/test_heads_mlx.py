"""EAGLE-3 heads on MLX: the head's definition, and texts of plain decoding, however it drafts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import contract
import mlx.core as mx
from conftest import few
from eagle_folders import WIDTH, attend_cells, head_weights, write_head
from edgespec.backends.mlx import backend as backend_module
from edgespec.backends.mlx import memory as memory_module
from edgespec.backends.mlx.backend import load
from edgespec.backends.mlx.engine import engine
from edgespec.backends.mlx.head_files import head_bytes
from edgespec.backends.mlx.loading import load_weights
from edgespec.backends.mlx.memory import MIN_NODES, PassSize, find_layout, parameter_bytes
from folder_texts import SAMPLINGS, check_lossless, states_of, write
from mlx import nn
from mlx.optimizers import Adam
from mlx_models import FAMILIES, HYBRIDS, VOCAB_SIZE, check_closing_frees, write_model
from test_mlx_streaming import load_streamed, many_layers, small_parts  # noqa: F401, fixtures

from edgespec.errors import ModelError
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner

PROMPT = [*range(5, 25), *range(5, 17)]
OPTIONS = LoadOptions(context_length=128, budget=16, sessions=4)
DRAFTS = 268  # tokens of the head's vocabulary


def load_head(target: Any, folder: Path) -> Any:
    return engine.load_head(target, str(folder), OPTIONS.for_draft())


def rows_of(head: Any, tokens: list[int], states: Any) -> Any:
    """The head's logits after each token, of which all states but the last were given."""
    session = head.open()
    session.give(0, states)
    [logits] = head.forward([contract.work(session, tokens, range(-1, len(tokens) - 1))])
    session.close()
    return np.array([logits.row(node) for node in range(len(tokens))])


def taught(target: Any, head: Any, tokens: list[int], steps: int = 30) -> None:
    """Train the head until it knows this text by heart."""
    states, model = mx.array(states_of(target, tokens[:-1])), head.model
    embedded = head._embed(mx.array(tokens)[None])
    places = {token: place for place, token in enumerate(head._ids.tolist())}
    rows = mx.array([row for row in range(len(tokens) - 2) if tokens[row + 2] in places])
    labels = mx.array([places[tokens[row + 2]] for row in rows.tolist()])

    class Causal:
        offset = 1
        make_mask = staticmethod(lambda n, **_: "causal")
        update_and_fetch = staticmethod(lambda keys, values: (keys, values))

    def loss(model: Any) -> Any:
        fused = model.fuse(states)[None]
        own = model(embedded[:, 1:-1], fused[:, : len(tokens) - 2], [Causal])
        return nn.losses.cross_entropy(model.lm_head(model.norm(own[0, rows])), labels, reduction="mean")

    optimizer, step = Adam(0.01), nn.value_and_grad(model, loss)
    for _ in range(steps):
        _, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_model(tmp_path_factory.mktemp("heads") / "target", many_layers(FAMILIES["llama-3"]))
    backend = load(str(folder), context_length=128, budget=16, sessions=4)
    yield backend
    backend.close()


def test_states_are_what_layers_read(target: Any, tmp_path: Path) -> None:
    """The number after the last layer: what the last norm reads. A tree's nodes have those of their chains."""
    config = {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}
    head = load_head(target, write_head(tmp_path / "head", head_weights(VOCAB_SIZE, DRAFTS), **config))
    model = target.model.model
    x, read = model.embed_tokens(mx.array(PROMPT)[None]), list[Any]()
    for layer in model.layers:
        read.append(x)
        x = layer(x, "causal", None)
    expected = np.array(mx.concatenate([read[0], read[3], x], axis=-1)[0])
    np.testing.assert_allclose(states_of(target, PROMPT), expected, atol=1e-3)
    session = target.open()
    prefill(target, session, PROMPT)
    [logits] = target.forward([contract.work(session, [3, 4, 6, 8], [-1, 0, 0, 1], wanted=[3])])
    found = logits.states([2, 3])
    for row, chain in zip(found, ([3, 6], [3, 4, 8]), strict=True):
        np.testing.assert_allclose(row, states_of(target, PROMPT + chain)[-1], atol=1e-3)
    session.close()
    head.close()


def test_closing_frees_the_target(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "target", many_layers(FAMILIES["llama-3"]))
    path = write_head(tmp_path / "head", head_weights(VOCAB_SIZE, DRAFTS))

    def load_both() -> tuple[Any, Any]:
        target = load(str(folder), context_length=128)
        return target, load_head(target, path)

    check_closing_frees(load_both, PROMPT)


def test_states_of_a_streamed_target_are_those_in_memory(tmp_path: Path, load_streamed: Any) -> None:  # noqa: F811
    folder = write_model(tmp_path / "target", many_layers(FAMILIES["llama-3"]))
    streamed, memory = load_streamed(folder, context_length=128), load(str(folder), context_length=128)
    path = write_head(tmp_path / "head", head_weights(VOCAB_SIZE, DRAFTS))
    heads = [load_head(backend, path) for backend in (streamed, memory)]
    np.testing.assert_array_equal(*(states_of(backend, PROMPT) for backend in (streamed, memory)))
    for backend in (*heads, memory):
        backend.close()


@pytest.mark.parametrize("config", [{}, {"norm_before_residual": True, "norm_before_fc": True}], ids=["usual", "norms"])
def test_the_logits_of_a_head_are_those_of_torch(config: dict[str, Any], target: Any, tmp_path: Path) -> None:
    """The same weights in both engines: rows after given states, and a tree below them."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
    eagle = pytest.importorskip("edgespec.backends.torch.eagle")
    folder = write_head(tmp_path / "head", head_weights(VOCAB_SIZE, DRAFTS, **config), **config)
    theirs, head = eagle.load_head(folder, len(target.model.layers)), load_head(target, folder)
    assert head.capabilities.head
    assert target.capabilities.states == 3 * WIDTH
    states = states_of(target, PROMPT)

    def torch_rows(text: list[int], before: Any) -> tuple[Any, Any]:
        """Logits and own states after all tokens of a text but the first; `before` are the states before them."""
        embedded, cells = torch.tensor(np.array(head._embed(mx.array(text[1:])))), torch.zeros(2, 2, 64, 8)
        own = theirs(embedded, before, torch.arange(1, len(text)), attend_cells(cells, 0))
        return theirs.logits(own), own

    with torch.no_grad():
        before = theirs.fuse(torch.tensor(states))[:-1]
        expected, own = torch_rows(PROMPT, before)
        session, end = head.open(), len(PROMPT)
        session.give(0, states[:-1])
        [logits] = head.forward([contract.work(session, PROMPT, range(-1, end - 1))])
        np.testing.assert_allclose([logits.row(node) for node in range(1, end)], expected, atol=2e-4)
        session.commit(range(end))
        [first] = head.forward([contract.work(session, [7], [-1])])
        [second] = head.forward([contract.work(session, [8, 9], [0, 0], wanted=[1, 2])])
        rows, after = torch_rows([*PROMPT, 7], torch.cat([before, own[-1:]]))
        np.testing.assert_allclose(first.row(0), rows[-1], atol=2e-4)
        for node, token in ((1, 8), (2, 9)):
            rows, _ = torch_rows([*PROMPT, 7, token], torch.cat([before, own[-1:], after[-1:]]))
            np.testing.assert_allclose(second.row(node), rows[-1], atol=2e-4)
    session.close()
    head.close()
    assert target.capabilities.states == 0


def loaded(kind: str, folder: Path, load_streamed: Any) -> Any:  # noqa: F811
    options = {"context_length": 128, "budget": 16, "sessions": 4}
    if kind == "recurrent":
        return load(
            str(write_model(folder, HYBRIDS["lfm2"] | {"num_hidden_layers": 5, "layer_types": LFM2})), **options
        )
    path = write_model(folder, many_layers(FAMILIES["llama-3"]), bits=4 if kind == "4 bits" else 0)
    return load_streamed(path, **options) if kind == "streamed" else load(str(path), **options)


LFM2 = ["conv", "full_attention", "conv", "full_attention", "conv"]
MAKERS = [
    lambda head: SpecExecPlanner(head, depth=5, beam=4),
    lambda head: ChainPlanner(head, depth=4),
]


@pytest.mark.parametrize("kind", few(KINDS := ("in memory", "streamed", "recurrent", "4 bits"), *KINDS[1:]))
def test_text_with_a_head_is_that_of_plain_decoding(kind: str, tmp_path: Path, load_streamed: Any) -> None:  # noqa: F811
    target = loaded(kind, tmp_path / "target", load_streamed)
    head = load_head(target, write_head(tmp_path / "head", head_weights(VOCAB_SIZE, DRAFTS)))
    plain, _ = write(target, NonePlanner(), PROMPT, SAMPLINGS[0], 24)
    taught(target, head, PROMPT + plain)
    gained = list[float]()
    for sampling, makers in zip(SAMPLINGS, (MAKERS, MAKERS[:1]), strict=False):
        gained += check_lossless(target, (make(head) for make in makers), PROMPT, sampling, 24)
    assert max(gained) > 1.3  # it drafts from the right states
    head.close()
    target.close()


def test_two_texts_a_second_turn_and_a_saved_session(target: Any, tmp_path: Path) -> None:
    head = load_head(target, write_head(tmp_path / "head", head_weights(VOCAB_SIZE, DRAFTS)))
    other = [*PROMPT[9:20], 40, 41]
    states, turns = [states_of(target, text) for text in (PROMPT, other)], [[7, 8], [9, 10, 11]]
    alone = [rows_of(head, text, found[:-1]) for text, found in zip((PROMPT, other), states, strict=True)]
    sessions = [head.open(), head.open()]
    for session, found in zip(sessions, states, strict=True):
        session.give(0, found[:-1])
    pairs = zip(sessions, (PROMPT, other), strict=True)
    works = [contract.work(one, text, range(-1, len(text) - 1)) for one, text in pairs]
    for logits, rows in zip(head.forward(works), alone, strict=True):
        np.testing.assert_allclose(logits.row(len(rows) - 1), rows[-1], atol=1e-4)
    for session, text in zip(sessions, (PROMPT, other), strict=True):
        session.commit(range(len(text)))
    sessions[0].save(tmp_path / "saved")
    fork = sessions[0].fork()
    sessions[0].rewind(0)
    sessions[0].load(tmp_path / "saved")
    again = states_of(target, PROMPT + turns[0])
    expected = rows_of(head, PROMPT + turns[0], again[:-1])
    for session in (sessions[0], fork):
        session.give(len(PROMPT) - 1, again[len(PROMPT) - 1 : -1])
        [logits] = head.forward([contract.work(session, turns[0], [-1, 0])])
        np.testing.assert_allclose(logits.row(1), expected[-1], atol=1e-4)
    head.close()


def test_memory_is_planned_for_a_head(target: Any, tmp_path: Path) -> None:
    """Weights, cells, and what the largest pass takes."""
    folder, small = (
        write_head(tmp_path / "head", weights := head_weights(VOCAB_SIZE, DRAFTS)),
        PassSize(64, 16, 2, MIN_NODES),
    )
    found = backend_module._draft_bytes(str(folder), small)
    head = load_head(target, folder)
    assert (
        parameter_bytes(head.model)
        == sum(array.nbytes for name, array in weights.items() if name != "t2d") - 8 * DRAFTS
    )
    session = head.open()
    head.forward([contract.work(session, [5], [-1])])
    cells = sum(buffer.nbytes for buffer in session.state) * small.cells // session.caches[0].keys.shape[2]
    work = memory_module.work_bytes(json.loads((folder / "config.json").read_text()), small, 4)
    assert found - work >= parameter_bytes(head.model) + 2 * cells
    assert found - work <= parameter_bytes(head.model) + 2 * cells
    head.close()


def keep(weights: dict[str, Any]) -> None:
    pass


def lose_a_norm(weights: dict[str, Any]) -> None:
    del weights["midlayer.hidden_norm.weight"]


def read_less(weights: dict[str, Any]) -> None:
    weights["fc.weight"] = weights["fc.weight"][:, :-3]


def draft_beyond(weights: dict[str, Any]) -> None:
    weights["d2t"] = weights["d2t"] + 200


BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a tensor missing": (lose_a_norm, {}, "is no EAGLE-3 head, or is damaged"),
    "other widths": (read_less, {}, "31 wide vectors"),
    "the target's embedding in another width": (keep, {"hidden_size": 64}, "64 wide vectors"),
    "another target": (keep, {"vocab_size": 99}, "99 tokens; this target has 32 and 288"),
    "tokens beyond": (draft_beyond, {}, "not all among the target's 288"),
    "layers beyond": (keep, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"layers \[1, 2, 9\]"),
    "a config without heads": (keep, {"num_attention_heads": None}, "is no EAGLE-3 head, or is damaged"),
    "no words for its layers": (keep, {"eagle_aux_hidden_state_layer_ids": "all"}, "reads the layers all of"),
    "cut off": (None, {}, "is cut off"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_head_that_cannot_be_used(name: str, target: Any, tmp_path: Path) -> None:
    damage, config, message = BROKEN[name]
    weights = head_weights(VOCAB_SIZE, DRAFTS)
    if damage:
        damage(weights)
    folder = write_head(tmp_path / "head", weights, **config)
    if not damage:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=message) as caught:
        load_head(target, folder)
    assert str(folder) in str(caught.value)
    assert target.capabilities.states == 0


def test_a_head_takes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None) -> None:  # noqa: F811
    folder = write_model(tmp_path / "target", many_layers(FAMILIES["llama-3"]))
    head = write_head(tmp_path / "head", head_weights(VOCAB_SIZE, DRAFTS))
    for name in (
        "machine.memory.private_memory",
        "backends.mlx.memory.work_bytes",
        "backends.mlx.head_files.work_bytes",
    ):
        monkeypatch.setattr(f"edgespec.{name}", lambda *_: 0)
    monkeypatch.setattr(memory_module, "cell_bytes", lambda *_: (0, 4))
    for name in ("MARGIN", "KEPT"):
        monkeypatch.setattr(memory_module, name, 0)
    room = find_layout(load_weights(folder), folder).size + head_bytes(str(head), PassSize(128, 16, 1, MIN_NODES))
    plans = []
    for memory in (room, room - 1):
        beside = load(str(folder), memory=memory, context_length=128, budget=16, draft_files=[str(head)])
        plans.append(beside.plan)
        beside.close()
    assert plans[0] is None
    assert plans[1].draft_bytes == head_bytes(str(head), PassSize(128, 16, 1, MIN_NODES))


def test_layers_are_watched_only_while_a_head_is_loaded(target: Any, tmp_path: Path) -> None:
    kinds = [type(layer) for layer in target.model.layers]
    head = load_head(target, write_head(tmp_path / "head", head_weights(VOCAB_SIZE, DRAFTS)))
    watched = [type(layer) is not kind for layer, kind in zip(target.model.layers, kinds, strict=True)]
    assert watched == [number in (2, 3, 4) for number in range(7)]
    head.close()
    assert [type(layer) for layer in target.model.layers] == kinds


@pytest.mark.parametrize("name", ["mtp.norm.weight", "model.mtp_layers.0.norm.weight", "model.layers.9.eh_proj.weight"])
def test_the_head_in_a_models_folder_is_named(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "target", HYBRIDS["qwen3-next"])
    assert not engine.has_head(str(folder))
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), {name: mx.ones(32)})
    with pytest.raises(ModelError, match="MLX cannot draft with the head in this folder; the backend torch can"):
        engine.has_head(str(folder))
