"""What is asked of llama.cpp when a file is loaded."""

import ctypes
import signal
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import add, finish

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from contract import chain_rows, random_tokens
from edgespec.backends.llamacpp import engine, vocab
from edgespec.backends.llamacpp.context import ContextSize
from edgespec.backends.llamacpp.ggml import files
from edgespec.backends.llamacpp.ggml.files import llama_cpp, load_model, loaded_tensors, read_tensors, without_amx
from edgespec.backends.llamacpp.memory.planning import rehearse
from edgespec.backends.llamacpp.memory.probe_model import probe_file

from edgespec.errors import ContextFull, Interrupted, ModelError, SessionFileError
from edgespec.loop.passes import prefill
from edgespec.models.gguf_header import header_values


def test_kernels_for_amx_are_left_out_where_llama_cpp_was_built_with_them() -> None:
    assert without_amx(b"CPU : AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1 | ") == {"use_extra_bufts": False}
    assert without_amx(b"CPU : AVX512 = 1 | REPACK = 1 | ") == {}


@pytest.mark.parametrize("repack", [False, True])
def test_weights_are_repacked_unless_a_stream_is_compared_with_them(repack, smollm2, monkeypatch) -> None:
    asked = {}

    def stop(path, mapped, **params):
        asked.update(params)
        raise ModelError("enough was seen")

    monkeypatch.setattr(engine, "load_model", stop)
    monkeypatch.setattr(engine.MemoryPlanner, "plenty", lambda self, size: True)
    monkeypatch.setattr(engine, "without_amx", lambda info: {})
    with pytest.raises(ModelError, match="enough"):
        engine.load(str(smollm2), repack=repack)
    assert asked["use_extra_bufts"] is repack


@pytest.mark.parametrize(("arch", "sizes"), [("qwen35", [64, 0]), ("gemma4-assistant", [64, 64])])
def test_a_head_is_not_loaded_where_llama_cpp_skips_it(arch, sizes, tmp_path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(16, np.float32))
    finish(writer)
    assert [tensor.size for tensor in loaded_tensors(str(tmp_path / "model.gguf"))] == sizes


def vocab_with(path: Path, make, tags: list[str]) -> vocab.LlamaVocab:
    """A made-up vocabulary, the last tokens of which are control tokens."""
    gguf = pytest.importorskip("gguf")

    class Writer(gguf.GGUFWriter):
        def add_token_list(self, tokens):
            super().add_token_list([*tokens[: -len(tags)], *tags])

        def add_token_types(self, kinds):
            super().add_token_types([*kinds[: -len(tags)], *[3] * len(tags)])

    writer = Writer(path, "llama")
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(64)
    writer.add_layer_norm_rms_eps(1e-5)
    make(writer)
    finish(writer)
    return vocab.load_vocab(str(path))


@pytest.mark.parametrize("kind", ["byte_level_vocab", "sentencepiece_vocab"])
@pytest.mark.parametrize(
    ("tags", "cuts", "no_cuts"),
    [
        (["<s>", "[INST]", "[/INST]"], {b"<s>", b"[INST]", b"[/INST]"}, set()),
        (["<s>", "[INST]", "<s>[INST]", "a<b>c", "<b>"], set(), {b"<s>", b"[INST]", b"<b>", b"a<b>c"}),
        (["<s>", "the<s"], set(), {b"<s>"}),
    ],
)
def test_a_text_is_cut_where_its_tokens_stay_the_same(kind, tags, cuts, no_cuts, tmp_path, monkeypatch) -> None:
    """Time by the square of the number of control tokens let one request work for hours."""
    found = vocab_with(tmp_path / "vocab.gguf", getattr(pytest.importorskip("gguf_files"), kind), tags)
    monkeypatch.setattr(vocab, "PIECE", 8)
    generator = np.random.default_rng(0)
    words = [*tags, "<|im_end|>", "<end_of_turn>", "the", " ", "\n", "<", ">", "[", "]", "é", "a", "s>"]
    for _ in range(200):
        text = "".join(generator.choice(words, 60))
        whole = found._encoded(text.encode(), True, True)
        assert found.encode(text, add_bos=True, parse_special=True) == whole, text
    assert cuts <= found._cuts
    assert not no_cuts & found._cuts


def test_llama_cpp_gets_texts_with_many_control_tokens_in_pieces(tmp_path, monkeypatch) -> None:
    found = vocab_with(tmp_path / "vocab.gguf", pytest.importorskip("gguf_files").byte_level_vocab, ["<s>"])
    lengths, inner = [], llama_cpp.llama_tokenize

    def asked(model, data, *more):
        return lengths.append(len(data)) or inner(model, data, *more)

    monkeypatch.setattr(llama_cpp, "llama_tokenize", asked)
    assert len(found.encode("<s>a" * 20_000, add_bos=False, parse_special=True)) == 40_000
    assert max(lengths) < 2**13


def small_gpt2(path: Path, positions: int) -> str:
    """A made-up GPT-2 that has learned a vector for each of so many positions."""
    gguf, width, generator = pytest.importorskip("gguf"), 64, np.random.default_rng(0)
    from gguf_files import VOCAB, byte_level_vocab

    writer = gguf.GGUFWriter(path, "gpt2")
    add(
        writer,
        file_type=0,
        block_count=2,
        context_length=positions,
        embedding_length=width,
        feed_forward_length=2 * width,
        head_count=2,
        layer_norm_eps=1e-5,
    )
    byte_level_vocab(writer, "gpt-2")
    shapes = {"token_embd.weight": (VOCAB, width), "position_embd.weight": (positions, width)}
    norms, parts = ["output_norm"], dict[str, tuple[int, int]]()
    for layer in range(2):
        name = f"blk.{layer}"
        norms += [f"{name}.attn_norm", f"{name}.ffn_norm"]
        parts |= {f"{name}.attn_qkv": (3 * width, width), f"{name}.attn_output": (width, width)}
        parts |= {f"{name}.ffn_up": (2 * width, width), f"{name}.ffn_down": (width, 2 * width)}
    for name, sizes in [*((name, (width,)) for name in norms), *parts.items()]:
        shapes |= {f"{name}.weight": sizes, f"{name}.bias": sizes[:1]}
    for name, sizes in shapes.items():
        writer.add_tensor(name, generator.normal(0, 0.1, sizes).astype(np.float32))
    finish(writer)
    return str(path)


def test_a_context_ends_with_the_learned_positions(tmp_path) -> None:
    path = small_gpt2(tmp_path / "model.gguf", 48)
    for asked, notes in ((64, ["the context is 48, not 64: this model has no further positions"]), (32, []), (0, [])):
        model = engine.load(path, context_length=asked, budget=4)
        assert (model.capabilities.context_length, model.notes) == (asked % 64 or 48, notes)
        if notes:
            text = random_tokens(model, 49, 1)
            assert len(chain_rows(model, text[:48])) == 48
            with pytest.raises(ContextFull):
                chain_rows(model, text)
        model.close()


def test_a_name_of_no_parts_is_a_name_like_others(smollm2, tmp_path) -> None:
    path = tmp_path / "a-00001-of-00000.gguf"
    path.symlink_to(smollm2)
    assert loaded_tensors(str(path)) == loaded_tensors(str(smollm2))


def _make_context(path: str) -> None:
    rehearse(path, [ContextSize(64, 8, 1, 64)], 1 << 40)


def _twice(path: str) -> None:
    """Of a header with one key twice, which llama.cpp refuses with a line in its log."""
    names = list(header_values(path, ""))
    first, second = next(pair for pair in combinations(names, 2) if len(pair[0]) == len(pair[1]))
    wrong = Path(path).with_name("twice.gguf")
    wrong.write_bytes(Path(path).read_bytes().replace(second.encode(), first.encode(), 1))
    try:
        read_tensors(str(wrong))
    finally:
        wrong.unlink()


def _copy(path: str) -> None:
    with probe_file(path, {}):
        pass


@pytest.mark.parametrize(
    ("work", "while_it_logs"),
    [(load_model, "load"), (_make_context, "llama_context: "), (_twice, "gguf_init"), (_copy, "blk.29.")],
)
def test_ctrl_c_is_not_lost_in_a_callback_of_llama_cpp(work, while_it_logs, smollm2, monkeypatch) -> None:
    came = list[int]()

    def log(level, text, data):
        if not came and while_it_logs.encode() in text:
            came.append(1)
            signal.raise_signal(signal.SIGINT)

    callback = llama_cpp.llama_log_callback(log)
    monkeypatch.setattr(files, "keep_log", lambda: llama_cpp.llama_log_set(callback, ctypes.c_void_p(0)))
    monkeypatch.setattr("edgespec.backends.llamacpp.memory.probe_model.keep_log", files.keep_log)
    try:
        with pytest.raises(KeyboardInterrupt):
            work(str(smollm2))
        assert came
    finally:
        monkeypatch.undo()
        files.keep_log()


@pytest.fixture
def shares(monkeypatch) -> list[float]:
    """Of the weights, as llama.cpp reports them during a load; with the third comes a Ctrl-C."""
    shares, make = list[float](), llama_cpp.llama_progress_callback

    def watched(go_on):
        def ask(share, data):
            shares.append(share)
            if len(shares) == 3:
                signal.raise_signal(signal.SIGINT)
            return go_on(share, data)

        return make(ask)

    monkeypatch.setattr(llama_cpp, "llama_progress_callback", watched)
    return shares


def test_ctrl_c_ends_the_load_of_weights(shares, smollm2) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_model(str(smollm2))
    assert len(shares) == 3


def test_a_load_goes_on_if_the_programs_own_handler_does(shares, smollm2) -> None:
    came = list[int]()
    usual = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        llama_cpp.llama_model_free(load_model(str(smollm2)))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert came == [signal.SIGINT]
    assert shares[-1] == 1


def test_an_error_is_the_reason_of_a_failure_and_not_a_warning_before_it() -> None:
    files.forget_log()
    for level, line in ((3, b"control-looking token\n"), (4, b"missing tensor\n"), (4, b"error loading model\n")):
        files._keep_log(level, line, ctypes.c_void_p(0))
    assert files.last_log() == "missing tensor"
    files.forget_log()
    files._keep_log(3, b"no memory slot\n", ctypes.c_void_p(0))
    assert files.last_log() == "no memory slot"


def test_a_session_that_a_full_disk_cannot_hold_says_so_also_after_an_interrupted_pass(
    smollm2_tiny: Path, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")  # not on Windows
    backend, whole = (
        engine.load(str(smollm2_tiny), context_length=128, threads=1),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        session = backend.open()
        prefill(backend, session, list(range(5, 60)))
        backend.interrupt(backend.pass_number)
        with pytest.raises(Interrupted):
            prefill(backend, session, list(range(5, 70)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, whole[1]))
        with pytest.raises(SessionFileError, match=r"cannot be saved: .*File too large"):
            session.save(tmp_path / "a.session")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, whole)
        signal.signal(signal.SIGXFSZ, usual)
        backend.close()
    assert not list(tmp_path.iterdir())
