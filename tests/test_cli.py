"""The command line as a user meets it: what it prints, its exit codes, and one clear line for every mistake."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from conftest import Run
from forked import RUN, Forked, forked
from gguf_writer import add, finish
from reference.backend import random_model
from typist import typing_to

import edgespec
from edgespec.cli import terminal
from edgespec.cli.commands import cli
from edgespec.loading import exact
from edgespec.loading.pair import WIDEST, open_backends, plan_pair
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.machine import measurements as remembered
from edgespec.measure import bench, doctor
from edgespec.measure.bench import read_prompts
from edgespec.measure.report import learned_line

# What is not about passes that agree to the bit does without them: to find them takes longer than most tests.
ANY_PASSES = ["--exact", "off"]
REFERENCE = ["--backend", "reference"]


@pytest.fixture(scope="module")
def other_vocab_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random GGUF whose vocabulary is 300 made-up words."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    width, words = 64, [f"word{i}" for i in range(300)]
    writer = gguf.GGUFWriter(path, "llama")
    add(
        writer,
        block_count=1,
        context_length=128,
        embedding_length=width,
        feed_forward_length=width,
        head_count=2,
        layer_norm_rms_eps=1e-5,
        tokenizer_model="llama",
        token_list=words,
        token_scores=[0.0] * len(words),
        token_types=[1] * len(words),
    )
    shapes = {"token_embd": (300, width), "output": (300, width), "output_norm": (width,), "blk.0.attn_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width, width) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{name}": (width, width) for name in ("ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {"blk.0.ffn_norm": (width,)}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    finish(writer)
    return path


INTERRUPTED = """
import os, signal, sys
import edgespec.__main__
signal.signal(signal.SIGINT, signal.{handler})
class Interrupts:
    def find_spec(self, name, *more):
        if name == "edgespec.model":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["edgespec", "--version"]
edgespec.__main__.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT for one process")
@pytest.mark.parametrize(("handler", "code"), [("default_int_handler", 130), ("SIG_IGN", 0)])
def test_ctrl_c_while_the_program_starts_is_no_traceback(handler: str, code: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED.format(handler=handler)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert ("version" in done.stdout) == (code == 0)  # a program that ignores Ctrl-C, as under nohup, goes on


def test_after_the_start_ctrl_c_is_an_exception_again_and_garbage_is_collected() -> None:
    code = (
        "import gc, signal; from edgespec import __main__ as s; from edgespec.cli import commands as c;"
        "c.main = lambda: print(signal.getsignal(2), gc.isenabled());"
    )
    done = subprocess.run([sys.executable, "-c", code + "s.main()"], capture_output=True, text=True, check=False)
    assert "default_int_handler" in done.stdout
    assert done.stdout.endswith(" True\n")


def refused(run: Run, *arguments: str, code: int, says: str, stdin: str = "") -> None:
    """One line on standard error, nothing on standard output."""
    status, out, err = run(*arguments, stdin=stdin)
    assert (status, out) == (code, ""), err
    lines = [line for line in err.strip().splitlines() if " of plain decoding" not in line]  # what computes where
    assert len(lines) == 1, err
    assert says in lines[-1]


def test_a_mistake_ends_the_process_with_its_code() -> None:
    done = forked("run", "nothing.gguf", "hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "edgespec: nothing.gguf: there is no such file\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat"], "edgespec: no such command 'chat'; see edgespec --help"),
        (["convert"], "edgespec: missing argument 'SRC'; see edgespec convert --help"),
        (["run", "--draftt", "x"], "no such option"),
        (["run", "a.gguf", "two", "words"], "unexpected extra argument (words): put what has spaces into quotes; see"),
        (["serve", "x.gguf", "--grace", "-1"], "invalid value for '--grace': -1 is not in the range x>=0; see"),
        (["lend", "--threads", "0"], "invalid value for '--threads': 0 is not in the range 1<=x<=1024; see"),
        (["convert", "a", "b", "--to", "c"], "'c' is not one of 'hf', 'mlx', 'gguf'; see edgespec convert --help"),
    ],
)
def test_a_wrong_command_line_is_one_line(run: Run, arguments: list[str], says: str) -> None:
    refused(run, *arguments, code=2, says=says)


@pytest.mark.parametrize(
    "command", [[], ["run"], ["models"], ["bench"], ["convert"], ["datastore"], ["datastore", "build"]]
)
def test_every_command_has_help(run: Run, command: list[str]) -> None:
    status, out, _ = run(*command, "--help")
    assert status == 0
    assert "Usage:" in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nothing.gguf", "hi"], 1, "there is no such file"),
        (["./", "hi"], 1, "has no config.json"),
        (["smolm2", "hi"], 2, "did you mean smollm2-135m"),
        (["x.gguf", ""], 2, "prompt is empty"),
        (["x.gguf", "  \n"], 2, "prompt is empty"),
        (["x.gguf", "hi", "--budget", "0"], 2, "budget is 0"),
        (["x.gguf", "hi", "--gpu-layers", "-2"], 2, "--gpu-layers is '-2', but must be a number, -1 for all layers"),
        (["x.gguf", "hi", "--ctx", "-1"], 2, "--ctx is -1, but must be from 0 to 16777216"),
        (["x.gguf", "hi", "--threads", "0"], 2, "threads is 0, but must be from 1 to 1024"),
        (["x.gguf", "hi", "--budget", "many"], 2, "many"),
        (["x.gguf", "hi", "--temperature", "-1"], 2, "temperature is -1.0"),
        (["x.gguf", "hi", "--temperature", "nan"], 2, "temperature is nan"),
        (["x.gguf", "hi", "--top-p", "0"], 2, "top_p is 0.0"),
        (["x.gguf", "hi", "--planner", "magic"], 2, "there is no planner 'magic'"),
        (["x.gguf", "hi", "--planner", "specexec"], 2, "needs a draft model"),
        (["x.gguf", "hi", "--planner", "none", "--datastore", "d"], 2, "does not use a datastore"),
        (["x.gguf", "hi", "--planner", "sssd", "--draft", "y.gguf"], 2, "planner sssd does not use a draft; auto"),
        (["x.gguf", "hi", "--planner", "sssd", "--tau", "1"], 2, "has no option 'tau'"),
        (["x.gguf", "hi", "--tau", "0.5"], 2, "--tau is for drafting with a draft model: name one with --draft"),
        (["x.gguf", "hi", "--draft", "y.gguf", "--tau", "nan"], 2, "tau is nan"),
        (["x.gguf", "hi", "--max-tokens", "0"], 2, "max tokens is 0"),
        (["x.gguf", "hi", "--stop", ""], 2, "--stop is empty"),
        (["x.gguf", "hi", "--raw", "--system", "be brief"], 2, "--raw"),
        (["x.gguf", "hi", "--raw", "--chat-template", "t.jinja"], 2, "--chat-template has no meaning with --raw"),
        (["hf:owner/file.gguf", "hi"], 2, "OWNER/REPOSITORY/FILE"),
        (["package:no_such_package/x.gguf", "hi"], 1, "-m pip install no-such-package"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], code: int, says: str) -> None:
    refused(run, "run", *arguments, code=code, says=says)


@pytest.mark.parametrize(
    ("option", "instead", "says"),
    [
        (["--depth", "0"], "depth=…", "depth is 0"),
        (["--beam", "4"], "beam=…", "has no option 'beam'"),
        (["--min-probability", "2"], "min_probability=…", "min_probability is 2.0"),
        (["--no-coupling"], "coupling=False", "has no option 'coupling'"),
        (["--no-memory-of-costs"], f"set {remembered.OFF}=1", "no such file"),
        (["--presence-penalty", "nan"], "generate(…, presence_penalty=…)", "presence_penalty is nan"),
        (["--frequency-penalty", "nan"], "generate(…, frequency_penalty=…)", "frequency_penalty is nan"),
        (["--logit-bias", "5"], "generate(…, logit_bias={ID: BIAS})", "ID=BIAS"),
    ],
)
def test_options_that_go_are_accepted_with_a_note(run: Run, option: list[str], instead: str, says: str) -> None:
    _, out, err = run("run", "nothing.gguf", "hi", "--planner", "sssd", *option)
    note, error = err.splitlines()
    assert out == ""
    assert note.startswith(f"note: {option[0]} goes with the next version; ")
    assert instead in note
    assert says in error
    assert option[0] not in run("run", "--help")[1]


@pytest.mark.parametrize(
    ("option", "note"),
    [
        (["--first-come"], "requests are always served as they came"),
        (["--api-key", "key"], "use --api-key-file or $EDGESPEC_API_KEY, which others cannot see"),
    ],
)
def test_a_server_takes_old_options_with_a_note(run: Run, option: list[str], note: str) -> None:
    _, _, err = run("serve", "nothing.gguf", *option)
    assert err.startswith(f"note: {option[0]} goes with the next version; {note}\n")
    assert "no such file" in err
    assert f"{option[0]} " not in run("serve", "--help")[1]


@pytest.mark.parametrize("name", ["run", "serve", "bench"])
def test_help_lists_every_option_once_by_section(run: Run, name: str) -> None:
    _, out, _ = run(name, "--help")
    sections = re.findall(r"^(\w[\w ]*):$", out, re.MULTILINE)
    assert sections[:4] == ["Model", "Memory", "Drafting", "Server" if name == "serve" else "Sampling"]
    listed = re.findall(r"^  (-.+?)(?:  |$)", out, re.MULTILINE)
    shown = [one for one in cli.commands[name].params if isinstance(one, click.Option) and not one.hidden]
    for option in shown:
        assert sum(option.opts[-1] in row.replace(",", " ").split() for row in listed) == 1, option.opts
    assert len(listed) == len(shown) + 1  # and --help


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_model_that_is_no_model_is_one_line(run: Run, tmp_path: Path) -> None:
    pipe, text, gone = tmp_path / "pipe.gguf", tmp_path / "notes.txt", tmp_path / "gone.gguf"
    os.mkfifo(pipe)
    text.write_text("# Tides", "utf-8")
    for path, says in [
        (pipe, "is a pipe or a device, not a GGUF file"), (text, "is not a GGUF file"), (gone, "there is no such file"),
    ]:  # fmt: skip
        for command in ("run", "models", "doctor"):
            refused(run, command, str(path), *(["hi"] if command == "run" else []), code=1, says=f"{path}: {says}")


def test_a_broken_models_file_is_named_with_its_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models:\n  - name: a\n    goal: file:a\n", "utf-8")
    refused(run, "models", "--models", str(path), code=1, says=f"{path}, line 2")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("", "has no prompts"),
        ("{}\n", "line 1"),
        ('{"prompt": "hi"}\n{"prompt": 3}\n', "line 2"),
        ('{"prompt": "hi"}\nnot json\n', "line 2"),
        ('[[0, "hi"], [1, 2]]', "record 2"),
        ('[[0, "hi"], ["hi"]]', "record 2"),
        ('[{"text": "hi"}, {"question": ""}]', "record 2"),
        ('[[0, "hi"], [1, "cut sh', "line 1"),
        ("[]", "has no prompts"),
    ],
)
def test_an_unreadable_prompts_file_is_refused(run: Run, tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content, "utf-8")
    refused(run, "bench", str(path), code=2, says=says)


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a"}\n\n{"turns": ["b", "more"]}\n{"question": "c\u2028"}\n{"text": "d"}\n',
        '[0, "a"]\n{"question": "b", "turns": ["b"]}\n[1, "c\u2028"]\n[2, "d"]',
        '\ufeff{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c\u2028"}\n{"prompt": "d"}\n',
        '[[0, "a"],\n  [1, "b"],\n  {"question": "c\u2028"},\n  {"text": "d"}]\n',
    ],
)
def test_prompts_are_read_in_every_form(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, "utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == ["a", "b", "c\u2028", "d"]


def test_run_writes_the_answer_to_stdout_and_the_summary_to_stderr(run: Run, smollm2_whole: Path) -> None:
    _, out, err = run("run", str(smollm2_whole), "Why is the sky blue?", "-n", "24", *ANY_PASSES)
    assert "light" in out
    assert "acceptance length" in err


def test_json_is_one_object_for_every_planner(run: Run, small: Path) -> None:
    results = []
    for planner in ("none", "sssd", "chain", "specexec"):
        draft = ["--draft", str(small)] if planner in ("chain", "specexec") else []
        arguments = ["run", str(small), "-", "--json", "-n", "16", "--planner", planner, "--budget", "6", *draft]
        arguments += ANY_PASSES
        results.append(json.loads(run(*arguments, stdin="Count from one to ten.")[1]))
    assert all(result["stats"]["tokens"] == len(result["tokens"]) for result in results)
    assert [result["stats"]["planner"] for result in results] == ["none", "sssd", "chain", "specexec"]
    assert results[2]["stats"]["acceptance_length"] > 2  # a model is a good draft of itself


def test_a_variable_sets_an_option_and_a_bad_value_names_it(
    run: Run, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", str(small), "Hello", "--json", "--planner", "none", *ANY_PASSES]
    monkeypatch.setenv("EDGESPEC_RUN_MAX_TOKENS", "3")
    monkeypatch.setenv("EDGESPEC_BENCH_MAX_TOKENS", "5")  # another command's
    assert len(json.loads(run(*arguments)[1])["tokens"]) == 3
    assert len(json.loads(run(*arguments, "-n", "2")[1])["tokens"]) == 2  # the command line takes precedence
    monkeypatch.setenv("EDGESPEC_RUN_MAX_TOKENS", "three")
    code, _, says = run(*arguments)
    assert code == 2
    assert "'three' is not a valid integer" in says
    assert "$EDGESPEC_RUN_MAX_TOKENS" in says


def test_same_seed_same_text(run: Run, small: Path) -> None:
    arguments = ["run", str(small), "Tell me a story.", "--json", "-n", "16", "-t", "1", "--planner", "none"]
    first, again, other = (
        json.loads(run(*arguments, *ANY_PASSES, "--seed", seed)[1])["tokens"] for seed in ("5", "5", "6")
    )
    assert first == again != other


def test_a_stop_string_ends_the_text_and_is_not_shown(run: Run, small: Path) -> None:
    arguments = ["run", str(small), "Count: one two three", "--raw", "--json", "-n", "40", "--planner", "none"]
    arguments += ANY_PASSES
    whole = json.loads(run(*arguments)[1])["text"]
    stop = whole[8:11]
    cut = json.loads(run(*arguments, "--stop", stop)[1])
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["stats"]["finish_reason"] == "stop"


def test_drafted_tokens_are_tinted(run: Run, small: Path) -> None:
    arguments = [str(small), "Say hello.", "-n", "12", "--planner", "chain", "--draft", str(small)]
    arguments += [*ANY_PASSES, "--budget", "4"]
    terminal = f"import sys; sys.stdout.isatty = lambda: True; {RUN}"  # click strips colours where there is none
    done = forked("run", *arguments, "--show-drafts", program=terminal)
    assert "\x1b[32m" in done.stdout
    assert "\x1b[32m" not in run("run", *arguments)[1]


def test_errors_that_need_a_model(run: Run, small: Path, other_vocab_gguf: Path, tmp_path: Path) -> None:
    model = str(small)
    long = {"says": "context length is 64 tokens", "stdin": "word " * 100}
    refused(run, "run", model, "-", "--ctx", "64", *ANY_PASSES, code=1, **long)
    other = ["--draft", str(other_vocab_gguf)]
    refused(run, "run", model, "hi", *other, *ANY_PASSES, code=1, says="another vocabulary than the target")
    status, _, err = run("doctor", model, *other, *ANY_PASSES, "--backend", "llamacpp")
    assert (status, "another vocabulary than the target" in err) == (1, True)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small.read_bytes()[:-1000])
    refused(run, "run", str(cut), "hi", code=1, says="is cut off: fetch or copy it again")
    store = tmp_path / "a.store"
    text = tmp_path / "a.txt"
    text.write_text("some words to copy from " * 50, "utf-8")
    assert run("datastore", "build", str(store), str(text), "--model", model)[0] == 0
    asked = ["hi", "--datastore", str(store), *ANY_PASSES]
    refused(run, "run", str(other_vocab_gguf), *asked, code=1, says="another tokenizer")
    store.write_bytes(store.read_bytes()[:-10])
    refused(run, "run", model, *asked, code=1, says="damaged")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_what_was_written_and_exits_with_130(small: Path) -> None:
    arguments = [str(small), "Tell me a very long story.", "-n", "3000", "--ctx", "8192", "--planner", "none"]
    with Forked("run", *arguments, *ANY_PASSES) as process:
        first = process.stdout.read(40)  # it is writing
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait() == 130
    assert len(first) == 40
    assert (first + rest).endswith("\n")
    assert "tokens/s" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("place", "shown"),
    [("edgespec.cli.commands._loaded", ""), ("edgespec.cli.terminal.GenerationResult.add", "tokens/s")],
)
def test_ctrl_c_exits_with_130_before_a_model_is_loaded_and_while_it_writes(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch, place: str, shown: str
) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, pressed)
    code, _, err = run("run", tiny, "hello", "-n", "8", *REFERENCE)
    assert code == 130
    assert shown in err
    assert "Traceback" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_closed_pipe_ends_quietly(tiny: str) -> None:
    arguments = ["run", tiny, "Tell me a long story.", "-n", "4000", "--ctx", "8000", "--planner", "none", *REFERENCE]
    with Forked(*arguments) as process:
        process.stdout.read(10)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 1
        assert errors.splitlines()[1:] == []  # the first says what computes


def test_bench_compares_planners_and_finds_nothing_wrong(
    run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.001)
    monkeypatch.setattr(terminal, "FIRST_LINE", 0.001)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "Say hello.", "category": "a"}\n{"turns": ["Name a colour.", "x"], "category": "b"}\n', "utf-8"
    )
    model = str(small)
    arguments = ["bench", str(prompts), "--model", model, "--draft", model, "-n", "8", "--budget", "8"]
    arguments += ANY_PASSES
    status, out, err = run(*arguments, "--planners", "specexec, sssd,chain ", "--json")
    assert status == 0, err
    assert "measuring: 50 %, " in err  # without a terminal: lines
    report = json.loads(out)
    assert list(report["planners"]) == ["none", "specexec", "sssd", "chain"]
    assert report["unexplained"] == 0
    for row in report["planners"].values():
        assert abs(row["draft_share"] + row["target_share"] + row["plan_share"] - 1) < 1e-9
        assert set(row["by_category"]) == {"a", "b"}
    assert report["planners"]["none"]["acceptance_length"] == 1
    shown = run(*arguments, "-n", "2")[1]
    assert "acceptance length" in shown
    assert "specexec" in shown  # by default, too, where a draft is given
    copying = "the planners none, sssd do not use a draft; auto, specexec, "
    refused(run, *arguments, "--planners", "none,sssd", code=2, says=copying)
    store = ["--datastore", "x.store", "--planners", "none,chain"]
    refused(run, *arguments, *store, code=2, says="none, chain do not use a datastore; auto, sssd do")


@pytest.fixture
def bench_of_reference(tmp_path: Path) -> list[str]:
    """A bench of a tiny model on the reference backend."""
    prompts, model = tmp_path / "prompts.jsonl", tmp_path / "tiny.npz"
    prompts.write_text('{"prompt": "a a a a"}\n')
    random_model(2, vocab_size=258).save(model)
    return ["bench", str(prompts), "--model", str(model), *REFERENCE, "--raw", "-n", "4"]


def test_bench_shows_notes_beside_the_table_as_run_does(
    run: Run, bench_of_reference: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(*about: Any, **options: Any) -> list[Any]:
        (target,) = open_backends(*about, **options)
        target.keep_to(BatchInvariance("narrow", RowClass(1, 5), RowClass(1, 20)))
        target.notes = ["a note of the target"]
        return [target]

    monkeypatch.setattr(bench, "open_backends", kept)
    monkeypatch.setattr(exact, "find", lambda *about, **options: [])
    for planners, fewer in (("sssd", True), ("none", False)):
        status, out, err = run(*bench_of_reference, "--budget", "64", "--planners", planners)
        assert status == 0, err
        assert "acceptance length" in out
        assert "a note of the target" in err
        assert ("passes have at most 4 draft tokens, not 64" in err) is fewer
    report = json.loads(run(*bench_of_reference, "--budget", "64", "--json")[1])
    assert [note.split(":")[0] for note in report["notes"]] == [
        "a note of the target", "passes have at most 4 draft tokens, not 64",
    ]  # fmt: skip
    assert "at most" not in run(*bench_of_reference)[2]


def test_bench_and_doctor_load_a_model_that_may_stream_as_run_does(
    run: Run, bench_of_reference: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded, budgets = list[Any](), list[int]()

    def wide(*about: Any, **options: Any) -> list[Any]:
        loaded.append(about[3])
        backends = open_backends(*about, **options)
        backends[0].capabilities = replace(backends[0].capabilities, streams=True, widest=128)
        return backends

    class Watched(edgespec.Model):
        def __init__(self, *about: Any, **options: Any) -> None:
            budgets.append(options.get("budget", 0))
            super().__init__(*about, **options)

    monkeypatch.setattr(bench, "open_backends", wide)
    monkeypatch.setattr(bench, "Model", Watched)
    status, _, err = run(*bench_of_reference)
    assert status == 0, err
    assert loaded.pop().widest == WIDEST
    assert budgets[-1] == 128
    settings = tmp_path / "models.yaml"
    model = bench_of_reference[3]
    settings.write_text(f"models: [{{name: small, target: 'file:{model}', defaults: {{budget: 8}}}}]")
    given = ["--model", "small", "--models", str(settings)]
    for more in (["--budget", "64"], given):
        run(*bench_of_reference, *more)
        assert loaded.pop().widest == 0
    monkeypatch.setattr(
        doctor, "plan_pair", lambda *about, **more: loaded.append(about[3]) or plan_pair(*about, **more)
    )
    for more, widest in ([], WIDEST), (["--budget", "64"], 0), (given[2:], WIDEST):
        run("doctor", model, *REFERENCE, *more)
        assert loaded.pop().widest == widest
    run("doctor", "small", *REFERENCE, *given[2:])
    assert loaded.pop().widest == 0


def test_bench_counts_seeds_on_beyond_the_largest(run: Run, small: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    arguments = ["bench", str(prompts), "--planners", "none", *ANY_PASSES]
    status, _, err = run(*arguments, "--model", str(small), "-n", "2", "--seed", str(2**64 - 1))
    assert status == 0, err
    refused(run, *arguments, "--model", "nothing.gguf", "-n", "0", code=2, says="max_tokens is 0")


NAMES = (
    "--draft", "--planner", "--datastore", "--machine", "--models", "--backend", "--chat-template", "--json-schema",
    "--grammar", "--resume", "--png", "--write",
)  # fmt: skip


@pytest.mark.parametrize("command", ["run", "serve", "bench", "doctor", "models", "pair"])
def test_an_empty_name_is_refused(run: Run, command: str) -> None:
    for option in {name for one in cli.commands[command].params for name in one.opts}.intersection(NAMES):
        refused(run, command, "nothing.gguf", option, "", code=2, says=f"{option} is empty: give a name, or leave it")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--system", "be brief"], "--system has no meaning with --raw"),
        (["--tau", "0.5"], "--tau is for drafting with a draft model: name one with --draft"),
    ],
)
def test_bench_refuses_what_run_refuses(
    run: Run, bench_of_reference: list[str], tiny: str, given: list[str], says: str
) -> None:
    refused(run, *bench_of_reference, *given, code=2, says=says)
    refused(run, "run", tiny, "hi", *REFERENCE, "--raw", *given, code=2, says=says)


def test_bench_refuses_a_prompt_without_room_before_it_measures(
    run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, answered = tmp_path / "prompts.jsonl", list[str]()
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "word " * 300)))
    monkeypatch.setattr(edgespec.Model, "generate", lambda self, question, **options: answered.append(question))
    status, _, err = run("bench", str(prompts), "--model", str(small), "--ctx", "256", "--raw", *ANY_PASSES)
    assert status == 1
    assert "maximum context length is 256 tokens" in err
    assert not answered


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_chat_on_a_terminal_remembers_and_obeys_its_commands(small: Path, tmp_path: Path) -> None:
    arguments = ["run", str(small), "-n", "30", "--planner", "none", *ANY_PASSES]
    with typing_to(*arguments, environment={"XDG_CACHE_HOME": str(tmp_path)}) as person:
        person.until("/help")
        person.type("/stats\r")
        person.until("No answer yet")
        person.type("My name is Ann.\x1b\rSay hi.\r")
        person.until("tokens/s")
        person.type("/stats\r")
        person.until("tokens by source")
        person.type("/clear\r")
        person.until("Forgotten")
        person.type("/exit\r")
        assert person.ends() == 0


def test_an_answer_that_was_cut_says_so(run: Run, tiny: str) -> None:
    _, out, err = run("run", tiny, "hello", *REFERENCE, "-n", "7")
    first, cut, figures = err.splitlines()
    assert first == "reference; exactly the text of plain decoding"
    assert cut == "cut at 7 tokens (-n)"
    assert figures.startswith("7 tokens, ")
    assert "cut" not in out
    full = "cut: the context is full (--ctx)"
    assert run("run", tiny, "hello", *REFERENCE, "--ctx", "60")[2].splitlines()[1] == full
    unlimited = run("run", tiny, "hello", *REFERENCE, "--ctx", "600", "-n", "-1")[2]
    assert unlimited.splitlines()[1] == full
    assert int(re.findall(r"(\d+) tokens,", unlimited)[0]) > 512
    whole = run("run", tiny, "hello", *REFERENCE, "-t", "0", "-n", "7")[1]
    stopped = run("run", tiny, "hello", *REFERENCE, "-t", "0", "-n", "7", "--stop", whole[3:5])[2]
    assert "cut" not in stopped


def test_the_last_line_has_the_seed_that_writes_the_text_again(run: Run, tiny: str) -> None:
    arguments = ["run", tiny, "hello", *REFERENCE, "-n", "12", "-t", "1"]
    (_, first, err), (_, second, _) = run(*arguments, "--seed", "-1"), run(*arguments)
    seed = re.search(r"seed (\d+)$", err.splitlines()[-1])
    assert seed
    assert run(*arguments, "--seed", seed[1])[1] == first != second


def test_text_on_standard_input_stands_above_the_prompt(run: Run, tiny: str, tmp_path: Path) -> None:
    arguments = ["run", tiny, "What is above?", *REFERENCE, "--raw", "-n", "9", "--seed", "1"]
    expected = run(*arguments[:2], "a fox\n\nWhat is above?", *arguments[3:])[1]
    status, out, err = run(*arguments, stdin="a fox\n")
    assert (status, out) == (0, expected)
    assert err.startswith("6 characters of standard input stand above the prompt\n")
    alone = run(*arguments)[1]
    assert alone != expected
    file, nothing = tmp_path / "fox.txt", tmp_path / "empty.txt"
    file.write_text("a fox\n", "utf-8")
    nothing.touch()
    for path, is_ in [(file, expected), (nothing, alone)]:
        with path.open() as stdin:
            assert forked(*arguments, stdin=stdin.fileno()).stdout == is_
    with Forked(*arguments, stdin=subprocess.PIPE) as process:
        process.stdin.write("a fox\n")
        process.stdin.close()
        assert process.stdout.read() == expected
    with Forked(*arguments, stdin=subprocess.PIPE) as process:
        process.stdin.close()
        assert process.stdout.read() == alone
    closed = forked(*arguments, program=f"import os, sys; os.close(0); sys.stdin = None; {RUN}")
    assert closed.stdout == alone


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_silent_pipe_is_not_waited_for_for_ever(tiny: str, run: Run) -> None:
    arguments = ["run", tiny, "What is above?", *REFERENCE, "--raw", "-n", "9", "--seed", "1"]
    expected = run(*arguments)[1]
    patient = f"import edgespec.cli.commands as c; c.PATIENCE = 0.1; {RUN}"
    with Forked(*arguments, program=patient, stdin=subprocess.PIPE) as process:
        assert process.stdout.read() == expected
        assert "for standard input, an open pipe" in process.stderr.read()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_closed_terminal_ends_no_run_under_nohup(tiny: str) -> None:
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {RUN}"
    arguments = ["run", tiny, "hello", *REFERENCE, "-n", "400", "--ctx", "900", "--raw"]
    with Forked(*arguments, program=ignoring) as process:
        process.stdout.read(10)
        process.send_signal(signal.SIGHUP)
        process.stdout.read()
        assert process.wait() == 0


@pytest.mark.parametrize(
    "question", ["Why is the sky blue", "Why?", "Is 1/2 = 0.5?", "Hello there\nfriend", "word " * 99]
)
def test_a_question_without_a_model(run: Run, question: str) -> None:
    refused(run, "run", question, code=2, says="the model comes first: edgespec run smollm2-135m ")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_no_colours_where_none_are_wanted(tiny: str, environment: dict[str, str], coloured: bool) -> None:
    with typing_to("run", tiny, "hello", *REFERENCE, "-n", "5", environment=environment) as person:
        person.until("cut at 5")
        assert person.ends() == 0
        assert ("\x1b[2m" in person.raw) == coloured
        if environment.get("TERM") == "dumb":
            assert "\x1b" not in person.raw


def test_costs_are_kept_from_run_to_run_unless_told_otherwise(
    run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(remembered.OFF)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    asked = ["run", str(small), "one two one two one", "--raw", "-n", "6", "--ctx", "64"]
    with edgespec.load(str(small), context_length=64, remember=False) as model:
        texts = [model.generate(asked[2], max_tokens=6, seed=1, temperature=0.0).text + "\n"]
    assert remembered.everything() == []
    passes = [0]
    for _ in range(2):
        texts.append(run(*asked)[1])
        (found,) = remembered.everything()
        assert found["about"]["target"].startswith(small.name)
        passes.append(found["value"]["passes"])
        assert found["value"]["target"]
        assert found["value"]["ledgers"]["1"]["plain"] > 0
    assert texts[0] == texts[1] == texts[2]
    assert 0 < passes[1] < passes[2]
    assert "target's passes 1: " in learned_line(found)
    assert learned_line(found).endswith(f"from today, {passes[2]} passes")
    status, out, _ = run("doctor", "--forget-costs")
    assert (status, out) == (0, "1 measurements forgotten\n")
    assert remembered.everything() == []
