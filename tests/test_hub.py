"""Fetching from a hub: what a source means, and that what arrives is right however the line and the server behave."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fake_hub
import numpy as np
import pytest
from conftest import Run
from fake_hub import COMMIT, FakeHub
from forked import RUN, Forked

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")

import huggingface_hub
import huggingface_hub.constants

import edgespec
from edgespec.cli import catalogue as catalogue_commands
from edgespec.errors import EdgespecError, ModelError, UsageError
from edgespec.machine.described import find_machine
from edgespec.measure.predictor import predict
from edgespec.models import download, hub, pulled, registry
from edgespec.models.convert import converter
from edgespec.models.gguf_header import tensor_names
from edgespec.models.hub import choose_file, parse
from edgespec.models.registry import find_model, local_head, local_path

SIZE = 50_000
CONTENT = random.Random(1).randbytes(SIZE)
SOURCE = "hf:owner/repo/model.gguf"
SPLIT = [f"big-Q4_K_M-{i:05}-of-00003.gguf" for i in (1, 2, 3)]


def point_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Have the library ask this hub."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with one file, asked in pieces of 9,000 bytes and without pauses."""
    served = FakeHub({"owner/repo/model.gguf": CONTENT})
    server = served.start()
    point_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "PIECE", 9000)
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setattr(hub, "SPARE", 0)
    yield served
    server.shutdown()
    server.server_close()


def fetch(source: str = SOURCE) -> Path:
    return Path(hub.fetch(hub.ask(parse(source.removeprefix("hf:")))))


def leftovers(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*.edgespec-*")]


def test_a_file_is_fetched_in_pieces_into_the_hubs_own_cache(fake: FakeHub, tmp_path: Path) -> None:
    path = fetch()
    assert path.read_bytes() == CONTENT
    assert path.resolve().name == hashlib.sha256(CONTENT).hexdigest()  # the blob, as the library names it
    assert path.parent == tmp_path / "cache" / "models--owner--repo" / "snapshots" / COMMIT
    assert path == Path(huggingface_hub.try_to_load_from_cache("owner/repo", "model.gguf"))
    assert {asked for method, _, asked in fake.requests if method == "GET"} == {
        f"bytes={start}-{min(start + 9000, SIZE) - 1}" for start in range(0, SIZE, 9000)
    }
    assert leftovers(tmp_path) == []
    before = len(fake.requests)
    assert local_path(SOURCE) == str(path)  # what is here is not asked for
    assert len(fake.requests) == before


@pytest.mark.parametrize(("ranges", "count", "cut"), [(True, 25, 0.5), (False, 10, 0.7)])
def test_a_line_that_is_cut_anywhere(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool, count: int, cut: float
) -> None:
    """In any share of the answers, after any number of bytes."""
    if not ranges:  # every attempt starts at the first byte, so many of them may bring nothing new
        monkeypatch.setattr(download, "RETRIES", 100)
    fake.ranges = ranges
    fetch()
    listing, fake.sent = hub.ask(parse("owner/repo/model.gguf")), 0
    for seed in range(count):
        shutil.rmtree(tmp_path / "cache")
        chance = random.Random(seed)
        fake.cut = lambda length, chance=chance: chance.randrange(1, length + 1) if chance.random() < cut else None  # type: ignore[misc]
        assert Path(hub.fetch(listing)).read_bytes() == CONTENT, seed
    assert not ranges or fake.sent == count * SIZE  # nothing twice


@pytest.mark.parametrize("pieces", [9000, 7000])
def test_a_later_run_goes_on(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """A record of other pieces is not believed."""
    monkeypatch.setattr(download, "RETRIES", 0)
    monkeypatch.setattr(download, "CONNECTIONS", 1)
    answers = [None, None, 4000, 0]
    fake.cut = lambda length: answers.pop(0) if answers else 0
    with pytest.raises(EdgespecError, match=r"model\.gguf: fetching stopped after 1 attempts without a byte"):
        fetch()
    assert len(leftovers(tmp_path)) == 2
    assert fake.sent == 22_000
    fake.cut = lambda length: None
    monkeypatch.setattr(download, "PIECE", pieces)
    assert fetch().read_bytes() == CONTENT
    assert fake.sent == (SIZE if pieces == 9000 else 22_000 + SIZE)
    assert leftovers(tmp_path) == []


def test_a_busy_server_is_asked_again_but_not_for_a_file_that_has_gone(fake: FakeHub) -> None:
    fake.statuses = [403] * 20
    with pytest.raises(EdgespecError, match="the server answers 403"):
        fetch()
    assert len(fake.statuses) > 10
    fake.statuses = [503, 429, 500]
    assert fetch().read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(fake: FakeHub, tmp_path: Path) -> None:
    fake.wrong = lambda content: content[:-1] + bytes([content[-1] ^ 1])
    with pytest.raises(EdgespecError, match=r"has the checksum .* damaged on the way; it is removed"):
        fetch()
    assert leftovers(tmp_path) == []
    assert hub.cached(parse("owner/repo/model.gguf")) is None
    fake.wrong = lambda content: content
    assert fetch().read_bytes() == CONTENT


def test_other_bytes_than_asked_for_are_refused(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = download._check

    def elsewhere(response: object) -> None:
        real(response)
        response.headers["content-range"] = "bytes 17-99/50000"  # type: ignore[attr-defined]

    monkeypatch.setattr(download, "_check", elsewhere)
    with pytest.raises(EdgespecError, match="the server sends other bytes"):
        fetch()


def test_a_disk_without_room_is_found_before_a_byte_is_fetched(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage._replace(free=SIZE - 1))
    with pytest.raises(EdgespecError, match=r"0\.0 GB are to be fetched, but 0\.0 GB are free"):
        fetch()
    assert fake.sent == 0


def test_a_disk_that_fills_up_keeps_what_is_there(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CONNECTIONS", 1)
    put, room = download.Partial.put, [20_000]

    def limited(self: download.Partial, at: int, data: bytes) -> None:
        room[0] -= len(data)
        with download._disk(self.data):
            if room[0] < 0:
                raise OSError(28, "No space left on device")
        put(self, at, data)

    monkeypatch.setattr(download.Partial, "put", limited)
    with pytest.raises(EdgespecError, match="the disk is full; what is there is kept"):
        fetch()
    assert len(leftovers(tmp_path)) == 2
    room[0] = 10**9
    fake.sent = 0
    assert fetch().read_bytes() == CONTENT
    assert fake.sent < SIZE


def test_without_checksums_the_library_fetches_it(fake: FakeHub, tmp_path: Path) -> None:
    content = CONTENT * 30  # what is small needs no word
    fake.files["owner/repo/model.gguf"] = content
    fake.checksums = False
    said = list[str]()
    path = hub.fetch(hub.ask(parse("owner/repo/model.gguf")), say=said.append)
    assert Path(path).read_bytes() == content
    assert said == ["model.gguf: the hub gives no checksum, so this is fetched by huggingface_hub, which cannot resume"]


def test_all_parts_of_a_split_file_by_any_of_them(fake: FakeHub) -> None:
    fake.files = {f"owner/repo/sub/{name}": name.encode() * 100 for name in SPLIT}
    for part in SPLIT:
        path = fetch(f"hf:owner/repo/sub/{part}")
        assert path.name == SPLIT[0]
        assert [path.with_name(name).read_bytes() for name in SPLIT] == [name.encode() * 100 for name in SPLIT]
        assert local_path(f"hf:owner/repo/sub/{part}") == str(path)


def test_a_missing_part_is_named(fake: FakeHub, tmp_path: Path) -> None:
    fake.files = {f"owner/repo-GGUF/{name}": b"x" * 100 for name in SPLIT[:2]}
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf is missing there"):
        fetch("hf:owner/repo-GGUF")
    with pytest.raises(ModelError, match="cannot be fetched: there is no such file"):
        fetch(f"hf:owner/repo-GGUF/{SPLIT[0]}")
    fake.files = {f"owner/repo-GGUF/{name}": b"x" * 100 for name in SPLIT}
    path = fetch(f"hf:owner/repo-GGUF/{SPLIT[0]}")
    path.with_name(SPLIT[1]).unlink()
    with pytest.raises(ModelError, match="is not fetched yet"):
        local_path("hf:owner/repo-GGUF:Q4_K_M", fetch=False)


@pytest.mark.parametrize(
    ("names", "type_", "found"),
    [
        (["a-Q8_0.gguf", "a-Q4_K_M.gguf"], "", "a-Q4_K_M.gguf"),
        (["a-Q8_0.gguf", "a-F16.gguf"], "", "a-Q8_0.gguf"),
        (["a-Q5_0.gguf", "a-F16.gguf"], "", "a-F16.gguf"),
        (["a-Q8_0.gguf", "a-q4_k_m.gguf"], "Q4_K_M", "a-q4_k_m.gguf"),
        (["a-IQ4_K_M.gguf", "a.Q4_K_M.gguf"], "Q4_K_M", "a.Q4_K_M.gguf"),
        (["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "q4_k_m", "a-Q4_K_M.gguf"),
        (["a-Q4_K_M.gguf"], "Q4_K", None),
        (["mmproj-Q8_0.gguf", "mtp-a-Q8_0.gguf", "sub/eagle3-Q8_0.gguf", "a.imatrix.gguf"], "Q8_0", None),
        ([f"Q4_K_M/{name}" for name in reversed(SPLIT)], "", f"Q4_K_M/{SPLIT[0]}"),
        (["README.md"], "", None),
    ],
)
def test_a_type_chooses_a_file_as_in_llama_cpp(names: list[str], type_: str, found: str | None) -> None:
    assert choose_file(names, type_) == found


def test_short_forms(fake: FakeHub) -> None:
    names = ["a-Q8_0.gguf", "a-Q4_K_M.gguf", "mmproj-Q4_K_M.gguf"]
    fake.files = {f"owner/repo-GGUF/{name}": name.encode() for name in names}
    assert fetch("hf:owner/repo-GGUF").name == "a-Q4_K_M.gguf"
    assert fetch("hf:owner/repo-GGUF:q8_0").name == "a-Q8_0.gguf"
    assert local_path("hf:owner/repo-GGUF:Q8_0", fetch=False).endswith("a-Q8_0.gguf")
    with pytest.raises(
        ModelError, match="has no GGUF file of the type Q2_K; its GGUF files are of the types Q4_K_M, Q8_0"
    ):
        fetch("hf:owner/repo-GGUF:Q2_K")
    fake.files["owner/plain/a-Q8_0.gguf"] = b"x"
    with pytest.raises(ModelError, match=r"name a type, as in owner/plain:Q4_K_M"):
        fetch("hf:owner/plain")


@pytest.mark.parametrize("rest", ["owner", "owner/", "/repo", "owner/file.gguf", "owner/repo/file.bin", "a/b:c/d"])
def test_what_is_no_source(rest: str) -> None:
    with pytest.raises(UsageError, match="must be hf:OWNER/REPOSITORY"):
        parse(rest)


def test_a_pinned_revision(fake: FakeHub) -> None:
    source = f"hf:owner/repo@{COMMIT}/model.gguf"
    path = fetch(source)
    assert path.read_bytes() == CONTENT
    assert local_path(source, fetch=False) == str(path)
    assert COMMIT in fake.requests[0][1]
    assert fetch() == path  # by another name: linked, not fetched again
    assert fake.sent == SIZE


def test_two_programs_at_once_fetch_once(fake: FakeHub) -> None:
    fake.hold = threading.Event()
    said, paths = list[str](), list[str]()
    listing = hub.ask(parse("owner/repo/model.gguf"))

    def one() -> None:
        paths.append(hub.fetch(listing, say=lambda text: (said.append(text), fake.hold.set())))  # type: ignore[func-returns-value, union-attr]

    threads = [threading.Thread(target=one) for _ in range(2)]
    threads[0].start()
    fake.asked.wait(20)  # it has the lock
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert len(set(paths)) == 1
    assert len(paths) == 2
    assert said == ["model.gguf: another program is fetching it; waiting"]
    assert fake.sent == SIZE


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_what_is_there_and_the_next_pull_goes_on(fake: FakeHub, tmp_path: Path) -> None:
    hub = {"HF_ENDPOINT": huggingface_hub.constants.ENDPOINT, "HF_HUB_CACHE": str(tmp_path / "cache")}
    pieces = f"from edgespec.models import download; download.PIECE, download.CONNECTIONS = 9000, 1; {RUN}"
    pull = partial(Forked, "pull", SOURCE, program=pieces, environment=hub)
    held, count = threading.Event(), [0]

    def hold(length: int) -> None:
        count[0] += 1
        if count[0] == 3:
            fake.asked.clear()
            fake.hold = held

    fake.cut = hold  # type: ignore[assignment]
    with pull() as process:
        while fake.hold is None:
            assert process.poll() is None, process.stderr.read()
            fake.asked.wait(0.05)
        fake.asked.wait(20)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
        assert process.wait() == 130
    assert "the same command continues" in errors
    assert "Traceback" not in errors
    held.set()
    fake.cut, fake.sent = (lambda length: None), 0
    with pull() as process:
        assert Path(process.stdout.read().splitlines()[-1]).read_bytes() == CONTENT
    assert fake.sent <= SIZE - 3 * 9000


FOLDER = {"config.json": b"{}", "model.safetensors": CONTENT, "consolidated.safetensors": b"again", "README.md": b"hi"}


def test_a_folder_is_fetched_without_what_no_engine_reads(fake: FakeHub) -> None:
    fake.files = {f"owner/folder/{name}": content for name, content in FOLDER.items()}
    fake.files["owner/folder/additional_chat_templates/tools.jinja"] = b"{{ messages }}"  # in front of the others
    tokenizer_only = Path(local_path("hf:owner/folder", weights=False))
    assert {file.name for file in tokenizer_only.iterdir()} == {"config.json", "additional_chat_templates"}
    with pytest.raises(ModelError, match="is not fetched yet"):
        local_path("hf:owner/folder", fetch=False)
    folder = Path(local_path(find_model("owner/folder").target))
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == {
        name: FOLDER[name] for name in ("config.json", "model.safetensors")
    }
    assert local_path("hf:owner/folder", fetch=False) == str(folder)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    for wrong in (index, [], {"weight_map": {"a": ["b"]}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match="is not fetched yet"):
            local_path("hf:owner/folder", fetch=False)


def test_looking_for_a_tokenizer_leaves_a_folder_where_it_is(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.files = {f"owner/folder/{name}": content for name, content in (FOLDER | {"tokenizer.json": b"{}"}).items()}
    folder, asked = local_path("hf:owner/folder"), len(fake.requests)
    monkeypatch.setattr(fake_hub, "COMMIT", COMMIT[::-1])  # the owner has changed something
    assert local_path("hf:owner/folder", weights=False) == folder
    assert local_path("hf:owner/folder", fetch=False) == folder
    assert len(fake.requests) == asked


def test_a_folder_that_another_program_fetched_without_its_tokenizer_gets_it(fake: FakeHub) -> None:
    fake.files = {f"owner/folder/{name}": content for name, content in (FOLDER | {"tokenizer.json": b"{}"}).items()}
    for name in ("config.json", "model.safetensors"):
        folder = Path(huggingface_hub.hf_hub_download("owner/folder", name)).parent
    fake.requests.clear()
    assert local_path("hf:owner/folder", weights=False) == str(folder)
    assert (folder / "tokenizer.json").exists()
    assert not any("main" in path for _, path, _ in fake.requests)  # a newer commit would hide the weights
    assert not any("model.safetensors" in path for _, path, _ in fake.requests)


def test_a_folder_whose_fetch_was_stopped_is_not_complete(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**FOLDER, "tokenizer_config.json": b"{}"}
    fake.files = {f"owner/folder/{name}": content for name, content in files.items()}
    real = huggingface_hub.hf_hub_download

    def stopped(repository: str, name: str, **options: str) -> str:
        if name == "tokenizer_config.json":
            raise KeyboardInterrupt
        return real(repository, name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "hf_hub_download", stopped)
        with pytest.raises(KeyboardInterrupt):
            fetch("hf:owner/folder")
    with pytest.raises(ModelError, match="is not fetched yet"):
        local_path("hf:owner/folder", fetch=False)
    folder = Path(local_path("hf:owner/folder"))
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer_config.json"}


def test_what_is_not_there_is_one_line(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = list[str]()
    for source in ("hf:owner/repo/other.gguf", "hf:owner/other", "hf:owner/other/model.gguf"):
        with pytest.raises(ModelError) as caught:
            local_path(source)
        messages.append(str(caught.value))
    point_at(monkeypatch, "http://127.0.0.1:9")  # the port of "discard": nobody is there
    with pytest.raises(ModelError) as caught:
        local_path("hf:owner/more")
    messages.append(str(caught.value))
    assert [message.partition(": ")[2].partition(": ")[0] for message in messages] == [
        "cannot be fetched",
        "neither a folder here nor a repository on the hub that you may read",
        "neither a folder here nor a repository on the hub that you may read",
        "no such folder here, and it cannot be fetched from the hub",
    ]
    assert "the hub cannot be reached; is this machine online?" in messages[-1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        local_path("hf:owner/more")
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize("source", [SOURCE, "owner/repo:Q8_0", "owner/folder"])
def test_a_gated_repository_says_what_to_do_before_the_question(fake: FakeHub, run: Run, source: str) -> None:
    fake.files = {f"owner/folder/{name}": content for name, content in FOLDER.items()} | {
        f"owner/repo/model{kind}.gguf": CONTENT for kind in ("", "-Q8_0")
    }
    fake.gated = True
    for command in (["pull", source], ["run", source, "hi", "--yes"]):
        status, out, err = run(*command)
        assert (status, out, fake.sent) == (1, "", 0)
        assert "its owner asks you to agree to terms first: do so on its page on the hub, then say who you are" in err
        assert err.count("\n") == 1
    fake.gated = False
    assert run("pull", source)[0] == 0
    fake.gated = source != SOURCE  # a file by its name is always asked for
    assert run("pull", source)[0] == 0  # it is here


def catalogue(tmp_path: Path, size: int = SIZE, digest: str = "") -> str:
    path = tmp_path / "models.yaml"
    digests = f"['{digest or hashlib.sha256(CONTENT).hexdigest()}']"
    path.write_text(
        f"models:\n  - name: mine\n    target: {SOURCE}\n    files:\n"
        f"      {SOURCE}: {{bytes: {size}, sha256: {digests}}}\n"
    )
    return str(path)


@pytest.mark.parametrize("source", ["hf:owner/model", SOURCE])
def test_a_dry_run_of_convert_fetches_nothing(fake: FakeHub, run: Run, tmp_path: Path, source: str) -> None:
    header = b'{"a": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}'
    fake.files["owner/model/model.safetensors"] = len(header).to_bytes(8, "little") + header + bytes(8)
    fake.files["owner/model/config.json"] = b"{}"
    command = ["convert", source, str(tmp_path / "out.gguf"), "--to", "gguf", "--dry-run"]
    status, out, err = run(*command)
    assert (status, out, fake.sent) == (1, "", 0)
    assert err.splitlines() == [f"edgespec: {source} is not fetched yet: edgespec pull {source} does that"]
    assert run(*re.findall("edgespec (pull .*) does that", err)[0].split())[0] == 0
    assert local_path(source, fetch=False)
    if source != SOURCE:
        assert "out.gguf: about 0.00 GB as bfloat16" in run(*command)[1]


def test_a_size_that_models_yaml_does_not_state_may_be_any(fake: FakeHub, run: Run, tmp_path: Path) -> None:
    assert run("pull", "mine", "--models", catalogue(tmp_path, size=0))[0] == 0
    assert fake.sent == SIZE


def test_pull_says_what_it_would_fetch(fake: FakeHub, run: Run, tmp_path: Path) -> None:
    status, out, _ = run("pull", "mine", "--models", catalogue(tmp_path), "--dry-run")
    assert status == 0
    assert out.splitlines() == ["    0.00 GB  to fetch  owner/repo/model.gguf", "    0.00 GB  in all"]
    assert fake.sent == 0
    status, out, _ = run("pull", "mine", "--models", catalogue(tmp_path))
    assert status == 0
    assert Path(out.splitlines()[-1]).read_bytes() == CONTENT
    assert "is here" in run("pull", "mine", "--models", catalogue(tmp_path), "--dry-run")[1]


def test_a_dry_run_without_the_hub_has_the_sizes_of_models_yaml(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    command = ["pull", "mine", "--dry-run", "--models"]
    status, out, err = run(*command, catalogue(tmp_path, size=2 * 10**9))
    assert (status, out.splitlines()) == (0, [f"    2.00 GB  to fetch  {SOURCE}", "    2.00 GB  in all"])
    assert "these are the sizes in models.yaml, since the hub did not answer" in err
    assert run(*command, catalogue(tmp_path, size=0))[:2] == (1, "")


@pytest.mark.parametrize(
    ("size", "digest", "says"),
    [
        (SIZE + 1, "", "has 50000 bytes on the hub, but 50001 in models.yaml"),
        (SIZE, "0" * 64, "000000000000… in models.yaml"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_what_is_not_as_models_yaml_says_is_refused(
    run: Run, tmp_path: Path, size: int, digest: str, says: str
) -> None:
    status, out, err = run("pull", "mine", "--models", catalogue(tmp_path, size, digest))
    assert (status, out) == (1, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_checksum_of_models_yaml_counts_where_the_hub_gives_none(fake: FakeHub, run: Run, tmp_path: Path) -> None:
    fake.checksums = False
    status, _, err = run("pull", "mine", "--models", catalogue(tmp_path, digest="0" * 64))
    assert status == 1
    assert f"{hashlib.sha256(CONTENT).hexdigest()[:12]}… on the hub, but 000000000000… in models.yaml" in err
    assert fake.sent == SIZE
    assert not any(path.read_bytes() == CONTENT for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert hub.cached(parse("owner/repo/model.gguf")) is None
    assert run("models", "--installed")[1] == ""
    assert run("pull", "mine", "--models", catalogue(tmp_path))[0] == 0


def test_a_file_whose_check_was_stopped_is_not_taken_and_checked_by_the_next_pull(
    fake: FakeHub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.checksums = False

    def stopped(path: Path, progress: object) -> str:
        raise KeyboardInterrupt

    command = ["pull", "mine", "--models", catalogue(tmp_path, digest="0" * 64)]
    for delete in (["models", "--delete", "owner/repo/model.gguf", "--yes"], []):
        with monkeypatch.context() as patch:
            patch.setattr(hub, "checksum", stopped)
            assert run(*command)[0] == 130
        assert hub.cached(parse("owner/repo/model.gguf")) is None
        assert "0.00 GB, incomplete" in run("models", "--installed")[1]
        if delete:
            assert run(*delete)[0] == 0
            assert not any(path.read_bytes() == CONTENT for path in (tmp_path / "cache").rglob("*") if path.is_file())
    sent = fake.sent
    status, _, err = run(*command)
    assert (status, fake.sent) == (1, sent)
    assert "000000000000… in models.yaml" in err
    assert hub.cached(parse("owner/repo/model.gguf")) is None


def test_a_checksum_of_models_yaml_counts_without_a_pull(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "own_models_file", lambda: Path(catalogue(tmp_path, digest="0" * 64)))
    with pytest.raises(ModelError, match=r"000000000000… in models\.yaml"):
        local_path(SOURCE)
    assert fake.sent == 0


@pytest.mark.parametrize("source", ["mine", SOURCE])
def test_checksums_of_all_models_yaml_count_for_pull_and_load(
    fake: FakeHub, run: Run, tmp_path: Path, source: str
) -> None:
    models = catalogue(tmp_path, digest="0" * 64)
    assert "000000000000… in models.yaml" in run("pull", source, "--models", models)[2]
    assert fake.sent == 0
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    for planner in ("none", "auto"):  # which looks for a head first
        with pytest.raises(ModelError, match=r"000000000000… in models\.yaml"):
            edgespec.load(source, planner=planner, models_file=models)
    assert fake.sent == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["pull"], 2, "missing argument 'NAME|SOURCE…'; see edgespec pull --help"),
        (["pull", "no-such-name"], 2, "there is no model 'no-such-name'"),
        (["pull", "./model.gguf"], 2, "there is no such file here; for one on the hub write hf:OWNER/REPOSITORY/FILE"),
        (["pull", "a/b/c.gguf"], 2, "there is no such file here; for one on the hub write hf:OWNER/REPOSITORY/FILE"),
        (["pull", __file__], 2, "is a path on this machine; there is nothing to fetch"),
        (["pull", "https://hub.example/a/b"], 2, "is a web address; for a model on the hub write hf:a/b, else fetch"),
        (["run", "https://x.example/a/b/resolve/main/c.gguf?x=1", "hi"], 2, "write hf:a/b/c.gguf, else fetch"),
        (["pull", "https://x.example"], 2, "write hf:OWNER/REPOSITORY, else fetch"),
        (["pull", "smollm2-135m"], 2, "comes in a Python package"),
        (["pull", "hf:owner/other/model.gguf"], 1, "neither a folder here nor a repository on the hub"),
        (["run", "owner/re--po", "hi"], 1, "hf:owner/re--po: no such folder here, and it cannot be fetched"),
        (["run", "hf:owner/re..po", "hi"], 1, "hf:owner/re..po: no such folder here, and it cannot be fetched"),
        (["run", "hf:owner/repo.git/a.gguf", "hi"], 1, "hf:owner/repo.git/a.gguf: cannot be fetched: "),
        (["pull", "owner/repo:Q3_K_M"], 1, "has no GGUF file of the type Q3_K_M"),
        # Such as a head that was published as pytorch_model.bin.
        (["pull", "owner/eagle"], 1, "has no weights that engines read: no file model*.safetensors"),
        (["run", SOURCE, "hi"], 1, "0.00 GB are not here yet; say --yes, or fetch them first: edgespec pull"),
    ],
)
def test_bad_input_is_one_line(fake: FakeHub, run: Run, arguments: list[str], code: int, says: str) -> None:
    fake.files |= {"owner/eagle/config.json": b"{}", "owner/eagle/pytorch_model.bin": CONTENT}
    status, out, err = run(*arguments)
    assert (status, out, fake.sent) == (code, "", 0)
    assert says in err.strip().splitlines()[-1]


def test_run_fetches_when_told_to(fake: FakeHub, run: Run, smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.files["owner/repo/model.gguf"] = smollm2_tiny.read_bytes()
    monkeypatch.setattr(download, "PIECE", 16 << 20)
    status, out, err = run(
        "run", SOURCE, "hi", "--yes", "-n", "4", "--ctx", "64", "--exact", "off", "--planner", "none"
    )
    assert status == 0, err
    assert out.strip()
    assert "snapshots" not in out  # only the answer


def test_plain_decoding_fetches_no_draft(fake: FakeHub, run: Run) -> None:
    status, _, err = run("run", "big.gguf", "hi", "--draft", SOURCE, "--planner", "none", "--yes")
    assert (status, fake.sent) == (1, 0)
    assert err.splitlines()[0] == "note: the planner none does not use a draft"


def everything_in(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and ".locks" not in path.parts}


def test_models_that_were_fetched_are_listed_and_deleted_and_nothing_else(
    fake: FakeHub, run: Run, tmp_path: Path
) -> None:
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    fake.files["owner/repo/theirs.gguf"] = b"GGUF by another program"
    huggingface_hub.hf_hub_download("owner/repo", "theirs.gguf")
    (cache / "models--owner--repo" / "notes.txt").write_text("mine")
    before = everything_in(cache)
    path = Path(run("pull", "mine", "--models", catalogue(tmp_path))[1].splitlines()[-1])
    run("pull", "hf:owner/repo/theirs.gguf")  # is here already
    (row,) = json.loads(run("models", "--installed", "--json")[1])
    assert row | {"when": 0} == {"name": "owner/repo/model.gguf", "bytes": SIZE, "path": str(path), "when": 0}
    assert abs(row["when"] - time.time()) < 600
    out = run("models", "--installed")[1]
    assert str(path) in out
    assert "theirs" not in out
    status, out, err = run("models", "--delete", "owner/repo/model.gguf")
    assert (status, out) == (2, "")
    assert "no terminal to ask at" in err
    assert path.exists()
    for name in ("owner/repo/theirs.gguf", "smollm2-135m", str(path)):
        assert run("models", "--delete", name, "--yes")[0] != 0
    status, out, _ = run("models", "--delete", "mine", "--models", catalogue(tmp_path), "--yes")
    assert (status, out) == (0, "owner/repo/model.gguf is deleted\n")
    assert everything_in(cache) == before
    assert run("models", "--installed")[1] == ""


def test_a_question_is_asked_before_a_model_is_deleted(
    fake: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(run("pull", SOURCE)[1].splitlines()[-1])
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(catalogue_commands, "sys", SimpleNamespace(stdin=terminal, stderr=terminal))
    for answer, code, left in [("n\n", 130, True), ("", 130, True), ("y\n", 0, False)]:
        assert run("models", "--delete", "owner/repo/model.gguf", stdin=answer)[0] == code
        assert path.exists() == left


def test_a_fetch_that_was_cut_can_be_deleted(fake: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    monkeypatch.setattr(download, "RETRIES", 0)
    fake.cut = lambda length: 10 if fake.sent < 100 else 0
    assert run("pull", SOURCE)[0] == 1
    assert any(name.endswith(".edgespec-partial") for name in everything_in(cache))
    assert "incomplete" in run("models", "--installed")[1]
    assert run("models", "--delete", "owner/repo/model.gguf", "--yes")[0] == 0
    assert everything_in(cache) == set()


def test_bytes_that_another_revision_shares_stay(fake: FakeHub, run: Run) -> None:
    path = Path(run("pull", SOURCE)[1].splitlines()[-1])
    other = path.parents[1] / "another" / path.name
    other.parent.mkdir()
    other.symlink_to(path.resolve())
    assert run("models", "--delete", "owner/repo/model.gguf", "--yes")[0] == 0
    assert not path.exists()
    assert other.read_bytes() == CONTENT


def test_a_draft_that_another_model_uses_stays(fake: FakeHub, run: Run, tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    names = {"big": "a", "huge": "b"}
    models.write_text("models:\n" + "".join(
        f"  - {{name: {name}, target: 'hf:owner/{name}/{file}.gguf', draft: 'hf:owner/small/c.gguf'}}\n"
        for name, file in names.items()
    ))  # fmt: skip
    fake.files |= {f"owner/{name}/{file}.gguf": b"GGUF" + name.encode() for name, file in names.items()}
    fake.files["owner/small/c.gguf"] = b"GGUF small"
    options = ["--models", str(models)]
    assert run("pull", *names, *options)[0] == 0
    assert run("models", "--delete", "big", "--yes", *options)[1] == "owner/big/a.gguf is deleted\n"
    out = run("models", "--delete", "huge", "--yes", *options)[1]
    assert out == "owner/huge/b.gguf is deleted\nowner/small/c.gguf is deleted\n"


def test_two_records_at_once_are_both_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, folder = pulled._write, tmp_path / "models--owner--repo"
    monkeypatch.setattr(pulled, "_write", lambda *what: (time.sleep(0.3), write(*what)))
    names = ["owner/repo/a.gguf", "owner/repo/b.gguf"]
    threads = [threading.Thread(target=pulled.add, args=(folder, name, [(name, "")], True)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(json.loads((folder / pulled.RECORD).read_text())) == names


def test_a_record_leads_to_no_other_file(fake: FakeHub, run: Run, tmp_path: Path) -> None:
    folder = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--owner--repo"
    (folder / "snapshots").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / name).write_text("mine")
    (folder / "snapshots" / "link").symlink_to(tmp_path / "a")
    (folder / "snapshots" / "folder").symlink_to(tmp_path)
    (folder / "snapshots" / "own").write_text("fetched")
    others = [os.path.relpath(tmp_path / "b", folder), str(tmp_path / "b"), "snapshots/folder/b"]
    files = [
        ["snapshots/link", ""],
        ["snapshots/own", ""],
        *([other, ""] for other in others),
        ["x", str(tmp_path / "b")],
    ]
    (folder / pulled.RECORD).write_text(json.dumps({"owner/repo/x.gguf": [1, files]}))
    assert run("models", "--delete", "owner/repo/x.gguf", "--yes")[0] == 0
    assert not (folder / "snapshots" / "own").exists()
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["mine", "mine"]
    (folder / pulled.RECORD).write_text("[1, 2]")
    assert run("models", "--installed")[0] == 0


HEADS = {
    "big-Q4_K_M.gguf": b"GGUF big", "mtp-big-Q4_K_M.gguf": b"GGUF head", "mtp-big-Q8_0.gguf": b"GGUF other head",
    "mmproj-big.gguf": b"GGUF eyes",
}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "model", "found"),
    [
        (["mtp-a-Q8_0.gguf", "mtp-a-Q4_0.gguf"], "a-Q4_K_M.gguf", "mtp-a-Q4_0.gguf"),  # as many bits
        (["mtp-a-Q4_0.gguf", "mtp-a-Q4_K_M.gguf"], "a-Q4_K_M.gguf", "mtp-a-Q4_K_M.gguf"),
        (["mtp-a-Q4_0.gguf", "mtp-a-BF16.gguf"], "a-F16.gguf", "mtp-a-BF16.gguf"),
        (["mtp-a.gguf", "sub/mtp-a.gguf"], "sub/a.gguf", "sub/mtp-a.gguf"),  # the nearest folder
        (["mtp-a.gguf"], "sub/a.gguf", "mtp-a.gguf"),
        (["other/mtp-a.gguf", "eagle3-a.gguf", "mtp-a.txt", "a-mtp.gguf"], "a.gguf", None),
        (["mtp-a-00002-of-00002.gguf", "mtp-a-00001-of-00002.gguf"], "a.gguf", "mtp-a-00001-of-00002.gguf"),
    ],
)
def test_of_several_heads_the_nearest_is_taken_as_in_llama_cpp(names: list[str], model: str, found: str | None) -> None:
    assert hub.choose_head([*names, model], model, "mtp-") == found


def test_pull_fetches_the_head_beside_a_model_and_run_finds_it(fake: FakeHub, run: Run) -> None:
    fake.files = {f"owner/repo/{name}": content for name, content in HEADS.items()}
    source = "hf:owner/repo/big-Q4_K_M.gguf"
    out = run("pull", source, "--dry-run")[1].splitlines()
    assert [line.rpartition("/")[2] for line in out[:-1]] == ["big-Q4_K_M.gguf", "mtp-big-Q4_K_M.gguf"]
    assert local_head(source) is None
    assert run("pull", source, "--no-draft")[0] == 0
    assert local_head(source) is None
    status, out, err = run("pull", "owner/repo:Q4_K_M")
    assert (status, err) == (0, "")
    assert Path(out.splitlines()[-1]).read_bytes() == HEADS["mtp-big-Q4_K_M.gguf"]
    assert local_head(source) == local_head("hf:owner/repo:Q4_K_M") == out.splitlines()[-1]
    assert local_head("hf:owner/repo/mtp-big-Q4_K_M.gguf") is None  # a head has none


@pytest.mark.parametrize(
    ("arguments", "fetched"),
    [
        (["run", "MODEL", "hi"], True),
        (["run", "MODEL", "hi", "--planner", "none"], False),
        (["run", "MODEL", "hi", "--draft", "hf:owner/repo/mtp-big-Q8_0.gguf"], False),
        (["pair", "MODEL", "small.gguf"], False),
        (["datastore", "build", "out.store", __file__, "--model", "MODEL"], False),
    ],
)
def test_a_models_head_is_fetched_with_it_where_it_drafts(
    fake: FakeHub, run: Run, arguments: list[str], fetched: bool
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    fake.files = {f"owner/repo/{name}": content for name, content in HEADS.items()}
    model = "hf:owner/repo/big-Q4_K_M.gguf"
    assert run(*(model if one == "MODEL" else one for one in arguments), "--yes")[0] == 1  # it is no GGUF
    assert (Path(local_path(model, fetch=False)).parent / "mtp-big-Q4_K_M.gguf").exists() == fetched


def test_a_head_of_a_kind_that_cannot_be_used_is_told_and_not_fetched(fake: FakeHub, run: Run) -> None:
    fake.files["owner/repo/dflash-big-Q4_K_M.gguf"] = b"GGUF"
    status, out, err = run("pull", SOURCE)
    assert (status, out.count("\n")) == (0, 2)
    assert err.startswith("note: dflash-big-Q4_K_M.gguf: a head of a kind that no engine here can use")


def test_a_head_whose_bytes_are_wrong_or_cut_is_one_line_and_no_draft(
    fake: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "RETRIES", 0)
    fake.files["owner/repo/eagle3-model.gguf"] = random.Random(2).randbytes(SIZE)
    fake.wrong = lambda content: content if content == CONTENT else b"x" * len(content)
    status, _, err = run("pull", SOURCE)
    assert (status, err.count("\n")) == (1, 1)
    assert "eagle3-model.gguf" in err
    assert local_path(SOURCE, fetch=False)
    assert local_head(SOURCE) is None
    fake.wrong, before = (lambda content: content), fake.sent
    fake.cut = lambda length: 4000 if fake.sent - before < SIZE // 2 else 0
    assert run("pull", SOURCE)[0] == 1
    assert local_head(SOURCE) is None
    fake.cut = lambda length: None
    assert run("pull", SOURCE)[0] == 0
    assert Path(local_head(SOURCE) or "").read_bytes() == fake.files["owner/repo/eagle3-model.gguf"]


def test_a_draft_that_is_the_head_is_fetched_once(fake: FakeHub, run: Run, tmp_path: Path) -> None:
    fake.files = {f"owner/repo/{name}": content for name, content in HEADS.items()}
    models = tmp_path / "models.yaml"
    names = {"target": "big-Q4_K_M.gguf", "draft": "mtp-big-Q4_K_M.gguf"}
    sources = ", ".join(f"{role}: 'hf:owner/repo/{name}'" for role, name in names.items())
    models.write_text(f"models:\n  - {{name: big, {sources}}}\n")
    assert len(run("pull", "big", "--models", str(models), "--dry-run")[1].splitlines()) == 3


def test_a_head_is_deleted_with_the_last_model_that_it_is_for(fake: FakeHub, run: Run) -> None:
    fake.files = {f"owner/repo/{name}": content for name, content in HEADS.items()}
    fake.files["owner/repo/big-Q8_0.gguf"] = b"GGUF larger"
    assert run("pull", "hf:owner/repo/big-Q4_K_M.gguf", "hf:owner/repo/big-Q8_0.gguf")[0] == 0
    assert (
        run("models", "--delete", "hf:owner/repo/big-Q8_0.gguf", "--yes")[1] == "owner/repo/big-Q8_0.gguf is deleted\n"
    )
    assert local_head("hf:owner/repo/big-Q4_K_M.gguf")
    out = run("models", "--delete", "hf:owner/repo/big-Q4_K_M.gguf", "--yes")[1].splitlines()
    assert [line.split(" ")[0].rpartition("/")[2] for line in out] == [
        "big-Q4_K_M.gguf", "mtp-big-Q4_K_M.gguf", "mtp-big-Q8_0.gguf",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", SOURCE, "out.gguf", "--to", "gguf", "--quant", "Q4_0", "--yes"],
        ["pair", SOURCE, "draft.gguf", "--yes"],
        ["doctor", SOURCE, "--draft", "draft.gguf", "--yes"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_command_fetches_in_silence(run: Run, fake: FakeHub, arguments: list[str]) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")  # what is fetched is no GGUF
    assert re.search("fetching .*model.gguf", err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "mine"],
        ["pair", "mine", "small.gguf"],
        ["pair", "big.gguf", "mine"],
        ["bench", "prompts.jsonl", "--model", "mine"],
        ["bench", "prompts.jsonl", "--model", "big.gguf", "--draft", "mine", "--planners", "specexec"],
        ["datastore", "build", "out.store", "prompts.jsonl", "--model", "mine"],
        ["run", "smollm2-135m", "hi", "--draft", "mine"],
        ["run", "with-draft", "hi", "--planner", "none", "--approximate", "cascade:0.5"],
        ["bench", "prompts.jsonl", "--model", "with-draft", "--planners", "none", "--approximate", "cascade:0.5"],
    ],
    ids=" ".join,
)
def test_a_command_asks_before_it_fetches(
    run: Run, fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "Hi"}\n', "utf-8")
    models = Path(catalogue(tmp_path))
    with models.open("a", encoding="utf-8") as file:
        file.write(f"  - {{name: with-draft, target: 'file:big.gguf', draft: '{SOURCE}'}}\n")
    status, out, err = run(*arguments, "--models", str(models))
    assert (status, out, fake.sent) == (1, "", 0)
    assert "owner/repo/model.gguf: 0.00 GB are not here yet; say --yes" in err
    missing = "with-draft" if "with-draft" in arguments else "mine"
    assert err.endswith(f"edgespec pull {missing} --models {models}\n")
    status, _, err = run(*arguments, "--models", str(models), "--yes")
    assert (status, fake.sent) == (1, SIZE)  # what is fetched is no GGUF
    assert "fetching owner/repo/model.gguf: 0.00 GB\n" in err


@pytest.mark.parametrize("source", [SOURCE, "hf:owner/folder"])
def test_convert_asks_before_it_fetches(fake: FakeHub, run: Run, tmp_path: Path, source: str) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")
    fake.files |= {f"owner/folder/{name}": content for name, content in FOLDER.items()}
    fake.files["owner/repo/mtp-model.gguf"] = b"GGUF head"
    (tmp_path / "stub.py").touch()
    command = ["convert", source, str(tmp_path / "out.gguf"), "--to", "gguf", "--quant", "Q4_0"]
    command += [] if source == SOURCE else ["--converter", str(tmp_path / "stub.py")]
    status, out, err = run(*command)
    assert (status, out, fake.sent) == (1, "", 0)
    assert f"are not here yet; say --yes, or fetch them first: edgespec pull {source}" in err
    status, _, err = run(*command, "--yes")
    assert status == 1  # what is fetched are no weights
    assert f"fetching {source[3:]}" in err
    assert local_path(source, fetch=False)
    assert local_head(SOURCE) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([SOURCE], "nothing to do: say --quant, --for or --drop-layers"),
        ([SOURCE, "--quant", "Q9_9"], "there is no type 'Q9_9'"),
        ([SOURCE, "--quant", "Q4_0", "--trust"], "--trust is for model folders"),
        ([SOURCE, "--quant", "Q4_0", "--dtype", "float16"], "--dtype is for model folders"),
        (["hf:owner/folder", "--requantise"], "--requantise is for GGUFs"),
        (["hf:owner/folder", "--converter", "no-such.py"], "no-such.py: there is no such file; --converter takes"),
    ],
)
def test_what_convert_refuses_is_not_fetched(fake: FakeHub, run: Run, arguments: list[str], says: str) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")
    source, *options = arguments
    status, _, err = run("convert", source, "out.gguf", "--to", "gguf", *options, "--yes")
    assert (status, fake.sent) == (2, 0)
    assert says in err.splitlines()[-1]


def test_convert_names_a_missing_package_before_it_fetches(
    fake: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "find_spec", lambda name: None)
    status, _, err = run("convert", "hf:owner/folder", "out.gguf", "--to", "gguf", "--yes")
    assert (status, fake.requests) == (1, [])
    assert "llama.cpp's converter needs the package 'torch'" in err


@pytest.fixture
def parts(tmp_path: Path, fake: FakeHub) -> list[str]:
    """A split GGUF on the hub, with tokens in its first part."""
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")
    from gguf_writer import begin, finish

    writer = begin(tmp_path / "big.gguf", "llama", 2, block_count=1, embedding_length=8, token_list=["word"] * 900)
    for i in range(4):
        writer.add_tensor(f"blk.0.t{i}.weight", np.zeros(30_000, np.float32))
    finish(writer)
    names = sorted(file.name for file in tmp_path.glob("big-*.gguf"))
    fake.files |= {f"owner/repo/{name}": (tmp_path / name).read_bytes() for name in names}
    return names


@pytest.mark.parametrize("ranges", [True, False])
def test_of_a_file_on_the_hub_only_headers_are_read(
    fake: FakeHub, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    """More of those that the first bytes do not hold; each looks like the whole file, and the cache gets nothing."""
    monkeypatch.setattr(hub, "HEADER", 2000)
    fake.ranges = ranges
    with hub.without_weights(parse(f"owner/repo/{parts[0]}")) as path:
        assert [file.name for file in sorted(Path(path).parent.iterdir())] == parts
        for name in parts:
            made = str(Path(path).with_name(name))
            assert tensor_names(made) == tensor_names(str(tmp_path / name))
            assert os.path.getsize(made) == os.path.getsize(tmp_path / name)
            with open(made, "rb") as file:
                assert any(file.read(4096))
    assert not Path(path).exists()
    assert not (tmp_path / "cache").exists()
    asked = [asked for method, _, asked in fake.requests if method == "GET"]
    assert asked[:2] == ["bytes=0-1999", "bytes=2000-7999"]
    if ranges:
        assert fake.sent < 40_000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF" + bytes(9000), "is damaged or cut off"),
        (b"<!doctype html>" + bytes(9000), "is not a GGUF file but a web page"),
    ],
)
def test_what_is_no_gguf_on_the_hub_is_said_by_its_name(fake: FakeHub, content: bytes, says: str) -> None:
    fake.files["owner/repo/model.gguf"] = content
    with (
        pytest.raises(ModelError, match=rf"^hf:owner/repo/model\.gguf: {says}"),
        hub.without_weights(parse("owner/repo/model.gguf")),
    ):
        pass


def test_a_model_of_the_hub_runs_elsewhere_as_the_same_file_here(fake: FakeHub, smollm2: Path) -> None:
    fake.files["owner/repo/other.gguf"] = smollm2.read_bytes()
    called, machine = find_machine("macbook-24")
    found = predict("hf:owner/repo/other.gguf", machine, called, ask=True)
    assert fake.sent < 4 * hub.HEADER < smollm2.stat().st_size
    right = predict(str(smollm2), machine, called)
    assert (found.here, found.size, found.found) == (False, right.size, right.found)
