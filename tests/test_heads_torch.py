"""EAGLE-3 heads on PyTorch: rows as the head's own definition has them, and texts as plain decoding writes them."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

import torch
from eagle_folders import attend_cells
from edgespec.backends.torch.backend import load
from edgespec.backends.torch.eagle import EagleHead, load_head
from edgespec.backends.torch.engine import engine
from folder_texts import SAMPLINGS, by_temperature, check_lossless, states_of
from hf_models import SMALL, VOCAB_SIZE, check_closing_frees, save, tiny_model, transformers
from safetensors.torch import load_file, save_file
from test_torch import Recorder, memory_for

from edgespec.errors import ModelError
from edgespec.loop.backend import Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.specexec import SpecExecPlanner

OPTIONS = {"context_length": 128, "budget": 16, "threads": 1}
DRAFT_OPTIONS = LoadOptions(context_length=128, budget=16, sessions=2).for_draft()
IDS = torch.arange(5, 200)  # the draft vocabulary
LAYERS = [0, 1, 3]  # the last is the input of the last norm
TEXT = [5, 9, 30, 7, 9, 30, 11]


def head_folder(folder, **changes):
    """A head with random weights for the models of `SMALL`."""
    about = SMALL | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(IDS),
        "eagle_aux_hidden_state_layer_ids": LAYERS, **changes,
    }  # fmt: skip
    torch.manual_seed(3)
    head = EagleHead(transformers.LlamaConfig.from_dict(about), LAYERS)
    for weight in head.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    head.set_draft_ids(IDS)
    folder.mkdir(exist_ok=True)
    save_file(head.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return save(tiny_model("llama"), folder / "target"), head_folder(folder / "head")


def load_both(folders):
    target = load(str(folders[0]), **OPTIONS)
    return target, engine.load_head(target, str(folders[1]), DRAFT_OPTIONS)


@pytest.fixture
def pair(folders):
    return load_both(folders)


def rows(backend, session, tokens, parents):
    wanted = np.arange(session.nodes, session.nodes + len(tokens), dtype=np.int32)
    work = Work(session, np.array(tokens, np.int32), np.array(parents, np.int32), wanted)
    logits = backend.forward([work])[0]
    return np.stack([logits.row(node) for node in wanted.tolist()])


def test_a_head_has_the_type_of_its_target_but_exact_frequencies(folders):
    """Rounded to 16 bits they rotate late positions by radians too far."""
    target = load(str(folders[0]), **OPTIONS, dtype="bfloat16")
    head = engine.load_head(target, str(folders[1]), DRAFT_OPTIONS).model
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}
    exact = load_head(folders[1], 3)._rotary.inv_freq
    assert exact.dtype == torch.float32
    torch.testing.assert_close(head._rotary.inv_freq, exact, rtol=0, atol=0)


def test_states_are_the_inputs_of_the_targets_layers(pair):
    target, _ = pair
    own, last = transformers.AutoModelForCausalLM.from_pretrained(target.model.config._name_or_path), []
    own.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0]))
    with torch.inference_mode():
        hidden = own(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[0][0], hidden[1][0], last[0]], 1).numpy()
    np.testing.assert_allclose(states_of(target, TEXT), expected, rtol=1e-4, atol=1e-4)


def test_a_trees_nodes_have_the_states_of_their_chains(pair):
    target, _ = pair
    session = target.open()
    prefill(target, session, TEXT)
    tokens, parents = [3, 4, 6, 8, 12], [-1, 0, 0, 1, -1]
    work = Work(session, np.array(tokens, np.int32), np.array(parents, np.int32), np.array([0], np.int32))
    found = target.forward([work])[0].states(range(5))
    session.close()
    for node, chain in [(2, [3, 6]), (3, [3, 4, 8]), (4, [12])]:
        np.testing.assert_allclose(found[node], states_of(target, TEXT + chain)[-1], rtol=1e-4, atol=1e-4)


def test_rows_are_those_of_the_heads_definition(pair):
    """Row p takes token p and the state of position p - 1; drafted rows take the row before's own state."""
    target, head = pair
    drafted = [40, 41, 42]
    states = torch.from_numpy(states_of(target, TEXT))
    module, embed = head.model, target.model.get_input_embeddings()
    cells = torch.zeros(2, SMALL["num_key_value_heads"], 64, SMALL["head_dim"])
    with torch.inference_mode():
        known, places = torch.tensor(TEXT[1:]), torch.arange(1, len(TEXT))
        out = module(embed(known), module.fuse(states[:-1]), places, attend_cells(cells, 0))
        expected = [module.logits(out[-1])]
        for i, token in enumerate(drafted):
            place = torch.tensor([len(TEXT) + i])
            attend = attend_cells(cells, len(TEXT) - 1 + i)
            out = module(embed(torch.tensor([token])), out[-1:], place, attend)
            expected.append(module.logits(out[-1]))
    session = head.open()
    session.give(0, states_of(target, TEXT[:-1]))
    logits, node = prefill(head, session, TEXT, want_last=True)
    found = [logits.row(node)]
    for i, token in enumerate(drafted):
        found.append(rows(head, session, [token], [i - 1])[0])
    np.testing.assert_allclose(np.stack(found), torch.stack(expected).numpy(), rtol=1e-4, atol=1e-4)
    assert np.isinf(found[0][np.setdiff1d(np.arange(VOCAB_SIZE), IDS.numpy())]).all()


def test_a_node_of_a_tree_has_the_logits_of_its_chain(pair):
    target, head = pair

    def read():
        session = head.open()
        session.give(0, states_of(target, TEXT[:-1]))
        prefill(head, session, TEXT, want_last=True)
        return session

    session = read()
    rows(head, session, [40, 50], [-1, -1])
    found = rows(head, session, [41, 51, 42], [0, 1, 0])
    session.close()
    for node, chain in [(0, [40, 41]), (1, [50, 51]), (2, [40, 42])]:
        session = read()
        rows(head, session, chain[:1], [-1])
        np.testing.assert_allclose(rows(head, session, chain[1:], [0])[0], found[node], rtol=1e-4, atol=1e-4)
        session.close()


def test_states_are_kept_only_while_a_head_is_loaded(pair):
    target, head = pair

    def watched():
        return [module for module in target.model.modules() if module._forward_pre_hooks]

    assert len(watched()) == len(LAYERS)
    head.close()
    assert watched() == []
    assert target.capabilities.states == 0


def test_closing_frees_the_target(folders):
    check_closing_frees(lambda: load_both(folders), TEXT)


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral, window", "qwen3 moe", "qwen3-next"])
def test_texts_with_a_head_are_plain_ones(tmp_path, folders, family, sampling):
    target = load(str(save(tiny_model(family), tmp_path)), **OPTIONS)
    head = engine.load_head(target, str(folders[1]), DRAFT_OPTIONS)
    planners = [kind(head, depth=5, tau=0.3) for kind in (SpecExecPlanner, ChainPlanner)]
    check_lossless(target, planners, TEXT, sampling, 24)
    assert head.capabilities.head


def test_a_head_of_a_streamed_target(tmp_path, folders):
    folder = save(tiny_model("llama", num_hidden_layers=5), tmp_path)
    target = load(str(folder), **OPTIONS, gpu_memory=memory_for(folder, 1, **OPTIONS), copies=Recorder)
    assert target.streamers
    head = engine.load_head(target, str(folders[1]), DRAFT_OPTIONS)
    check_lossless(target, [SpecExecPlanner(head, depth=5, tau=0.3)], TEXT, SAMPLINGS[1], 24)


def test_a_folder_of_vllms_speculators_is_the_same_head(tmp_path, folders):
    """Its layer has another name, and a part of config.json of its own."""
    weights, about = load_file(folders[1] / "model.safetensors"), json.loads((folders[1] / "config.json").read_text())
    other = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    mine = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    layer = {name: value for name, value in about.items() if name not in mine}
    save_file(other, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({name: about[name] for name in mine} | {"transformer_layer_config": layer})
    )
    heads = [load_head(folder, 3) for folder in (tmp_path, folders[1])]
    assert heads[0].layers == heads[1].layers
    for name, weight in heads[1].state_dict().items():
        assert torch.equal(heads[0].state_dict()[name], weight)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"hidden_size": 64, "head_dim": 16}, "64 wide vectors"),
        ({"hidden_size": 64, "head_dim": 16, "target_hidden_size": 32}, "64 wide vectors"),  # the target's embeddings
        ({"vocab_size": 300}, "300 tokens"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, r"reads the layers \[0, 1, 9\] of its target, which has 3"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "reads the layers all of its target"),
    ],
)
def test_a_head_of_another_model_is_refused(tmp_path, folders, changes, line):
    target = load(str(folders[0]), **OPTIONS)
    with pytest.raises(ModelError, match=line) as caught:
        engine.load_head(target, str(head_folder(tmp_path / "other", **changes)), DRAFT_OPTIONS)
    assert str(caught.value).count(f"{tmp_path / 'other'}: ") == 1
