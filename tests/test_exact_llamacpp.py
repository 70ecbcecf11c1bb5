"""Passes kept in one class of shapes write equal texts, bit for bit, with weights whose kernels differ by shape."""

import signal
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import contract
import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import mixture_files
import window_files
from alone import Generation
from auto_planners import auto_planner
from conftest import few, made_up, once, quantised
from edgespec.backends.llamacpp import cells
from edgespec.backends.llamacpp import session as session_of_llamacpp
from edgespec.backends.llamacpp.engine import engine, load
from edgespec.backends.llamacpp.ggml.files import llama_cpp, without_amx
from edgespec.backends.llamacpp.memory import attention
from gguf_files import small_llama

from benchmarks.made_up import Shape, write_made_up
from edgespec.errors import ContextFull, Interrupted, UsageError
from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.loading import row_classes
from edgespec.loading.exact import FEW, apply_row_class, usable
from edgespec.loading.row_classes import MANY, _rows, find, tokens
from edgespec.loop.backend import Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import Prefill, prefill, start_of
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.shapes import ALWAYS, BatchInvariance, RowClass
from edgespec.loop.stats import GenerationStats
from edgespec.machine.this_machine import this_machine
from edgespec.model import Model
from edgespec.planners.auto import new_auto_state
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner

# llama_ftype in llama.h. Of the model's rows, those of 128 numbers fit no block of 256, but those of 512 do.
KINDS = {"Q4_K_M": 15, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "IQ4_XS": 30, "F16": 1, "BF16": 32}
BOTH = ("narrow", "wide")
CLASSES = {"Q4_1": BOTH, "made up": BOTH, "Q8_0": BOTH[:1], "Q4_0": BOTH[:1], "F16": BOTH[:1]}  # others: wide
MIXTURES = ("mixtral", "qwen3 moe", "gpt-oss")
FAMILIES = ("gemma2", "gemma3", *MIXTURES)
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, seed=2),
]
SHORT = "Once upon a time, a fox"
LONG = "The lighthouse keeper wrote down the weather every morning, and every evening he read it out. " * 26


# Intel's AMX rules other kernels out (`without_amx`), so there weights are never repacked.
REPACKS = not without_amx(llama_cpp.llama_print_system_info())


def has_class(plan):
    """Whether there is a row class of the first way to compute, however fast."""
    found = find("llamacpp", plan.build, plan.ways[0], plan.path, remember=True, say=lambda text: None)
    least = MANY if plan.options.exact == "wide" else FEW
    return any(group.most >= least for group in usable(found))


@contextmanager
def loaded(path, asked=None, *, repack=True, **options):
    """With two threads: with one, llama.cpp does not split the cache. As a whole program it may repack weights."""
    sizes = {"context_length": 1024, "threads": 2, "budget": 64, "exact": asked}
    plan = engine.plan(str(path), LoadOptions(**sizes | options), this_machine())
    repack = repack and len(plan.ways) > 1 and has_class(plan)
    with closing(engine.load(plan, plan.ways[0 if repack else -1])) as backend:
        apply_row_class(backend, str(path), asked)
        yield backend


@pytest.fixture(scope="session")
def weights(smollm2, smollm2_folder):
    """Paths of models by the kind of their weights; all but "made up", which has SmolLM2's tokens, know bytes."""

    def get(kind):
        if kind == "made up":
            return made_up(smollm2, smollm2_folder)
        if kind in FAMILIES:
            return once(smollm2_folder / f"{kind}.gguf", lambda new: family(kind, new))
        floats = once(smollm2_folder / "exact.gguf", lambda new: small_llama(new, layers=2, width=128))
        return once(smollm2_folder / f"{kind}.gguf", lambda new: quantised(floats, new, KINDS[kind]))

    return get


def family(kind, path):
    """A tiny model of this family with random weights of 4 bits."""
    with pytest.MonkeyPatch.context() as patch:
        if kind in MIXTURES:
            patch.setattr(mixture_files, "LAYERS", 2)
            architecture, used, _ = mixture_files.KINDS[kind]
            patch.setitem(mixture_files.KINDS, kind, (architecture, used, 256))
            whole = mixture_files.write_mixture(path.with_suffix(".f32"), kind, bits=32)
        else:
            patch.setattr(window_files, "HIDDEN", 256)
            whole = window_files.write_windowed(path.with_suffix(".f32"), kind, layers=2)
    quantised(whole, path, KINDS["Q4_K_M"])
    whole.unlink()


@pytest.fixture(scope="module")
def drafts(weights):
    """For the targets with SmolLM2's tokens, and for the others."""
    paths = {known: str(weights(kind)) for known, kind in ((True, "made up"), (False, "Q4_1"))}
    found = {
        known: load(path, context_length=1024, threads=2, budget=64, in_order=False) for known, path in paths.items()
    }
    yield lambda target: found[target.vocab.size > 1000]
    for backend in found.values():
        backend.close()


def ids_of(target, text, most=None):
    return target.vocab.encode(text, add_bos=True, parse_special=False)[:most]


def write(target, planner, ids, sampling, count, budget=62):
    """The tokens that are written, each with its log-probability, which the bits of all logits decide."""
    session, output, stats = target.open(), [], GenerationStats()
    for step in Generation(
        target, session, planner, ids, sampling, max_tokens=count, budget=budget, stats=stats, stop_ids=frozenset(),
        log_probs=1,
    ).steps():  # fmt: skip
        output += [
            (token, found.log_prob, *found.best) for token, found in zip(step.tokens, step.log_probs, strict=True)
        ]
    planner.close()
    session.close()
    return output, stats


def auto(draft):
    pace = new_auto_state(streams=True)
    return auto_planner("auto", pace, SssdPlanner(), SpecExecPlanner(draft, cost=pace.draft))


PLANNERS = {
    "specexec": lambda draft: SpecExecPlanner(draft, depth=8, beam=4),
    "chain": lambda draft: ChainPlanner(draft, depth=6),
    "sssd": lambda draft: SssdPlanner(),
    "lookahead": lambda draft: LookaheadPlanner(),
    "auto": auto,
}


# What kernels differ by: blocks of 256 or 32, repacked or not, floats. Of each one always runs.
OFTEN = ("Q4_K_M", "Q4_1", "F16")


@pytest.mark.parametrize("kind", few([*OFTEN, "Q8_0", "made up", "Q4_0", "IQ4_XS", "BF16"], *OFTEN))
def test_texts_are_equal(weights, drafts, kind, whole_grid):
    """Every planner, each at one of the temperatures; with some weights at all of them, in one of both classes."""
    path, checked, names = weights(kind), set(), list(PLANNERS)
    for turn, asked in enumerate(CLASSES.get(kind, BOTH[1:])):
        with loaded(path, asked) as target:
            exact, ids = target.capabilities.exact, ids_of(target, SHORT)
            checked.add(exact)
            assert target.capabilities.logit_tolerance == 0
            for i, sampling in enumerate(SAMPLINGS):
                plain, _ = write(target, NonePlanner(), ids, sampling, 16)
                some = names[(i + turn) % 2 :: 2] if kind == "Q4_1" else [names[i], "auto"]
                for name in names if kind == "Q4_1" and whole_grid else some:
                    output, _ = write(target, PLANNERS[name](drafts(target)), ids, sampling, 16)
                    assert output == plain, f"{kind}, {exact}, {name}, {sampling}"
    assert checked


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("kind", "asked", "kv_type"),
    [("made up", "narrow", None), ("made up", "narrow", "f16"), ("made up", "wide", None), ("Q4_1", "wide", None)],
)
def test_texts_are_equal_after_a_long_prompt(weights, drafts, kind, asked, kv_type):
    """From 512 cells on llama.cpp splits the cache among threads for one row, from 64 rows on it adds up tiles."""
    with loaded(weights(kind), asked, kv_type=kv_type) as target:
        ids = ids_of(target, LONG, 610)
        assert len(ids) > 600
        plain, _ = write(target, NonePlanner(), ids, SAMPLINGS[2], 12)
        for name, make in PLANNERS.items():
            output, _ = write(target, make(drafts(target)), ids, SAMPLINGS[2], 12)
            assert output == plain, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("asked", ["narrow", "wide"])
def test_a_real_pair(asked):
    """Where it is there: 1.5 B of 4 bits, whose kernels differ most, with its draft."""
    folder = Path("~/.cache/edgespec/models").expanduser()
    target, small = (folder / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("1.5b", "0.5b"))
    if not (target.exists() and small.exists()):
        pytest.skip("the pair is not in the cache folder")
    with loaded(target, asked) as model, loaded(small, "off", in_order=False) as helper:
        ids = ids_of(model, SHORT)
        plain, _ = write(model, NonePlanner(), ids, SAMPLINGS[2], 16)
        assert write(model, PLANNERS["specexec"](helper), ids, SAMPLINGS[2], 16)[0] == plain


def first_rows(target, *sizes):
    """Logits of the first node of chains of these sizes after a long prompt."""
    rows = []
    for size in sizes:
        session, nodes = target.open(), np.arange(size, dtype=np.int32)
        prefill(target, session, list(range(100, 700)))
        rows.append(target.forward([Work(session, nodes + 5, nodes - 1, nodes)])[0].row(0))
        session.close()
    return rows


def test_without_classes_they_part(weights):
    """What the classes are for: the same chain in passes of 1, 2, 8 and 64 rows has other logits."""
    with loaded(weights("made up"), "off") as target:
        assert target.capabilities.exact is None
        assert target.capabilities.logit_tolerance > 0
        rows = first_rows(target, 1, 2, 8, 64)
        for i in range(3):
            assert not np.array_equal(rows[i], rows[i + 1])


def test_a_wrong_class_is_noticed(weights):
    """The checks can fail: passes of 1 to 63 rows are no class of these weights."""

    def factory(**options):
        backend = load(str(weights("made up")), threads=2, exact="wide", **options)
        shape = RowClass(1, 63)
        backend.keep_to(BatchInvariance("wrong", shape, shape))
        return backend

    with pytest.raises(AssertionError, match="tolerance 0"):
        contract.tree_equals_chains(factory)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "shape",
    [RowClass(8, 63), pytest.param(RowClass(8, 60, step=4), marks=pytest.mark.skipif(not REPACKS, reason="AMX"))],
    ids=["as they are", "repacked"],
)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check, shape, weights):
    """Trees, forks, rewinds and company, to the bit. Prompts are read in the trees' class, so any chain tells."""

    def factory(**options):
        repack = shape.step > 1
        path = str(weights("made up"))
        plan = engine.plan(path, LoadOptions(threads=2, exact="wide", **options), this_machine())
        backend = engine.load(plan, plan.ways[0 if repack else -1])
        assert ("repacked" in backend.computing) == repack
        backend.keep_to(BatchInvariance("wide", shape, shape))
        return backend

    check(factory)


@pytest.mark.skipif(not REPACKS, reason="with Intel's AMX weights are never repacked")
def test_repacked_weights_have_classes(weights):
    """Few rows one by one, many four at a time: prompts and trees are in classes of their own."""
    with loaded(weights("made up"), "narrow") as target:
        exact = target.capabilities.exact
        assert target.computing["repacked"]
        assert (exact.trees, exact.prompts.step) == (RowClass(1, 3), 4)
    with loaded(weights("made up"), "off") as target:
        assert not np.array_equal(*first_rows(target, 1, 4))  # else the classes say nothing


@pytest.mark.covering(1)
@pytest.mark.parametrize(("asked", "kv_type"), [("narrow", None), ("narrow", "f16"), ("wide", "f16")])
def test_a_chat_keeps_its_prefix(weights, drafts, asked, kv_type):
    """Four turns with the cache of the turns before, and each of them read anew."""
    with loaded(weights("made up"), asked, kv_type=kv_type, context_length=2048) as target:
        messages, kept = list[dict[str, str]](), 0
        with Model(target, SpecExecPlanner(drafts(target), depth=6, beam=4), budget=62) as chat:
            for turn in range(4):
                messages.append({"role": "user", "content": f"{turn}. {LONG[: 200 + 150 * turn]}"})
                stats = GenerationStats()
                answer = chat.chat(messages, max_tokens=16, temperature=1.0, seed=turn, stats=stats)
                kept += stats.cached_tokens
                messages.append({"role": "assistant", "content": answer.text})
        assert kept > 200
        for turn in range(4):
            with Model(target, NonePlanner()) as fresh:
                again = fresh.chat(messages[: 2 * turn + 1], max_tokens=16, temperature=1.0, seed=turn)
            assert again.text == messages[2 * turn + 1]["content"], turn


@pytest.mark.parametrize("repack", [False, pytest.param(True, marks=pytest.mark.skipif(not REPACKS, reason="AMX"))])
def test_short_prompts_go_on_from_one_another(weights, drafts, repack):
    """Questions that a template begins alike, one after the other, and each of them alone."""
    questions, sampling = ["Why?", "Who are you?", "Count to three."], {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    with loaded(weights("made up"), "narrow", sessions=2, repack=repack, context_length=2048) as target:
        alone, kept = [], 0
        for question in questions:
            with Model(target, NonePlanner()) as fresh:
                alone.append(fresh.chat(question, **sampling).text)
        with Model(target, SpecExecPlanner(drafts(target), depth=6, beam=4), budget=2) as model:
            for question, text in zip(questions, alone, strict=True):
                result = model.chat(question, **sampling)
                assert result.text == text
                assert result.stats.prompt_tokens < target.capabilities.exact.prompts.least
                kept += result.stats.cached_tokens
                assert model.chat(LONG, **sampling).stats.cached_tokens == 0  # cells of the one do not for the other
                kept += model.chat(question, **sampling).stats.cached_tokens
                kept += model.chat(question + question, **sampling).stats.cached_tokens
        assert kept > 20 * len(questions)


@pytest.mark.parametrize("repack", [False, pytest.param(True, marks=pytest.mark.skipif(not REPACKS, reason="AMX"))])
def test_short_prompts_begin_with_what_another_session_has_read(weights, repack):
    """A long text that begins alike in between is of no use to them, and theirs is of none to it."""
    asked, sampling = ["Why?", LONG, "Who are you?"], {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    with loaded(weights("made up"), "narrow", sessions=5, repack=repack, context_length=2048) as target:
        alone, kept = [], []
        for prompt in asked:
            with Model(target, NonePlanner()) as fresh:
                alone.append(fresh.chat(prompt, **sampling).text)
        with Model(target, [NonePlanner() for _ in range(5)]) as model:
            for _ in range(2):
                found = [model.chat(prompt, **sampling) for prompt in asked]
                assert [result.text for result in found] == alone
                kept.append([result.stats.cached_tokens for result in found])
        lengths = [result.stats.prompt_tokens for result in found]
        assert kept[0][:2] == [0, 0]
        assert 8 <= kept[0][2] < lengths[2] - 1
        assert kept[1] == lengths  # nothing has given way


def test_cells_up_to_a_prompts_first_tile_cost_no_rows(weights, monkeypatch):
    """They hold copies of another text's, so that its tiles are those that it has alone."""
    first, second = ([7 + 3 * i for i in range(n)] for n in (91, 70))
    with loaded(weights("made up"), "narrow", sessions=2) as target:
        alone, other = target.open(), target.open()
        expected, node = prefill(target, alone, second, want_last=True)
        rows, compute = [], target.compute
        expected = expected.row(node)
        alone.rewind(0)
        monkeypatch.setattr(
            target, "compute", lambda found, **more: rows.append(len(found.tokens)) or compute(found, **more)
        )
        prefill(target, alone, first)
        found, node = prefill(target, other, second, want_last=True)
        assert np.array_equal(found.row(node), expected)
        kept, node = prefill(target, alone, first, want_last=True)  # what was copied stays as it was
        shape = target.capabilities.exact.prompts
        assert rows[:2] == [shape.rows(len(first)), shape.rows(len(second))]
        kept = kept.row(node)
        other.close()
        alone.rewind(0)
        found, node = prefill(target, alone, first, want_last=True)
        assert np.array_equal(found.row(node), kept)


def test_a_prompt_goes_on_within_a_tile(weights, monkeypatch, whole_grid):
    """Wherever its session stops: the tile begun is copied to where its other tokens come."""
    texts = [[7 + (3 + other) * i for i in range(n)] for other, n in enumerate((301, 290, 400))]
    prompts = [texts[a][:cut] + texts[b][cut:] for a in range(3) for b in range(3) for cut in (9, 24, 64, 100, 190)]
    order = np.random.default_rng(5).permutation(len(prompts) * (1 + whole_grid)) % len(prompts)
    with loaded(weights("made up"), "narrow", sessions=4, context_length=512) as target:
        alone, expected = target.open(), []
        for prompt in prompts:
            alone.rewind(0)
            found, node = prefill(target, alone, prompt, want_last=True)
            expected.append(found.row(node))
        alone.close()
        sessions, moves, move = [target.open() for _ in range(3)], [], target.cells.move
        monkeypatch.setattr(target.cells, "move", lambda *about: moves.append(about) or move(*about))
        for i, number in enumerate(order):
            wanted = prompts[number]
            starts = [start_of(target.capabilities, session, wanted, want_last=True) for session in sessions]
            if max(starts) - starts[i % 3] >= 8:
                sessions[i % 3].close()
                sessions[i % 3] = sessions[int(np.argmax(starts))].fork()
            found, node = prefill(target, sessions[i % 3], wanted, want_last=True)
            assert np.array_equal(found.row(node), expected[number]), (i, number)
            if i % 4 == 1:  # others write meanwhile
                tree = Work(sessions[i % 3], np.array([3, 4], np.int32), np.array([-1, -1], np.int32), np.array([0]))
                target.forward([tree])
                sessions[i % 3].commit([1])
        assert len(moves) > len(order) / 2


def test_prompts_of_one_pass_are_read_as_if_alone(weights):
    """Also in an empty cache: each begins where a tile does. One that cannot go on in its tile is refused."""
    texts = [[7 + 3 * i for i in range(70)], [9 + 4 * i for i in range(100)]]
    with loaded(weights("made up"), "narrow", sessions=2, context_length=512) as target:
        sessions, expected = [target.open(), target.open()], []
        works = [Prefill(target, *about, want_last=True).work() for about in zip(sessions, texts, strict=True)]
        for work, text in zip(works, texts, strict=True):
            expected.append(target.forward([work])[0].row(len(text) - 1))
            work.session.rewind(0)
        together = target.forward(works)
        for logits, text, row in zip(together, texts, expected, strict=True):
            assert np.array_equal(logits.row(len(text) - 1), row)
        for session in sessions:
            session.rewind(0)
        prefill(target, sessions[1], texts[1][:90])
        nodes = np.arange(10, dtype=np.int32)
        rest = Work(sessions[1], nodes + 5, nodes - 1, nodes[-1:], prompt=True)
        with pytest.raises(ContextFull, match="another of the same forward comes before it"):
            target.forward([works[0], rest])
        assert sessions[1].token_ids == texts[1][:90]


def test_nodes_of_an_interrupted_session_leave_no_holes(weights):
    """Their cells lie below those of another session's nodes, whose next ones would be put there, out of order."""
    number = np.arange(1, dtype=np.int32)

    def grow(session, first):
        """A chain of three more nodes, one a pass."""
        chain = [Work(session, number + 20 + i, number + i - 1, number + i) for i in range(first, first + 3)]
        return [target.forward([work])[0].row(first + i) for i, work in enumerate(chain)]

    with loaded(weights("made up"), "narrow", sessions=2, context_length=512) as target:
        session, other = target.open(), target.open()
        prefill(target, session, [7 + 3 * i for i in range(70)])
        prefill(target, other, [9 + 4 * i for i in range(100)])
        expected = grow(other, 0) + grow(other, 3)
        other.commit([])
        grow(session, 0)
        found = grow(other, 0)
        target.interrupt(target.pass_number)
        with pytest.raises(Interrupted):
            grow(session, 3)
        assert (session.nodes, session.token_ids[-1]) == (0, 7 + 3 * 69)
        assert np.array_equal(found + grow(other, 3), expected)


class CtrlC:
    """llama.cpp's library; before one of the calls that change its cache comes Ctrl-C."""

    def __init__(self):
        self.calls, self.at = 0, -1

    def __getattr__(self, name):
        found = getattr(llama_cpp, name)
        if not name.startswith(("llama_memory_", "llama_state_")):
            return found

        def call(*about):
            self.calls += 1
            if self.calls == self.at:
                signal.raise_signal(signal.SIGINT)
            return found(*about)

        return call


@pytest.mark.parametrize("in_order", [False, True])
def test_ctrl_c_while_cells_are_moved(weights, monkeypatch, in_order, whole_grid):
    """All texts are what they were, wherever it comes: of the one that goes on within a tile, and of the others."""
    texts = [[7 + (3 + other) * i for i in range(n)] for other, n in enumerate((151, 140, 80))]
    texts.append(texts[0][:90] + texts[1][90:140])
    step, came = 1 if whole_grid or not in_order else 3, 0
    with loaded(weights("made up"), "narrow", sessions=4, context_length=512) as target:

        def read(session, text):
            found, node = prefill(target, session, text, want_last=True)
            return found.row(node)

        def begin():
            sessions = [target.open() for _ in range(2)]
            for session, text in zip(sessions, (texts[0], texts[2]), strict=True):
                prefill(target, session, text)
                target.forward([Work(session, np.array([3], np.int32), np.array([-1], np.int32), np.array([0]))])
                session.commit([0])
            return [sessions[0].fork(), *sessions]

        expected, library = [], CtrlC()
        for text in texts:
            alone = target.open()
            expected.append(read(alone, text))
            alone.close()
        for module in (cells, session_of_llamacpp):
            monkeypatch.setattr(module, "llama_cpp", library)
        while True:
            held = begin()
            target.cells.uncertain = in_order
            library.calls, library.at = 0, 1 + came * step
            try:
                read(held[0], texts[3])
            except KeyboardInterrupt:
                came += 1
            else:
                break
            finally:
                library.at = -1
            for session in held:
                session.rewind(len(session.token_ids))
            held.append(target.open())
            for session, number in zip(held, (3, 0, 2, 1), strict=True):
                assert np.array_equal(read(session, texts[number]), expected[number]), (came, number)
            for session in held:
                session.close()
        assert came > 10


@pytest.mark.parametrize(  # of each, one always runs
    "kind",
    [pytest.param(kind, marks=() if kind in ("gemma3", "gpt-oss") else pytest.mark.exhaustive) for kind in FAMILIES],
)
def test_families(weights, kind):
    """Windows, soft caps, and mixtures, where it depends on the tokens how many rows an expert gets."""
    with loaded(weights(kind), budget=32) as target:
        exact, ids = target.capabilities.exact, ids_of(target, LONG[:300])
        assert exact is not None
        if kind in MIXTURES and "repacked" not in target.computing:
            assert exact.trees.most < 8
        for sampling in SAMPLINGS:
            plain, _ = write(target, NonePlanner(), ids, sampling, 12)
            assert write(target, SssdPlanner(), ids, sampling, 12)[0] == plain, sampling


def last_row(backend, session, token_ids):
    found, node = prefill(backend, session, token_ids, want_last=True)
    return found.row(node)


def test_a_prompt_after_a_failed_pass_has_its_class_behind_a_window(weights, monkeypatch):
    """Cells that were put in order are waste behind a rewind, so the next prompt begins where a tile does."""
    old, new = [7 + 3 * i % 240 for i in range(200)], [9 + 5 * i % 240 for i in range(600)]
    with loaded(weights("gemma3"), "narrow") as target:
        session, rows, decode = target.open(), list[int](), target._decode
        expected = last_row(target, session, old[:128] + new)
        session.rewind(0)
        prefill(target, session, old)
        target.cells.uncertain = True
        target.forward([Work(session, np.array([3], np.int32), np.array([-1], np.int32), np.array([0]))])
        session.commit([])
        monkeypatch.setattr(target, "_decode", lambda total: (rows.append(total), decode(total)))
        assert np.array_equal(last_row(target, session, old[:128] + new), expected)
        assert sum(rows) >= 600
        assert max(rows) <= llama_cpp.llama_n_ubatch(target.context)


def test_a_mixtures_prompt_has_only_its_own_rows_behind_a_window(weights):
    """Rows before it would choose experts, and kernels depend on the number of rows."""
    text = [9 + 7 * i % 240 for i in range(30)]
    with loaded(weights("gpt-oss"), "narrow", repack=False, sessions=2) as target:
        session, other = target.open(), target.open()
        assert target.capabilities.exact.blocks
        expected = last_row(target, session, text)
        session.rewind(0)
        prefill(target, other, text[:10])
        assert np.array_equal(last_row(target, session, text), expected)


def test_experts_make_large_passes_no_class(weights):
    path = weights("gpt-oss")
    with pytest.raises(UsageError, match="at most 7 rows agree"), loaded(path, "wide", repack=False):
        pass


def test_what_the_cache_is_kept_in(weights, small):
    path = weights("made up")
    for asked, kv_type in [(None, None), ("narrow", "q8_0"), ("wide", None), ("off", "f16/q8_0")]:
        target = load(str(path), exact=asked, kv_type=kv_type, context_length=64, threads=2)
        assert target.computing["kv_type"] == (kv_type or "f16"), (asked, kv_type)
        target.close()
    with loaded(small) as target:
        assert target.computing["kv_type"] == "f32"


def test_one_row_has_the_attention_of_a_few(weights, monkeypatch):
    """So it needs no padding. Where the processor's backend cannot be told, one row is none of the class."""
    path, least = weights("made up"), []
    for device in (attention._device, lambda: None):
        monkeypatch.setattr(attention, "_device", device)
        with loaded(path, "narrow", kv_type="f16", repack=False) as target:
            assert ("attention" in target.computing) == (device() is not None)
            least.append(target.capabilities.exact.trees.least)
            target.capabilities = replace(target.capabilities, exact=None)  # nothing is padded
            assert np.array_equal(*first_rows(target, 1, 2)) == (device() is not None)
    assert least == [1, 2]


def test_only_what_is_made_while_it_is_looked_for_is_captured(weights):
    with loaded(weights("made up"), "narrow", kv_type="f16") as first, attention.capture_cpu_backend() as made:
        assert made == []
        with loaded(weights("made up"), "off") as second:
            assert (len(made), second.computing.get("attention")) == (2, None)  # one of them to plan
        assert first.computing["attention"] == "alike"
    with loaded(weights("made up"), "off"):
        assert len(made) == 2
    with attention.capture_cpu_backend() as made:
        other = Thread(target=lambda: load(str(weights("made up")), context_length=64).close())
        other.start()
        other.join()
    assert made == []


def test_a_class_that_is_not_there(small):
    """Without flash attention a gap between a node's ancestors moves what is added up first."""
    with pytest.raises(UsageError, match="what stands between its ancestors"), loaded(small, "wide"):
        pass
    with loaded(small) as target:
        assert target.capabilities.exact is None


@pytest.fixture(scope="module")
def wide_heads(small, smollm2_folder):
    """Of 8 bits; rounding hid from the logits of a trial where its cells lay, if its cache was in float32."""
    raw, path = smollm2_folder / "wide-heads.raw", smollm2_folder / "wide-heads.gguf"

    def make(new):
        write_made_up(raw, Shape(2, 256, 512, 8, 8, vocab=1), small, lambda done, total: None)
        quantised(raw, new, KINDS["Q8_0"])

    return once(path, make)


def test_attention_that_adds_up_cells_has_no_row_class(wide_heads):
    """Without flash attention, as with a cache in float32, it is a product over all cells, those of others included."""
    with loaded(wide_heads, kv_type="f32") as backend:
        assert backend.capabilities.by_cell == ALWAYS
        assert backend.capabilities.exact is None
    with pytest.raises(UsageError, match="--exact any: here a node's logits depend on what stands between"):
        loaded(wide_heads, "any", kv_type="f32").__enter__()


@pytest.mark.parametrize(
    ("kv_type", "tiled"),
    [("f16", True), pytest.param("f32/f16", True, marks=pytest.mark.exhaustive), ("f16/q8_0", False)],
)
def test_passes_that_attend_in_tiles_take_no_trees(wide_heads, kv_type, tiled, monkeypatch, whole_grid):
    """Where the cells of a tree's path lie decides in which tile a key is added up."""
    if not whole_grid:
        monkeypatch.setattr(row_classes, "SIZES", (1, 8, 63, 64, 65, 128))
        monkeypatch.setattr(row_classes, "LARGER", ())
    computing = {"threads": 2, "gpu_layers": 0, "kv_type": kv_type} | (attention.ALIKE if tiled else {})
    found = find("llamacpp", "build", computing, str(wide_heads), remember=False, say=lambda text: None)
    assert not any(one.least < 64 <= one.most for one in found) or not tiled
    assert [one.trees for one in found if one.most >= 64] == [not tiled]


def test_a_watched_probe_model_shows_what_rounding_hides(wide_heads):
    """63 and 64 rows have other attention. Products with weights of 8 bits round it."""
    computing = {"threads": 2, "gpu_layers": 0, "kv_type": "f16"}
    differ = {}
    for watched in (False, True):
        with engine.probe_model(str(wide_heads), computing, watched=watched) as backend:
            chain, session = tokens(backend, 64, 1), backend.open()
            backend.state_width = 0
            rows = [_rows(backend, session, chain[:size]) for size in (62, 63, 64)]
            assert np.array_equal(rows[0], rows[1][:62])
            differ[watched] = not np.array_equal(rows[1], rows[2][:63])
    assert differ[True]
    assert rows[0].shape[1] > backend.vocab.size
