"""Which engine runs what, and one clear line where none can."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, converted

import edgespec
from edgespec.errors import EdgespecError, MissingPackage, UsageError
from edgespec.loop.engines import ENGINE_OPTIONS, LoadOptions, check_supported, choose_backend, find_engine
from edgespec.machine.this_machine import Gpu, Machine, this_machine

FOLDER_ENGINES = ["torch", "mlx"]


def refused(run: Run, *arguments: str, code: int, says: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (code, ""), err
    assert err.count("\n") == 1, err
    assert err.startswith("edgespec: ")
    assert says in err


def has(engine: str) -> None:
    package = {"mlx": "mlx_lm"}.get(engine, engine)
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'edgespec[{engine}]'")


@pytest.fixture(params=FOLDER_ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    has(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that both engines load."""
    has("torch")
    from hf_models import save, tiny_model

    return save(tiny_model("llama"), tmp_path_factory.mktemp("tiny") / "model")


def machine(system: str, processor: str, installed: Sequence[str]) -> Machine:
    return replace(this_machine(), platform=system, architecture=processor, packages=tuple(installed))


MAC, PC = ("darwin", "arm64"), ("linux", "x86_64")


@pytest.mark.parametrize(
    ("where", "installed", "expected"),
    [
        (MAC, ["mlx_lm", "torch"], "mlx"),
        (MAC, ["torch"], "torch"),
        (MAC, ["mlx_lm"], "mlx"),
        (("darwin", "x86_64"), ["mlx_lm", "torch"], "torch"),
        (("linux", "aarch64"), ["mlx_lm", "torch"], "torch"),
        (PC, ["mlx_lm", "torch"], "torch"),
        (PC, ["mlx_lm"], "mlx"),
    ],
)
def test_the_engine_for_a_folder(where: tuple[str, str], installed: list[str], expected: str) -> None:
    assert choose_backend(True, machine(*where, installed)) == expected
    assert choose_backend(False, machine(*where, installed)) == "llamacpp"


@pytest.mark.parametrize(("where", "extra"), [(MAC, "mlx"), (PC, "torch")])
def test_no_engine_for_a_folder(where: tuple[str, str], extra: str) -> None:
    with pytest.raises(MissingPackage, match=rf"pip install 'edgespec\[{extra}\]'"):
        choose_backend(True, machine(*where, []))


def test_nothing_is_fetched_for_an_engine_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    refused(run, "run", "owner/repository", "hi", code=1, says="pip install 'edgespec[")
    refused(run, "run", "owner/repository", "hi", "--backend", "other", code=2, says="there is no backend 'other'")


def test_a_folder_runs_on_each_engine_and_says_on_which(run: Run, engine: str, tiny: Path) -> None:
    options = ["--raw", "--json", "-n", "8", "--ctx", "128", "--budget", "4", "--planner", "sssd"]
    status, out, err = run("run", str(tiny), "abcabcabc", *options, "--backend", engine)
    assert status == 0, err
    result = json.loads(out)
    assert result["stats"]["backend"] == engine
    assert result["stats"]["tokens"] == len(result["tokens"]) == 8


def test_without_a_word_a_folder_runs(run: Run, tiny: Path) -> None:
    status, _, err = run("run", str(tiny), "abc", "--raw", "-n", "4", "--ctx", "128")
    assert status == 0
    assert f"on {choose_backend(True, this_machine())})" in err


@pytest.mark.parametrize(
    ("backend", "option", "others"),
    [
        ("torch", ["--kv-type", "q8_0"], "threads, gpu_layers, memory, device, dtype, gpu_memory"),
        ("mlx", ["--threads", "2"], "memory"),
        ("mlx", ["--gpu-layers", "0"], "memory"),
        ("mlx", ["--dtype", "float16"], "memory"),
        ("llamacpp", ["--device", "cpu"], "threads, gpu_layers, memory, kv_type, gpu_memory"),
        ("mlx", ["--kv-type", "q8_0"], "memory"),
    ],
)
def test_an_option_of_another_engine(run: Run, tiny: Path, backend: str, option: list[str], others: str) -> None:
    has("llama_cpp" if backend == "llamacpp" else backend)
    name = option[0].removeprefix("--").replace("-", "_")
    says = f"the backend {backend} has no option {name!r}; its options: {others}"
    refused(run, "run", str(tiny), "hi", "--backend", backend, *option, code=2, says=says)


def test_options_reach_the_engine(tiny: Path) -> None:
    limits = {}
    for dtype in (None, "bfloat16"):
        with edgespec.load(str(tiny), backend="torch", dtype=dtype, device="cpu", context_length=64) as model:
            limits[dtype] = model.target.capabilities.logit_tolerance
    assert limits[None] < limits["bfloat16"]


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", {"model_type": "gpt-17", "architectures": ["Gpt17"]}, "gpt-17"),
        ("model.safetensors", None, "safetensors"),
    ],
)
def test_a_folder_that_is_not_whole_or_that_nobody_knows(
    run: Run, engine: str, tiny: Path, tmp_path: Path, file: str, change: dict[str, Any] | None, says: str
) -> None:
    broken = Path(shutil.copytree(tiny, tmp_path / "broken"))
    if change:
        (broken / file).write_text(json.dumps(json.loads((broken / file).read_text("utf-8")) | change), "utf-8")
    else:
        (broken / file).unlink()
    refused(run, "run", str(broken), "hi", "--backend", engine, code=1, says=says)


def test_an_architecture_without_attention(run: Run, engine: str, tmp_path: Path) -> None:
    from hf_models import SMALL, byte_tokenizer, torch, transformers

    torch.manual_seed(0)
    small = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = transformers.MambaConfig(**small, state_size=4, intermediate_size=64, time_step_rank=2, use_bcdt_rms=False)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    command = ["run", str(tmp_path), "hi", "--raw", "--backend", engine, "--ctx", "64", "-n", "4"]
    if engine == "mlx":  # its states can be copied
        assert run(*command)[0] == 0
    else:
        refused(run, *command, code=1, says="does not go on from copies of its states; use a GGUF")


def test_a_file_on_an_engine_for_folders(run: Run, engine: str, tiny: Path) -> None:
    refused(run, "run", str(tiny / "config.json"), "hi", "--backend", engine, code=1, says="is a file")


def test_gpus_that_are_not_there_or_too_small(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor takes a GPU's place."""
    from edgespec.backends.torch.engine import engine

    options = ["--backend", "torch", "--ctx", "128", "--gpu-memory"]
    refused(run, "run", str(tiny), "hi", *options[:2], "--device", "cuda:99", code=2, says="is not there")
    refused(run, "run", str(tiny), "hi", *options, "ten", code=2, says="gpu_memory is for GPUs")
    monkeypatch.setattr(engine, "gpus", lambda device: [Gpu("cpu", False, 1 << 40)], raising=False)
    refused(run, "run", str(tiny), "hi", *options, "1M", code=2, says="1 MiB of GPU memory cannot hold 2 layers")
    refused(run, "run", str(tiny), "hi", *options, "ten", code=2, says="'ten' is not a size")


def test_doctor_looks_at_folders(run: Run, engine: str, tiny: Path) -> None:
    options = ["--ctx", "128", "--budget", "4", "--exact", "off"]
    code, out, _ = run("doctor", str(tiny), "--backend", engine, *options, "--draft", str(tiny))
    assert code == 0
    rows = dict(line.split("  ", 1) for line in out.splitlines())
    assert rows["engine"].strip() == engine
    assert "fits into memory" in rows["plan"]
    assert " s; " in rows["pass, 5 nodes"]
    refused(run, "doctor", str(tiny), "--backend", engine, *options, "--kv-type", "q8_0", code=2, says="'kv_type'")


def test_doctor_compares_engines(run: Run, tiny: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    options = ["--ctx", "128", "--budget", "4", "--exact", "off"]
    code, out, _ = run("doctor", str(tiny), *options)
    best, other = (line.split()[1] for line in out.splitlines() if line.startswith("engine"))
    assert (code, {best, other}) == (0, {"torch", "mlx"})
    assert out.splitlines()[-1].startswith(f"use --backend {best}: about ")
    found = json.loads(run("doctor", str(tiny), *options, "--json")[1])
    assert {found["engine"], *(one["engine"] for one in found["others"])} == {"torch", "mlx"}


def test_doctor_and_a_folder_that_does_not_fit(run: Run, tiny: Path) -> None:
    has("mlx")
    code, out, _ = run("doctor", str(tiny), "--backend", "mlx", "--ctx", "128", "--memory", "1M")
    assert code == 1
    assert "this cannot run, because 1 MiB of memory are too little for this model" in out
    refused(run, "doctor", str(tiny), "--draft", "smollm2-135m", code=2, says="must both be GGUF files, or folders")


@pytest.fixture(scope="module")
def small_hf(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `small`."""
    folder = tmp_path_factory.mktemp("small") / "hf"
    converted(small, folder)
    return folder


class TestPairs:
    """A GGUF and a folder, each on its own engine."""

    OPTIONS = ("--raw", "--json", "-n", "10", "--ctx", "64", "--budget", "4", "--exact", "off")
    QUESTION = ("The cat sat on the mat. The cat sat on", *OPTIONS)

    def write(self, run: Run, *arguments: str) -> dict[str, Any]:
        status, out, err = run("run", *arguments)
        assert status == 0, err
        return dict(json.loads(out))

    def test_each_engine_by_its_own_path(self, run: Run, small: Path, small_hf: Path) -> None:
        """The folder has the GGUF's weights, so each is nearly a draft of itself; text stays the target's."""
        for target, draft, name in (
            (small, small_hf, "llamacpp"),
            (small_hf, small, choose_backend(True, this_machine())),
        ):
            plain = self.write(run, str(target), *self.QUESTION, "--planner", "none")
            drafted = self.write(run, str(target), *self.QUESTION, "--draft", str(draft))
            assert drafted["tokens"] == plain["tokens"]
            assert plain["stats"]["backend"] == drafted["stats"]["backend"] == name
            assert drafted["stats"]["acceptance_length"] > 2

    def test_an_option_that_one_of_both_has(self, run: Run, small: Path, small_hf: Path) -> None:
        has("torch")
        options = ["--threads", "1", "--memory", "4G"]
        drafted = self.write(run, str(small), *self.QUESTION, "--draft", str(small_hf), *options)
        assert drafted["stats"]["tokens_by_source"]["draft"] > 0

    def test_another_vocabulary(self, run: Run, small: Path, tiny: Path) -> None:
        says = "another vocabulary than the target"
        refused(run, "run", str(small), "hi", "--draft", str(tiny), "--ctx", "128", code=1, says=says)

    def test_a_datastore_serves_both(self, run: Run, small: Path, small_hf: Path, tmp_path: Path) -> None:
        text, store = tmp_path / "text.txt", tmp_path / "text.store"
        text.write_text("The cat sat on the mat and purred. " * 20, "utf-8")
        status, out, err = run("datastore", "build", str(store), str(text), "--model", str(small_hf))
        assert status == 0, err
        assert "1 documents" in out
        found = self.write(run, str(small), *self.QUESTION, "--datastore", str(store))
        assert found["stats"]["tokens"] == 10

    def test_bench_names_the_engines(self, run: Run, small: Path, small_hf: Path, tmp_path: Path) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "Say hello."}\n', "utf-8")
        options = ["--draft", str(small_hf), "--planners", "specexec", "-n", "6", "--budget", "4", "--ctx", "64"]
        status, out, err = run("bench", str(prompts), "--model", str(small), *options, "--json")
        assert status == 0, err
        report = json.loads(out)
        assert (report["backend"], report["draft_backend"]) == ("llamacpp", choose_backend(True, this_machine()))
        assert report["unexplained"] == 0


def test_every_engine_names_its_options() -> None:
    has("llama_cpp")
    fields = set(LoadOptions.__dataclass_fields__)
    assert set(ENGINE_OPTIONS) < fields
    for name in ("llamacpp", "reference"):
        assert find_engine(name).supported <= {*ENGINE_OPTIONS, "draft_files"} <= fields
    assert {"threads", "gpu_layers", "memory", "draft_files"} <= find_engine("llamacpp").supported
    assert not find_engine("reference").supported
    with pytest.raises(UsageError, match="there is no backend 'other'"):
        find_engine("other")
    with pytest.raises(UsageError, match="the backend reference has no option 'memory'; its options: none"):
        check_supported(["reference"], LoadOptions(memory="1G"))


def test_the_old_argument_for_the_order_is_taken_with_a_warning() -> None:
    with (
        pytest.warns(UserWarning, match="first_come goes with the next version"),
        pytest.raises(EdgespecError, match="there is no such file"),
    ):
        edgespec.load("nothing.gguf", first_come=True)
