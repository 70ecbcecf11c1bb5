"""What `exit_gain.py` finds, for a person: tables, and a picture."""

from collections.abc import Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.exit_gain import (
    BESIDE,
    Beside,
    Draft,
    Machine,
    by_seconds,
    by_size,
    draft_curve,
    draft_share,
    gains,
    go_on,
    nothing,
    texts,
    with_next,
)
from benchmarks.exits import Searched
from benchmarks.hints import BAR, Hint, told_late
from edgespec.errors import UsageError
from edgespec.loop.pass_times import Curve
from edgespec.measure.pictures import check_picture

DRAWN = 4  # nodes of a draft pass beside the target's, in what goes by seconds
GRID = np.round(np.geomspace(0.05, 12.8, 17), 3)  # seconds of drafting beside a pass


def machines(compute: float, streamed: int, disks: Sequence[float]) -> list[Machine]:
    """With the draft on the target's processors and on its own; disks that feed passes at so many GB/s.

    Args:
        compute: seconds of the target's pass, without the disk.
        streamed: bytes that a pass reads.
        disks: GB/s.
    """
    found = []
    for own in (False, True):
        for disk in disks:
            wait = max(0.0, streamed / (disk * 1e9) - compute)  # reading goes on during the computation
            where = "draft apart" if own else "same cores"
            found.append(Machine(f"{where}, {disk:g} GB/s", compute, wait, own))
    return found


def report(
    rounds: Sequence[Searched], beam: int, where: Sequence[Machine], curve: Curve | None = None
) -> dict[str, Any]:
    """All figures.

    Args:
        rounds: of one file.
        beam: most nodes of a draft pass.
        where: machines to foretell for.
        curve: of the draft's passes; default: as they were logged.

    Raises:
        UsageError: no text has two rounds.
    """
    found = curve or draft_curve(rounds)
    draft: Draft = lambda nodes: float(found.seconds(nodes))  # noqa: E731
    kinds = dict[str, Any]()
    for kind in sorted({one.kind for one in rounds}):
        mine = [one for one in rounds if one.kind == kind]
        pairs = list(with_next(mine))
        if not pairs:
            continue
        sizes = [int(size) for size in pairs[0][0].known]
        kinds[kind] = {
            "texts": len(texts(mine)),
            "rounds": len(pairs),
            "acceptance_length": fmean(one.written for one, _ in pairs),
            "draft_seconds": draft_share([one for one, _ in pairs], draft, beam),
            "by_size": by_size(pairs, sizes, beam),
            "by_seconds": by_seconds(pairs, GRID.tolist(), draft, DRAWN),
        }
    if not kinds:
        raise UsageError("no text has two rounds yet: replay more")
    gain = {machine.name: _gain(rounds, machine, draft, beam) for machine in where}
    return {"draft_pass_ms": {n: 1000 * draft(n) for n in (1, 4, beam)}, "kinds": kinds, "gain": gain}


def _gain(rounds: Sequence[Searched], machine: Machine, draft: Draft, beam: int) -> dict[str, Any]:
    """Of the beams tried beside the target's pass, what the best of all texts gains."""
    tried = {
        size: gains(rounds, machine, draft, beam, partial(go_on, hidden=machine.hidden, draft=draft, beam=size))
        for size in BESIDE
    }
    best = max(BESIDE, key=lambda size: fmean(median(one) for one in tried[size].values()))
    about = {"compute": machine.compute, "wait": machine.wait, "beside": best, "by_beam": tried}
    return about | {"re-rooted": gains(rounds, machine, draft, beam, nothing), "ahead": tried[best]}


def tables(found: dict[str, Any]) -> str:
    """For a terminal."""
    text = StringIO()
    console = Console(file=text, width=120)
    for kind, one in found["kinds"].items():
        about = (
            f"{kind}: {one['texts']} texts, {one['rounds']} rounds, {one['acceptance_length']:.2f} tokens a round, "
            f"{one['draft_seconds']:.2f} s of drafting"
        )
        view = Table(title=about, title_justify="left")
        for heading in ("K'", "h(K')", "exit read", "E[X]", "tokens of a hit", "passes saved", "of", "hidden s"):
            view.add_column(heading, justify="right")
        for row in one["by_size"]:
            hit = f"{row.tokens / row.hits:.1f}" if row.hits else ""
            view.add_row(
                str(row.size), f"{row.hits:.2f}", f"{row.read:.2f}", f"{row.tokens:.2f}", hit, f"{row.saved:.1f}",
                f"{row.passes:.1f}", f"{row.seconds:.2f}",
            )  # fmt: skip
        console.print(view)
    passes = ", ".join(f"{nodes}: {ms:.0f} ms" for nodes, ms in found["draft_pass_ms"].items())
    title = f"times as fast as today's, median of texts (draft passes by nodes: {passes})"
    view = Table(title=title, title_justify="left")
    view.add_column("machine")
    for heading in ("target s", "disk s", "beam"):
        view.add_column(heading, justify="right")
    for kind in found["kinds"]:
        view.add_column(f"{kind}: re-rooted", justify="right")
        view.add_column("ahead", justify="right")
    for name, row in found["gain"].items():
        values = [f"{median(row[mode][kind]):.3f}" for kind in found["kinds"] for mode in ("re-rooted", "ahead")]
        view.add_row(name, f"{row['compute']:.2f}", f"{row['wait']:.2f}", str(row["beside"]), *values)
    console.print(view)
    return text.getvalue().rstrip()


def hint_gains(
    found: dict[str, Any],
    rounds: Sequence[Searched],
    hints: Sequence[Hint],
    beam: int,
    hidden: float,
    curve: Curve | None = None,
) -> dict[str, dict[str, list[float]]]:
    """By kind and layers: median G of texts where the hint comes when so many layers are computed, and at once.

    Without any it is that of "".

    Args:
        found: by `hints.judge`.
        rounds: of `hints`.
        hints: all of them; texts of which some are missing are left out.
        beam: most nodes of a draft pass before the tree is sent.
        hidden: seconds of a target pass, in all of which the draft can go on.
        curve: as for `report`.
    """
    costs = curve or draft_curve(rounds)
    beside: dict[str, Any] = {"hidden": hidden, "draft": lambda n: float(costs.seconds(n)), "beam": DRAWN}
    machine, told = Machine("", hidden, 0.0, True), {(one.kind, one.text, one.start) for one in hints}
    gained = dict[str, dict[str, list[float]]]()
    for kind, one in found.items():
        mine = [text for text in texts(rounds) if text[0].kind == kind]
        whole = [r for text in mine if all((r.kind, r.text, r.start) in told for r in text[:-1]) for r in text]
        ways: dict[str, list[Beside]] = {"": [partial(go_on, **beside)]}
        last = int(list(one["by_layer"])[-1])
        for layers, (_, weight) in one["by_layer"].items():
            ways[layers] = [told_late(hints, layers, part, weight, **beside) for part in (int(layers) / last, 0.0)]
        gained[kind] = {
            name: [median(gains(whole, machine, beside["draft"], beam, way)[kind]) for way in both]
            for name, both in ways.items()
            if whole
        }
    return gained


def hint_table(found: dict[str, Any], gained: dict[str, dict[str, list[float]]]) -> str:
    """What `hints.judge` and `hint_gains` found."""
    text = StringIO()
    console = Console(file=text, width=120)
    for kind, one in found.items():
        ranks = one["ranks"]
        console.print(
            f"{kind}: {one['rounds']} exits; the draft had read the last accepted node of {ranks['asked']}, "
            f"and the bonus was among its candidates in {ranks['among']}"
        )
        view = Table("order by", "bonus is first", "h(2K)", "at b", "x as fast, told then / at once")
        times = {name: " / ".join(f"{value:.3f}" for value in both) for name, both in gained[kind].items()}
        view.add_row("the draft", str(ranks["first"]["draft"]), f"{one['own']:.2f}", "", times.get("", ""))
        for layers, (hits, weight) in one["by_layer"].items():
            first = str(ranks["first"][layers])
            view.add_row(f"{layers} layers", first, f"{hits:.2f}", f"{weight}", times.get(layers, ""))
        console.print(view)
        rise = one["fitted"] - one["own"]
        console.print(
            f"layers and b chosen on all other texts: h(2K) {one['fitted']:.2f}, {rise:+.2f}; the bar: +{BAR}"
        )
    return text.getvalue().rstrip()


def picture(found: dict[str, Any], out: Path) -> None:
    """h by nodes known, and by seconds hidden.

    Raises:
        MissingPackage: matplotlib is not installed.
        UsageError: it cannot be written.
    """
    check_picture(out)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, one in found["kinds"].items():
        sizes = [row.size for row in one["by_size"]]
        line = left.plot(sizes, [row.hits for row in one["by_size"]], "o-", label=f"{kind}: known")[0]
        left.plot(sizes, [row.read for row in one["by_size"]], "--", color=line.get_color(), label="read, too")
        right.plot(GRID, [row[0] for row in one["by_seconds"]], "-", color=line.get_color(), label=f"{kind}: known")
        right.plot(GRID, [row[1] for row in one["by_seconds"]], "--", color=line.get_color(), label="read, too")
    left.set(xlabel="nodes known", ylabel="exits", ylim=(0, 1))
    right.set(xlabel="seconds of drafting beside the pass", xscale="log", ylim=(0, 1))
    for axes in (left, right):
        axes.legend(fontsize=8)
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:
        raise UsageError(f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
