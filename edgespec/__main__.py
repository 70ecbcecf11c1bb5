"""The program `edgespec`, also as `python -m edgespec`. Ctrl-C may interrupt its many imports."""

import gc
import os
import signal


def main() -> None:
    """Run `edgespec`; while it is imported, Ctrl-C ends it without a traceback."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    gc.disable()  # to look for garbage in what is imported takes a sixth of the start
    from edgespec.cli.commands import main as run

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, usual)
    run()


if __name__ == "__main__":
    main()
