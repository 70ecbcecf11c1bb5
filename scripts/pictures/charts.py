"""Charts that can be read on white and on black."""

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from edgespec.machine.files import write_whole

GREY = "#808080"
COLOURS = {"drafting": "#3fa65a", "computing": "#4a86d8", "waiting for weights": "#d9822b", "planning": "#a45fc9"}


def rounds(runs: Mapping[str, Mapping[str, Any]], title: str, out: Path) -> None:
    """Where the time of a pass goes, from the `stats` of `edgespec run --json`: a bar for each run."""
    figure, axes = _axes((7.6, 2.5))
    for place, stats in enumerate(runs.values()):
        waited = stats["wait_seconds"]
        parts = stats["draft_seconds"], stats["target_seconds"] - waited, waited, stats["plan_seconds"]
        left, passes = 0.0, stats["passes"]
        for part, (label, colour) in zip(parts, COLOURS.items(), strict=True):
            axes.barh(place, part / passes, 0.55, left, color=colour, label="" if place else label)
            left += part / passes
        axes.text(left, place, f"  {stats['acceptance_length']:.1f} tokens", va="center", color=GREY)
    axes.set_yticks(range(len(runs)), runs)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set(xlabel="seconds per round", title=title)
    _write(figure, out)


def by_memory(sizes: Sequence[int], speeds: Mapping[str, Sequence[float]], title: str, out: Path) -> None:
    figure, axes = _axes((7.6, 3.4))
    for (name, values), colour in zip(speeds.items(), COLOURS.values(), strict=False):
        axes.plot(sizes, values, "o-", color=colour, label=name)
    axes.set(xlabel="GiB of memory for the models", ylabel="tokens/s, computed", title=title, xticks=sizes)
    axes.set_ylim(bottom=0)
    _write(figure, out)


def _axes(size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = matplotlib.rcParams
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "edgespec", "font.size": 11, "axes.titlesize": 11}
    settings |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    settings |= {"axes.spines.top": False, "axes.spines.right": False}
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _write(figure: Any, out: Path) -> None:
    figure.legend(loc="outside lower center", frameon=False, ncols=4)
    drawn = StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    write_whole(out, drawn.getvalue())
