"""Mutate model files and sessions, and run the program on each: a line and an exit code, no traceback, no signal.

    python tests/fuzz_files.py                                  10,000 files of 1 to 10 MB: 20 minutes on one core
    python tests/fuzz_files.py --count 100 --seed 7 --jobs 2
    python tests/fuzz_files.py --only 4711                      one file again; it stays, and its path is printed
    python tests/fuzz_files.py --model SmolLM2.gguf --count 200

File N is a function of the seed and N. Each is given to `doctor` and to `run` for two tokens; with every eighth, a run
also continues a mutated session. Each command is a process forked from this one, which has only imported the program.
"""

import argparse
import io
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = 120  # of a process
SHORT = ["--ctx", "64", "--exact", "off"]
EXTREMES = (0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
SESSION_EVERY = 8


@dataclass(frozen=True)
class Source:
    """A whole file, and where its tensor table and its data begin."""

    path: Path
    table: int
    data: int
    session: Path | None = None


@dataclass(frozen=True)
class Ended:
    number: int
    arguments: list[str]
    code: int
    said: str

    @property
    def fault(self) -> str:
        """Why this end is a defect, or ""."""
        lines = [one for one in self.said.splitlines() if one.strip()]
        if self.code < 0:
            return signal.Signals(-self.code).name
        if "Traceback (most recent call last)" in self.said:
            return "traceback"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        return "no line" if self.code and not lines else ""


def mutated(whole: bytes, start: int, end: int, chance: random.Random, *, moves: bool) -> bytes:
    """A copy with other bytes between `start` and `end`, or cut; with `moves`, bytes may also come in or go out."""
    kind = chance.choice(
        ["bytes", "bytes", "numbers", "numbers", "swap", "cut", *(["insert", "delete"] if moves else [])]
    )
    if kind == "cut":
        return whole[: chance.randrange(chance.choice([end, len(whole)]))]
    changed = bytearray(whole)
    place, length = chance.randrange(start, end - 8), chance.choice([1, 4, 8, 40])
    if kind == "insert":
        changed[place:place] = chance.randbytes(length)
    elif kind == "delete":
        del changed[place : place + length]
    elif kind == "swap":
        other = chance.randrange(start, end - 8)
        changed[place : place + 8], changed[other : other + 8] = whole[other : other + 8], whole[place : place + 8]
    for _ in range(chance.choice([1, 1, 2, 4]) if kind in ("bytes", "numbers") else 0):
        place = chance.randrange(start, end - 8)
        if kind == "bytes":
            changed[place] = chance.choice([0x80, 0xC3, 0xFF, chance.randrange(256)])
        else:
            width = chance.choice([4, 8])
            held = int.from_bytes(changed[place : place + width], "little")
            number = chance.choice([*EXTREMES, held - 1, held + 1, held + 1, held * 2]) % 2 ** (8 * width)
            changed[place : place + width] = number.to_bytes(width, "little")
    return bytes(changed)


def cases(
    sources: Sequence[Source], seed: int, numbers: Sequence[int], folder: Path
) -> Iterator[tuple[int, list[str]]]:
    """(number, arguments of a command), with the mutated file in `folder`; files of earlier numbers go."""
    from edgespec.backends.llamacpp.ggml.files import all_tensors  # noqa: F401  (imported once, before the forks)

    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        source = chance.choice(sources)
        whole, place = source.path.read_bytes(), folder / f"{number}.gguf"
        small = len(whole) < 1 << 20
        start = chance.choice([0, source.table])
        place.write_bytes(mutated(whole, start, source.data, chance, moves=small))
        model = [str(place), *SHORT, *(["--memory", "1G"] if chance.random() < 0.3 else [])]
        yield number, ["doctor", *model]
        yield number, ["run", *model, "--raw", "Hi", "-n", "2"]
        if source.session and number % SESSION_EVERY == 0:
            saved, held = folder / f"{number}.session", source.session.read_bytes()
            saved.write_bytes(mutated(held, 0, len(held), chance, moves=True))
            yield number, ["run", str(source.path), *SHORT, "--raw", "Hi", "-n", "2", "--resume", str(saved)]


def start(arguments: list[str], said: Path, seconds: int = SECONDS) -> int:
    """Fork a process that runs the program, for at most `seconds`; its output goes to `said`.

    Returns:
        Its id.
    """
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        signal.alarm(seconds)
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.stdin = io.StringIO()
        from edgespec.cli.commands import main

        main(arguments=arguments)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run_all(todo: Iterator[tuple[int, list[str]]], folder: Path, jobs: int, seconds: int = SECONDS) -> Iterator[Ended]:
    """Run the commands, `jobs` at a time."""
    running = dict[int, tuple[int, list[str], Path]]()
    serial, more = 0, True
    while running or more:
        while more and len(running) < jobs:
            found = next(todo, None)
            if more := found is not None:
                assert found
                said = folder / f"said-{serial}"
                running[start(found[1], said, seconds)] = (*found, said)
                serial += 1
        if running:
            child, status = os.wait()
            number, arguments, said = running.pop(child)
            text = said.read_text("utf-8", "replace") if said.exists() else ""
            said.unlink(missing_ok=True)
            yield Ended(number, arguments, os.waitstatus_to_exitcode(status), text)
            if not any(number == other for other, *_ in running.values()):
                for path in folder.glob(f"{number - 1}.*"):
                    path.unlink()


def small_files(folder: Path) -> list[Source]:
    """Made-up models below 1 MB of many kinds, the first with a session."""
    from gemma4_files import write_gemma4
    from gguf_files import small_llama
    from head_files import write_glm4moe
    from hybrid_files import write_hybrid
    from mixture_files import write_mixture
    from window_files import write_windowed

    paths = [
        small_llama(folder / "llama.gguf", layers=1),
        write_windowed(folder / "gemma3.gguf", "gemma3"),
        write_mixture(folder / "mixture.gguf", "qwen3 moe"),
        write_hybrid(folder / "hybrid.gguf", "lfm2"),
        write_glm4moe(folder / "head.gguf"),
        write_gemma4(folder / "gemma4.gguf"),
    ]
    return [source(path, session=path.stem == "llama") for path in paths]


def source(path: Path, *, session: bool = False) -> Source:
    """What is mutated of a file."""
    from edgespec.backends.llamacpp.ggml.files import all_tensors

    tensors, head = all_tensors(str(path)), path.read_bytes()
    data = min(tensor.start for tensor in tensors)
    table = min(at for tensor in tensors if 0 < (at := head.find(tensor.name.encode())) < data)
    saved = path.with_suffix(".session") if session else None
    if saved:
        done = start(
            ["run", str(path), *SHORT, "--raw", "Hi there", "-n", "4", "--resume", str(saved)],
            path.with_suffix(".said"),
        )
        os.waitpid(done, 0)
    return Source(path, table, data, saved)


def fuzz(sources: Sequence[Source], seed: int, numbers: Sequence[int], folder: Path, jobs: int = 1) -> list[Ended]:
    """
    Returns:
        The ends that are defects.
    """
    import edgespec.backends.llamacpp.engine  # noqa: F401

    import edgespec.cli.commands  # noqa: F401
    import edgespec.measure.doctor  # noqa: F401

    bad, codes, began, shown = list[Ended](), Counter[int](), time.monotonic(), 0.0
    for ended in run_all(cases(sources, seed, numbers, folder), folder, jobs):
        codes[ended.code] += 1
        if ended.fault:
            bad.append(ended)
            print(f"{ended.number}: {ended.fault}: {' '.join(ended.arguments)}\n{ended.said[-1500:]}", flush=True)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            done = numbers.index(ended.number) + 1
            print(f"{done} of {len(numbers)} files, {len(bad)} defects, {shown - began:.0f} s", file=sys.stderr)
    ends = f"{sum(codes.values())} commands, exit codes {dict(sorted(codes.items()))}"
    print(f"{len(numbers)} files, {ends}: {len(bad)} defects")
    return bad


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--only", type=int, help="number of a file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--model", type=Path, help="a file to mutate; default: made-up ones")
    given = parser.parse_args()
    os.environ["EDGESPEC_NO_MEMORY_OF_COSTS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        sources = [source(given.model)] if given.model else small_files(Path(folder))
        for one in sources:
            print(f"{one.path.name}: {one.path.stat().st_size} bytes, {one.data} before the tensors")
        numbers = range(given.first, given.first + given.count) if given.only is None else [given.only]
        kept = Path(tempfile.mkdtemp()) if given.only is not None else Path(folder)
        sys.exit(bool(fuzz(sources, given.seed, numbers, kept, given.jobs)))


if __name__ == "__main__":
    main()
