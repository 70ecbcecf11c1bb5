"""Heads in models' own folders on PyTorch: rows as defined elsewhere, and texts as plain decoding writes them."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

import torch
from alone import served
from edgespec.backends.torch import backend as backend_module
from edgespec.backends.torch.attention import ATTENTION
from edgespec.backends.torch.backend import load
from edgespec.backends.torch.engine import engine
from edgespec.backends.torch.offload import HostCopies
from folder_texts import by_temperature, check_lossless, states_of, write
from hf_models import SMALL, WITH_HEADS, add_head, save, tiny_model, transformers
from safetensors.torch import load_file, save_file
from test_heads_torch import head_folder, rows
from test_hybrids_torch import streamed
from test_torch import memory_for

import edgespec
from edgespec.errors import ModelError
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.machine.this_machine import this_machine
from edgespec.measure.doctor import diagnose
from edgespec.planners.auto import AutoState
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.choice import make_planner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

OPTIONS = {"context_length": 128, "budget": 16, "threads": 1}
DRAFT_OPTIONS = LoadOptions(context_length=128, budget=16, sessions=2).for_draft()
TEXT = [5, 9, 30, 7, 9, 30, 11, 5, 9]
DRAFTED = [40, 41, 42]
FAMILIES = list(WITH_HEADS)
D, KEY_HEADS = SMALL["head_dim"], SMALL["num_key_value_heads"]


class Made:
    """A folder with a head, and both loaded.

    Attributes:
        tensors: of the head, as in the folder.
    """

    def __init__(self, family: str, folder: Any, changes: dict[str, Any] | None = None, **options: Any) -> None:
        model = tiny_model(family, **changes or {})
        self.folder = save(model, folder)
        self.tensors = {name: tensor.numpy() for name, tensor in add_head(family, model, folder).items()}
        self.target = load(str(folder), **OPTIONS | options)
        self.head = engine.load_head(self.target, str(folder), DRAFT_OPTIONS)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Made("qwen3.5", tmp_path_factory.mktemp("mtp"), sessions=2)


def test_doctor_counts_the_head_of_a_folder_and_not_the_folder(qwen):
    found = diagnose(str(qwen.folder), backend="torch", budget=4, context_length=64)
    assert found.draft_size == sum(tensor.nbytes for tensor in qwen.tensors.values())
    assert found.draft_seconds > 0


def rows_of(made):
    """The head's logits after `TEXT`, and after each token that it drafted from its own states."""
    session = made.head.open()
    session.give(0, states_of(made.target, TEXT)[:-1])
    logits, node = prefill(made.head, session, TEXT, want_last=True)
    found = [logits.row(node), *(rows(made.head, session, [token], [i - 1])[0] for i, token in enumerate(DRAFTED))]
    session.close()
    return np.stack(found)


def norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attended(query, keys, values):
    """Of the last row's query [heads, d] over all rows' keys and values [n, key heads, d]."""
    group = len(query) // keys.shape[1]
    scores = np.einsum("hd,nhd->hn", query, keys.repeat(group, 1)) / np.sqrt(D)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), values.repeat(group, 1)).reshape(-1)


def nemotron_layer(x, w, past):
    """vLLM's nemotron_h_mtp.py: attention without positions, then experts of two matrices, chosen by sigmoid."""
    h = norm(x, w("mtp.layers.0.norm"))
    query, key, value = ((w(f"mtp.layers.0.mixer.{name}_proj") @ h).reshape(-1, D) for name in ("q", "k", "v"))
    past.append((key, value))
    keys, values = (np.stack(some) for some in zip(*past, strict=True))
    x = x + w("mtp.layers.0.mixer.o_proj") @ attended(query, keys, values)
    h, mixer = norm(x, w("mtp.layers.1.norm")), "mtp.layers.1.mixer"
    scores = sigmoid(w(f"{mixer}.gate") @ h)
    best = np.argsort(-(scores + w(f"{mixer}.gate.e_score_correction_bias", "")))[:2]
    share = dict(zip(best, scores[best] / scores[best].sum(), strict=True))

    def expert(of):
        return w(f"{of}.down_proj") @ np.maximum(w(f"{of}.up_proj") @ h, 0) ** 2

    routed = sum(share[number] * expert(f"{mixer}.experts.{number}") for number in share)
    return x + routed + expert(f"{mixer}.shared_experts")


def test_rows_are_those_of_the_definition(tmp_path):
    """Written down in NumPy, with tensors by their names in the folder; a target's state is after its last norm."""
    made = Made("nemotron-h moe", tmp_path)
    model, names, past, found = made.target.model, WITH_HEADS["nemotron-h moe"][1], [], []
    last = getattr(model.get_decoder(), "norm", None) or model.get_decoder().norm_f
    embedding, output = (
        one.weight.numpy().astype(float) for one in (model.get_input_embeddings(), model.get_output_embeddings())
    )

    def w(name, end=".weight"):
        return made.tensors[name + end].astype(float)

    with torch.inference_mode():
        states = last.forward(torch.from_numpy(states_of(made.target, TEXT))).numpy()
    text = TEXT + DRAFTED
    for position, token in list(enumerate(text))[1:]:
        state = states[position - 1] if position < len(TEXT) else found[-1]
        pair = [norm(embedding[token], w(names["enorm"])), norm(state, w(names["hnorm"]))]
        x = nemotron_layer(w(names["eh_proj"]) @ np.concatenate(pair), w, past)
        found.append(norm(x, w(names["norm"])))
    expected = np.stack(found[len(TEXT) - 2 :]) @ output.T
    np.testing.assert_allclose(rows_of(made), expected, rtol=1e-3, atol=1e-3)
    assert expected.std() > 0.3


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "glm4 moe"])
def test_rows_are_those_of_transformers(family, tmp_path):
    """Its own reader of the folder, and its own pass over all rows at once."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no heads")
    last = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}  # its norms are taken
    made = Made(family, tmp_path, last if "qwen" in family else {})
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    main._keys_to_ignore_on_load_unexpected = [r"^mtp.*", r"model\.layers\.3.*"]  # where it finds a head's tensors
    theirs = layers.MtpModel.from_pretrained(main).eval()
    with torch.inference_mode():
        states = main.get_decoder()(torch.tensor([TEXT])).last_hidden_state[:, :-1]
        expected, text = [], list(TEXT)
        for token in [*DRAFTED, None]:
            places = torch.arange(1, len(text))[None]
            cache = transformers.DynamicCache(config=theirs.config)
            own = theirs.forward_layer(0, states, places, cache, input_ids=torch.tensor([text[1:]]))
            expected.append(theirs.shared_head(own[0, -1]).numpy())
            states, text = torch.cat([states, own[:, -1:]], 1), [*text, token]
    np.testing.assert_allclose(rows_of(made), np.stack(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_with_a_head_are_plain_ones(family, tmp_path, sampling):
    made = Made(family, tmp_path)
    assert engine.has_head(str(tmp_path))
    assert made.target.capabilities.paths == (family != "glm4 moe")
    planners = [kind(made.head, depth=5, tau=0.3) for kind in (SpecExecPlanner, ChainPlanner)]
    check_lossless(made.target, planners, TEXT, sampling, 12)
    assert made.head.capabilities.head


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("family", ["qwen3.5", "glm4 moe"])
def test_a_head_of_a_streamed_target(family, tmp_path, sampling, monkeypatch):
    """The head stays in memory. Paths of a hybrid's trees go on from states. Layers stream with their experts."""
    monkeypatch.setattr(backend_module, "find_folder", lambda *_: None)
    kinds = ["linear_attention", "full_attention"] * 2 + ["linear_attention"]
    model = tiny_model(family, **({"num_hidden_layers": 5, "layer_types": kinds} if family == "qwen3.5" else {}))
    folder = save(model, tmp_path)
    memory = memory_for(folder, 0, **OPTIONS)
    add_head(family, model, folder)
    target = (
        streamed(folder) if family == "qwen3.5" else load(str(folder), **OPTIONS, gpu_memory=memory, copies=HostCopies)
    )
    assert target.streamers
    head = engine.load_head(target, str(folder), DRAFT_OPTIONS)
    check_lossless(target, [SpecExecPlanner(head, depth=5, tau=0.3)], TEXT, sampling, 12)


def taught(made, text, steps=80):
    """Train the head until it knows this text by heart."""
    head, target = made.head.model, made.target.model
    states = torch.from_numpy(states_of(made.target, text[:-1]))
    embeddings = target.get_input_embeddings()(torch.tensor(text[1:-1])).detach()
    places, labels = torch.arange(1, len(text) - 1), torch.tensor(text[2:])
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in head.parameters()], 0.02)
    head.config._attn_implementation = "sdpa"
    for _ in range(steps):
        own = head(embeddings, head.fuse(states[: len(labels)]), places, None)
        loss = torch.nn.functional.cross_entropy(head.logits(own), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.requires_grad_(False)
    head.config._attn_implementation = ATTENTION
    return loss.item()


@pytest.mark.parametrize("family", ["qwen3.5", "glm4 moe"])
def test_a_head_that_knows_the_text_drafts_it(family, tmp_path):
    """Rows get the right token, the state before it, and cells: else nothing would be right."""
    made = Made(family, tmp_path)
    prompt = [*range(5, 25)]
    plain, _ = write(made.target, NonePlanner(), prompt, SamplingParams(), 24)
    assert taught(made, prompt + plain) < 0.5
    lengths = check_lossless(made.target, [SpecExecPlanner(made.head, depth=5)], prompt, SamplingParams(), 24)
    assert max(lengths) > 2


@pytest.mark.parametrize("planner", ["auto", "specexec"])
def test_several_texts_and_second_turns_share_a_head(planner, tmp_path):
    made = Made("qwen3-next", tmp_path, sessions=2)
    prompts = [TEXT, [7, 8, 7, 8], [*TEXT, 3, 3], [7, 8, 7, 8, 1, 2]]
    requests = [Request(prompt, SamplingParams(0.8, seed=i), max_tokens=12) for i, prompt in enumerate(prompts)]
    found = []
    for name in ("none", planner):
        backends = [made.target, *([made.head] if name != "none" else [])]
        state = AutoState() if name == "auto" else None
        planners = [make_planner(name, backends, state=state, sequences=2) for _ in range(2)]
        found.append(served(Scheduler(made.target, planners, budget=8), requests)[0])
    assert found[0] == found[1]


def test_a_saved_session_of_a_head_goes_on(qwen, tmp_path):
    def ready():
        session = qwen.head.open()
        session.give(0, states_of(qwen.target, TEXT))
        return session

    session = ready()
    prefill(qwen.head, session, TEXT)
    session.save(tmp_path / "saved")
    expected = rows(qwen.head, session, [40], [-1])
    session.close()
    session = ready()
    session.load(tmp_path / "saved")
    session.give(0, states_of(qwen.target, TEXT))
    np.testing.assert_array_equal(rows(qwen.head, session, [40], [-1]), expected)
    session.close()


def without(part):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def twice(tensors):
    return tensors | {
        name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in tensors.items() if "mtp.layers" in name
    }


BROKEN = {
    "two layers, one after the other": (twice, "its head has 2 layers"),
    "a tensor missing": (without("mtp.fc.weight"), "does not fit the model"),
    "other widths": (lambda tensors: tensors | {"mtp.fc.weight": torch.zeros(32, 65)}, "does not fit the model"),
    "no layer": (without("mtp.layers"), "its head has 0 layers"),
    "none": (without("mtp."), "has no head of its own"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_head_that_cannot_be_used(name, qwen, tmp_path):
    change, message = BROKEN[name]
    folder = save(tiny_model("qwen3.5"), tmp_path)
    save_file(change(load_file(qwen.folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message) as caught:
        engine.load_head(qwen.target, str(folder), DRAFT_OPTIONS)
    assert str(folder) in str(caught.value)
    assert engine.load(engine.plan(str(folder), LoadOptions(exact="off"), this_machine())).model  # without its head


def test_a_head_of_another_kind_is_named(tmp_path):
    folder = save(tiny_model("qwen3"), tmp_path)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.norm.weight": torch.ones(32)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="a head in a qwen3 model cannot be used; those of qwen3_next"):
        engine.has_head(str(folder))
    assert not engine.has_head(str(save(tiny_model("llama"), tmp_path / "llama")))


def test_the_head_of_a_folder_is_a_draft_by_name(qwen):
    options = {"context_length": 64, "backend": "torch", "budget": 8, "exact": "off"}
    texts = []
    for more in ({"planner": "none"}, {"draft": "head", "planner": "specexec"}):
        with edgespec.load(str(qwen.folder), **options, **more) as model:
            texts.append(model.generate("abc", max_tokens=12).text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("own", [True, False], ids=["own", "EAGLE-3"])
def test_memory_is_planned_for_a_head(own, qwen, tmp_path, monkeypatch):
    """Its weights and cells; without it a layer more stays in memory."""
    head = qwen.folder if own else head_folder(tmp_path / "head")
    target = load(str(qwen.folder), **OPTIONS)
    model = engine.load_head(target, str(head), DRAFT_OPTIONS).model
    asked = {"own_head": own, "draft_files": () if own else (str(head),)}
    fixed = []
    choose = backend_module.choose_placement
    monkeypatch.setattr(backend_module, "choose_placement", lambda *args: fixed.append(args[2]) or choose(*args))
    for more in ({}, asked):
        load(str(qwen.folder), **OPTIONS, sessions=2, gpu_memory=1 << 40, copies=HostCopies, **more).close()
    cells = 2 * (OPTIONS["context_length"] + target.capabilities.max_nodes) * 2 * KEY_HEADS * D
    weights = sum(weight.numel() for weight in model.parameters())
    assert fixed[-1] - fixed[0] == 4 * (weights + cells)


def test_a_model_whose_head_cannot_be_used_runs_and_says_so(tmp_path):
    folder = save(tiny_model("qwen3"), tmp_path)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.norm.weight": torch.ones(32)}, file, {"format": "pt"})
    with edgespec.load(str(folder), context_length=64, backend="torch", exact="off") as model:
        [note] = [note for note in model.notes if "head" in note]
        assert note.startswith("the head of the model is not used: ")
        assert "a head in a qwen3 model cannot be used" in note
        assert model.generate("abc", max_tokens=2).text
