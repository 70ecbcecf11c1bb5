"""Models with recurrent layers on llama.cpp: all architectures write what plain decoding writes, however guessed."""

import ctypes
import json
import platform
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from alone import Generation
from conftest import Run, quantised
from contract import chain_rows
from edgespec.backends.common.paths import MOST_UNREAD
from edgespec.backends.llamacpp import recurrent as paths
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.engine import load
from hybrid_files import ARCHITECTURES, write_hybrid
from test_lossless_llamacpp import SAMPLINGS, loaded, write
from test_offload_llamacpp import least_memory

from edgespec.errors import Interrupted, UsageError
from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.loop.backend import Work
from edgespec.loop.draft_passes import run_one
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.machine.this_machine import this_machine
from edgespec.measure.lossless import explain
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.weights import ring

Q4_1, Q8_0 = 3, 7
PROMPT = [*range(5, 25), *range(5, 17)]  # with something to copy
streaming = pytest.mark.skipif(not ring.can_stream(this_machine()), reason="weights are streamed on Linux and macOS")
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels of other machines were not measured")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def planners(draft: LlamaBackend) -> list[Any]:
    return [
        lambda: SpecExecPlanner(draft, depth=6, beam=4),
        lambda: ChainPlanner(draft, depth=4),
        lambda: SssdPlanner(depth=5),
        lambda: LookaheadPlanner(depth=5),
    ]


def some(draft: LlamaBackend, number: int, whole_grid: bool) -> list[Any]:
    """Planners at a temperature: each at one of the three, or all."""
    return planners(draft) if whole_grid else planners(draft)[number::3]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_grid(arch: str, folder: Path, whole_grid: bool) -> None:
    """At three temperatures, with a draft that is right now and then, and is recurrent itself."""
    path, other = (
        write_hybrid(folder / f"{arch}.gguf", arch),
        write_hybrid(folder / f"{arch}-draft.gguf", arch, spread=0.9),
    )
    gained = set[float]()
    with loaded(path) as target, loaded(other, in_order=False, resident=True) as draft:
        assert target.capabilities.paths
        for number, sampling in enumerate(SAMPLINGS):
            plain, _ = write(target, NonePlanner(), PROMPT, sampling, 24)
            for make in some(draft, number, whole_grid):
                planner = make()
                output, stats = write(target, planner, PROMPT, sampling, 24)
                planner.close()
                gained.add(stats.acceptance_length)
                found = explain(target, PROMPT, plain, output, sampling)
                assert found is None or found.tie, f"{planner.name}, {sampling}: {found}"
    assert max(gained) > 1.3  # guesses were right at all


@x86_only
@pytest.mark.parametrize("arch", ["granitehybrid", "qwen35"])
def test_quantised_weights_in_memory_are_equal_to_the_bit(arch: str, folder: Path) -> None:
    """Their kernels treat every row alike, and the cells of attention stand in the order of the text."""
    path = write_hybrid(folder / f"{arch}-whole.gguf", arch)
    small = quantised(path, folder / f"{arch}-q4.gguf", Q4_1)
    with loaded(small) as target, loaded(path, in_order=False, resident=True) as draft:
        for sampling in SAMPLINGS:
            plain, _ = write(target, NonePlanner(), PROMPT, sampling, 32)
            for make in planners(draft):
                planner = make()
                assert write(target, planner, PROMPT, sampling, 32)[0] == plain, f"{planner.name}, {sampling}"
                planner.close()


@pytest.fixture(scope="module")
def granite(folder: Path) -> Path:
    return quantised(write_hybrid(folder / "granite.gguf", "granitehybrid"), folder / "granite-q4.gguf", Q4_1)


def test_a_chat_of_five_turns_keeps_what_it_has_read(granite: Path) -> None:
    """Each turn reads only what is new since the last state; its text is a fresh session's."""

    def turn(session: Any, planner: Any, prompt: list[int], seed: int, row: Any = None) -> tuple[list[int], Generation]:
        sampling, output = SamplingParams(temperature=0.8, seed=seed), list[int]()
        generation = Generation(
            target, session, planner, prompt, sampling, max_tokens=12, budget=16, stats=GenerationStats(),
            stop_ids=frozenset(), last_row=row,
        )  # fmt: skip
        for round_ in generation.steps():
            output += round_.tokens
        return output, generation

    with loaded(granite, sessions=2) as target, loaded(granite, in_order=False, resident=True) as draft:
        session, planner, prompt, ends = target.open(), SpecExecPlanner(draft, depth=5, beam=4), PROMPT, list[int]()
        for number in range(5):
            fresh = target.open()
            plain, _ = turn(fresh, NonePlanner(), prompt, number)
            fresh.close()
            output, turned = turn(session, planner, prompt, number)
            found = explain(target, prompt, plain, output, SamplingParams(temperature=0.8, seed=number))
            assert found is None or found.tie
            assert turned.stats.cached_tokens >= (ends[-1] if ends else 0)
            ends.append(len(prompt))
            prompt = [*prompt, *output, 40 + number, 41, 42]
        # The last answer once more: its prompt is all there.
        _, turned = turn(session, planner, prompt[: ends[-1]], 9, turned.last_row)
        assert turned.stats.cached_tokens == ends[-1]
        planner.close()


def check_next_row(target: Any, session: Any, text: list[int]) -> None:
    """The session has this text, and goes on as one that has read it anew, up to rounding."""
    assert session.token_ids == text
    nodes = np.zeros(1, np.int32)
    row = target.forward([Work(session, nodes + 9, nodes - 1, nodes)])[0].row(0)
    assert np.abs(row - chain_rows(target, [*text, 9])[-1]).max() < 0.1  # far below what one wrong token does


def two_texts(target: Any) -> tuple[Any, Any]:
    sessions = target.open(), target.open()
    for session, text in zip(sessions, TWO, strict=True):
        prefill(target, session, text)
    return sessions


TWO = (PROMPT, PROMPT[:9])


def test_what_is_owed_is_brought_on_within_the_pass(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights are streamed: no pass of its own reads them again, once there is a state far enough behind."""
    with loaded(granite, sessions=2) as target:
        target.capabilities = replace(target.capabilities, streams=True)
        calls, owed, session, compute = list[int](), list[int](), target.open(), target.compute

        def counted(rows: Any, **more: Any) -> None:
            calls.append(len(rows.tokens))
            compute(rows, **more)

        prefill(target, session, PROMPT)
        monkeypatch.setattr(target, "compute", counted)
        generator, nodes = np.random.default_rng(0), np.arange(6, dtype=np.int32)
        for _ in range(30):  # a chain of which three are right
            owed.append(session.unread_committed)
            target.forward([Work(session, generator.integers(5, 200, 6).astype(np.int32), nodes - 1, nodes)])
            session.commit([0, 1, 2])
        assert len(calls) <= 30 + 2  # a pass each, and one or two that bring on what is owed at first
        assert max(owed) <= MOST_UNREAD + 3
        assert sorted(owed)[15] == 3  # usually what the pass before has accepted
        check_next_row(target, session, list(session.token_ids))


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    """With layers that can be streamed."""
    sizes = {"LAYERS": 8, "ATTENTION": (3, 7), "WIDTH": 256, "HIDDEN": 512, "INNER": 512, "HEAD": 64, "STATE": 128}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(f"hybrid_files.{name}", size)
        whole = write_hybrid(folder / "large.gguf", "granitehybrid")
    return quantised(whole, folder / "large-q8.gguf", Q8_0)


@streaming
def test_streamed_weights_give_the_same_logits(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    options: dict[str, Any] = {"context_length": 256, "threads": 1, "budget": 16}
    with (
        closing(load(str(large), memory=least_memory(large, **options), **options)) as streamed,
        closing(load(str(large), resident=True, repack=False, **options)) as resident,  # not repacked: other kernels
    ):
        assert len(streamed.streamer.plan.streamed) >= 4
        tree, tokens = np.array([-1, 0, 0, 1, 2, 4], np.int32), np.arange(30, 36, dtype=np.int32)
        found = []
        for backend in (streamed, resident):
            session, rows = backend.open(), []
            prefill(backend, session, PROMPT)
            for _ in range(3):
                logits = backend.forward([Work(session, tokens, tree, np.arange(6, dtype=np.int32))])[0]
                rows += [logits.row(node) for node in range(6)]
                session.commit([0, 2])
            found.append(np.array(rows))
            session.close()
        assert np.isfinite(found[0]).all()
        np.testing.assert_array_equal(*found)
        sampling = SamplingParams(temperature=0.7, seed=1)
        assert (
            write(streamed, SssdPlanner(), PROMPT, sampling, 16)[0]
            == write(resident, NonePlanner(), PROMPT, sampling, 16)[0]
        )


def test_a_pass_that_fails_leaves_texts_as_they_were(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States may have been moved without their contents, those of other sessions, too: all texts are read again."""
    with loaded(granite, sessions=3) as target:
        (one, other), nodes, compute = two_texts(target), np.arange(4, dtype=np.int32), target.compute

        def failing(rows: Any, **more: Any) -> None:
            compute(rows, **more)
            raise KeyboardInterrupt

        monkeypatch.setattr(target, "compute", failing)
        with pytest.raises(KeyboardInterrupt):
            target.forward([Work(one, nodes + 9, np.array([-1, 0, 0, 1], np.int32), nodes)])
        monkeypatch.setattr(target, "compute", compute)
        for session, text in zip((one, other), TWO, strict=True):
            check_next_row(target, session, text)


def test_a_saved_session_goes_on_with_what_it_owes(granite: Path, tmp_path: Path) -> None:
    """From its last state, to the bit; tokens behind it are read again, and so is all where nothing is before."""
    file, nodes = tmp_path / "text.session", np.arange(3, dtype=np.int32)
    found, text = list[np.ndarray](), list[int]()
    for loads in (False, True):
        with loaded(granite, sessions=2) as target:
            session = target.open()
            if loads:
                assert session.load(file) == "a note"
            else:
                prefill(target, session, PROMPT)
                target.forward([Work(session, nodes + 9, nodes - 1, nodes)])
                session.commit([0, 1])  # the path ended one node further
                text = list(session.token_ids)
                session.save(file, "a note")
            assert (session.token_ids, session.unread_committed) == (text, 2)
            logits = target.forward([Work(session, nodes + 20, np.array([-1, 0, 0], np.int32), nodes)])[0]
            found.append(np.array([logits.row(node) for node in range(3)]))
            session.rewind(len(PROMPT) - 1)
            check_next_row(target, session, PROMPT[:-1])
    np.testing.assert_array_equal(*found)


def test_a_prompt_goes_on_from_a_file(granite: Path, tmp_path: Path, run: Run) -> None:
    def answer(text: str, *more: str) -> tuple[list[int], int]:
        code, out, err = run("run", str(granite), text, "--raw", "--json", "-n", "8", "--seed", "3", *more)
        assert code == 0, err
        found = json.loads(out)
        return found["tokens"], found["stats"]["cached_tokens"]

    file, text = str(tmp_path / "text.session"), "the keeper wrote down the weather every morning"
    first, cached = answer(text, "--resume", file)
    assert cached == 0
    assert Path(file).exists()
    again, _ = answer(text + " and every evening", "--resume", file)  # only the end of the text before has a state
    assert (first, again) == (answer(text)[0], answer(text + " and every evening")[0])


def test_an_interrupt_between_calls_loses_no_state(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(granite, sessions=3) as target:
        (one, other), compute, nodes = two_texts(target), target.compute, np.arange(4, dtype=np.int32)

        def interrupted(rows: Any, **more: Any) -> None:
            compute(rows, **more)
            target.interrupt(target.pass_number)

        monkeypatch.setattr(target, "compute", interrupted)
        with pytest.raises(Interrupted):  # paths of other lengths go in a call of their own
            target.forward(
                [Work(one, nodes + 9, nodes - 1, nodes), Work(other, nodes[:1] + 9, nodes[:1] - 1, nodes[:1])]
            )
        monkeypatch.setattr(target, "compute", compute)
        for session, text in zip((one, other), TWO, strict=True):
            assert session.behind == 0
            check_next_row(target, session, text)


def test_llama_cpp_ends_no_pass_of_a_recurrent_model_within_a_layer(
    granite: Path, smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another process sets the flag: an aborted pass may have moved states without their contents."""
    for path, ended in ((granite, False), (smollm2_tiny, True)):
        with loaded(path) as target:
            flags = list[Any]()
            monkeypatch.setattr(
                "edgespec.backends.llamacpp.backend.install", lambda stop, _, to=flags: to.append(stop.flag)
            )
            target.use_flag(flag := ctypes.create_string_buffer(2))
            assert flags == [flag] * ended
            assert target.stop.flag is flag


@streaming
def test_a_streamed_pass_is_interrupted_within_a_layer(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are read again then, for states may lie where their contents are not yet."""
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    options: dict[str, Any] = {"context_length": 256, "threads": 1, "budget": 16, "sessions": 3}
    with closing(load(str(large), memory=least_memory(large, **options), **options)) as target:
        (one, other), entered, nodes = two_texts(target), target.streamer.enter, np.arange(4, dtype=np.int32)

        def enter(layer: int) -> None:
            entered(layer)
            target.interrupt(target.pass_number)

        monkeypatch.setattr(target.streamer, "enter", enter)
        with pytest.raises(Interrupted):
            target.forward([Work(one, nodes + 9, np.array([-1, 0, 0, 1], np.int32), nodes)])
        monkeypatch.setattr(target.streamer, "enter", entered)
        for session, text in zip((one, other), TWO, strict=True):
            check_next_row(target, session, text)


@streaming
def test_states_are_in_the_plan(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More paths and more sessions need more memory."""
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    options: dict[str, Any] = {"context_length": 256, "threads": 1}
    state = 4 * 512 * 128 * 6  # bytes, of the layers that are recurrent
    one, two = (least_memory(large, budget=16, sessions=count, **options) for count in (1, 2))
    assert two - one > 10 * state
    assert least_memory(large, budget=16, **options) - least_memory(large, budget=1, **options) > 6 * state


def test_many_sessions_have_fewer_paths(granite: Path) -> None:
    with loaded(granite) as few, loaded(granite, sessions=20) as many:
        assert few.capabilities.max_leaves > many.capabilities.max_leaves >= 1
    with pytest.raises(UsageError, match="40 texts at once are too many"):
        load(str(granite), sessions=40)


def test_one_architecture_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "metadata", lambda model, key: b"deepseek4")
    assert "cannot be copied" in paths.why_not(None)


def test_the_command_line_says_it(granite: Path, run: Run) -> None:
    code, out, _ = run("models", str(granite))
    assert code == 0
    assert "some layers are recurrent: trees are evaluated path by path" in out
    code, _, err = run("run", str(granite), "Hi", "-n", "2", "--exact", "wide")
    assert code == 2
    assert "some layers are recurrent, and which passes agree to the bit is not looked for" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_texts_that_share_passes_are_those_written_alone(streams: bool, folder: Path) -> None:
    """Paths of several texts in one rectangle, or in one each."""
    path = write_hybrid(folder / f"shared-{streams}.gguf", "granitehybrid")
    with loaded(path, sessions=5) as target, loaded(path, in_order=False, resident=True, sessions=3) as draft:
        target.capabilities = replace(target.capabilities, streams=streams)
        prompts = [[5 + number, *PROMPT[: 20 + 2 * number]] for number in range(5)]
        alone = [write(target, NonePlanner(), prompt, SAMPLINGS[1], 20)[0] for prompt in prompts]
        guesses = [make() for make in (NonePlanner, *planners(draft))]
        texts = [
            Generation(
                target, target.open(), planner, prompt, SAMPLINGS[1], max_tokens=20, budget=8, stats=GenerationStats()
            )
            for planner, prompt in zip(guesses, prompts, strict=True)
        ]
        for text in texts:
            text.read_prompt()
        while going := [text for text in texts if not text.finished]:
            passes = [text.cut(run_one(text.propose())) for text in going]
            for text, one, logits in zip(going, passes, target.forward([one.work for one in passes]), strict=True):
                text.accept(one, logits)
        for text, prompt, plain in zip(texts, prompts, alone, strict=True):
            text.session.close()
            found = explain(target, prompt, plain, text.token_ids[len(prompt) :], SAMPLINGS[1])
            assert found is None or found.tie, str(found)
