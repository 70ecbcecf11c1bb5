"""Steps of a measurement in processes of their own: an error, a crash or a hang of one does not end the others."""

import multiprocessing
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

GRACE = 10.0  # seconds for a process to end

Tell = Callable[[str, Any, str], None]  # takes a name of what was found, its value for a file, and lines to show


def run_apart(
    module: str, step: str, options: Mapping[str, Any], seconds: float, tell: Tell, *, method: str = "spawn"
) -> str:
    """Run a function of a module in a new process.

    Args:
        module: its name.
        step: name of the function, which takes `tell` and options.
        options: of the step.
        seconds: after which the process is killed.
        tell: called here for what the function has told.
        method: of `multiprocessing`.

    Returns:
        Why the step has failed, in a line; "": it has not.
    """
    new: Any = multiprocessing.get_context(method)
    end = monotonic() + seconds
    receiver, sender = new.Pipe(duplex=False)
    process = new.Process(target=_run, args=(module, step, dict(options), sender), daemon=True)
    process.start()
    sender.close()
    failed = f"stopped after {seconds:.0f} s"
    try:
        while receiver.poll(max(0.0, end - monotonic())):
            kind, *found = receiver.recv()
            if kind == "ended":
                failed = found[0]
                break
            tell(*found)
    except EOFError:
        process.join(GRACE)
        failed = f"the process ended with code {process.exitcode}"
    process.kill()  # also one that hangs in a driver's clean-up
    process.join(GRACE)
    return failed


def _run(module: str, step: str, options: dict[str, Any], sender: Connection) -> None:
    try:
        getattr(import_module(module), step)(lambda *found: sender.send(("told", *found)), **options)
        sender.send(("ended", ""))
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        sender.send(("ended", f"{type(error).__name__}: {text[0]}"))
