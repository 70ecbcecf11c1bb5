"""Where files of the user are: the cache folder and models.yaml, also without a home folder."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import Run

from edgespec.errors import EdgespecError
from edgespec.machine import files, measurements
from edgespec.measure.pair_report import check_writable
from edgespec.models.registry import own_models_file

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="another system has other folders")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user id that has no name."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LOCALAPPDATA", "USERPROFILE", measurements.OFF):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4242424, raising=False)


@LINUX
def test_folders_are_those_of_the_freedesktop_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for named, cache, config in [
        ("", "/home/me/.cache/edgespec", "/home/me/.config/edgespec"),
        ("/elsewhere", "/elsewhere/edgespec", "/elsewhere/edgespec"),
        ("relative", "/home/me/.cache/edgespec", "/home/me/.config/edgespec"),  # the rules say: ignore it
    ]:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        monkeypatch.setenv("XDG_CONFIG_HOME", named)
        assert (files.cache_folder(), files.config_folder()) == (Path(cache), Path(config))


@pytest.mark.usefixtures("homeless")
@pytest.mark.skipif(sys.platform == "win32", reason="user ids")
def test_without_a_home_measurements_go_with_the_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.cache_folder().parent.is_dir()
    assert own_models_file() is None
    assert run("models", "smollm2-135m")[0] == 0
    assert measurements.remember({"kind": "test"}, 1)
    assert measurements.recall({"kind": "test"}, int) == 1
    assert "there is no home folder" in measurements.why_not_kept()
    with pytest.raises(EdgespecError, match="XDG_CONFIG_HOME names another place"):
        check_writable("mine")
    monkeypatch.setenv(measurements.OFF, "1")
    assert measurements.why_not_kept() == ""


@pytest.mark.usefixtures("homeless")
def test_without_any_folder_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_user_folder", lambda kind: None)
    files._of_this_process.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])
    assert not measurements.remember({"kind": "test"}, 1)
    assert measurements.recall({"kind": "test"}, int) is None
    assert "there is no home folder" in measurements.why_not_kept()


def test_own_models_are_found_where_the_configuration_is(
    run: Run, few_models: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "edgespec" / "models.yaml"
    own.parent.mkdir()
    own.write_text("models:\n  - {name: of-my-own, target: 'hf:a/b'}\n", "utf-8")
    assert "of-my-own" in run("models")[1]
    assert check_writable("another") == own


def test_a_cache_that_cannot_be_written_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(measurements.OFF, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measurements.why_not_kept() == ""
    (tmp_path / "file").write_text("no folder can be made in it", "utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert f"{tmp_path / 'file' / 'edgespec' / 'measured'} cannot be written" in measurements.why_not_kept()
