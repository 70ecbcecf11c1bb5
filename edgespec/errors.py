"""Typed errors; each message is a sentence that a user can act on."""

import os
import shlex
import sys


class EdgespecError(Exception):
    """Something went wrong outside the user's command line: exit code 1."""

    exit_code = 1


class UsageError(EdgespecError):
    """An argument or option is wrong: exit code 2."""

    exit_code = 2


class NoRoom(UsageError):
    """The model needs more memory than it may use."""


class ModelError(EdgespecError):
    """A model file is missing, damaged, or of a kind that cannot be run."""


class VocabMismatch(EdgespecError):
    """Two models, or a model and a datastore, do not share one vocabulary."""


class ContextFull(EdgespecError):
    """The sequence does not fit into the context."""


class DatastoreError(EdgespecError):
    """A datastore is missing, damaged, or built with another tokenizer."""


class SessionFileError(EdgespecError):
    """A saved session is missing, damaged, or of another model; or it cannot be written."""


class Interrupted(EdgespecError):
    """A pass was interrupted: see `Backend.interrupt`."""


class Closed(EdgespecError):
    """The model was closed."""

    def __init__(self, message: str = "the model was closed") -> None:
        super().__init__(message)


class RegistryError(EdgespecError):
    """models.yaml is missing, broken, or does not have the name asked for."""


def pip_install(*what: str) -> str:
    """The command that installs packages for the Python that runs this."""
    here = os.path.join(os.getcwd(), "")
    return shlex.join([sys.executable.removeprefix(here), "-m", "pip", "install", *what])


class MissingPackage(EdgespecError):
    """A package is not installed; the message has the pip command.

    Args:
        package: that is missing.
        extra: of edgespec, which brings the package; "": pip gets `package` itself.
        purpose: what needs it, as the message's subject.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        what = f"edgespec[{extra}]" if extra else package
        super().__init__(f"{purpose} needs the package {package!r}: {pip_install(what)}")
        self._given = package, extra, purpose

    def __reduce__(self) -> "tuple[type[MissingPackage], tuple[str, str, str]]":
        return MissingPackage, self._given  # pickled by another process
