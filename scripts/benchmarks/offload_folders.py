"""Models larger than memory on every engine: passes against the possible, answers against mlx-lm.

As in `offload.py`, every measurement is a process of its own inside a memory limit, and variants alternate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.offload import memory_group, run, summary, text_summary
from benchmarks.offload_worker import MLX_LM, Task
from edgespec.errors import UsageError
from edgespec.loading.pair import DEFAULT_BUDGET
from edgespec.machine.memory import disk_bandwidth, format_size

ENGINES = ("llamacpp", "mlx", "torch")
CONTEXT = 512  # tokens
DRAFT_BUFFERS = 300 << 20  # bytes of a draft's caches and buffers


@dataclass(frozen=True, slots=True)
class Folder:
    engine: str
    target: str
    draft: str = ""


def parse_folder(text: str) -> Folder:
    """Parse "mlx:big-folder" or "torch:big-folder+small-folder". Raises UsageError."""
    engine, _, rest = text.partition(":")
    target, _, draft = rest.partition("+")
    if engine not in ENGINES or not target:
        raise UsageError(f"{text!r} is not ENGINE:MODEL or ENGINE:MODEL+DRAFT, with {', '.join(ENGINES)} as ENGINE")
    for place in filter(None, (target, draft)):
        if not (Path(place) if engine == "llamacpp" else Path(place) / "config.json").is_file():
            raise UsageError(f"{place}: is no {'GGUF file' if engine == 'llamacpp' else 'folder with a config.json'}")
    return Folder(engine, target, draft)


def weight_files(model: str) -> list[Path]:
    return list(Path(model).glob("*.safetensors")) if Path(model).is_dir() else [Path(model)]


def weight_bytes(model: str) -> int:
    return sum(file.stat().st_size for file in weight_files(model))


def folder_speeds(
    folder: Folder,
    *,
    share: float,
    program: int,
    nodes: Sequence[int],
    prompts: Sequence[str],
    max_tokens: int,
    budget: int | None,
    rounds: int,
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Seconds of passes in memory and streamed; tokens per second of plain decoding, with the draft, and of mlx-lm.

    Args:
        folder: the model.
        share: of the weights that memory holds.
        program: bytes for all else; the draft's are added.
        nodes: of the passes; empty: no passes.
        prompts: questions; empty: no answers.
        max_tokens: per prompt.
        budget: most draft tokens per pass; None: as many as pay.
        rounds: parts of the prompts; variants alternate part by part.
        repeats: passes of each size in a round.
        say: called with a line about the measurement that starts.

    Raises:
        EdgespecError: no control group can be made here.
    """
    size = weight_bytes(folder.target)
    limit = int(share * size) + program
    with_draft = limit + (weight_bytes(folder.draft) + DRAFT_BUFFERS if folder.draft else 0)
    report: dict[str, Any] = {
        "target": folder.target, "engine": folder.engine, "size": size, "limit": limit, "limit_of_texts": with_draft,
    }  # fmt: skip
    one = Task(folder.target, backend=folder.engine, context_length=CONTEXT)
    largest = max(weight_files(folder.target), key=lambda file: file.stat().st_size)
    with memory_group() as group:

        def interleaved(tasks: dict[str, tuple[Task, int]]) -> dict[str, list[dict[str, Any]]]:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
            for number in range(rounds):
                for name, (task, most) in tasks.items():
                    say(f"{folder.engine}, {name}, round {number + 1} of {rounds}")
                    speeds.append(disk_bandwidth(str(largest), seconds=1.0))
                    part = replace(task, prompts=list(prompts[number::rounds]) if task.prompts else [])
                    files = [folder.target, *([folder.draft] if folder.draft else [])]
                    found[name].append(run(part, group, most, files))
            return found

        speeds: list[float] = []
        if nodes:
            timed = replace(one, nodes=list(nodes), repeats=repeats, budget=max(nodes))
            passes = {"in memory": (replace(timed, stream=False), 0), "streamed": (replace(timed, memory=limit), limit)}
            report["passes"] = {name: summary(results) for name, results in interleaved(passes).items()}
        if prompts:
            text = replace(
                one, memory=with_draft, max_tokens=max_tokens, prompts=list(prompts), budget=budget or DEFAULT_BUDGET,
                by_cost=budget is None,
            )  # fmt: skip
            texts = {"plain": (text, with_draft)}
            if folder.draft:
                texts["specexec"] = (replace(text, draft=folder.draft, planner="specexec"), with_draft)
            if folder.engine == "mlx":
                texts["mlx-lm alone"] = (replace(text, backend=MLX_LM), with_draft)
            report["texts"] = {name: text_summary(results) for name, results in interleaved(texts).items()}
        report["bandwidth"] = median(speeds) if speeds else 0.0
    return report


def lines(report: dict[str, Any]) -> list[list[str]]:
    """Rows of a table: name, seconds or tokens/s, and comparisons."""
    found = list[list[str]]()
    if passes := report.get("passes"):
        memory, streamed = passes["in memory"], passes["streamed"]
        moved = streamed.get("streamed", 0)
        for nodes, took in streamed["passes"].items():
            compute = memory["passes"].get(nodes, {}).get("seconds", 0.0)
            bound = max(compute, moved / report["bandwidth"])
            found.append([
                f"pass, {nodes} nodes", f"{took['seconds']:.3f} s", f"in memory {compute:.3f} s",
                f"{took['seconds'] / bound:.2f} of max(compute, read)", f"{streamed['peak'] / report['limit']:.2f}",
            ])  # fmt: skip
        found += [[name, "", "; ".join(one["failed"]), "", ""] for name, one in passes.items() if one["failed"]]
    plain = report.get("texts", {}).get("plain", {}).get("tokens_per_second")
    for name, one in report.get("texts", {}).items():
        if "tokens_per_second" not in one:
            found.append([name, "", "; ".join(one["failed"]), "", ""])
            continue
        speed = one["tokens_per_second"]
        found.append([
            name, f"{speed:.2f} tokens/s", f"{one['acceptance_length']:.2f} tokens per pass",
            f"{speed / plain:.2f} x plain" if plain else "", f"{one['peak'] / report['limit_of_texts']:.2f}",
        ])  # fmt: skip
    return found


def title(report: dict[str, Any]) -> str:
    streamed = report.get("passes", {}).get("streamed", {}).get("streamed", 0)
    moved = f", {format_size(streamed)} read in every pass" if streamed else ""
    return (
        f"{report['engine']}: {Path(report['target']).name}, {format_size(report['size'])} of weights in "
        f"{format_size(report['limit'])}{moved}, disk {report['bandwidth'] / 1e9:.2f} GB/s"
    )
