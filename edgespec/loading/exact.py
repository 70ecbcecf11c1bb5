"""The row class of a model's passes.

It is "narrow" (few rows, as plain decoding), "wide" (many rows; short passes are padded), or "any" (one for both).

Prompts are prefilled in the class of the largest passes, a shorter prompt in a smaller class. If that class differs
from decode's, generated tokens are prefilled again in the next turn of a chat, as a fresh session would do.
"""

from collections.abc import Callable
from contextlib import suppress

from edgespec.errors import UsageError
from edgespec.loading.row_classes import MANY, TriedClass, TriedClasses, find, is_timed
from edgespec.loop.backend import Backend, Capabilities
from edgespec.loop.engines import Computing, LoadPlan
from edgespec.loop.shapes import ALWAYS, BatchInvariance, RowClass
from edgespec.machine.measurements import why_not_kept

CHOICES = ("narrow", "wide", "any", "off")
FEW = 3  # rows: a class that reaches no further has no room for a tree
BLOCK = 512
FASTER = 1.1  # speed-up of single rows that is worth passes of fewer rows
SAME = 1.1  # slow-down of a narrow pass up to which wide is the default, also in memory
COLD = 2.0  # slow-down of a streamed layer against the probe model, whose weights stay in the processor's cache


def choose_way(
    engine: str, plan: LoadPlan, *, remember: bool = True, say: Callable[[str], None] = lambda text: None
) -> Computing:
    """Choose how the engine computes a model that it is about to load.

    The last of `plan.ways` is the usual one. Another way is taken if it is clearly faster and has the asked row class.
    It must have a class for many rows if the usual way has one.

    Args:
        engine: its name.
        plan: of this engine; if loading fills the memory, the usual way's classes are found now.
        remember: as for `find`.
        say: as for `find`.
    """
    *better, usual = plan.ways
    if plan.options.exact == "off":
        return usual
    least = MANY if plan.options.exact in ("wide", "any") else FEW

    def class_of(way: Computing) -> TriedClass | None:
        found = find(engine, plan.build, way, plan.path, remember=remember, say=say)
        return next((tried for tried in usable(found) if tried.most >= least), None)

    if plan.fills_memory:
        class_of(usual)
    for way in better:
        if (tried := class_of(way)) and _is_better(tried, class_of(usual)):
            return way
    return usual


def _is_better(tried: TriedClass, usual: TriedClass | None) -> bool:
    if usual is None:
        return True
    faster = not is_timed([tried, usual]) or usual.seconds > FASTER * tried.seconds
    return faster and not usual.most >= MANY > tried.most


def apply_row_class(
    backend: Backend,
    path: str,
    asked: str | None = None,
    *,
    remember: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> TriedClasses:
    """Have a loaded model keep to a row class.

    Args:
        backend: no session of it is open.
        path: of the model.
        asked: as for `choose`.
        remember: as for `find`.
        say: as for `find`.

    Returns:
        All row classes that were found; () if none were looked for.

    Raises:
        UsageError: there is no such class here.
    """
    if asked == "off" or backend.capabilities.logit_tolerance == 0:  # 0: passes of all sizes round alike
        return ()
    found = find_classes(backend, path, remember=remember, say=say)
    exact = choose(found, backend.capabilities, asked)
    if exact:
        backend.keep_to(exact)
    lost = why_not_kept() if found and remember else ""
    padding = notes_on_padding(found, exact, backend.capabilities.streams)
    backend.notes = [*backend.notes, *padding, *filter(None, [lost])]
    return found


def find_classes(
    backend: Backend, path: str, *, remember: bool = True, say: Callable[[str], None] = lambda text: None
) -> TriedClasses:
    """Those of a loaded model; arguments as for `apply_row_class`."""
    if backend.capabilities.logit_tolerance == 0 or backend.capabilities.by_cell == ALWAYS:
        return ()
    about = backend.name, backend.build, backend.computing, path
    return find(*about, remember=remember, say=say, loaded=backend)


def notes_on_padding(found: TriedClasses, exact: BatchInvariance | None, streams: bool) -> list[str]:
    if exact is None or exact.trees.least == 1 or streams or not is_timed(found):
        return []
    times = next(tried.seconds for tried in found if tried.least == exact.trees.least) / found[0].seconds
    if times <= SAME:
        return []
    return [
        f"passes are padded to {exact.trees.least} rows, so that they agree to the bit, and take {times:.1f} times as "
        "long as one row; other values of --kv-type or --exact may do without"
    ]


def note_on_budget(budget: int, target: Backend, path: str, *, approximate: bool = False) -> list[str]:
    """
    Args:
        budget: draft tokens per pass that were asked for.
        target: loaded, and kept to a row class.
        path: of its model.
        approximate: --exact can only be off, as `check_approximate` says.

    Returns:
        A note for the user if the row class allows fewer, with what lifts this limit.
    """
    exact, limits = target.capabilities.exact, target.capabilities
    if exact is None or not exact.trees.most < min(budget + 1, limits.max_nodes, limits.max_wanted):
        return []
    found = find_classes(target, path, remember=False)
    lifts = "--exact off"
    with suppress(UsageError):
        wide = choose(found, limits, "wide")
        lifts = "--exact wide or off" if wide and wide.trees.most > exact.trees.most and not approximate else lifts
    return [
        f"passes have at most {exact.trees.most - 1} draft tokens, not {budget}: more than {exact.trees.most} rows "
        f"are not bit-identical in the row class {exact.name}; {lifts} lifts this limit"
    ]


def check_choice(asked: str | None) -> None:
    """
    Raises:
        UsageError: `asked` is neither None nor one of `CHOICES`.
    """
    if asked not in (None, *CHOICES):
        raise UsageError(f"exact is {asked!r}, but must be one of {', '.join(CHOICES)}")


def choose(found: TriedClasses, limits: Capabilities, asked: str | None) -> BatchInvariance | None:
    """The row class to generate in; None: there is none, or `asked` is "off".

    Args:
        found: of `find`.
        limits: of the model.
        asked: one of `CHOICES`; None: wide if its passes take no longer, as where they wait for weights; else narrow.

    Raises:
        UsageError: there is no such class here.
    """
    check_choice(asked)
    if asked == "off":
        return None
    most = min(limits.max_nodes, limits.max_wanted)
    good = [tried for tried in usable(found) if tried.least + FEW <= most]
    if not good:
        if asked is not None:
            raise UsageError(f"--exact {asked}: {why_no_class(found, limits.paths)}")
        return None
    narrow, mixture = good[0], not all(tried.row_independent for tried in found)
    others = [] if mixture else [tried for tried in good[1:] if tried.most >= MANY]
    wide = narrow if narrow.most >= MANY else next(iter(others), None)
    if asked == "wide" and wide is None:
        raise UsageError(f"--exact wide: here only passes of at most {narrow.most} rows agree; use --exact narrow")
    if asked == "any" and wide is not narrow:
        raise UsageError(f"--exact any: here only passes of at most {narrow.most} rows agree; leave it out")
    cheap = wide is not None and _costs_little(wide, narrow, limits)
    chosen = wide if wide and (asked == "wide" or (asked is None and cheap)) else narrow
    name = "any" if narrow.most >= MANY else "wide" if chosen is wide else "narrow"
    trees = _shape(chosen, most)
    if mixture:  # only equal blocks have equal bits
        return BatchInvariance(name, trees, RowClass(1, min(BLOCK, limits.max_nodes)), blocks=True)
    # Of the fewest rows of a pass, all may be wanted.
    prompts = [tried for tried in found if tried.least <= limits.max_wanted][-1]
    if chosen is prompts:
        return BatchInvariance(name, trees, trees)
    short = _shape(wide, most) if wide and wide is not prompts else None
    return BatchInvariance(name, trees, _shape(prompts, limits.max_nodes), short)


def _costs_little(wide: TriedClass, narrow: TriedClass, limits: Capabilities) -> bool:
    """True if a wide pass of the fewest rows takes about as long as such a narrow one.

    A draft is not considered, though wide passes pay sooner with one: plain decoding must be of the same class.
    """
    if not is_timed([wide, narrow]):
        return limits.streams
    if not limits.streams:
        return wide.seconds <= SAME * narrow.seconds
    few, many = (max(limits.read_seconds, COLD * limits.layers * tried.seconds) for tried in (narrow, wide))
    return many <= SAME * few


def usable(found: TriedClasses) -> list[TriedClass]:
    return [tried for tried in found if tried.trees and tried.row_independent and tried.most >= FEW]


def _shape(tried: TriedClass, most: int) -> RowClass:
    most = min(tried.most, most)
    return RowClass(tried.least, most - most % tried.step, tried.step)


def why_no_class(found: TriedClasses, paths: bool) -> str:
    if paths:
        return "some layers are recurrent, and which passes agree to the bit is not looked for in such models"
    if not any(tried.trees for tried in found if tried.most >= FEW):
        return "here a node's logits depend on what stands between its ancestors, or on where its pass begins"
    return "here a row's logits depend on the other rows of its pass, so no passes agree to the bit"


def exactness_line(found: TriedClasses, exact: BatchInvariance | None, paths: bool = False) -> str:
    sizes = ", ".join(map(_name, usable(found)))
    if not sizes:
        return why_no_class(found, paths)
    used = f"; used: {exact.name}, at least {exact.trees.least}" if exact else ""
    untimed = (
        "" if is_timed(found) else "; which cost least is not known, since other programs computed when they were tried"
    )
    return f"passes of these numbers of rows agree to the bit: {sizes}{used}{untimed}"


def _name(tried: TriedClass) -> str:
    if tried.least == tried.most:
        return str(tried.least)
    sizes = f"{tried.least} to {tried.most}"
    return sizes if tried.step == 1 else f"{sizes} in multiples of {tried.step}"
