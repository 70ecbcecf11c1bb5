"""Judging a pair: what forbids it, what is foretold of it, what is recommended, and what is written down."""

import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Run
from gguf_writer import add, finish

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

import gguf
from edgespec.backends.llamacpp.vocab import load_vocab
from gguf_files import byte_level_vocab, sentencepiece_vocab, small_llama

import edgespec
from edgespec.errors import EdgespecError, RegistryError, UsageError, VocabMismatch
from edgespec.loading.pair import close_all, open_backends
from edgespec.loop.engines import LoadOptions
from edgespec.loop.same_vocab import check_same_vocab
from edgespec.loop.text import user_messages
from edgespec.measure import pair as pair_module
from edgespec.measure import pair_report, recording
from edgespec.measure.pair import (
    Measured,
    Row,
    budgets,
    drafts_here,
    expected_tokens,
    measure_pair,
    without_disturbance,
)
from edgespec.measure.pair_checks import check_pair
from edgespec.measure.pair_report import (
    append_entry,
    card,
    check_writable,
    figures,
    pair_table,
    picture,
    ranking,
    recommendation,
)
from edgespec.measure.recording import QUESTIONS, questions, record
from edgespec.measure.replay import replay
from edgespec.model import Model
from edgespec.models.registry import Entry, find_model, read_models
from edgespec.planners.choice import make_planner

GB = 10**9
Edit = Callable[[Any], object]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def header(path: Path, edit: Edit = lambda writer: None, arch: str = "llama", vocab: Edit = byte_level_vocab) -> str:
    """A GGUF with a single tensor."""
    writer = gguf.GGUFWriter(path, arch)
    add(writer, block_count=1, context_length=4096)
    vocab(writer)
    edit(writer)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    return str(path)


def change(key: str, value: Any) -> Edit:
    def edit(writer: Any) -> None:
        old = next((values[key] for values in writer.kv_data if key in values), None)
        for values in writer.kv_data:
            if key in values:
                values[key] = gguf.GGUFValue(value, old.type, getattr(old, "sub_type", None)) if old else values[key]

    return edit


def kinds(writer: Any) -> None:
    values = next(v for v in writer.kv_data if "tokenizer.ggml.token_type" in v)
    values["tokenizer.ggml.token_type"].value[5] = 3


def renamed(old: str, new: str, kind: int) -> Edit:
    def edit(writer: Any) -> None:
        values = {key: value for part in writer.kv_data for key, value in part.items()}
        names, kinds = values["tokenizer.ggml.tokens"].value, values["tokenizer.ggml.token_type"].value
        at = names.index(old)
        names[at], kinds[at] = new, kind

    return edit


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda writer: None, ""),
        (change("tokenizer.ggml.pre", "qwen2"), "pre is 'smollm' in the target and 'qwen2' in the draft; harmless"),
        (change("tokenizer.ggml.eos_token_id", 3), "eos_token_id is .* so they may end sequences differently"),
        (lambda writer: writer.add_add_bos_token(True), "add_bos_token is not given in the target and True in the"),
        (kinds, "1 tokens have another name or kind .* in the draft, such as '&'"),
        (renamed("<think>", "[PAD266]", 5), "1 tokens have another name or kind .* in the draft, such as '<think>'"),
        (renamed("<|im_start|>", "<|user|>", 3), "1 tokens have another name or kind .* such as '<|im_start|>'"),
        (renamed("[PAD270]", "<tool>", 4), "1 tokens have another name or kind"),
        (change("tokenizer.chat_template", "{{ messages[0]['content'] }}"), "templates write a talk with a system"),
        (change("tokenizer.chat_template", TEMPLATE + "{{ tools }}"), "templates write a talk with tools differently"),
        (change("llama.context_length", 1024), "the draft was trained for 1024 tokens, not 2048"),
    ],
)
def test_what_is_warned_of(tmp_path: Path, edit: Edit, says: str) -> None:
    target, draft = header(tmp_path / "a.gguf"), header(tmp_path / "b.gguf", edit)
    (tmp_path / "a.gguf").open("ab").write(b"\0" * 10_000_000)  # so that sizes need no warning
    verdict = check_pair(target, draft, context_length=2048, memory=GB)
    assert verdict.refusals == []
    assert len(verdict.warnings) == bool(says)
    if says:
        assert re.search(says, verdict.warnings[0]), verdict.warnings
        assert "\n" not in verdict.warnings[0]


def test_a_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    assert load_vocab(header(tmp_path / "a.gguf")).tool_template is None
    both = header(tmp_path / "b.gguf", lambda writer: writer.add_string("tokenizer.chat_template.tool_use", "two"))
    vocab = load_vocab(both)
    assert (vocab.chat_template, vocab.tool_template) == (TEMPLATE, "two")


def test_sizes_are_warned_of(tmp_path: Path) -> None:
    target, draft = header(tmp_path / "a.gguf"), header(tmp_path / "b.gguf")
    verdict = check_pair(target, draft, context_length=2048, memory=1000)
    assert "has 1.00 of the target's bytes" in verdict.warnings[0]
    assert "of memory, and stays there" in verdict.warnings[1]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (renamed("<|im_start|>", "<|user|>", 3), ""),  # QwQ and its Qwen2.5 drafts have such names
        (renamed("<think>", "[PAD266]", 5), ""),
        (renamed("<think>", "<plan>", 4), "token 266 is '<think>' in the target and '<plan>' in the draft"),
        (renamed("12", "13", 1), "token 261 is '12' in the target and '13' in the draft"),
    ],
)
def test_a_draft_that_only_proposes_may_have_other_names_of_tokens_that_write_nothing(
    tmp_path: Path, edit: Edit, says: str
) -> None:
    target, draft = (load_vocab(header(tmp_path / f"{edited}.gguf", edited)) for edited in (lambda writer: None, edit))
    with pytest.raises(VocabMismatch, match=says) if says else nullcontext():
        check_same_vocab(target, draft)
    with pytest.raises(VocabMismatch, match="use a draft of the same model family"):
        check_same_vocab(target, draft, writes=True)


def test_the_text_is_the_targets_where_names_differ_and_a_cascade_is_refused(tmp_path: Path) -> None:
    target, draft = small_llama(tmp_path / "target.gguf"), tmp_path / "draft.gguf"
    draft.write_bytes(target.read_bytes().replace(b"<|im_end|>", b"<|IM_END|>"))
    options: dict[str, Any] = {"context_length": 128, "budget": 8, "threads": 1, "exact": "off"}
    with edgespec.load(str(target), draft=str(draft), planner="chain", **options) as model:
        found = model.generate("a", max_tokens=12)
        assert found.stats.tokens_by_source["draft"] > 0
    with edgespec.load(str(target), planner="none", **options) as model:
        assert found.text == model.generate("a", max_tokens=12).text
    with pytest.raises(VocabMismatch, match=r"'<\|im_end\|>' in the target and '<\|IM_END\|>' in the draft"):
        edgespec.load(str(target), draft=str(draft), approximate="cascade:0.5", **options)


def test_what_is_refused(tmp_path: Path) -> None:
    good = header(tmp_path / "a.gguf")
    foreign = header(tmp_path / "b.gguf", vocab=sentencepiece_vocab)
    recurrent = header(tmp_path / "c.gguf", arch="glm5-next")
    part = header(tmp_path / "d-00001-of-00002.gguf")
    (tmp_path / "e.gguf").write_text("hello")
    for pair, says in [
        ((good, foreign), "the draft has another vocabulary than the target"),
        ((good, recurrent), "keeps the states of glm5-next where they cannot be copied"),
        ((recurrent, good), "keeps the states of glm5-next where they cannot be copied"),
        ((good, part), "00002-of-00002.gguf: there is no such file"),
        ((str(tmp_path / "e.gguf"), good), "is not a GGUF file"),
    ]:
        verdict = check_pair(*pair, context_length=2048, memory=GB)
        assert len(verdict.refusals) == 1
        assert says in verdict.refusals[0]
        assert "\n" not in verdict.refusals[0]


def test_recurrent_layers_are_no_reason(tmp_path: Path) -> None:
    pair = header(tmp_path / "a.gguf", arch="mamba"), header(tmp_path / "b.gguf", arch="mamba2")
    assert check_pair(*pair, context_length=2048, memory=GB).refusals == []


def test_a_file_that_is_cut_off(small: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small.read_bytes()[:-1000])
    verdict = check_pair(str(small), str(cut), context_length=2048, memory=GB)
    assert "cut.gguf: is cut off" in verdict.refusals[0]
    assert len(check_pair(str(cut), str(cut), context_length=2048, memory=GB).refusals) == 1


def test_a_replay_gains_what_the_target_would_have_given(small: Path) -> None:
    """Against the recording of plain decoding, each planner takes as many passes as against the target itself."""
    entry = find_model(str(small))
    backends = open_backends(entry, str(small), None, LoadOptions(context_length=512, budget=8, exact="off"))
    try:
        question = user_messages("Count from one to ten.")
        with Model(backends[0], make_planner("none", backends)) as model:
            prompt_ids, plain = model.encode(question), model.generate(question, max_tokens=32)
        for name in ("sssd", "chain", "specexec"):
            with Model(backends[0], make_planner(name, backends), budget=5) as model:
                real = model.generate(question, max_tokens=32)
            assert real.token_ids == plain.token_ids
            planner = make_planner(name, backends)
            found = replay(planner, prompt_ids, plain.token_ids, 5, backends[0].vocab.size)
            planner.close()
            assert sum(found.acceptance_lengths) == real.stats.gained == len(plain.token_ids) - 1
            assert len(found.acceptance_lengths) == real.stats.passes
    finally:
        close_all(backends)


def test_answers_are_recorded_once(small: Path, tmp_path: Path) -> None:
    kept, asked = tmp_path / "sub" / "answers.jsonl", questions(["prose", "code"], 1)
    options = LoadOptions(context_length=512, budget=8, exact="off")
    (target,) = open_backends(find_model(str(small)), None, None, options)
    try:
        seen = list[tuple[int, int]]()
        first = record(target, asked, kept, 8, lambda *what: seen.append(what))
        assert seen == [(0, 2), (1, 2), (2, 2)]
        assert [answer.category for answer in first] == ["prose", "code"]
        assert all(0 < len(answer.output_ids) <= 8 for answer in first)
        lines = kept.read_text().splitlines()
        kept.write_text(lines[0] + "\n" + lines[1][:20])  # it was interrupted while it wrote the second
        assert record(target, asked, kept, 8) == first
        nowhere = kept / "answers.jsonl"
        assert record(target, asked[:1], nowhere, 8) == first[:1]
    finally:
        target.close()
    assert len(kept.read_text().splitlines()) == 2
    assert record(_NoTarget(), asked, kept, 8) == first  # type: ignore[arg-type]


class _NoTarget:
    """Must not be asked."""

    class capabilities:  # noqa: N801
        streams, kept = False, 0

    def open(self) -> Any:
        return self

    def close(self) -> None:
        pass


def test_another_file_has_other_answers(tmp_path: Path) -> None:
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    a.write_bytes(b"1")
    b.write_bytes(b"1")
    about = ((a, 8, 512), (a, 9, 512), (a, 8, 96), (b, 8, 512))  # its context may cut an answer
    names = {recording.recording_file(str(path), *limits) for path, *limits in about}
    a.write_bytes(b"12")
    assert len({*names, recording.recording_file(str(a), 8, 512)}) == 5


def test_questions() -> None:
    assert questions(["chat"], 2) == [("chat", text) for text in QUESTIONS["chat"][:2]]
    with pytest.raises(UsageError, match="there is no task 'poem'"):
        questions(["poem"], 1)
    for count in (0, 6):
        with pytest.raises(UsageError, match="there are 1 to 5"):
            questions(["chat"], count)


def test_budgets_are_those_a_pass_may_have() -> None:
    assert budgets(6) == [2, 4, 6]
    assert budgets(62) == [2, 4, 6, 8, 16, 32, 62]
    assert budgets(0) == []
    assert expected_tokens(0.0) == 1
    assert expected_tokens(1.0) == 9


def test_a_busy_moment_makes_no_pass_dearer_than_a_larger_one() -> None:
    assert without_disturbance({1: 0.13, 3: 0.05, 5: 3.0, 9: 0.4}) == {1: 0.05, 3: 0.05, 5: 0.4, 9: 0.4}


def measured(sssd: float, specexec: float | None) -> Measured:
    """Passes of a second each, with so many tokens per pass."""
    rows = [Row("none", 0, 1.0, 0.0, 1.0, {"code": 1.0}), Row("sssd", 8, sssd, 0.0, 1.0, {"code": sssd})]
    if specexec is not None:
        rows.append(Row("specexec", 16, 2 * specexec, 1.0, 1.0, {"code": specexec}))
    return Measured("/big.gguf", "small.gguf" if specexec else "", rows, True, "wide", [])


@pytest.mark.parametrize(
    ("sssd", "specexec", "planner", "says"),
    [
        (0.9, 0.8, "none", "no draft, plain decoding; the best drafts (sssd, budget 8) make 0.90 ×"),
        (1.04, 1.03, "none", "no draft, plain decoding"),  # too little to be sure of
        (
            2.0,
            1.5,
            "sssd",
            "no draft, --planner sssd --budget 8: 2.00 tokens/s, 2.00 × plain decoding; with",
        ),
        (2.0, 3.0, "specexec", "this draft, --planner specexec --budget 16: 3.00 tokens/s, 3.00 × plain decoding"),
        (2.0, None, "sssd", "no draft, --planner sssd --budget 8: 2.00 tokens/s, 2.00 × plain decoding"),
    ],
)
def test_what_is_recommended(sssd: float, specexec: float | None, planner: str, says: str) -> None:
    found = measured(sssd, specexec)
    assert found.best.planner == planner
    assert recommendation(found).startswith(f"recommended: {says}")
    assert figures(found, "12G")["planner"] == planner


def test_tables_and_the_picture(tmp_path: Path) -> None:
    found = measured(2.0, 3.0)
    text = pair_table(found)
    assert "big.gguf, streamed, passes: wide" in text
    assert "6.00" in text
    lines = ranking([("slow.gguf", measured(2.0, 1.5)), ("quick.gguf", found)]).splitlines()
    order = [next(i for i, line in enumerate(lines) if name in line) for name in ("quick", "none (sssd)", "slow")]
    assert order == sorted(order)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'edgespec[bench]'")
    picture(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    picture(found, tmp_path / "a.png")  # a picture is replaced
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.png"]
    with pytest.raises(EdgespecError, match="cannot be written"):
        picture(found, tmp_path / "missing" / "a.png")


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("edgespec.measure.pair.measure_pair", lambda *_, **__: pytest.fail("began to measure"))
    missing, notes = str(tmp_path / "missing" / "a.png"), tmp_path / "notes.png"
    notes.write_text("# no picture")
    for there, path, code, says in (
        (object(), missing, 2, "there is no folder"), (None, "a.png", 1, "[bench]"),
        (object(), str(notes), 2, "exists and is not a PNG picture, so it is not replaced"),
        (object(), "notes.md", 2, "the picture is a PNG, but notes.md does not end in .png"),
    ):  # fmt: skip
        monkeypatch.setattr("edgespec.measure.pair_report.find_spec", lambda _, there=there: there)
        status, out, err = run("pair", str(small), "--png", path)
        assert (status, out, err.count("\n")) == (code, "", 1)
        assert says in err


OWN = """# mine
models:
    - name: first   # a comment
      target: file:a.gguf
# the end"""


@pytest.mark.parametrize("text", [OWN, OWN.replace("    - ", "- ").replace("      t", "  t"), "models:\n", None])
def test_an_entry_is_added_and_nothing_else_changes(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "deep" / "models.yaml"
    if text is not None:
        path.parent.mkdir()
        path.write_text(text)
    if text == "models:\n":  # is no list yet
        path.unlink()
    entry = {"name": "mine", "target": "file:/b.gguf", "measured": [figures(measured(2.0, 3.0), None)]}
    append_entry(path, entry)
    assert path.read_text().startswith(text if text and path.exists() and text != "models:\n" else "models:\n")
    found = {one.name: one for one in read_models(path)}
    assert found["mine"].measured[0]["tokens_per_pass"] == 6.0
    assert ("first" in found) == (text is not None and "first" in text)
    assert [file.name for file in path.parent.iterdir()] == ["models.yaml"]


def test_a_file_that_cannot_take_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: [{name: a, target: 'file:a'}]\n")
    with pytest.raises(RegistryError, match="does not end with its list of models, so add this yourself"):
        append_entry(path, {"name": "b", "target": "file:b"})
    assert path.read_text() == "models: [{name: a, target: 'file:a'}]\n"
    assert [file.name for file in tmp_path.iterdir()] == ["models.yaml"]
    with pytest.raises(UsageError, match="has a model named 'a' already"):
        check_writable("a", path)
    monkeypatch.setattr(pair_report.os, "access", lambda *what: False)
    with pytest.raises(EdgespecError, match="cannot be written: you may not write to"):
        check_writable("b", path)


def test_the_command(run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = str(small), tmp_path / "home" / ".config" / "edgespec" / "models.yaml"
    arguments = f"pair {model} {model} --tasks chat --questions 1 -n 6 --budget 4 --ctx 512".split()
    status, out, err = run(*arguments, "--json", "--write", "mine")
    assert status == 0, err
    report = json.loads(out)
    assert [(row["planner"], row["budget"]) for row in report["rows"]] == [
        ("none", 0), ("sssd", 2), ("sssd", 4), ("specexec", 2), ("specexec", 4),
    ]  # fmt: skip
    assert report["rows"][4]["tokens_per_pass"] > 1.5  # a model is a good draft of itself
    assert "the draft has 1.00 of the target's bytes" in err
    (entry,) = read_models(own)
    assert (entry.name, entry.target, entry.draft) == ("mine", f"file:{model}", f"file:{model}")
    assert entry.measured[0]["plain_tokens_per_second"] > 0
    status, out, err = run(*arguments, "--write", "mine")
    assert (status, out) == (2, "")
    assert "has a model named 'mine' already" in err


def test_a_card_says_what_was_measured_on_what_and_how(
    run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row("none", 0, 1.0, 0.0, 0.5, {"chat": 1.0}), Row("specexec", 8, 4.0, 0.1, 0.7, {"chat": 4.0})]
    found = Measured(str(small), str(small), rows, True, "narrow", [])
    monkeypatch.setattr(pair_module, "measure_pair", lambda *about, **options: found)
    monkeypatch.setattr(sys, "argv", ["edgespec", "pair", str(small), str(small), "--write", "card.md"])
    monkeypatch.chdir(tmp_path)
    status, _, err = run(*sys.argv[1:])
    assert (status, err.splitlines()[-1]) == (
        0,
        "card.md is written; to publish it: hf upload OWNER/REPOSITORY card.md README.md",
    )
    _, values, text = Path("card.md").read_text(encoding="utf-8").split("---\n", 2)
    assert yaml.safe_load(values) == {"library_name": "edgespec", "tags": ["edgespec", "speculative-decoding"]}
    assert f"    edgespec pair {small.name} {small.name} --write card.md\n" in text
    assert "| specexec | 8 | 4.00 | 4.00 | 100 | 700 | 5.00 | 2.50 |\n" in text
    assert "recommended: this draft, --planner specexec --budget 8: 5.00 tokens/s, 2.50 × plain decoding" in text
    assert str(tmp_path) not in text
    assert run(*sys.argv[1:])[0] == 0  # a card may be written anew
    Path("card.md").write_text("My notes", encoding="utf-8")
    status, _, err = run(*sys.argv[1:])
    assert (status, "is not a model card" in err) == (2, True), err
    hub = {"target": "hf:owner/name/big.gguf", "draft": None}
    assert "base_model: owner/name\n" in card(found, hub, figures(found, "2G"), "edgespec pair")


def test_a_split_file_is_one_model_of_the_size_of_its_parts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_module, "all_models", lambda models_file: [])
    folder = tmp_path / "models"
    folder.mkdir()
    small_llama(folder / "big.gguf", layers=4, split=8)
    target, *others = sorted(folder.iterdir())
    small_llama(folder / "small.gguf", layers=1)
    small_llama(folder / "half.gguf", layers=2, split=8)
    assert target.stat().st_size < (folder / "small.gguf").stat().st_size
    drafts = [folder / "half-00001-of-00003.gguf", folder / "small.gguf"]
    assert [Path(one) for one in drafts_here(str(target), None)] == drafts

    def measure(*more: Any, **options: Any) -> Any:
        raise UsageError("enough")

    monkeypatch.setattr(pair_module, "measure_pair", measure)
    _, _, err = run("pair", str(target), "--find")
    assert "2 of 2 files have the target's vocabulary" in err
    assert "looking for drafts" in err
    others[0].unlink()
    assert drafts_here(str(target), None) == []


def test_how_often_two_models_agree(run: Run, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_module, "TEACHER", 64)
    status, out, _ = run("pair", str(small), str(small), "--quick", "--json")
    assert status == 0
    assert json.loads(out)["agreement"]["1"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["a.gguf", "b.gguf", "--tasks", "poems"], 2, "there is no task 'poems'"),
        (["a.gguf", "b.gguf", "--questions", "9"], 2, "there are 1 to 5"),
        (["a.gguf", "b.gguf", "--budget", "0"], 2, "budget is 0"),
        (["a.gguf", "b.gguf", "-n", "1"], 2, "max tokens is 1, but must be at least 2"),
        (["a.gguf", "b.gguf", "--memory", "abc"], 2, "--memory: 'abc' is not a size"),
        (["a.gguf", "b.gguf", "--ctx", "-1"], 2, "--ctx is -1, but must be from 0 to 16777216"),
        (["a.gguf", "--quick"], 2, "--quick compares two models"),
        (["a.gguf", "b.gguf", "--quick", "--write", "mine"], 2, "--quick measures no speed: leave out --write"),
        (["a.gguf", "b.gguf", "--quick", "--budget", "8"], 2, "--quick measures no speed: leave out --budget"),
        (["a.gguf", "b.gguf", "--quick", "-n", "8"], 2, "--quick measures no speed: leave out --max-tokens"),
        (["a.gguf", "b.gguf", "--quick", "--questions", "1"], 2, "--quick measures no speed: leave out --questions"),
        (["a.gguf", "b.gguf", "--find"], 2, "--find tries all drafts there are"),
        (["a.gguf", "--find", "--png", "x.png"], 2, "it goes without DRAFT, --quick, --write and --png"),
        (["a.gguf", "b.gguf"], 1, "a.gguf: there is no such file"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], code: int, says: str) -> None:
    status, out, err = run("pair", *arguments)
    assert (status, out) == (code, "")
    assert says in err.strip().splitlines()[-1]
    assert "Traceback" not in err


def test_without_a_draft_it_is_said_what_is_measured(run: Run) -> None:
    assert run("pair", "nothing.gguf")[2].startswith("note: no draft is named, so only copying from the text (sssd) is")


@pytest.mark.parametrize("busy", [False, True])
def test_a_pair_without_a_draft(small: Path, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    monkeypatch.setattr(pair_module, "machine_is_busy", lambda: busy)
    found = measure_pair(
        Entry(name="a", target=f"file:{small}"), None, questions(["chat"], 1), max_tokens=4, budget=2,
        context_length=512,
    )  # fmt: skip
    assert recording.recording_file(str(small), 4, 512).exists()
    assert [row.planner for row in found.rows] == ["none", "sssd"]
    assert any("these figures are rough" in note for note in found.notes) == busy


def test_answers_of_one_token_are_no_measurement(small: Path) -> None:
    with pytest.raises(EdgespecError, match="all answers to chat have one token"):
        measure_pair(
            Entry(name="a", target=f"file:{small}"), None, questions(["chat"], 1), max_tokens=1, budget=2,
            context_length=512,
        )  # fmt: skip


def test_plain_decoding_is_measured_without_the_draft(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights are streamed, the draft takes memory from the target."""
    opened = list[Any]()

    def streaming(entry: Entry, draft: str | None, *others: Any, **options: Any) -> list[Any]:
        backends = open_backends(entry, draft, *others, **options)
        opened.append(draft)
        if draft:
            backends[0].capabilities = replace(backends[0].capabilities, streams=True)
        return backends

    monkeypatch.setattr(pair_module, "open_backends", streaming)
    found = measure_pair(
        Entry(name="a", target=f"file:{small}"), str(small), questions(["chat"], 1), max_tokens=4,
        budget=2, context_length=512,
    )  # fmt: skip
    assert opened == [str(small), None]
    assert [row.planner for row in found.rows] == ["none", "sssd", "specexec"]
    assert found.streams
    assert "nothing has to be streamed" in found.notes[-1]
