"""Models with recurrent layers on PyTorch: all architectures write what plain decoding writes, however guessed."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

from conftest import few
from contract import chain_rows
from edgespec.backends.common.recurrent import Lane, states_of
from edgespec.backends.torch.backend import TorchBackend, load
from edgespec.backends.torch.loading import decoder_layers
from edgespec.backends.torch.offload import HostCopies
from edgespec.backends.torch.recurrent import groups, state_bytes
from folder_texts import HYBRID_PROMPT as PROMPT
from folder_texts import SAMPLINGS, check_grid, check_lossless, check_unread
from hf_models import HYBRIDS, MAMBA, SMALL, perturbed, save, tiny_model, transformers
from test_lossless_torch import OPTIONS
from test_torch import memory_for

from edgespec.errors import ModelError
from edgespec.loop.backend import Capabilities, Work
from edgespec.loop.passes import prefill
from edgespec.planners.specexec import SpecExecPlanner

SIZES = [(4, 2), (9, 1), (4, 3), (2, 1), (4, 2)]  # of works: the width of their lanes, and how many
LAYERS = {
    "lfm2": ["conv", "conv", "full_attention", "conv", "conv"],
    "granite": ["mamba", "mamba", "attention", "mamba", "mamba"],
}


@pytest.mark.parametrize(("number", "family"), list(enumerate(HYBRIDS)), ids=HYBRIDS)
def test_the_grid(number: int, family: str, tmp_path: Path, whole_grid: bool) -> None:
    """With a draft that is right now and then, and is recurrent itself."""
    target = load(str(save(tiny_model(family), tmp_path / "target")), **OPTIONS)
    draft = load(str(save(perturbed(tiny_model(family), 0.1, 1), tmp_path / "draft")), **OPTIONS, sessions=2)
    assert check_grid(target, draft, number, whole_grid) > 1  # guesses were right at all


def streamed(folder: Path, **options: Any) -> TorchBackend:
    """With one layer on the device."""
    loaded = load(str(folder), **OPTIONS, **options)
    sessions, model = options.get("sessions", 1), loaded.model
    memory = memory_for(folder, 1, **OPTIONS, **options) + sessions * states_of(8) * state_bytes(model)
    found = load(str(folder), **OPTIONS, **options, gpu_memory=memory, copies=HostCopies)
    assert found.streamers
    assert len(found.streamers[0].blocks) >= 1
    return found


@pytest.mark.parametrize("family", few(["lfm2", "granite"], "lfm2"))  # qwen3.5: test_heads_mtp.py
def test_streamed_weights(family: str, tmp_path: Path) -> None:
    """Steps bring states on; texts are those of weights in memory, or part where rounding decides."""
    folder = save(tiny_model(family, num_hidden_layers=5, layer_types=LAYERS[family]), tmp_path / "target")
    draft = load(str(save(perturbed(tiny_model(family), 0.1, 1), tmp_path / "draft")), **OPTIONS)
    check_lossless(streamed(folder), [SpecExecPlanner(draft, depth=6, beam=4)], PROMPT, SAMPLINGS[1], 12)
    target, memory = streamed(folder, sessions=2), load(str(folder), **OPTIONS)
    session, nodes = check_unread(target, memory, PROMPT, 2e-3), np.arange(6, dtype=np.int32)
    session.commit([0])
    other = target.open()
    prefill(target, other, PROMPT[:7])
    batch = [
        Work(session, nodes, nodes - 1, nodes),
        Work(other, nodes[:3] + 9, np.array([-1, 0, 0], np.int32), nodes[:3]),
    ]
    found = target.forward(batch)  # other lanes, and more of them, in one pass
    text = session.token_ids
    np.testing.assert_allclose(found[0].row(5), chain_rows(memory, [*text, *range(6)])[-1], atol=2e-3)
    np.testing.assert_allclose(found[1].row(2), chain_rows(memory, [*PROMPT[:7], 9, 11])[-1], atol=2e-3)


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_ctrl_c_ends_a_pass_within_a_layer(family: str, tmp_path: Path) -> None:
    """Also before layers without attention; the text goes on as before."""
    target, entered = load(str(save(tiny_model(family), tmp_path / "target")), **OPTIONS, sessions=2), list[int]()
    expected, session = chain_rows(target, PROMPT[:6]), target.open()
    prefill(target, session, PROMPT[:3])
    layers, root = decoder_layers(target.model), np.zeros(1, np.int32)
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: entered.append(number))
    hook = layers[0].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        target.forward([Work(session, root, root - 1, root)])
    hook.remove()
    assert entered == [0]
    session.rewind(len(session.token_ids))
    np.testing.assert_array_equal(chain_rows(target, PROMPT[:6]), expected)
    prefill(target, session, PROMPT[:6])
    assert session.token_ids == PROMPT[:6]


def test_works_that_share_a_pass() -> None:
    """Trees of one depth, as many as fit; prompts alone. Where weights are streamed all trees."""
    limits = Capabilities(100, 20, 20, 8, 0.0, paths=True)
    lanes: list[list[Lane[Any]]] = [[Lane(0, None, [1] * width, [])] * count for width, count in SIZES]
    none = np.zeros(0, np.int32)
    batch: list[Any] = [Work(cast(Any, None), none, none, none, prompt=width == 9) for width, _ in SIZES]
    assert list(groups(batch, lanes, limits)) == [([0, 2], 4), ([4], 4), ([1], 9), ([3], 2)]
    streams = replace(limits, streams=True)
    assert list(groups(batch, lanes, streams)) == [([0, 2], 4), ([3, 4], 4), ([1], 9)]


def test_a_prompt_beside_a_tree(tmp_path: Path) -> None:
    target = load(str(save(tiny_model("lfm2"), tmp_path)), **OPTIONS, sessions=3)
    writing, reading = target.open(), target.open()
    prefill(target, writing, PROMPT[:9])
    nodes = np.arange(5, dtype=np.int32)
    tree = Work(writing, nodes + 30, np.array([-1, 0, 0, 2, 2], np.int32), nodes)
    found = target.forward([tree, Work(reading, nodes + 50, nodes - 1, nodes[-1:], prompt=True)])
    np.testing.assert_allclose(found[0].row(4), chain_rows(target, [*PROMPT[:9], 30, 32, 34])[-1], atol=2e-3)
    np.testing.assert_allclose(found[1].row(4), chain_rows(target, [*range(50, 55)])[-1], atol=2e-3)
    writing.commit([0, 2])
    reading.commit([0, 1, 2, 3, 4])
    assert reading.unread_committed == 0
    assert writing.unread_committed == 2


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "zamba2",
            {"layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8},
            r"of the layers \[-1\], not \[1\]",
        ),
        ("mamba", {"state_size": 8, "conv_kernel": 4}, "does not go on from copies of its states"),
        ("recurrent_gemma", {"attention_window_size": 8, "lru_width": 32}, "states where they cannot be copied"),
    ],
)
def test_what_is_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Layers that share their attention, that read parts of texts from no state, or have it inside modules."""
    config = transformers.AutoConfig.for_model(family, **(SMALL | MAMBA | {"mamba_ngroups": 2} | changes))
    folder = save(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    with pytest.raises(ModelError, match=message):
        load(str(folder), **OPTIONS)
