"""models.yaml: models by name, and where their files are."""

import importlib.util
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from edgespec.errors import ModelError, RegistryError, UsageError, first_mistake, pip_install
from edgespec.loop.sampling import SamplingParams
from edgespec.machine.files import config_folder, no_model_folder, read_yaml
from edgespec.models import hub

PACKAGE = Path(__file__).parent.parent
# The file of a source folder is at the top level; setup.py copies it into a package.
BUILT_IN = PACKAGE / "models.yaml" if (PACKAGE / "models.yaml").exists() else PACKAGE.parent / "models.yaml"
OWN_HEAD, OWN_LAYERS = OWN = "head", "layers"  # as names of a draft
SCHEMES = ("package:", "file:", "hf:", "shape:")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w.-]+)?(:[\w.-]+)?")  # OWNER/REPOSITORY[@REVISION][:TYPE]
# With OWNER, REPOSITORY and FILE where it may be a page of the hub.
WEB_ADDRESS = re.compile(r"https?://(?:[^/]+/([\w.-]+)/([\w.-]+)(?:/(?:resolve|blob)/[^/]+/([^?#]+\.gguf))?)?")


def _one_line(text: str) -> str:
    if not text.isprintable():  # a line break or NUL; messages and paths have this text
        raise ValueError(f"{text!r} has a character that cannot be printed")
    return text


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]


class Defaults(BaseModel):
    model_config = ConfigDict(extra="forbid")

    planner: str | None = None
    budget: Whole | None = Field(default=None, ge=1)
    context_length: Whole | None = None
    ctx: Whole | None = Field(default=None, exclude=True)  # the outdated name of `context_length`
    system: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @field_validator(*SAMPLING)
    @classmethod
    def _check_sampling(cls, value: float | None, about: ValidationInfo) -> float | None:
        given: dict[str, Any] = {} if value is None else {str(about.field_name): value}
        try:
            SamplingParams(**given)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _renamed(self) -> Self:
        self.context_length = self.ctx if self.context_length is None else self.context_length
        return self

    def sampling(self) -> dict[str, Any]:
        return {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}


class FileFacts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    bytes: Whole = 0  # all parts of a split GGUF together; 0: not known
    sha256: list[Digest] = []
    shape: dict[str, Any] = {}  # see `models/shapes.py`


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    target: Name
    draft: Name | None = None
    mlx: Name | None = None
    description: str = ""
    license: str = ""
    memory: str = ""  # recommended at least, such as 16G
    files: dict[str, FileFacts] = {}  # source -> facts
    measured: list[dict[str, Any]] = []
    defaults: Defaults = Field(default_factory=Defaults)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    models: list[Entry]


def read_models(path: Path) -> list[Entry]:
    """All entries of one models.yaml; `file:` sources become absolute.

    Raises:
        RegistryError: names the file and the line.
    """
    found, node = read_yaml(path, RegistryError, ours=path == BUILT_IN)
    if not isinstance(found, dict):
        raise RegistryError(f"{path}, line 1: must be a mapping with the key models, a list")
    try:
        entries = _File.model_validate(found).models
    except ValidationError as error:
        where, says = first_mistake(error, _File)
        raise RegistryError(f"{path}, line {_line(node, where)}: {says}") from error
    seen = set[str]()
    for i, entry in enumerate(entries):
        line = _line(node, ("models", i))
        if entry.name in seen:
            raise RegistryError(f"{path}, line {line}: there are two models named {entry.name!r}")
        seen.add(entry.name)
        for source in filter(None, (entry.target, entry.draft, entry.mlx)):
            if not source.startswith(SCHEMES):
                raise RegistryError(f"{path}, line {line}: {source!r} must start with one of {', '.join(SCHEMES)}")
        entry.target = _absolute(entry.target, path)
        entry.draft = _absolute(entry.draft, path) if entry.draft else None
        entry.mlx = _absolute(entry.mlx, path) if entry.mlx else None
    return entries


def _line(node: Any, loc: tuple[int | str, ...]) -> int:
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            inner = [value for key, value in node.value if key.value == part]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            inner = node.value[part : part + 1]
        else:
            inner = []
        if not inner:
            break
        node = inner[0]
    return int(node.start_mark.line) + 1 if node is not None else 1


def _absolute(source: str, models_file: Path) -> str:
    if not source.startswith("file:"):
        return source
    return f"file:{models_file.absolute().parent / os.path.expanduser(source.removeprefix('file:'))}"


def own_models_file() -> Path | None:
    """The user's own models.yaml, which need not exist; None: there is no home folder."""
    folder = config_folder()
    return folder / "models.yaml" if folder else None


def all_models(models_file: str | None = None) -> list[Entry]:
    """Entries of the file given, of the user's own, and the built-in ones; a name counts where it comes first.

    Raises:
        RegistryError: one of the files is broken, or the one given is missing.
    """
    paths = [Path(models_file)] if models_file else []
    paths += [own] if (own := own_models_file()) and own.exists() else []
    found = dict[str, Entry]()
    for entry in chain(*map(read_models, paths), _built_in(BUILT_IN)):
        found.setdefault(entry.name, entry)
    return list(found.values())


@cache
def _built_in(path: Path) -> tuple[Entry, ...]:
    """A command asks for several names."""
    return tuple(read_models(path))


def find_model(model: str, models_file: str | None = None) -> Entry:
    """The entry of a name, or one made up for a path, a source or OWNER/REPOSITORY on the hub.

    Raises:
        UsageError: there is no such name; proposes similar names.
        RegistryError: see `all_models`.
    """
    if model.startswith(SCHEMES):
        return Entry(name=model, target=model)
    if address := WEB_ADDRESS.match(model):
        source = "/".join(filter(None, address.groups())) or "OWNER/REPOSITORY"
        raise UsageError(
            f"{model}: is a web address; for a model on the hub write hf:{source}, else fetch the file first"
        )
    entries = {entry.name: entry for entry in all_models(models_file)}
    if model in entries:
        return entries[model]
    is_path = model.endswith(".gguf") or (model != "" and os.path.exists(os.path.expanduser(model)))
    if HUB_NAME.fullmatch(model) and not is_path:
        return Entry(name=model, target=f"hf:{model}")
    if "/" in model or is_path:
        return Entry(name=model, target=f"file:{Path(os.path.expanduser(model))}")
    near = get_close_matches(model, entries, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "edgespec models lists all names."
    raise UsageError(
        f"there is no model {model!r} and no such file; {hint} A path must end in .gguf or contain a slash."
    )


def is_folder(source: str) -> bool:
    """
    Raises:
        ModelError: a folder has no config.json, or the package that has it is not installed.
    """
    if source.startswith("hf:"):
        return hub.parse(source.removeprefix("hf:")).is_folder
    if source.startswith("shape:"):
        return False
    path = Path(local_path(source))
    if path.is_dir() and not (path / "config.json").is_file():
        raise no_model_folder(path)
    return path.is_dir()


def find_draft(name: str, entry: Entry, models_file: str | None) -> Entry:
    """As `find_model`; `OWN` are parts of `entry`: the head in its file, and some of its layers."""
    return entry if name in OWN else find_model(name, models_file)


def local_path(
    source: str,
    models_file: str | None = None,
    *,
    weights: bool = True,
    fetch: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """The file or folder behind a source; what is on the hub is fetched first, unless it is in its cache.

    Args:
        source: see models.yaml.
        models_file: a models.yaml whose checksums count, too.
        weights: fetch the weights of a folder on the hub, too.
        fetch: ask the hub; else only its cache.
        say: called with the progress.

    Raises:
        UsageError: a hub source is neither a repository nor a file in one, or there can be no package of the name.
        ModelError: it is not there, or differs from models.yaml.
        MissingPackage: the package that has it, or that fetches it, is not installed.
    """
    scheme, _, rest = source.partition(":")
    if scheme == "file":
        return rest
    if scheme == "package":
        return _package_file(rest)
    if scheme == "shape":
        raise ModelError(
            f"{rest}: only the shape of this model is known, for edgespec doctor --machine; to run it, name its file"
        )
    found = hub.parse(rest)
    if found.is_folder and not weights:
        return hub.folder_without_weights(found, fetch)
    if path := hub.cached(found):
        return path
    if not fetch:
        raise ModelError(f"{source} is not fetched yet: edgespec pull {source} does that")
    listing = check_facts(hub.ask(found), source, models_file)
    return hub.fetch(listing, lambda what, done, total: say(f"{what}, {done / 1e9:.1f} of {total / 1e9:.1f} GB"))


def check_facts(listing: hub.Listing, source: str, models_file: str | None) -> hub.Listing:
    """As `hub.check_listing`, with what `all_models` say about the files of a source."""
    for facts in filter(None, (entry.files.get(source) for entry in all_models(models_file))):
        listing = hub.check_listing(listing, facts.bytes or None, facts.sha256)
    return listing


def local_head(source: str) -> str | None:
    """Path of the head of a GGUF of the hub, from the same repository; None: none is in the cache."""
    found = hub.parse(source.removeprefix("hf:")) if source.startswith("hf:") else None
    return hub.cached_head(found) if found and not found.is_folder else None


def _package_file(rest: str) -> str:
    package, _, inside = rest.partition("/")
    if not package.isidentifier():
        raise UsageError(f"'package:{rest}' must be package:NAME/FILE, where NAME is a Python package")
    spec = importlib.util.find_spec(package)  # finds the folder without running the package
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the model is in the Python package {package.replace('_', '-')!r}, which is not installed: "
            f"{pip_install(package.replace('_', '-'))}"
        )
    return str(Path(spec.submodule_search_locations[0]) / inside)
