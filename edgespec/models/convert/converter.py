"""Model folders as GGUF files by llama.cpp's own converter, in another process.

The wheel of llama-cpp-python has no converter, but the source archive of the same version has; pip fetches it.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import prod
from pathlib import Path

from edgespec.errors import EdgespecError, MissingPackage, ModelError, UsageError, undone
from edgespec.machine.files import cache_folder, read_json_object
from edgespec.models.convert.gguf_write import check_layers
from edgespec.models.download import Progress
from edgespec.models.hub import WEIGHTS
from edgespec.models.safetensors_header import Stored, read_safetensors_header

ENGINE = "llama-cpp-python"
SCRIPT = "convert_hf_to_gguf.py"
NEEDS = "torch,convert"  # extras of edgespec
WANTED = (SCRIPT, "conversion/", "gguf-py/gguf/")  # of vendor/llama.cpp in the archive
OUT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
OUT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of a weight
# Lines of the converter: one for each tensor, then that of the plan; only now weights are read, converted and written.
TENSOR = re.compile(r"([\w.]+), .*--> (\w+), shape")
PLAN = "Writing the following files"
WRITTEN = re.compile(r"Writing: +(\d+)%")


def check_converter(path: str | None) -> None:
    """Errors of `find_converter` and `convert_folder` that are known before anything is fetched.

    Raises:
        UsageError: there is no such script.
        MissingPackage: a package that the engine's converter needs is not installed.
    """
    if path is not None:
        find_converter(path, lambda what, done, total: None)
        return
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise MissingPackage(package, NEEDS, "llama.cpp's converter")


def find_converter(path: str | None, report: Progress) -> Path:
    """The converter's script: `path`, or that of the installed engine's version, fetched once.

    Raises:
        UsageError: there is no such script.
        MissingPackage: the engine is not installed.
        EdgespecError: it cannot be fetched.
    """
    if path is not None:
        script = Path(path) / SCRIPT if Path(path).is_dir() else Path(path)
        if not script.is_file():
            raise UsageError(f"{script}: there is no such file; --converter takes llama.cpp's {SCRIPT}, or its folder")
        return script.absolute()
    try:
        name = f"converter-{version(ENGINE)}"
    except PackageNotFoundError as error:
        raise MissingPackage(ENGINE, "", "converting a folder") from error
    place = cache_folder()
    if not (place / name / SCRIPT).is_file():
        report("fetching llama.cpp's converter", 0, 0)
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as folder:
            archive = _fetch(version(ENGINE), Path(folder))
            extract(archive, Path(folder) / "made")
            with suppress(OSError):  # another process was first
                os.rename(Path(folder) / "made", place / name)
    return place / name / SCRIPT


def _fetch(wanted: str, folder: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ENGINE]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"{ENGINE}=={wanted}"],
        capture_output=True, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        why = (done.stderr.strip() or "pip gave no reason").splitlines()[-1]
        raise EdgespecError(
            f"llama.cpp's converter comes with the sources of {ENGINE} {wanted}, which pip cannot fetch ({why}); "
            f"--converter names a copy of llama.cpp instead"
        )
    return archives[0]


def extract(archive: Path, out: Path) -> None:
    """Extract the converter's regular files, and none outside `out`.

    Raises:
        EdgespecError: the archive has no converter.
    """
    with tarfile.open(archive) as files:
        for member in files:
            _, _, inside = member.name.partition("/vendor/llama.cpp/")
            if not (inside.startswith(WANTED) and member.isfile()) or ".." in Path(inside).parts:
                continue
            target = out / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            source = files.extractfile(member)
            assert source is not None
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
    if not (out / SCRIPT).is_file():
        raise EdgespecError(f"{archive.name}: has no {SCRIPT}; --converter names a copy of llama.cpp instead")


def count_weights(folder: Path, trust: bool, drop: Sequence[int] = ()) -> int:
    """Count the weights of a model folder.

    Args:
        folder: to check.
        trust: let programs in it run.
        drop: numbers of layers to leave out.

    Raises:
        UsageError: there is no such layer, or none would be left.
        ModelError: it is no model folder, is damaged, or wants to run programs of its own.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder}: has no config.json, so it is not a model folder")
    found = [read_json_object(config, ModelError)]
    with suppress(ModelError):
        found.append(read_json_object(folder / "tokenizer_config.json", ModelError))
    if not trust and any("auto_map" in one for one in found):
        raise ModelError(
            f"{folder}: wants to run programs of its own (auto_map in its config); read them, and say --trust, or "
            "take a ready GGUF"
        )
    if drop and type(layers := found[0].get("num_hidden_layers")) is int:
        check_layers(folder, drop, layers)
    weights = sum(prod(tensor.shape) for tensor in _stored(folder))
    if not weights:
        raise ModelError(f"{folder}: has no weights in {WEIGHTS}")
    return weights


def _stored(folder: Path) -> list[Stored]:
    """Tensors that the converter reads; other files, such as consolidated.safetensors, hold them once more."""
    return [tensor for file in sorted(folder.glob(WEIGHTS)) for tensor in read_safetensors_header(file)]


def convert_folder(
    folder: Path,
    out: Path,
    *,
    dtype: str,
    script: Path,
    trust: bool,
    progress: Progress,
    check: Callable[[Mapping[str, str]], None] = lambda tensors: None,
) -> None:
    """Write the GGUF `out` of a model folder.

    Args:
        folder: checked by `count_weights`.
        out: a partial file's name.
        dtype: of the weights: float32, float16 or bfloat16.
        script: llama.cpp's converter.
        trust: let programs in the folder run.
        progress: called with tensors that are named and in all, then with percent of the weights that are written.
        check: called with names and types of the tensors, before the weights are written.

    Raises:
        ModelError: the converter refuses; with its last line.
    """
    staged = folder.absolute()
    if not trust and any(folder.glob("*.py")):
        staged = out.with_name(f"{out.name}.folder")
        staged.mkdir()
        for file in folder.iterdir():
            if file.suffix != ".py":
                (staged / file.name).symlink_to(file.absolute())
    total = len(_stored(folder))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NO_LOCAL_GGUF")}
    environment |= {"HF_HUB_OFFLINE": "1"}
    named = out.with_name(out.name.replace("{", "{{").replace("}", "}}"))  # the converter formats the name
    options = ["--outfile", str(named), "--outtype", OUT_TYPES[dtype], "--model-name", _name_of(folder)]
    tensors, last = dict[str, str](), ""
    with subprocess.Popen(
        [sys.executable, "-s", str(script), str(staged), *options],
        cwd=script.parent, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
        errors="replace",
    ) as process:  # fmt: skip
        assert process.stderr is not None
        with undone(process.kill):
            for line in process.stderr:
                last = line.strip() or last
                if found := TENSOR.search(line):
                    tensors[found[1]] = found[2]
                    progress("naming tensors", min(len(tensors), total), total)
                elif PLAN in line and tensors:
                    check(tensors)
                elif found := WRITTEN.search(line):
                    progress("writing", int(found[1]), 100)
    if process.returncode:
        if "No module named" in last:
            raise MissingPackage(last.split("'")[1], NEEDS, "llama.cpp's converter")
        raise ModelError(f"{folder}: llama.cpp's converter refuses it: {last or 'without a word'}")


def _name_of(folder: Path) -> str:
    """Of a snapshot in the hub's cache the repository's name; the folder is called as its commit."""
    whole = folder.resolve()
    cached = re.fullmatch(r"models--.+--(.+)", whole.parent.parent.name) if whole.parent.name == "snapshots" else None
    return cached[1] if cached else whole.name
