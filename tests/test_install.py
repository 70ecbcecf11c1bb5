"""`make run` on a machine where it cannot install: one line, and where to read more."""

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import check_wheel
import pytest

ROOT = Path(__file__).parent.parent
LIBRARIES = ROOT / "scripts" / "packaging" / "libraries.cmake"


def test_without_a_compiler_one_line_says_what_to_install(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "scripts/install"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    make = shutil.which("make") or pytest.skip("there is no make")
    command = [make, "--no-print-directory", "run", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True)
    said, stopped = done.stderr.splitlines()
    assert "no compiler cc" in said
    assert {"apt", "dnf", "xcode-select"} < set(said.split())
    assert stopped.startswith("make: ***")
    assert not done.stdout
    assert not (tmp_path / ".venv").exists()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader("install", str(ROOT / "scripts" / "install"))
    module = module_from_spec(ModuleSpec("install", loader))
    loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path)
    monkeypatch.setattr(module, "LOG", tmp_path / "install.log")
    return module


def test_an_old_python_is_refused_before_anything_is_installed(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 6))
    monkeypatch.setenv("CC", "no-compiler")
    with pytest.raises(SystemExit, match=r"edgespec needs 3\.11") as stopped:
        install.main()
    assert "brew install python" in str(stopped.value)  # a Mac's own is too old
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("python", "silicon", "said"), [("x86_64", "1", True), ("x86_64", "0", False), ("arm64", "1", False)]
)
def test_a_python_for_intel_on_apple_silicon_is_named_before_llama_cpp_is_compiled(
    python: str,
    silicon: str,
    said: bool,
    install: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(install.platform, "machine", lambda: python)
    monkeypatch.setattr(install.shutil, "which", lambda name: name)
    asked = subprocess.CompletedProcess("sysctl", 0, stdout=f"{silicon}\n")
    monkeypatch.setattr(
        install.subprocess,
        "run",
        lambda command, **_: asked if "sysctl" in command[0] else subprocess.CompletedProcess("", 3),
    )
    with pytest.raises(SystemExit, match="3"):  # of the next step, venv
        install.main()
    assert ("Rosetta" in capsys.readouterr().err) == said


def test_macs_do_not_throttle_the_service_and_the_formula_can_compile_its_packages() -> None:
    packaging = ROOT / "scripts" / "packaging"
    with (packaging / "edgespec.plist").open("rb") as file:
        assert plistlib.load(file)["ProcessType"] == "Interactive"
    formula = (packaging / "edgespec.rb").read_text("utf-8")
    assert "process_type :interactive" in formula
    assert 'depends_on "rust" => :build' in formula


def test_on_windows_the_compiler_is_left_to_cmake(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Visual Studio is in no PATH."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(install.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 3))
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        with pytest.raises(SystemExit, match="3"):  # of the next step, venv
            install.main()


def test_what_pip_wrote_last_is_shown_where_it_fails(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text("#!/bin/sh\nseq 100; echo 'llama.cpp: error' >&2; exit 1\n")
    pip.chmod(0o755)
    with pytest.raises(SystemExit, match=str(tmp_path / "install.log")):
        install.pip("edgespec")
    assert capsys.readouterr().out.splitlines() == [*map(str, range(87, 101)), "llama.cpp: error"]
    assert len((tmp_path / "install.log").read_text().splitlines()) == 101


@pytest.mark.parametrize("asked", ["", "-DGGML_CUDA=on"])
def test_what_the_user_asks_of_cmake_is_kept(
    asked: str, install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip takes any build from its cache, so others have other caches."""
    caches = list[str]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CMAKE_ARGS", asked)
    monkeypatch.setattr(install.shutil, "which", lambda name: name)
    monkeypatch.setattr(install.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 0))
    monkeypatch.setattr(install, "pip", lambda *given: caches.extend(given[-1:] if "--cache-dir" in given else ()))
    install.main()
    *kept, include = shlex.split(os.environ["CMAKE_ARGS"])
    assert kept == asked.split()
    assert Path(include.partition("=")[2]) == LIBRARIES
    assert (caches == [str(tmp_path / "edgespec" / "pip")]) == (not asked)


@pytest.mark.parametrize(("asked", "blas"), [("", "OFF"), ("-DGGML_BLAS=ON", "ON")])
def test_a_third_of_llama_cpp_is_compiled_and_blas_only_where_it_is_asked_for(
    asked: str, blas: str, tmp_path: Path
) -> None:
    cmake = shutil.which("cmake") or pytest.skip("there is no cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(llama_cpp NONE)\n"
        "set(LLAMA_BUILD_COMMON ON CACHE BOOL 0 FORCE)\noption(LLAVA_BUILD 0 ON)\noption(GGML_BLAS 0 ON)\n"
        'message(STATUS "common ${LLAMA_BUILD_COMMON} llava ${LLAVA_BUILD} blas ${GGML_BLAS}")\n'
    )
    command = [cmake, tmp_path, "-B", tmp_path, f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={LIBRARIES}", *asked.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"common OFF llava OFF blas {blas}\n" in done.stdout


@pytest.mark.parametrize("lost", [check_wheel.STATIC / "tree.js", Path("edgespec", "models.yaml")])
def test_check_wheel_names_a_file_that_is_not_installed(lost: Path, tmp_path: Path) -> None:
    licenses = tmp_path / "edgespec-1.dist-info" / "licenses"
    for folder in (tmp_path, licenses):
        shutil.copytree(ROOT / check_wheel.STATIC, folder / check_wheel.STATIC)
    shutil.copy(ROOT / "models.yaml", tmp_path / "edgespec")
    shutil.copy(ROOT / "LICENSE", licenses)
    check_wheel.check_files(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(AssertionError, match=f"{tmp_path / lost} is missing"):
        check_wheel.check_files(tmp_path)


def test_a_package_has_no_files_of_an_earlier_build(tmp_path: Path) -> None:
    """`pipx install .` builds in this folder, again after each update of the sources."""
    if find_spec("setuptools") is None:  # to import it fails after the standard library's distutils
        pytest.skip("nothing to build with: pip install setuptools")
    gone = tmp_path / "edgespec" / "gone.py"
    gone.parent.mkdir()
    gone.touch()
    subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path], cwd=ROOT, check=True)
    assert (tmp_path / "edgespec" / "models.yaml").exists()
    assert not gone.exists()
