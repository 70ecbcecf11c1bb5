"""NVIDIA's cards, by the driver: an engine that was built without CUDA does not see them."""

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
PATIENCE = 5  # seconds


@cache
def nvidia_cards() -> Sequence[str]:
    """Their names; () without a driver."""
    if DRIVER.is_dir():
        lines = [line for file in sorted(DRIVER.glob("*/information")) for line in file.read_text("utf-8").splitlines()]
        return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    command = shutil.which("nvidia-smi")
    if not command:
        return []
    try:
        found = subprocess.run(
            [command, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []
