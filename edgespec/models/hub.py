"""Models on the Hugging Face hub: the files of a source, those that are in the cache, and fetching the others.

The cache is the hub's own, so other programs share the files. `download.py` fetches large ones, because huggingface_hub
from 1.18 on starts again after every cut.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from edgespec.errors import EdgespecError, ModelError, UsageError, first_line, installed, named, told_as
from edgespec.machine.files import part_names, read_json_object, read_text, size_on_disk
from edgespec.models import pulled
from edgespec.models.download import STALL, OpenRange, Progress, checksum, download, read_range
from edgespec.models.gguf_header import MOST_BYTES, check_header, check_magic

SOURCE = re.compile(r"([\w-][\w.-]*)/([\w-][\w.-]*)(?:@([\w.-]+))?(?:/(.+)|:([\w.-]+))?")
MAIN = "main"
USUAL = ("Q4_K_M", "Q8_0")  # types of GGUF files, tried in this order where none is named, as in llama.cpp
HEADS, OTHER_HEADS = ("mtp-", "eagle3-"), ("dflash-", "dspark-")  # file names of heads, the best kind first
BESIDE = re.compile(rf"(^|/)(mmproj|{'|'.join(HEADS + OTHER_HEADS)})|imatrix", re.IGNORECASE)  # no language models
TYPE = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*)", re.IGNORECASE)
WEIGHTS = "model*.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
FOLDER_FILES = ("*.json", "*.jinja", "*.txt", *TOKENIZERS, WEIGHTS)
UNREACHABLE = ("TransportError", "ConnectionError")  # of the HTTP clients that huggingface_hub has used
HEADER = 1 << 20  # bytes that are asked for first; with a vocabulary, a header has some megabytes
LAST = 64  # bytes behind the name of a header's last tensor, at most
SPARE = 10**9  # bytes of the disk that stay free


class Unreachable(ModelError):
    """The hub was not asked, or did not answer."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """A GGUF file, named by `file` or by `type`; without either a model folder.

    Attributes:
        repository: OWNER/REPOSITORY.
        revision: branch, tag or commit.
        file: a GGUF file; of a split one, any part.
        type: such as Q4_K_M; "": the first of `USUAL` that is there, else any file; None: not named.
    """

    repository: str
    revision: str = MAIN
    file: str = ""
    type: str | None = None

    @property
    def is_folder(self) -> bool:
        return not self.file and self.type is None

    @property
    def name(self) -> str:
        """As in models.yaml, of a source that names a file."""
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"hf:{self.repository}{revision}/{self.file}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """
    Attributes:
        name: path in the repository.
        size: in bytes.
        sha256: "" for small files, and for mirrors that give none.
        path: its place in the cache, a link to `blob`.
        blob: the file itself in the cache.
        expected: what `sha256` should be where that is ""; "": anything.
    """

    name: str
    size: int
    sha256: str
    path: Path
    blob: Path
    expected: str = ""

    @property
    def is_here(self) -> bool:
        return self.path.exists() or bool(self.sha256 and self.blob.exists())


@dataclass(frozen=True, slots=True)
class Listing:
    """
    Attributes:
        source: what was asked for.
        commit: of the files.
        files: those of a folder; or a GGUF file, with all parts in order.
    """

    source: HubSource
    commit: str
    files: list[HubFile]

    @property
    def missing(self) -> list[HubFile]:
        return [file for file in self.files if not file.is_here]


def parse(rest: str) -> HubSource:
    """Parse a source without its `hf:`.

    Raises:
        UsageError: it has none of these forms.
    """
    match = SOURCE.fullmatch(rest)
    if not match or match[2].endswith(".gguf") or (match[4] and not match[4].endswith(".gguf")):
        raise UsageError(
            f"'hf:{rest}' must be hf:OWNER/REPOSITORY, hf:OWNER/REPOSITORY:TYPE as in :Q4_K_M, or "
            "hf:OWNER/REPOSITORY/FILE.gguf; a revision may follow the repository as @REVISION"
        )
    of_files = match[2].lower().endswith("-gguf") and not match[4]
    return HubSource(f"{match[1]}/{match[2]}", match[3] or MAIN, match[4] or "", match[5] or ("" if of_files else None))


def choose_file(names: Sequence[str], type_: str) -> str | None:
    """The GGUF file of a type among a repository's files, the first part of a split one; None: there is none.

    Args:
        names: of all files.
        type_: such as Q4_K_M, in any case; "": the usual one, else the first file.
    """
    models = sorted((n for n in names if n.endswith(".gguf") and not BESIDE.search(n)), key=lambda n: (len(n), n))
    for wanted in (type_,) if type_ else USUAL:
        pattern = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?=[-.])", re.IGNORECASE)
        if found := next((name for name in models if pattern.search(name.rpartition("/")[2])), None):
            return found
    return None if type_ else next(iter(models), None)


def choose_head(names: Sequence[str], model: str, kind: str) -> str | None:
    """The head of a kind for a GGUF file, chosen as in llama.cpp's common/download.cpp; None: there is none.

    It lies in the model's folder or above, the nearer the better; then the better, the closer its type.

    Args:
        names: of a repository's files.
        model: the GGUF file.
        kind: one of `HEADS` or `OTHER_HEADS`.
    """
    folder = PurePosixPath(model).parent
    if BESIDE.search(model):
        return None
    heads = [
        path for path in map(PurePosixPath, sorted(names))
        if path.suffix == ".gguf" and path.name.lower().startswith(kind) and path.parent in (folder, *folder.parents)
        and part_names(str(path))[0] == str(path)
    ]  # fmt: skip

    def distance(path: PurePosixPath) -> tuple[int, bool, int]:
        return -len(path.parts), _type(path.name) != _type(model), abs(_bits(path.name) - _bits(model))

    return str(min(heads, key=distance)) if heads else None


def _type(name: str) -> str:
    found = TYPE.findall(name)
    return found[-1].upper() if found else ""


def _bits(name: str) -> int:
    return int((re.search(r"\d+", _type(name)) or [0])[0])


def heads_of(listing: Listing) -> tuple[HubSource | None, list[str]]:
    """
    Args:
        listing: of a GGUF file.

    Returns:
        The best head for it in its repository, and heads there of kinds that no engine uses.
    """
    source, names = listing.source, list[str]()
    with suppress(EdgespecError), _errors(source):  # mirrors may have no listing
        info = _library(source).HfApi().model_info(source.repository, revision=source.revision)
        names = [file.rfilename for file in info.siblings or ()]
    heads, others = (
        [name for kind in kinds if (name := choose_head(names, listing.files[0].name, kind))]
        for kinds in (HEADS, OTHER_HEADS)
    )
    return HubSource(source.repository, source.revision, heads[0]) if heads else None, others


def cached_head(source: HubSource) -> str | None:
    """The head of a GGUF file, from its repository, in the cache; None: there is none, or the file is not there."""
    names = list(_cached_ggufs(source))
    file = source.file or choose_file(names, source.type or "")
    heads = [name for kind in HEADS if file in names and (name := choose_head(names, str(file), kind))]
    paths = [cached(HubSource(source.repository, source.revision, name)) for name in heads]
    return next(filter(None, paths), None)


def cached(source: HubSource) -> str | None:
    """The file or folder of a source in the cache; None: it is not there, or not all of it.

    Raises:
        ModelError: the hub has no such names.
    """
    hub = _library(source)
    file = source.file or choose_file(list(_cached_ggufs(source)), source.type or "")
    names = ["config.json"] if source.is_folder else part_names(file) if file else []
    with _errors(source):
        found = [hub.try_to_load_from_cache(source.repository, name, revision=source.revision) for name in names]
    if not found or not all(isinstance(path, str) for path in found):
        return None
    path = Path(found[0])
    return str(path) if not source.is_folder else str(path.parent) if _has_weights(path.parent) else None


def folder_without_weights(source: HubSource, fetch: bool) -> str:
    """The cached copy of a model folder, fetched without its weights where it is not there.

    Raises:
        ModelError: it is not fetched yet, or cannot be.
    """
    hub, here = _library(source), cached(source)
    if here and any(file for pattern in TOKENIZERS for file in Path(here).glob(pattern)):
        return here
    if here:  # a tokenizer of a newer commit would hide the weights that are here
        source = replace(source, revision=Path(here).name)
    patterns = [pattern for pattern in FOLDER_FILES if pattern != WEIGHTS]
    with _errors(source):
        return str(
            hub.snapshot_download(
                source.repository, revision=source.revision, allow_patterns=patterns, local_files_only=not fetch
            )
        )


def cache_of_hub() -> Path:
    """
    Raises:
        MissingPackage: huggingface_hub is not installed.
        UsageError: there is no home folder for the cache.
    """
    _library("models of the hub")
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):
        raise UsageError("there is no home folder for models of the hub: HF_HOME names another place")
    return Path(constants.HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    return cache_of_hub() / f"models--{repository.replace('/', '--')}"


def _cached_ggufs(source: HubSource) -> Iterator[str]:
    folder = repository_folder(source.repository)
    reference = folder / "refs" / source.revision
    snapshot = folder / "snapshots" / (read_text(reference, ModelError) if reference.is_file() else source.revision)
    for file in snapshot.rglob("*.gguf"):
        if file.exists():  # else the link's target was removed
            yield file.relative_to(snapshot).as_posix()


def _has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    try:
        names = set(read_json_object(index, ModelError)["weight_map"].values()) if index.is_file() else None
        return all((folder / name).is_file() for name in names or ["model.safetensors"])
    except (ModelError, KeyError, AttributeError, TypeError):
        return False


def ask(source: HubSource) -> Listing:
    """The files of a source on the hub, now.

    Raises:
        ModelError: no such repository or file, or the hub does not answer.
    """
    hub = _library(source)
    from huggingface_hub.file_download import get_hf_file_metadata

    storage = repository_folder(source.repository)
    commit, sizes = source.revision, dict[str, tuple[int, str]]()
    with _errors(source):
        if source.file:  # mirrors may have no listing
            for name in part_names(source.file):
                found = get_hf_file_metadata(hub.hf_hub_url(source.repository, name, revision=commit))
                commit = found.commit_hash or commit  # all parts from one commit
                sizes[name] = found.size or 0, _sha256(found.etag)
        else:
            info = hub.HfApi().model_info(source.repository, revision=source.revision, files_metadata=True)
            commit, siblings = info.sha, {file.rfilename: file for file in info.siblings or ()}
            for name in _wanted(source, list(siblings)):
                file = siblings[name]
                sizes[name] = file.size or 0, _sha256(file.lfs and file.lfs.sha256)
    files = [
        HubFile(name, size, digest, storage / "snapshots" / commit / name, storage / "blobs" / (digest or "-"))
        for name, (size, digest) in sizes.items()
    ]
    listing = Listing(source, commit, files)
    if not source.file and listing.missing:  # everybody may list what only those may fetch who agreed to its terms
        with _errors(source):
            get_hf_file_metadata(hub.hf_hub_url(source.repository, listing.missing[0].name, revision=commit))
    return listing


def _wanted(source: HubSource, names: Sequence[str]) -> list[str]:
    if source.is_folder:
        wanted = [name for name in names if any(fnmatch(name, pattern) for pattern in FOLDER_FILES)]
        if "config.json" not in wanted:
            ggufs = choose_file(names, "")
            hint = f"; it has GGUF files: name a type, as in {source.repository}:Q4_K_M" if ggufs else ""
            raise ModelError(f"hf:{source.repository}: has no config.json, so it is not a model folder{hint}")
        if not any(fnmatch(name, WEIGHTS) for name in wanted):
            raise ModelError(f"hf:{source.repository}: has no weights that engines read: no file {WEIGHTS}")
        return wanted
    file = choose_file(names, source.type or "")
    if file is None:
        types = sorted({match[0] for name in names if name.endswith(".gguf") for match in TYPE.finditer(name)})
        has = f"its GGUF files are of the types {', '.join(types)}" if types else "it has no GGUF files"
        raise ModelError(f"hf:{source.repository}: has no GGUF file of the type {source.type or USUAL[0]}; {has}")
    parts = part_names(file)
    if missing := [part for part in parts if part not in names]:
        raise ModelError(f"hf:{source.repository}: {missing[0]} is missing there; a split GGUF needs all its parts")
    return parts


def _sha256(etag: str | None) -> str:
    return etag if etag and re.fullmatch("[0-9a-f]{64}", etag) else ""


def check_listing(listing: Listing, size: int | None, digests: Sequence[str]) -> Listing:
    """Refuse files that differ from models.yaml.

    Args:
        listing: what the hub has.
        size: bytes of all files that are expected; None: any.
        digests: SHA-256 of each file; none: any.

    Returns:
        The listing, with the checksums to expect of files for which the hub gives none.

    Raises:
        ModelError: they differ; names both.
    """
    name = f"hf:{listing.source.repository}/{listing.files[0].name}"
    found = sum(file.size for file in listing.files)
    if size is not None and found != size:
        raise ModelError(f"{name}: has {found} bytes on the hub, but {size} in models.yaml: it is another file by now")
    files = list(listing.files)
    for i, (file, digest) in enumerate(zip(listing.files, digests, strict=False)):
        if file.sha256:
            _compare(file.name, file.sha256, digest)
        else:
            files[i] = replace(file, expected=digest)
    return replace(listing, files=files)


def _compare(name: str, found: str, digest: str) -> None:
    if found != digest:
        raise ModelError(
            f"{name}: has the checksum {found[:12]}… on the hub, but {digest[:12]}… in models.yaml: it is another file "
            "by now"
        )


def check_space(listings: Sequence[Listing]) -> None:
    """
    Raises:
        EdgespecError: the disk has no room for the missing files; names both sizes.
    """
    needed = sum(file.size for listing in listings for file in listing.missing)
    cache = cache_of_hub()
    folder = next(place for place in (cache, *cache.parents) if place.exists())
    there = sum(size_on_disk(part) for listing in listings for file in listing.missing for part in _partial(file))
    free = shutil.disk_usage(folder).free
    if needed and needed - there + SPARE > free:
        raise EdgespecError(
            f"{folder}: {needed / 1e9:.1f} GB are to be fetched, but {free / 1e9:.1f} GB are free and "
            f"{SPARE / 1e9:.0f} GB are left alone; HF_HOME names another place"
        )


def _partial(file: HubFile) -> list[Path]:
    known = file.blob.with_name(f"{file.blob.name}.edgespec-partial"), pulled.unchecked(file.path)
    return [path for path in known if path.exists()]


def fetch(
    listing: Listing,
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Fetch what is missing, check it, and return the path of the file or folder.

    Args:
        listing: from `ask`, checked.
        progress: called with what is done with which file, bytes done and bytes in all.
        say: called with a line for the user.

    Raises:
        EdgespecError: it cannot be fetched; what is there stays for the next try.
    """
    hub, source, missing = _library(listing.source), listing.source, listing.missing
    check_space([listing])
    with _errors(source):
        _record(listing, missing, done=False)
    for file in missing:
        if file.sha256:
            _fetch_blob(source, listing.commit, file, progress, say)
        elif file.size > 1 << 20:
            say(f"{file.name}: the hub gives no checksum, so this is fetched by huggingface_hub, which cannot resume")
    paths = dict[str, str]()
    with _errors(source):
        # Weights last: `cached` takes a folder that has them for complete.
        for file in sorted(listing.files, key=lambda one: fnmatch(one.name, WEIGHTS)):
            # By the requested revision, so that the cache remembers it.
            paths[file.name] = path = hub.hf_hub_download(source.repository, file.name, revision=source.revision)
            if file.expected and file in missing:
                _check_fetched(source, file, Path(path), progress)
        _record(listing, missing, done=True)
    return str(Path(paths["config.json"]).parent) if source.is_folder else paths[listing.files[0].name]


def _check_fetched(source: HubSource, file: HubFile, path: Path, progress: Progress) -> None:
    """Raises ModelError, and removes the file, if its checksum is not the expected one."""
    label, folder = file.name.rpartition("/")[2], repository_folder(source.repository)
    hidden = pulled.unchecked(path)
    with pulled.locked(folder):
        path.replace(hidden)
        found = checksum(hidden, lambda done: progress(f"checking {label}", done, file.size))
        try:
            _compare(file.name, found, file.expected)
        except ModelError:
            pulled.delete_file(folder, path.relative_to(folder).as_posix())
            raise
        hidden.replace(path)


def _record(listing: Listing, missing: Sequence[HubFile], done: bool) -> None:
    folder, source = repository_folder(listing.source.repository), listing.source
    name = source.repository if source.is_folder else f"{source.repository}/{listing.files[0].name}"
    files = [
        (file.path.relative_to(folder).as_posix(), file.blob.relative_to(folder).as_posix() if file.sha256 else "")
        for file in missing
    ]
    if missing:
        pulled.add(folder, name, files, done)


@contextmanager
def without_weights(source: HubSource) -> Iterator[str]:
    """Path of a GGUF of the hub, whose parts have headers but no weights: sparse files, removed after the `with`.

    Raises:
        EdgespecError: as for `ask`, or a header cannot be fetched.
    """
    listing = ask(source)
    with TemporaryDirectory(prefix="edgespec-") as folder:
        paths = [Path(folder) / PurePosixPath(file.name).name for file in listing.files]
        for file, path in zip(listing.files, paths, strict=True):
            with _errors(source), told_as(str(path), f"hf:{source.repository}/{file.name}"):
                _write_header(_ranges(source, listing.commit, file), file.size, path)
        yield str(paths[0])


def _write_header(request: OpenRange, size: int, path: Path) -> None:
    found, wanted = b"", min(size, HEADER)
    while True:
        found += read_range(request, len(found), wanted)
        path.write_bytes(found[: None if wanted == size else -LAST])
        check_magic(path)
        try:
            check_header(path)
            break
        except ModelError:  # as of a file that is cut off
            if wanted >= min(size, MOST_BYTES):
                raise
            wanted = min(size, 4 * wanted)
    with path.open("wb") as file:
        file.write(found)
        file.truncate(size)


def _ranges(source: HubSource, commit: str, file: HubFile) -> OpenRange:
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(source.repository, file.name, revision=commit)
    headers = {**build_hf_headers(library_name="edgespec"), "Accept-Encoding": "identity"}

    @contextmanager
    def request(start: int, stop: int) -> Iterator[Any]:
        ranged = headers | {"Range": f"bytes={start}-{stop - 1}"}
        with get_session().stream("GET", url, headers=ranged, follow_redirects=True, timeout=STALL) as response:
            yield response

    return request


def _fetch_blob(source: HubSource, commit: str, file: HubFile, progress: Progress, say: Callable[[str], None]) -> None:
    from filelock import FileLock, Timeout

    with _errors(source):
        file.blob.parent.mkdir(parents=True, exist_ok=True)
        locks = file.blob.parents[2] / ".locks" / file.blob.parents[1].name
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{file.sha256}.lock")  # the one that huggingface_hub takes
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            say(f"{file.name}: another program is fetching it; waiting")
            held = lock.acquire()
        with named(file.name, EdgespecError), held:
            if not file.blob.exists():
                label = file.name.rpartition("/")[2]
                download(
                    _ranges(source, commit, file), file.blob, file.size, file.sha256,
                    lambda what, done, total: progress(f"{what} {label}", done, total),
                )  # fmt: skip


def _library(source: HubSource | str) -> Any:
    what = source if isinstance(source, str) else f"hf:{source.repository}"
    return installed("huggingface_hub", "hub", f"fetching {what}")


@contextmanager
def _errors(source: HubSource) -> Iterator[None]:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"hf:{source.repository}" + (f"/{source.file}" if source.file else "")
    known = {  # some are kinds of those after them
        GatedRepoError: ": its owner asks you to agree to terms first: do so on its page on the hub, then say who you "
        "are with: hf auth login",
        RepositoryNotFoundError: ": neither a folder here nor a repository on the hub that you may read",
        RevisionNotFoundError: f": has no revision {source.revision!r}",
        LocalEntryNotFoundError: " is not fetched yet, or the hub cannot be reached: {}",
        EntryNotFoundError: ": cannot be fetched: there is no such file",
    }
    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:
        if says := next((says for kind, says in known.items() if isinstance(error, kind)), ""):
            raise ModelError(name + says.format(first_line(error))) from error
        why, forbidden = first_line(error), isinstance(error, OfflineModeIsEnabled)
        silent = any(kind.__name__ in UNREACHABLE for kind in type(error).__mro__)
        if forbidden:
            why = "HF_HUB_OFFLINE forbids to ask the hub"
        elif silent:
            why = f"the hub cannot be reached; is this machine online? ({why})"
        what = "no such folder here, and it cannot be fetched from the hub" if source.is_folder else "cannot be fetched"
        raise (Unreachable if forbidden or silent else ModelError)(f"{name}: {what}: {why}") from error


def sizes_by_file(listings: Mapping[str, Listing]) -> list[tuple[str, int, bool]]:
    """
    Returns:
        (repository and file, bytes, True if it is in the cache) of each file.
    """
    return [
        (f"{listing.source.repository}/{file.name}", file.size, file.is_here)
        for listing in listings.values()
        for file in listing.files
    ]
