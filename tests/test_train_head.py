"""scripts/train-head: what it trains is what drafts, it goes on after a stop, and both forms of its files load."""

import json
import os
import re
import runpy
import signal
import sys
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: pip install 'edgespec[convert]'")
pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import torch
from eagle_folders import attend_cells
from edgespec.backends.llamacpp.engine import engine
from edgespec.backends.torch.eagle import load_head
from folder_texts import states_of
from gguf_files import VOCAB, small_llama
from gguf_files import write_gguf as write_target
from gguf_writer import Reader
from hf_models import save, tiny_model
from test_heads_llamacpp import read

from edgespec.errors import ModelError, UsageError
from edgespec.loop.engines import LoadOptions
from edgespec.machine.this_machine import this_machine
from edgespec.measure.json_lines import resume
from heads.answers import Line, Sample, read_samples
from heads.target import Target, load_target, read_states, record
from heads.training import (
    Frozen,
    Settings,
    Trainer,
    draft_vocabulary,
    key_heads,
    lesson,
    loss_of,
    new_head,
    schedule,
    stack,
    unroll,
)

SCRIPT = Path(__file__).parent.parent / "scripts" / "train-head"
CPU = torch.device("cpu")
FEW = ("--vocab", "128", "--epochs", "2", "-n", "8", "--answers", "1", "--parallel", "4")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So that figures are those of every run, and few processors are enough."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def precise(monkeypatch):
    monkeypatch.setattr("heads.target.has_fast_products", lambda device: False)
    monkeypatch.setattr("heads.target.STORED", torch.float32)


def samples_of(model: Any, count: int) -> list[Sample]:
    """Greedy answers of a model to random prompts."""
    found = []
    for number in range(count):
        start = number % 9
        ids = torch.randint(4, 200, (1, max(1, start)), generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            while ids.shape[1] < 24:
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        found.append(Sample(ids[0].tolist(), start, True, number % 4 == 0))
    return found


@cache
def target_and_samples() -> tuple[Target, list[Sample]]:
    target = Target(tiny_model("llama").requires_grad_(False), [2, 1, 0], CPU)
    return target, samples_of(target.model, 12)


@pytest.fixture
def school(tmp_path, precise):
    """A tiny target, what a head takes of it, its texts with their states, and a new head."""
    target, samples = target_and_samples()
    record(target, samples, tmp_path / "states", lambda done, total: None)
    states = read_states(tmp_path / "states", samples, 4 * 32)
    ids = draft_vocabulary(samples, 100, 272)
    lessons = [lesson(sample, rows) for sample, rows in zip(samples, states, strict=True)]
    return target, Frozen(target.embeddings, target.output[ids], None), samples, lessons, new_head(target, ids)


def test_states_are_the_layers_inputs(school):
    target, _, samples, lessons, _ = school
    with torch.no_grad():
        found = target.model(input_ids=torch.tensor([samples[5].token_ids]), output_hidden_states=True)
    expected = torch.cat([found.hidden_states[i][0] for i in (2, 1, 0, 3)], -1)
    torch.testing.assert_close(lessons[5].states, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(expected[:, 96:] @ target.output.T, found.logits[0], atol=1e-4, rtol=1e-4)


def test_a_stopped_recording_goes_on(school, tmp_path):
    target, _, samples, _, _ = school
    file = tmp_path / "states"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2 + 3])
    record(target, samples, file, lambda done, total: None)
    assert file.read_bytes() == whole


def test_training_computes_what_drafting_computes(school):
    """Row by row, from cells, as the backends draft; with other texts in the batch."""
    _, frozen, _, lessons, head = school
    batch = stack([lessons[3], lessons[8], lessons[1]], CPU)
    with torch.no_grad():
        found = list(unroll(head, frozen, batch, 4))
        for number, one in enumerate((lessons[3], lessons[8], lessons[1])):
            states = head.fuse(one.states[:, :96])
            for row in range(one.first, one.rows):
                cells = torch.zeros(2, head.config.num_key_value_heads, 32, head.config.head_dim)
                tokens = frozen.embeddings[one.token_ids[1:]]
                places = torch.arange(1, 32)
                drafted = head(tokens[: row + 1], states[: row + 1], places[: row + 1], attend_cells(cells, 0))
                for step in range(min(4, one.rows - row)):
                    if step:
                        at = slice(row + step, row + step + 1)
                        drafted = head(tokens[at], drafted[-1:], places[at], attend_cells(cells, row + step))
                    expected = found[step][number, row - one.first]
                    torch.testing.assert_close(drafted[-1], expected, atol=1e-4, rtol=1e-4)


def test_the_loss_is_the_cross_entropy_with_the_target(school):
    target, frozen, samples, lessons, head = school
    one = lessons[7]
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([samples[7].token_ids])).logits[0]
        expected, weights = 0.0, 0.0
        for step, states in enumerate(unroll(head, frozen, stack([one], CPU), 3)):
            losses = []
            for row in range(one.rows - one.first - step):
                token = one.first + row + step + 1  # of the row; the next is predicted
                if head.t2d[samples[7].token_ids[token + 1]]:
                    wanted = torch.softmax(logits[token][head.draft_ids], -1)
                    ours = torch.log_softmax(head.draft_logits(states[0, row]), -1)
                    losses.append(float(-(wanted * ours).sum()))
            expected, weights = expected + 0.8**step * np.mean(losses), weights + 0.8**step
        assert float(loss_of(head, frozen, stack([one], CPU), 3)) == pytest.approx(expected / weights, rel=1e-4)


def trainer_of(school, path: Path, epochs: int, held: Any = None, rate: float = 3e-3) -> Trainer:
    target, frozen, samples, lessons, _ = school
    head = new_head(target, draft_vocabulary(samples, 100, 272))
    train = [one for sample, one in zip(samples, lessons, strict=True) if not sample.held_out]
    held = held or [one for sample, one in zip(samples, lessons, strict=True) if sample.held_out]
    return Trainer(head, frozen, train, held, Settings(epochs, rate, steps=3, batch=2), path)


def test_the_loss_falls_and_the_head_agrees_more_often(school, tmp_path):
    texts = school[3]  # a random model's answers to other prompts cannot be foreseen
    trainer, losses = trainer_of(school, tmp_path / "checkpoint", 12, texts, 1e-2), list[float]()
    before = trainer.measure()
    after = trainer.run(lambda step, total, loss: losses.append(loss), lambda step, found: None)
    assert len(losses) == trainer.total == 12 * 5
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5
    assert min(after) > max(before) + 0.2


def test_a_run_that_ctrl_c_stopped_ends_as_one_that_was_not(school, tmp_path):
    whole = trainer_of(school, tmp_path / "whole", 4)
    figures = whole.run(lambda step, total, loss: None, lambda step, found: None)

    def press(step: int, total: int, loss: float) -> None:
        if step in (7, 14):
            os.kill(os.getpid(), signal.SIGINT)

    for stopped_at in (7, 14):
        trainer = trainer_of(school, tmp_path / "parts", 4)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(press, lambda step, found: None)
        assert trainer.step == stopped_at
    trainer = trainer_of(school, tmp_path / "parts", 4)
    assert trainer.run(press, lambda step, found: None) == figures
    for name, weights in whole._head.state_dict().items():
        assert torch.equal(weights, trainer._head.state_dict()[name]), name
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_answers():
    samples = [Sample([9, 9, 9, 5, 7, 7, 5, 6], 3, True, False)]
    assert draft_vocabulary(samples, 3, 20).tolist() == [5, 6, 7]
    assert draft_vocabulary(samples, 5, 20).tolist() == [0, 1, 5, 6, 7]


@pytest.mark.parametrize(
    ("heads", "theirs", "d", "expected"),
    [(9, 3, 64, 9), (14, 2, 64, 14), (12, 2, 128, 4), (32, 8, 128, 8), (4, 2, 8, 4)],
)
def test_values_carry_an_embedding(heads, theirs, d, expected):
    assert key_heads(heads, theirs, d) == expected


def test_the_rate_rises_and_falls():
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=0.01)


# The command.


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    return small_llama(tmp_path_factory.mktemp("target") / "tiny.gguf")


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    keys = ("prompt", "question", "text")
    lines = [{keys[i % 3]: f"the {i} in the"} for i in range(22)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"turns": ["the", "in"]}]))
    return path


@pytest.fixture
def train(monkeypatch, capfd):
    """Run the script in this process: exit code, standard output, standard error."""
    loader = SourceFileLoader("train_head", str(SCRIPT))
    module = module_from_spec(ModuleSpec("train_head", loader))
    loader.exec_module(module)

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            module.main(module.command, [str(one) for one in arguments])
        except SystemExit as ended:
            return int(ended.code or 0), *capfd.readouterr()
        return 0, *capfd.readouterr()

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_gguf) -> Path:
    """A head for the tiny GGUF, as the script writes it."""
    from edgespec.cli.commands import main

    folder = tmp_path_factory.mktemp("trained")
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": f"in the {i}"}) + "\n" for i in range(24)))
    loader = SourceFileLoader("train_head", str(SCRIPT))
    module = module_from_spec(ModuleSpec("train_head", loader))
    loader.exec_module(module)
    main(module.command, [str(tiny_gguf), str(folder / "p.jsonl"), str(folder / "head"), *FEW, "--answers", "2"])
    return folder / "head"


@pytest.mark.exhaustive
def test_both_forms_hold_the_same_head(trained, tiny_gguf):
    import gguf

    head = load_head(trained, 4)
    assert head.layers == [2, 2, 1]
    assert sorted(path.name for path in trained.iterdir()) == [
        "answers.jsonl", "config.json", "eagle3-tiny.gguf", "model.safetensors", "training.json"
    ]  # fmt: skip
    file = Reader(trained / "eagle3-tiny.gguf")
    fields = {key: field.contents() for key, field in file.fields.items()}
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == [2, 2, 1]
    assert fields["eagle3.target_hidden_size"] == 256
    theirs = {key: field.contents() for key, field in Reader(tiny_gguf).fields.items()}
    for key, value in theirs.items():
        assert not key.startswith("tokenizer.") or fields[key] == value, key
    tensors = {tensor.name: tensor for tensor in file.tensors}
    assert "token_embd.weight" not in tensors
    assert tensors["d2t"].data.tolist() == head.draft_ids.tolist()
    assert tensors["d2t"].tensor_type == gguf.GGMLQuantizationType.I64
    assert int(head.t2d.sum()) == 128
    np.testing.assert_array_equal(tensors["fc.weight"].data, head.fc.weight.numpy())


def test_answers_are_the_targets_and_are_kept(trained, tiny_gguf, prompts, train):
    import edgespec

    lines = resume(trained / "answers.jsonl", Line)
    assert [line.number for line in lines].count(1) == 24 == len(lines) / 2
    with edgespec.load(tiny_gguf, planner="none", context_length=256, exact="off", remember=False) as model:
        for line in (*lines[:3], *lines[-3:]):
            result = model.chat(line.prompt, max_tokens=8, temperature=0.7 * line.number, seed=line.number)
            assert line.token_ids[line.start :] == result.token_ids
            assert line.token_ids[: line.start] == model.encode([{"role": "user", "content": line.prompt}])
    held = [sample.held_out for sample in read_samples(trained / "answers.jsonl")]
    assert sum(held) == 4


@pytest.mark.exhaustive
def test_a_started_folder_goes_on(tiny_gguf, prompts, train, tmp_path):
    out, more = tmp_path / "head", [*FEW[4:], "--vocab", "64", "--epochs", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heads.target.record", lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
        code, _, err = train(tiny_gguf, prompts, out, *more)
    assert (code, err.strip()) == (130, "stopped: the same command goes on from here")
    assert not (out / "config.json").exists()
    code, _, err = train(tiny_gguf, prompts, out, *more)
    assert code == 0, err
    lines, config = (out / "answers.jsonl").read_text(), (out / "config.json").read_text()
    head = load_head(out, 4).state_dict()
    (out / "config.json").unlink()
    broken = lines.splitlines(keepends=True)
    (out / "answers.jsonl").write_text("".join(broken[:15]) + broken[15][:20])
    code, shown, err = train(tiny_gguf, prompts, out, *more)
    assert code == 0, err
    assert "chains give" in shown
    assert sorted((out / "answers.jsonl").read_text().splitlines()) == sorted(lines.splitlines())
    assert (out / "config.json").read_text() == config
    assert {name: value.shape for name, value in head.items()} == {
        name: value.shape for name, value in load_head(out, 4).state_dict().items()
    }
    code, shown, _ = train(tiny_gguf, prompts, out, *more)
    assert (code, shown) == (0, f"{out}: the head is trained already; remove the folder to train another\n")


def test_a_folder(train, prompts, tmp_path):
    target = save(tiny_model("qwen2"), tmp_path / "target")
    (target / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    code, shown, err = train(target, prompts, tmp_path / "head", "--ctx", "128", *FEW)
    assert code == 0, err
    assert re.match(r"\d+ answers, \d{3} tokens; \d held out\n(step \d+ of \d\d: agreement .*\n)+$", shown)
    assert load_head(tmp_path / "head", 3).layers == [2, 1, 0]
    assert not list((tmp_path / "head").glob("*.gguf"))


def test_a_head_that_llama_cpp_cannot_feed_is_for_pytorch(train, prompts, tmp_path):
    model = tiny_model("qwen2", vocab_size=VOCAB, num_hidden_layers=4)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    target = write_target(tmp_path / "tiny.gguf", model.config, weights)
    code, _, err = train(target, prompts, tmp_path / "head", *FEW)
    assert code == 0, err
    assert "llama.cpp gives no inputs of layers for qwen2, so the head is for PyTorch only\n" in err
    assert load_head(tmp_path / "head", 4).layers == [2, 2, 1]
    assert not list((tmp_path / "head").glob("*.gguf"))


@pytest.mark.parametrize("changes", [{"token_ids": "abc"}, {"token_ids": [1.5]}, {"number": None}, {"prompt": 5}])
def test_a_damaged_line_of_answers_is_refused(changes, tmp_path):
    line = {"prompt": "a", "number": 0, "token_ids": [1, 2], "start": 1}
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert len(list(read_samples(path))) == 1
    path.write_text(json.dumps(line | changes) + "\n")
    with pytest.raises(UsageError, match=r"answers\.jsonl: holds something else"):
        list(read_samples(path))


def test_the_file_of_a_head_has_the_whole_name_of_its_target():
    name = runpy.run_path(str(SCRIPT))["gguf_name"]
    for target in ("Coder-1.5B", "Coder-1.5B.gguf"):
        assert name(Path("models") / target) == "eagle3-Coder-1.5B.gguf"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["TARGET", "ONE", "OUT"], "ONE: has one prompt, but one is held out and others are trained on: give more"),
        (["TARGET", "BAD", "OUT"], "BAD, line 1: needs a JSON object with UTF-8 text as prompt, turns, question, text"),
        (["TARGET", "PROMPTS", "NOWHERE/x"], "NOWHERE/x: there is no folder NOWHERE"),
        (["TARGET", "PROMPTS", "OTHER"], "OTHER: exists and is no folder of this script: name another"),
        (["TARGET", "PROMPTS", "BAD"], "BAD: exists and is no folder of this script: name another"),
        (["BAD", "PROMPTS", "OUT"], "BAD: is not a GGUF file"),
        (["TARGET", "PROMPTS", "OUT", "--gguf", "BAD"], "BAD: is not a GGUF file"),
        (["TARGET", "PROMPTS", "OUT", "--device", "gpu"], "device 'gpu' is not there"),
        (
            ["TARGET", "PROMPTS", "BEGUN", "--epochs", "9"],
            "BEGUN: was begun with epochs 2, and not 9: give the same, or another folder",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, message, tiny_gguf, prompts, train, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "the"}\n')
    (tmp_path / "bad").write_text("no\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    paths = {
        "TARGET": tiny_gguf, "PROMPTS": prompts, "OUT": tmp_path / "out", "ONE": tmp_path / "one.jsonl",
        "BAD": tmp_path / "bad", "NOWHERE/x": tmp_path / "nowhere" / "x", "NOWHERE": tmp_path / "nowhere",
        "OTHER": tmp_path / "other", "BEGUN": tmp_path / "begun",
    }  # fmt: skip
    if "BEGUN" in arguments:
        (tmp_path / "begun").mkdir()
        options = {"answers": 1, "max_tokens": 8, "ctx": 2048, "parallel": 4, "memory": None, "vocab": 128, "epochs": 2}
        options |= {"target": str(tiny_gguf), "texts": [str(prompts)], "kind": "edgespec head"}
        (tmp_path / "begun" / "training.json").write_text(json.dumps(options))
    more = [one for pair in zip(FEW[::2], FEW[1::2], strict=True) for one in pair if pair[0] not in arguments]
    code, _, err = train(*(paths.get(one, one) for one in arguments), *more)
    for name in ("NOWHERE/x", "NOWHERE", "ONE", "BAD", "OTHER", "BEGUN"):
        message = message.replace(name, str(paths[name]))
    assert code in (1, 2)
    assert err.splitlines()[-1].startswith(f"edgespec: {message}")
    assert len([line for line in err.splitlines() if line.startswith("edgespec")]) == 1
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_target_that_cannot_be_trained_on_is_refused_before_it_answers(train, prompts, tmp_path):
    model = tiny_model("qwen2", vocab_size=VOCAB)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items() if "k_proj.bias" not in name}
    target = write_target(tmp_path / "tiny.gguf", model.config, weights)
    code, _, err = train(target, prompts, tmp_path / "out", *FEW)
    assert code == 1
    assert err.endswith(f"edgespec: {target}: the tensor blk.0.attn_k.bias is missing\n")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_one_line(monkeypatch, tiny_gguf, prompts, train, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = train(tiny_gguf, prompts, tmp_path / "out")
    assert code == 1
    assert err.startswith("edgespec: training a head needs the package 'transformers': ")
    assert err.endswith("-m pip install 'edgespec[train]'\n")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_one_line(school, tmp_path):
    (tmp_path / "checkpoint").write_bytes(b"no")
    with pytest.raises(ModelError, match="checkpoint: is damaged; remove it, and the training begins again"):
        trainer_of(school, tmp_path / "checkpoint", 1)


@pytest.mark.parametrize("damage", ["config", "tensors", "cut"])
def test_a_damaged_head_is_one_line(trained, tmp_path, damage):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    if damage == "config":
        (tmp_path / "config.json").write_text('{"hidden_size": 256}')
    elif damage == "tensors":
        config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 128}
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        (tmp_path / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="is no EAGLE-3 head") as caught:
        load_head(tmp_path, 4)
    assert "\n" not in str(caught.value)


# llama.cpp, whose own drafting tests/test_heads_llamacpp.py compares with this binding's.

TEXT = [17, 40, 99, 23, 140, 201, 64, 8, 17, 99, 150, 31]


@pytest.fixture
def both(trained, tiny_gguf):
    """The target and its head on llama.cpp."""
    options = {"context_length": 256, "threads": 1, "budget": 32}
    target = engine.load(engine.plan(str(tiny_gguf), LoadOptions(**options), this_machine()))
    yield target, engine.load_head(target, str(trained / "eagle3-tiny.gguf"), LoadOptions(**options).for_draft())
    target.close()


def check_close(ours, theirs) -> None:
    assert (np.isinf(ours) == np.isinf(theirs)).all()
    finite = np.isfinite(ours)
    np.testing.assert_allclose(ours[finite], theirs[finite], atol=2e-3 * float(np.abs(theirs[finite]).max()))


def test_llama_cpp_gives_the_states_that_are_recorded_and_computes_the_same_head(
    both, trained, tiny_gguf, tmp_path, precise
):
    from edgespec.models.convert.folder_from_gguf import convert

    torch_target = load_target(convert(tiny_gguf, tmp_path / "folder", dtype="float32").path, [2, 2, 1], CPU)
    samples = [Sample(TEXT, 2, True, False)]
    record(torch_target, samples, tmp_path / "states", lambda done, total: None)
    (states,) = read_states(tmp_path / "states", samples, 4 * 256)
    inputs = states[:, : 3 * 256]
    target, its_head = both
    check_close(inputs.numpy(), states_of(target, TEXT))
    head = load_head(trained, 4).float()
    cells = torch.zeros(2, head.config.num_key_value_heads, 32, head.config.head_dim)
    with torch.no_grad():
        tokens = torch_target.embeddings[TEXT[1:]]
        drafted = head(tokens, head.fuse(inputs)[:-1], torch.arange(1, len(TEXT)), attend_cells(cells, 0))
        check_close(head.logits(drafted)[-1].numpy(), read(target, its_head, TEXT)[2])
