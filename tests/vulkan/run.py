"""Pools of experts, streamed layers, and row classes, on a software GPU: `make test-vulkan`.

Builds llama.cpp with Vulkan once, for Mesa's processor device. Each case runs with pools on the device and without, in
processes of their own: the numbers must be equal, to the bit. A case that the driver ends is listed, and not counted.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
from conftest import quantised
from edgespec.backends.llamacpp.ggml.files import keep_log
from gguf_files import small_llama
from models import EXPERTS, FAMILIES, write
from recorded_models import REAL, make_models

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "vulkan"
SITE, WHEELS, FILES = (BUILD / name for name in ("site", "wheels", "files"))
HUB = Path("~/.cache/edgespec/models").expanduser()  # real models that were downloaded
NEEDS = {  # package of Debian -> where one of its files lies
    "mesa-vulkan-drivers": "share/vulkan/icd.d/lvp_icd.*json",
    "libvulkan-dev": "include/vulkan/vulkan.h",
    "spirv-headers": "include/spirv/unified1/spirv.hpp",
}
DEVICE, DENSE, Q8_0 = "Vulkan0", "llama", 7  # llama_ftype
LONGEST = 3600  # seconds of a case; the driver compiles for minutes what it has not in its cache
CHOSEN = {"gpu_memory": "680M", "room": 10 << 20}  # by the planner: pools for some layers
ROOM = {"room": 6 << 20}
DRAFTS = {"planners": ["specexec", "auto", "sssd"]}
SHORT = {"tokens": 12}
SEVERAL = {"slots": EXPERTS + 4, "here": EXPERTS, "times": 2}


@dataclass(frozen=True)
class Case:
    """One of `cases.py`, on a model of `family` with weights of `kind`.

    Attributes:
        size: experts of a layer.
        pools: its options with pools.
        common: those with pools and without.
    """

    name: str
    family: str = "qwen3moe"
    kind: str = "Q8_0"
    size: int = EXPERTS
    does: str = "numbers"
    pools: dict[str, Any] = field(default_factory=lambda: {"slots": EXPERTS + 4, "here": EXPERTS})
    common: dict[str, Any] = field(default_factory=dict)


CASES = [
    *(Case(family, family, pools=SEVERAL) for family in FAMILIES),
    *(Case(f"weights in {kind}", kind=kind, pools=SEVERAL) for kind in ("Q4_0", "Q4_K", "MXFP4")),
    Case("experts in no more slots than one layer has", pools={"slots": EXPERTS, "here": EXPERTS}),
    Case("a pool in memory that the device computes in", pools=SEVERAL | {"shared": True}),
    Case("a pool in memory, half of the layers", "gpt-oss", common={"gpu_layers": 3}, pools=SEVERAL | {"shared": True}),
    Case("experts that are read ahead", pools=SEVERAL | {"here": 2 * EXPERTS}),
    Case("half of the layers", "gpt-oss", common={"gpu_layers": 3}, pools=SEVERAL),
    Case("several sequences", common={"sessions": 3, "rows": [1, 4, 33]}),
    Case("drafts", does="drafts"),
    Case("a saved session", does="saved"),
    Case("a model that is loaded again", does="again"),
    Case("what the planner chooses, twice", size=64, does="planned", common=CHOSEN, pools={}),
    Case("what the planner chooses on a Mac", size=64, does="planned", pools={"room": 10 << 20, "on_a_mac": True}),
    Case("drafts in a row class", DENSE, "Q8_0", does="exact", pools=DRAFTS),
    Case("half of the layers, in a row class", DENSE, "Q8_0", does="exact", common={"gpu_layers": 4}, pools=DRAFTS),
    *(Case(f"{name}, in a row class", name, does="exact", common={"tokens": 12}, pools=DRAFTS) for name in REAL),
    Case(
        "half of smollm2, in a row class",
        "smollm2",
        does="exact",
        common={"gpu_layers": 15, "tokens": 12},
        pools=DRAFTS,
    ),
    Case("layers that are streamed", DENSE, "F32", does="streamed", pools=ROOM),
    Case(
        "half of the layers, streamed", DENSE, "F32", does="streamed", common={"gpu_layers": 4}, pools={"room": 6 << 20}
    ),
]


def build() -> None:
    """Make the wheel, if none is kept, and unpack it."""
    if (SITE / "llama_cpp").exists():
        return
    headers = Path(os.environ.get("VULKAN_HEADERS", "/usr"))
    places = {"mesa-vulkan-drivers": Path("/usr")}
    missing = [name for name, file in NEEDS.items() if not [*places.get(name, headers).glob(file)]]
    missing += [] if which("glslc") else ["glslc"]
    if missing:
        sys.exit(f"apt install {' '.join(missing)}\nor name a folder with newer headers: VULKAN_HEADERS=…/usr")
    if not [*WHEELS.glob("*.whl")]:
        print("building llama.cpp with Vulkan, which takes 20 minutes on two cores", flush=True)
        options = {
            "GGML_VULKAN": "ON",
            "Vulkan_INCLUDE_DIR": headers / "include",
            "LLAVA_BUILD": "OFF",
            "SPIRV-Headers_DIR": headers / "share/cmake/SPIRV-Headers",
            "Vulkan_GLSLC_EXECUTABLE": HERE / "glslc",
        }
        given = os.environ | {"CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in options.items())}
        wheel = f"llama-cpp-python=={version('llama-cpp-python')}"
        pip("wheel", "--no-deps", "--no-binary", "llama-cpp-python", "-w", str(WHEELS), wheel, env=given)
    pip("install", "--no-deps", "--target", str(SITE), *map(str, WHEELS.glob("*.whl")))


def pip(*arguments: str, **given: Any) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, **given)


def run(case: Case, out: Path, **options: Any) -> tuple[int, str]:
    """A case's status and last line; its numbers lie in `out`."""
    paths = (SITE, ROOT / "tests", HERE)
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "GGML_VK_VISIBLE_DEVICES": "0",
        "OMP_WAIT_POLICY": "passive",
        "EDGESPEC_NO_MEMORY_OF_COSTS": "1",
    }
    about = {"out": str(out), "device": DEVICE, "gpu_layers": -1} | case.common | options
    does = "numbers" if case.does in ("planned", "streamed") and "room" not in about else case.does
    command = [sys.executable, str(HERE / "cases.py"), does, json.dumps(about)]
    try:
        done = subprocess.run(
            command, env=os.environ | given, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"took longer than {LONGEST} seconds"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def tried(case: Case) -> tuple[str, str]:
    """
    Returns:
        "equal", "killed" or what is wrong, and the case's own report.
    """
    FILES.mkdir(parents=True, exist_ok=True)
    model = draft = FILES / f"{case.family}-{case.kind}-{case.size}.gguf"
    if case.family in REAL:
        model, draft = (FILES / f"{case.family}{part}.gguf" for part in ("", "-draft"))
        keep_log()
        if case.family in make_models(FILES, HUB, kinds=()):
            return "missing", f"{HUB} does not have it"
    elif not model.exists():
        if case.family != DENSE:
            write(model, case.family, case.kind, case.size)
        elif case.kind == "F32":
            small_llama(model, layers=6)
        else:
            keep_log()
            quantised(small_llama(model.with_suffix(".raw"), layers=6), model, Q8_0)
    found = list[Any]()
    for options in ({}, case.pools):
        out = FILES / f"{CASES.index(case)}-{len(found)}.npy"
        drafts = {"draft": str(draft)} if options is DRAFTS else {}
        status, line = run(case, out, path=str(model), **options, **drafts)
        if status < 0:
            return "killed", f"by signal {-status}, {'with' if found else 'without'} pools"
        if status:
            return "failed", line
        found.append(np.load(out))
    expected, rows = found[0][0], [*found[0], *found[1]]
    if not np.isfinite(expected).all() or expected.std() == 0:
        return "failed", "the numbers are none"
    wrong = max(float(np.abs(one - expected).max()) for one in rows)
    return ("equal" if all(np.array_equal(one, expected) for one in rows) else f"differ by {wrong:.3g}"), line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    asked = parser.parse_args(arguments)
    build()
    results = dict[str, list[str]]()
    for case in CASES:
        if asked.only in case.name:
            result, line = tried(case)
            results.setdefault(result, []).append(case.name)
            print(f"{result:8} {case.name}: {line}", flush=True)
    killed, equal = results.pop("killed", []), results.pop("equal", [])
    print(f"{len(equal)} equal, {sum(map(len, results.values()))} wrong, {len(killed)} that the driver ended")
    return 1 if results or not equal else 0


if __name__ == "__main__":
    sys.exit(main())
