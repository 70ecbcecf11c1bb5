"""What the machine has: sizes, free memory inside control groups, file systems, the speed of a disk."""

import contextlib
import ctypes
import gc
import math
import os
import re
import struct
import subprocess
import sys
import threading
from itertools import pairwise, zip_longest
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from as_on_windows import Kernel32
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ModelError, UsageError
from edgespec.machine import disk, measurements
from edgespec.machine import memory as machine
from edgespec.machine import system as system_module
from edgespec.machine.disk import disk_bandwidth, file_system
from edgespec.machine.memory import (
    all_memory,
    available_memory,
    format_size,
    parse_size,
    private_memory,
)
from edgespec.machine.system import HUGE, READ_SIZE, open_direct, own_processors, read_buffer
from edgespec.machine.this_machine import this_machine

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1073741824", GIB),
        ("12G", 12 * GIB),
        ("12g", 12 * GIB),
        ("12GB", 12 * GIB),
        ("12GiB", 12 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        (" 900 M ", 900 * MIB),
        ("7k", 7 << 10),
        ("0.5T", 1 << 39),
        ("1.04GiB", int(1.04 * GIB)),
        ("5B", 5),
    ],
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


BAD_SIZES = ["", " ", "abc", "G", "12X", "12GG", "-1G", "+1G", "1e9", "0", "0.0G", "0.1", "1,5G", "1.G", ".5G", "nan"]


@pytest.mark.parametrize("text", [*BAD_SIZES, "inf", "12G B", "12IB", "12 34", "9" * 40, "9" * 400 + "T"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size: write for example 12G") as caught:
        parse_size(text)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="0123456789.kKmMgGtTiIbB -+e", max_size=30) | st.text(max_size=8))
def test_any_text_is_a_size_above_zero_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_size(text) > 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 MiB"),
        (MIB, "1 MiB"),
        (312.4 * MIB, "312 MiB"),
        (GIB - 1, "1024 MiB"),
        (GIB, "1.00 GiB"),
        (1.04 * GIB, "1.04 GiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, 1 << 45))
def test_a_size_rounded_up_can_be_given_back(size: int) -> None:
    assert size <= parse_size(format_size(size, up=True)) <= size * 1.011 + MIB


# --- free memory -------------------------------------------------------------------------------------------------


def system(root: Path, *, free: int, cgroup: str | None = None) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {99 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {free >> 10} kB\nHugePages_Total: 0\n"
    )
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group1(root: Path, path: str, limit: int, used: int, active: int = 0, inactive: int = 0) -> None:
    folder = root / "sys/fs/cgroup/memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"cache 5\nactive_file 1\ninactive_file 1\ntotal_active_file {active}\ntotal_inactive_file {inactive}\n"
    )


def group2(
    root: Path,
    path: str,
    limit: int | str,
    used: int = 0,
    active: int = 0,
    inactive: int = 0,
    high: int | str | None = None,
) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    if high is not None:  # kernels before 4.5, and what imitates control groups, have none
        (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\nfile 9\nactive_file {active}\ninactive_file {inactive}\n")


def quota(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("cgroup", "inner", "outer", "processors"),
    [
        ("0::/a/b\n", {"max": "200000 100000"}, {"max": "max 100000"}, 2),
        ("0::/a/b\n", {"max": "max 100000"}, {"max": "150000 100000"}, 2),  # one and a half
        ("0::/a/b\n", {"max": "900000 100000"}, {"max": "10000 100000"}, 1),
        ("0::/a/b\n", {"max": "max 100000"}, {"max": "max 100000"}, 16),
        ("0::/a/b\n", {"max": "6400000 100000"}, {}, 16),
        ("3:cpu,cpuacct:/a/b\n0::/\n", {"cfs_quota_us": "300000", "cfs_period_us": "100000"}, {}, 3),
        ("3:cpu,cpuacct:/a/b\n0::/\n", {"cfs_quota_us": "-1", "cfs_period_us": "100000"}, {}, 16),
        ("3:cpu:/a/b\n", {"cfs_quota_us": "nonsense", "cfs_period_us": "0"}, {}, 16),
        (None, {}, {}, 16),
    ],
)
def test_a_quota_of_processors_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str | None, inner: Any, outer: Any, processors: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)), raising=False)
    root = system(tmp_path, free=1, cgroup=cgroup)
    base = root / "sys/fs/cgroup" / ("cpu" if "cpu" in (cgroup or "") else "")
    quota(base / "a", **outer)
    quota(base / "a/b", **inner)
    assert own_processors(root) == processors


def test_in_a_container_the_quota_of_the_mounted_root_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)), raising=False)
    root = system(tmp_path, free=1, cgroup="0::/../elsewhere\n")
    quota(root / "sys/fs/cgroup", max="400000 100000")
    assert own_processors(root) == 4


V1 = "5:cpu:/other\n4:memory:/box/inner\n1:name=systemd:/\n0::/\n"
NO_LIMIT_V1 = 9223372036854771712


@pytest.mark.parametrize("cgroup", ["0::/\n", None])  # a kernel, or a sandbox, without groups has no such file
def test_free_memory_is_the_systems_where_no_group_limits(tmp_path: Path, cgroup: str | None) -> None:
    assert available_memory(system(tmp_path, free=5 * GIB, cgroup=cgroup)) == 5 * GIB


def test_version_1_limits_of_the_group_and_of_those_around_it(tmp_path: Path) -> None:
    root = system(tmp_path, free=50 * GIB, cgroup=V1)
    group1(root, "", NO_LIMIT_V1, 30 * GIB)
    group1(root, "box", 8 * GIB, 3 * GIB, active=GIB, inactive=GIB // 2)
    group1(root, "box/inner", NO_LIMIT_V1, 2 * GIB)
    assert available_memory(root) == 8 * GIB - 3 * GIB + GIB + GIB // 2
    group1(root, "box/inner", 4 * GIB, 3 * GIB)
    assert available_memory(root) == GIB


@pytest.mark.parametrize(
    ("limits", "highs", "room"),
    [
        (("max", "max", "max"), (), 50 * GIB),
        ((6 * GIB, "max", "max"), (), 5 * GIB),
        (("max", 6 * GIB, "max"), (), 5 * GIB),
        (("max", "max", 6 * GIB), (), 5 * GIB),
        ((9 * GIB, 3 * GIB, 7 * GIB), (), 2 * GIB),
        ((9 * GIB, 60 * GIB, 2 * GIB), (), GIB),
        # Beyond memory.high everything crawls.
        (("max", "max"), ("max", "max"), 50 * GIB),
        (("max", "max"), ("max", 6 * GIB), 5 * GIB),
        (("max", "max"), (6 * GIB, "max"), 5 * GIB),
        ((9 * GIB, "max"), ("max", 60 * GIB), 8 * GIB),
        (("max", 9 * GIB), ("max", 7 * GIB), 6 * GIB),
        (("max", 7 * GIB), (4 * GIB, 9 * GIB), 3 * GIB),
        (("max", 7 * GIB), (0, "max"), 0),
        (("", ""), ("max", 6 * GIB), 5 * GIB),  # one odd file does not hide the other
        ((GIB // 2,), (), 0),  # a group over its limit leaves nothing
    ],
)
def test_version_2_the_tightest_of_nested_limits_counts(
    tmp_path: Path, limits: tuple[int | str, ...], highs: tuple[int | str, ...], room: int
) -> None:
    root = system(tmp_path, free=50 * GIB, cgroup="0::/a/b/c\n")
    for path, limit, high in zip_longest(("a", "a/b", "a/b/c")[: len(limits)], limits, highs):
        group2(root, path, limit, used=GIB, high=high)
    assert available_memory(root) == room


def test_version_2_page_cache_counts_as_free(tmp_path: Path) -> None:
    root = system(tmp_path, free=50 * GIB, cgroup="0::/a\n")
    group2(root, "a", 4 * GIB, used=3 * GIB, active=GIB, inactive=GIB)
    assert available_memory(root) == 3 * GIB


@pytest.mark.parametrize("path", ["/docker/0123abc", "/../../outside"])
def test_in_a_container_the_mounted_root_counts(tmp_path: Path, path: str) -> None:
    """The path in /proc/self/cgroup is the host's; what is mounted is the container's own group."""
    root = system(tmp_path, free=50 * GIB, cgroup=f"0::{path}\n")
    group2(root, "", 2 * GIB, used=GIB // 2)
    assert available_memory(root) == 3 * GIB // 2
    (root / "proc/self/cgroup").write_text(f"4:memory:{path}\n")
    group1(root, "", 3 * GIB, GIB)
    assert available_memory(root) == 2 * GIB


def test_a_group_whose_files_are_odd_is_passed_over(tmp_path: Path) -> None:
    root = system(tmp_path, free=50 * GIB, cgroup="0::/a/b/c\n")
    group2(root, "a", 4 * GIB)
    group2(root, "a/b", GIB)
    (root / "sys/fs/cgroup/a/b/memory.stat").write_text("anon 7\n")
    group2(root, "a/b/c", "")
    assert available_memory(root) == 4 * GIB


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="memory is only looked up there")
def test_this_machine_has_memory() -> None:
    assert 16 * MIB < available_memory() < 1 << 50


# As Macs printed them: github.com/HMCL-dev/HMCL/pull/4876 (24 GB, in use), github.com/wazuh/wazuh/issues/22113.
IN_USE = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                3857.
Pages active:                            446206.
Pages inactive:                          443760.
Pages speculative:                         1075.
Pages throttled:                              0.
Pages wired down:                        181483.
Pages purgeable:                          17340.
"Translation faults":                8667427138.
Pages copy-on-write:                  156847509.
File-backed pages:                       294894.
Anonymous pages:                         596147.
Pages stored in compressor:             1943619.
Pages occupied by compressor:            442179.
"""
FREE = """Mach Virtual Memory Statistics: (page size of 4096 bytes)
Pages free:                             6127229.
Pages active:                            485320.
Pages inactive:                          628646.
Pages speculative:                       430715.
Pages purgeable:                          11820.
File-backed pages:                      1080348.
Anonymous pages:                         464333.
"""


def test_a_mac_with_a_browser_has_its_inactive_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = [IN_USE, FREE]
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform="darwin", maxsize=sys.maxsize))
    monkeypatch.setattr(
        machine, "subprocess",
        SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout=printed.pop(0)), SubprocessError=OSError),
    )  # fmt: skip
    assert available_memory() == (3857 + 443760 + 1075) * 16384  # 6.8 GiB; 4.6 of them are free or of files
    assert available_memory() == (6127229 + 1080348 + 11820) * 4096


def test_a_mac_tells_what_a_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """proc_pid_rusage fills a struct rusage_info_v0: an id, seven numbers, the footprint, two times."""

    def fill(pid: int, flavor: int, pointer: Any) -> int:
        assert (pid, flavor, ctypes.sizeof(pointer._obj)) == (os.getpid(), 0, 96)
        ctypes.memmove(ctypes.addressof(pointer._obj), struct.pack("16x10Q", 1, 2, 3, 4, 5, 6, 7, 3 * GIB, 8, 9), 96)
        return 0

    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(proc_pid_rusage=fill))
    assert private_memory() == 3 * GIB
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(proc_pid_rusage=lambda *_: -1))
    assert private_memory() == 0


M4_PRO, M5, M5_PRO = (
    {"Performance": 10, "Efficiency": 4},
    {"Super": 4, "Efficiency": 6},
    {"Super": 6, "Performance": 12},
)


@pytest.mark.parametrize(("levels", "cores"), [(M4_PRO, 10), (M5, 4), (M5_PRO, 18), ({}, 7)])
def test_all_cores_of_a_mac_compute_but_efficiency_cores(
    levels: dict[str, int], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Intel Mac knows no levels. Names as in lablup/all-smi#167."""
    known = {"hw.nperflevels": struct.pack("i", len(levels)), "machdep.cpu.brand_string": b"Apple M\0"}
    for i, (name, count) in enumerate(levels.items()):
        known |= {f"hw.perflevel{i}.name": name.encode() + b"\0"}
        known |= {f"hw.perflevel{i}.physicalcpu": struct.pack("i", count)}
    become_a_mac(monkeypatch, known)
    monkeypatch.setattr(system_module, "own_processors", lambda: 7)
    assert (system_module.compute_cores(), system_module.chip()) == (cores, "Apple M")


def become_a_mac(monkeypatch: pytest.MonkeyPatch, known: dict[str, bytes]) -> None:
    """Let this be a Mac whose kernel knows these values."""

    def sysctlbyname(name: bytes, value: Any, size: Any, *_: Any) -> int:
        found = known.get(name.decode(), b"")
        ctypes.memmove(value, found, len(found))
        size._obj.value = len(found)
        return 0 if found else -1

    monkeypatch.setattr(system_module, "sys", SimpleNamespace(platform="darwin", byteorder=sys.byteorder))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))


@pytest.mark.parametrize(
    ("python", "silicon", "expected"), [("x86_64", 1, True), ("x86_64", 0, False), ("arm64", 1, False)]
)
def test_a_python_for_intel_on_apple_silicon_is_known(
    python: str, silicon: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_a_mac(monkeypatch, {"hw.optional.arm64": struct.pack("i", silicon)})
    monkeypatch.setattr(system_module.platform, "machine", lambda: python)
    assert system_module.under_rosetta() == expected


def test_a_mac_stays_awake_while_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that keep it awake overlap, so that it cannot fall asleep between two of them."""
    started, now = list[float](), [1000.0]
    monkeypatch.setattr(system_module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(system_module.subprocess, "run", lambda command, **_: started.append(now[0]))
    system_module.stay_awake()
    assert not started
    monkeypatch.setattr(system_module, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(system_module, "_asked_awake", -math.inf)
    for now[0] in range(1000, 2000, 20):
        system_module.stay_awake()
    assert len(started) > 2
    assert max(after - before for before, after in pairwise(started)) < system_module.AWAKE - 60


def test_a_macs_measurements_are_of_its_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Mac, to which they are copied, measures again."""
    monkeypatch.setattr(measurements, "Path", lambda path: tmp_path / "none")
    monkeypatch.setattr(measurements, "chip", lambda: "Apple M4 Pro")
    assert re.fullmatch(r"Apple M4 Pro, \d+ cores", measurements.processor_name())


def test_free_memory_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform="win32", maxsize=sys.maxsize))
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=Kernel32()), raising=False)
    assert (available_memory(), all_memory()) == (3 * GIB, 8 * GIB)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=Kernel32(works=False)), raising=False)
    assert min(available_memory(), all_memory()) > 1 << 60  # unknown: nothing can be said against a model


def test_free_memory_where_only_all_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more than all of it is more than what is free, too."""
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform="freebsd14"))
    numbers = {"SC_PHYS_PAGES": 1 << 20}
    monkeypatch.setattr(os, "sysconf", lambda name: numbers[name])
    assert available_memory() == PAGESIZE << 20


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="os.preadv is taken away here, but must be there first")
def test_the_speed_of_a_disk_where_it_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with pytest.raises(UsageError, match="is measured on Linux and macOS only"):
        disk_bandwidth(str(path))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
def test_private_memory_grows_with_what_is_written() -> None:
    gc.collect()  # what earlier tests left behind must not be freed in between
    before = private_memory()
    assert before > MIB
    with mmap(-1, 64 * MIB, MAP_PRIVATE | MAP_ANONYMOUS) as block:  # what malloc gives may be old pages
        for page in range(0, len(block), PAGESIZE):
            block[page] = 1
        grown = private_memory() - before
    assert 60 * MIB < grown < 80 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's C library")
def test_freed_memory_is_given_back() -> None:
    script = """if True:
        import numpy as np
        from edgespec.machine.memory import give_back_freed_memory, private_memory

        give_back_freed_memory()
        np.full(30 << 20, 1, np.uint8)  # after which glibc keeps blocks of 30 MiB
        before = private_memory()
        arrays = [np.full((9 + i % 7) << 20, 1, np.uint8) for i in range(20)]
        del arrays[::2]
        print((private_memory() - before) / sum(array.nbytes for array in arrays))
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.2


def test_private_memory_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert private_memory() == 0


# --- file systems and disks --------------------------------------------------------------------------------------


def mountinfo(folder: Path, *mounts: tuple[str, str]) -> Path:
    path = folder / "mountinfo"
    path.write_text(
        "".join(
            f"{30 + i} 1 8:{i} / {point} rw,relatime shared:{i} - {kind} /dev/x{i} rw\n"
            for i, (point, kind) in enumerate(mounts)
        )
    )
    return path


def test_the_longest_mount_point_names_the_file_system(tmp_path: Path) -> None:
    mounts = mountinfo(
        tmp_path, ("/", "ext4"), ("/mnt/models", "nfs4"), ("/mnt", "xfs"), ("/mnt/my\\040disk", "btrfs"), ("/m", "zfs")
    )
    assert file_system("/mnt/models/a.gguf", mounts) == "nfs4"
    assert file_system("/mnt/models", mounts) == "nfs4"
    assert file_system("/mnt/models2/a.gguf", mounts) == "xfs"  # a name that only begins alike
    assert file_system("/mnt/my disk/a.gguf", mounts) == "btrfs"
    assert file_system("/home/a.gguf", mounts) == "ext4"


def test_of_mounts_on_one_point_the_last_counts(tmp_path: Path) -> None:
    assert file_system("/data/a", mountinfo(tmp_path, ("/data", "autofs"), ("/data", "nfs"))) == "nfs"


def test_odd_names_of_mount_points(tmp_path: Path) -> None:
    mounts = mountinfo(tmp_path, ("/", "ext4"), ("/a\\011b\\134c", "nfs"))
    assert file_system("/a\tb\\c/file", mounts) == "nfs"


@pytest.mark.parametrize("odd", [b"\xe9", "\u2028".encode(), "\u00a0".encode(), b"\r"])
def test_names_of_any_characters(tmp_path: Path, odd: bytes) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(b"30 1 8:0 / /m" + odd + b" rw - nfs host rw\n31 1 8:1 / / rw - ext4 /dev/x1 rw\n")
    assert file_system(os.fsdecode(b"/m" + odd + b"/file"), mounts) == "nfs"
    assert file_system("/other", mounts) == "ext4"


def test_a_link_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    mounts = mountinfo(tmp_path, ("/", "ext4"), (str(real.resolve()), "nfs"))
    assert file_system(str(tmp_path / "link" / "a.gguf"), mounts) == "nfs"


def test_no_mount_table(tmp_path: Path) -> None:
    assert file_system("/a", tmp_path / "missing") == ""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


@pytest.mark.skipif(sys.platform == "win32", reason="os.preadv is not there")
def test_the_buffer_of_a_read_is_huge_pages_where_there_are_any() -> None:
    buffer = read_buffer()
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert (len(buffer), address % HUGE) == (READ_SIZE, 0)
    buffer[:] = b"x" * READ_SIZE
    wishes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if wishes.exists() and "[never]" not in wishes.read_text(encoding="utf-8"):
        assert "hg" in flags_of(address)  # VM_HUGEPAGE


def flags_of(address: int) -> list[str]:
    """Of the mapping that holds an address (Linux)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")


@pytest.mark.skipif(sys.platform == "win32", reason="os.preadv is not there")
@pytest.mark.parametrize("size", [1000, 5 * MIB, 24 * MIB])
def test_bandwidth_of_a_real_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1) * size)
    files, threads = open_files(), threading.active_count()
    assert 0 < disk_bandwidth(str(path), seconds=0.1) < 1e12
    assert (open_files(), threading.active_count()) == (files, threads)


@pytest.mark.skipif(sys.platform == "win32", reason="os.preadv is not there")
def test_bandwidth_where_the_time_ends_before_the_first_read(tmp_path: Path) -> None:
    """As on a machine that is too busy to start a thread in it: callers divide by the speed."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    assert disk_bandwidth(str(path), seconds=0.0) > 0


@pytest.mark.skipif(sys.platform == "win32", reason="os.preadv is not there")
def test_bandwidth_where_direct_reads_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 9 * MIB)
    monkeypatch.setattr(disk, "open_direct", lambda name: (os.open(name, os.O_RDONLY), False))
    assert disk_bandwidth(str(path), seconds=0.1) > 0


@pytest.mark.skipif(sys.platform == "win32", reason="os.preadv is not there")
def test_bandwidth_of_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files()
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ModelError, match=rf"^{path}: cannot be read: \w+"):
            disk_bandwidth(str(path), seconds=0.1)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelError, match="cannot be read: Input/output error"):
        disk_bandwidth(str(path), seconds=0.1)
    assert open_files() == files


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no O_DIRECT on this system")
def test_where_direct_reads_are_refused_the_file_opens_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello")
    really = os.open

    def refuse(name: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really(name, flags)

    monkeypatch.setattr(os, "open", refuse)
    descriptor, direct = open_direct(str(path))
    assert not direct
    assert os.read(descriptor, 9) == b"hello"
    os.close(descriptor)


def test_memory_of_this_program_is_free_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan needs has it, too."""
    monkeypatch.setattr(machine, "available_memory", lambda: 3 * GIB)
    monkeypatch.setattr(machine, "private_memory", lambda: GIB)
    found = this_machine()
    assert (found.free, found.used) == (4 * GIB, GIB)
