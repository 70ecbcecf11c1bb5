"""Self-drafting on PyTorch: layers of the target draft, in memory and where the others are streamed."""

import gc
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")

import torch
from alone import served
from conftest import few
from contract import Reused, by_main_check, work
from edgespec.backends.torch import backend as backend_module
from edgespec.backends.torch.backend import load
from edgespec.backends.torch.engine import engine
from edgespec.backends.torch.offload import BUFFERS, HostCopies
from folder_texts import by_temperature, check_layers_by_name, check_lossless, rows_of
from hf_models import SMALL, check_closing_frees, save, tiny_model
from test_torch import Recorder, memory_for

import edgespec
from edgespec.errors import ModelError, UsageError
from edgespec.loading.pair import with_head
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.choice import make_planner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

LAYERS = 8
OPTIONS: dict[str, Any] = {"context_length": 128, "budget": 16, "threads": 1}
PROMPT = [5, 9, 30, 7, 9, 30]
FAMILIES = ["llama", "mistral, window", "gemma3", "mixtral", "gpt-oss"]
KEPT = {8: [0, 1, 4, 5, 6, 7], 5: [0, 1, 5, 6, 7], 2: [0, 7]}  # by layers in memory


def made(family: str, folder: Any, seed: int = 0) -> Any:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 4} if family in ("gemma3", "gpt-oss") else {}
    model = tiny_model(family, seed, num_hidden_layers=LAYERS, **kinds)
    for layer in model.model.layers[2:6]:  # layers in the middle change little, as in trained models
        layer.mlp.apply(lambda module: [weight.data.mul_(0.3) for weight in module.parameters(recurse=False)] and None)
    return save(model, folder), model


@pytest.fixture(scope="module", params=few(FAMILIES, "llama", "mistral, window", "gpt-oss"))
def folder(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("own"))[0]


def pair(folder, resident=LAYERS, **options):
    """A target with so many layers in memory, and its draft."""
    options = OPTIONS | options
    more = {}
    if resident < LAYERS:
        cells = load(str(folder), **options, gpu_memory=1 << 40, copies=HostCopies).open().cells.nbytes
        room = memory_for(folder, resident, **options) + options.get("sessions", 1) * cells  # those of the draft
        more = {"gpu_memory": room, "copies": Recorder}
    target = load(str(folder), **options, **more, own_layers=True)
    return target, own(target, folder, sessions=options.get("sessions", 1))


def own(target, folder, sessions=1):
    options = LoadOptions(**OPTIONS, sessions=sessions, own_layers=True).for_draft()
    return engine.load_head(target, str(folder), options)


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("resident", KEPT)
@pytest.mark.parametrize("planner", [SpecExecPlanner, ChainPlanner])
def test_texts_are_those_of_plain_decoding(folder, resident, planner, sampling):
    target, draft = pair(folder, resident)
    assert (not target.streamers) == (resident == LAYERS)
    (tokens,) = check_lossless(target, [planner(draft, depth=6, tau=0.5)], PROMPT, sampling, 24)
    assert tokens > 1 or resident == 2


def test_several_texts_share_the_layers(llama):
    prompts, found = [PROMPT, [7, 8, 7, 8], [*PROMPT, 3, 3]], []
    requests = [Request(prompt, SamplingParams(0.7, seed=i), max_tokens=12) for i, prompt in enumerate(prompts)]
    for name in ("none", "specexec"):
        target, draft = pair(llama, 5, sessions=2)
        planners = [make_planner(name, [target, *([draft] if name != "none" else [])]) for _ in range(2)]
        found.append(served(Scheduler(target, planners, budget=8), requests)[0])
    assert found[0] == found[1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("resident", KEPT)
def test_rows_are_those_of_a_model_of_these_layers(tmp_path, folder, resident):
    """Of tokens that the target has not read."""
    _, draft = pair(folder, resident)
    model = load(str(folder), **OPTIONS).model
    model.model.layers = torch.nn.ModuleList(model.model.layers[number] for number in KEPT[resident])
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    config = model.config
    config.num_hidden_layers = len(KEPT[resident])
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in KEPT[resident]]
    model.save_pretrained(tmp_path)
    for file in folder.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    short = load(str(tmp_path), **OPTIONS)
    np.testing.assert_array_equal(rows_of(draft, PROMPT), rows_of(short, PROMPT))
    assert [list(cells.open().cells.by_layer) for cells in pair(folder, resident)] == [list(range(8)), KEPT[resident]]


def test_cells_are_those_of_the_target_where_it_has_read(folder):
    """Also of tokens that the draft read before, and after a rewind; those of the last token are the draft's own."""
    target, draft = pair(folder, sessions=2)
    ours, theirs = draft.open(), target.open()

    def compare(count):
        for layer in KEPT[LAYERS]:
            mine, wanted = (session.cells.by_layer[layer][:, :, :count] for session in (ours, theirs))
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0)

    prefill(draft, ours, PROMPT)  # before the target
    prefill(target, theirs, [*PROMPT, 1, 2])
    target.open()  # of another text
    draft.forward([work(ours, [1, 2, 3], [-1, 0, 1], wanted=[2])])
    compare(8)
    ours.commit([0, 1, 2])
    theirs.rewind(4)
    ours.rewind(4)
    prefill(target, theirs, [*PROMPT[:4], 8, 9, 10])
    draft.forward([work(ours, [8, 9, 10, 11], [-1, 0, 1, 2], wanted=[2, 3])])
    compare(6)
    assert not torch.equal(ours.cells.by_layer[7][:, :, 6], theirs.cells.by_layer[7][:, :, 6])


def test_a_draft_reads_nothing_and_takes_no_memory_for_weights(folder):
    target, draft = pair(folder, 5)
    target.streamers[0]._engine.events.clear()
    rows_of(draft, PROMPT)
    assert target.streamers[0]._engine.events == []
    assert draft.wait_seconds == 0
    gc.collect()
    assert {id(weight) for weight in draft.model.parameters()} == {id(weight) for weight in target.model.parameters()}


@pytest.fixture(scope="module")
def drafts(llama):
    targets = []

    def loaded(**options):
        targets.append(load(str(llama), threads=1, **options))
        return own(targets[-1], llama, sessions=options["sessions"])

    yield (reused := Reused(loaded))
    reused.close()


@by_main_check
def test_contract(check, drafts):
    check(drafts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made("llama", tmp_path_factory.mktemp("llama"))[0]


def test_memory_is_planned_for_cells(llama, monkeypatch):
    fixed = []
    choose = backend_module.choose_placement
    monkeypatch.setattr(backend_module, "choose_placement", lambda *args: fixed.append(args[2]) or choose(*args))
    for asked in (False, True):
        options = OPTIONS | {"sessions": 2, "own_layers": asked}
        target = load(str(llama), **options, gpu_memory=1 << 40, copies=HostCopies)
    cell = LAYERS * 2 * SMALL["num_key_value_heads"] * SMALL["head_dim"] * 4
    assert fixed[-1] - fixed[0] == 2 * (OPTIONS["context_length"] + target.capabilities.max_nodes) * cell


def test_streamed_layers_are_consecutive(llama):
    assert [one.self_attn.layer_idx for one in pair(llama, 3)[0].streamers[0].layers] == [1, 2, 3, 4, 5]


def test_layers_of_a_hybrid_are_refused(tmp_path):
    folder = save(tiny_model("qwen3.5"), tmp_path)
    target = load(str(folder), **OPTIONS)
    with pytest.raises(ModelError, match=r"has recurrent layers, so its own layers cannot draft; use a draft"):
        own(target, folder)


def test_without_a_layer_in_memory_it_says_so(llama):
    target = load(str(llama), **OPTIONS, gpu_memory=memory_for(llama, 0, **OPTIONS), copies=HostCopies)
    assert len(target.streamers[0].layers) == LAYERS
    assert BUFFERS < LAYERS
    with pytest.raises(ModelError, match="none of its layers stays in memory, so none can draft"):
        own(target, llama)


def test_other_engines_say_what_to_do_instead():
    with pytest.raises(UsageError, match=r"llamacpp cannot draft with layers of the target .*--drop-layers makes"):
        with_head(["llamacpp"] * 2, ["a.gguf"] * 2, "layers", LoadOptions())


@pytest.mark.parametrize("more", [{"planner": "pearl"}, {"planner": "specexec", "ahead": True}])
def test_they_cannot_go_on_while_the_target_runs_and_are_not_loaded_for_that(llama, monkeypatch, more):
    monkeypatch.setattr("edgespec.loading.draft_or_memory.load_pair", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UsageError, match="layers: drafts from the target's own states, so it cannot go on while"):
        edgespec.load(str(llama), backend="torch", draft="layers", **more)


def test_closing_frees_the_model(llama):
    check_closing_frees(lambda: pair(llama), PROMPT)


def test_the_user_names_them_layers(llama, run):
    check_layers_by_name(llama, "torch")
    code, out, err = run("doctor", str(llama), "--draft", "layers", "--backend", "torch", "--exact", "off")
    assert code == 0, err
    assert "draft     " not in out
    assert "specexec" in out


def test_plain_decoding_after_a_draft_reads_the_whole_model(llama):
    """The layers that were left out are back."""
    target, draft = pair(llama)
    rows_of(draft, PROMPT)
    other = load(str(llama), **OPTIONS)
    np.testing.assert_array_equal(rows_of(target, PROMPT), rows_of(other, PROMPT))


def test_measurements_are_not_those_of_the_model_as_its_own_draft(llama, monkeypatch):
    seen = []
    monkeypatch.setattr("edgespec.loading.pair.recall", lambda about, form: seen.append(about))
    for draft in (str(llama), "layers"):
        edgespec.load(str(llama), draft=draft, backend="torch", exact="off", context_length=128).close()
    first, second = seen
    assert first["draft"] == second["draft"]
    assert first != second
