"""`edgespec doctor --machine`: a model that is not here, on a machine that is not here."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from gguf_writer import finish

from edgespec.cli.commands import cli
from edgespec.errors import ModelError, UsageError
from edgespec.machine import described
from edgespec.machine.described import as_yaml, describe, find_machine, named, with_measured, with_speeds
from edgespec.machine.measurements import OFF, remember
from edgespec.machine.this_machine import this_machine

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp.memory import planning

from edgespec.measure import predictor
from edgespec.measure.outlook import draft_passes
from edgespec.measure.predictor import Elsewhere, faster, path_of, predict
from edgespec.measure.report import report
from edgespec.models.registry import BUILT_IN, find_model, read_models
from edgespec.models.shapes import file_of

ENTRIES = named()
NEEDED = {"memory_speed", "operations", "disk"}


@pytest.fixture(scope="module", autouse=True)
def _shapes_are_written_and_rehearsed_once() -> Iterator[None]:
    """What llama.cpp's buffers take depends on a shape and on sizes, not on the machine."""
    written, really = dict[str, str](), planning.rehearse
    known = cache(lambda path, sizes, target: really(path, sizes, 1 << 60, target))

    def rehearse(path: str, sizes: Sequence[Any], free: int, target: str = "") -> Any:
        return known(path, tuple(sizes), target) if free > 1 << 30 else really(path, sizes, free, target)

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def file(shape: Any) -> Iterator[str]:
            key = json.dumps(shape)
            if key not in written:
                written[key] = stack.enter_context(file_of(shape))
            yield written[key]

        patch.setattr(predictor, "file_of", file)
        patch.setattr(planning, "rehearse", rehearse)
        patch.setattr(planning, "loaded_tensors", cache(planning.loaded_tensors))
        yield


@cache
@cache
def on(model: str, machine: str, **changes: Any) -> Elsewhere:
    called, described = find_machine(machine)
    return predict(model, replace(described, **changes), called)


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """A file with a machine of machines.yaml, changed."""

    def write(name: str, **changes: Any) -> str:
        entry = ENTRIES[name] | changes
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"machines": [{key: value for key, value in entry.items() if value != "gone"}]}))
        return str(path)

    return write


@pytest.mark.parametrize("name", ENTRIES)
def test_every_named_machine_has_all_speeds_and_a_source_for_each_figure(name: str) -> None:
    _, machine = find_machine(name)
    sources = ENTRIES[name]["sources"]
    assert min(machine.memory_speed, machine.operations, machine.disk.speed) > 0
    assert sources.keys() >= NEEDED
    for gpu in machine.gpus:
        assert min(gpu.memory_speed, gpu.operations, gpu.limit) > 0
        assert gpu.shared or gpu.link_speed > 0
        assert gpu.memory_speed >= machine.memory_speed
        assert {"gpus", "gpus.memory_speed"} & sources.keys()
    assert machine.disk.speed < machine.memory_speed
    assert machine.free < machine.memory


@pytest.mark.parametrize(
    ("machine", "layers"), [("macbook-24", "some"), ("laptop-32", "none"), ("rtx4090-64", "some"), ("studio-64", "all")]
)
def test_a_70b_that_is_not_here(machine: str, layers: str) -> None:
    found = on("llama-3.3-70b", machine)
    first = found.found[0]
    placed, speeds = first.where.placed, first.tokens_per_second
    assert not found.here
    assert "GiB, not here" in report(found)
    assert placed.layers == 80
    assert {"none": 0, "all": 80}.get(layers, placed.on_device) == placed.on_device
    assert (layers == "some") == (0 < placed.on_device < 80)
    assert first.where.exact == (layers == "none")
    assert speeds["none"] == pytest.approx(1 / first.passes[0].seconds)
    assert first.passes[0].seconds >= first.streamed / found.described.disk.speed
    assert "computed, not measured" in report(found)


@pytest.mark.parametrize(("machine", "reads"), [("macbook-24", True), ("studio-64", False), ("rtx4090-64", False)])
def test_a_draft_is_promised_only_where_reading_takes_longer_than_a_row_a_pass(machine: str, reads: bool) -> None:
    """On Metal 8 rows took 7.4 times as long as one (github.com/ggml-org/llama.cpp/issues/25250)."""
    found = on("llama-3.3-70b", machine)
    one, *trees = found.found[0].passes
    assert bool(trees) == (found.found[0].tokens_per_second.keys() > {"none"}) == reads
    assert all(tree.nodes * (one.seconds - one.waited) <= tree.seconds for tree in trees)
    assert ("with draft tokens not known: what rows cost there was not measured" in report(found)) == (not reads)


def test_trees_are_counted_where_reading_takes_twice_as_long_as_computing_their_rows() -> None:
    """By the published cost of rows on a Mac's GPU; of a processor none is known."""
    disk = find_machine("macbook-24")[1].disk
    slow, fast = (on("llama-3.3-70b", "macbook-24", disk=replace(disk, speed=n * disk.speed)).found[1] for n in (1, 3))
    assert [made.nodes for made in slow.passes] == [1, 8, 65]
    assert [made.nodes for made in fast.passes] == [1, 8]
    assert [made.nodes for made in on("llama-3.3-70b", "laptop-32").found[0].passes] == [1]


def test_a_tree_takes_as_many_draft_passes_as_tokens_are_expected_to_be_accepted() -> None:
    """With 7 draft tokens the pair of docs/measured.md made 4.1 draft passes, and 3.5 tokens."""
    assert [draft_passes(nodes) for nodes in (1, 2, 8, 65)] == [0, 1, 3, 8]


@pytest.mark.parametrize("tried", [True, False])
def test_who_computes_the_experts_that_a_mac_reads_counts(tried: bool) -> None:
    gpus = tuple(replace(gpu, pools=tried) for gpu in find_machine("macbook-24")[1].gpus)
    usual, slow = (
        on("gpt-oss-20b", "macbook-24", free=9 << 30, gpus=gpus, memory_speed=speed).found[0] for speed in (1e11, 1e8)
    )
    assert usual.where.placed.on_device == 24 * tried
    computing = [one.passes[0].seconds - one.passes[0].waited for one in (usual, slow)]
    assert (computing[1] < 2 * computing[0]) == tried  # the processor's speed hardly matters


def test_engines_are_compared_by_planners_that_are_known_for_both() -> None:
    first, other = on("llama-3.3-70b", "rtx4090-64").found
    assert other.tokens_per_second["specexec"] > first.tokens_per_second["none"] > other.tokens_per_second["none"]
    assert faster([first, other]) == ""


def test_more_memory_and_a_faster_disk_are_never_slower() -> None:
    seconds = [on("qwen2.5-32b", "laptop-32", free=gib << 30).found[0].passes[0].seconds for gib in (8, 12, 28)]
    assert seconds == sorted(seconds, reverse=True)
    _, laptop = find_machine("laptop-32")
    disk = replace(laptop.disk, speed=2 * laptop.disk.speed)
    fast = on("qwen2.5-32b", "laptop-32", free=12 << 30, disk=disk).found[0]
    assert fast.passes[0].seconds == pytest.approx(seconds[1] / 2)


def test_a_mixture_reads_only_the_experts_of_a_pass() -> None:
    """Of a dense model of this size a pass reads all."""
    found = on("gpt-oss-20b", "desktop-64").found[0]
    assert 0.1 < found.passes[0].seconds * 62.7e9 / (found.stays * 0.9) < 0.5
    less = on("gpt-oss-20b", "laptop-32", free=8 << 30).found[0]
    assert [made.read for made in less.passes] == sorted(made.read for made in less.passes)
    assert 0 < 4 * less.passes[0].read < less.passes[-1].read


@pytest.mark.parametrize(
    ("model", "machine", "rough"),
    [("gpt-oss-20b", "laptop-32", True), ("gpt-oss-20b", "studio-64", False), ("qwen3-14b", "laptop-32", False)],
)
def test_a_speed_with_experts_on_a_processor_is_called_rough(model: str, machine: str, rough: bool) -> None:
    assert ("with experts on a processor only roughly" in report(on(model, machine))) == rough


def test_what_lies_in_a_cards_pools_is_not_read_and_what_they_lack_comes_over_its_link() -> None:
    _, machine = find_machine("rtx3060-32")
    link = machine.gpus[0].link_speed
    fast, slow, none = (
        on("gpt-oss-120b", "rtx3060-32", gpus=gpus).found[0].passes[0]
        for gpus in (machine.gpus, (replace(machine.gpus[0], link_speed=link / 100),), ())
    )
    assert fast.read == slow.read < none.read
    assert fast.seconds < none.seconds
    assert fast.seconds - fast.waited < slow.seconds - slow.waited


def test_on_a_mac_the_disk_brings_the_experts_that_do_not_fit() -> None:
    _, mac = find_machine("macbook-24")
    found, fast = (
        on("gpt-oss-120b", "macbook-24", disk=replace(mac.disk, speed=speed)).found[0].passes[0] for speed in (1e9, 2e9)
    )
    assert found.seconds == pytest.approx(2 * fast.seconds)
    assert found.seconds == pytest.approx(found.read / 1e9)


def test_a_card_that_must_copy_is_predicted_for_pytorch_too() -> None:
    first, other = on("llama-3.3-70b", "rtx3060-32").found
    assert (first.where.engine, other.where.engine) == ("llamacpp", "torch")
    assert other.copied > 30e9
    assert other.passes[0].seconds >= other.copied / 25e9
    assert "torch" in faster(on("llama-3.3-70b", "rtx3060-32", memory_speed=1e10).found)
    assert len(on("qwen3-8b", "rtx4090-64").found) == 1  # all of it is on the card


def test_a_processor_reads_no_embeddings_where_a_card_has_the_output_that_they_are() -> None:
    machine = replace(find_machine("rtx4090-64")[1], memory_speed=1.0)
    found = predict("gemma-4-e2b", machine, "").found[0]
    assert found.where.placed.on_device == found.where.placed.layers
    assert found.passes[0].seconds < 1


def test_input_embeddings_take_no_memory_of_a_card_that_copies_layers() -> None:
    """2.1 GB, four layers of this model; a card that holds all layers holds them, too."""
    _, other = on("llama-3.3-70b", "rtx4090-64").found
    assert other.where.placed.streamed == 46


@pytest.mark.parametrize("machine", ["macbook-24", "rtx4090-64"])
def test_a_context_as_trained_takes_its_memory_on_every_engine(machine: str) -> None:
    called, described = find_machine(machine)
    trained, stated = (predict("llama-3.3-70b", described, called, context_length=n).found for n in (0, 131072))
    assert len(trained) == 2
    for one, two in zip(trained, stated, strict=True):
        assert (one.stays, one.copied, bool(one.cannot_run)) == (two.stays, two.copied, bool(two.cannot_run))


def test_two_cards_hold_more_layers_than_one(written: Callable[..., str]) -> None:
    """What lies on which is said, and a slow card takes its time for its own layers only."""
    (card,) = ENTRIES["rtx3060-32"]["gpus"]
    _, machine = find_machine(written("rtx3060-32", gpus=[card, card | {"name": "CUDA1"}]))
    (alone, first), (both, second) = (
        on("llama-3.3-70b", "rtx3060-32").found,
        predict("llama-3.3-70b", machine, "").found,
    )
    for one, two in ((alone, both), (first, second)):
        assert one.where.placed.shares == ()
        assert [name for _, name in two.where.placed.shares] == ["CUDA0", "CUDA1"]
        assert two.passes[0].seconds < one.passes[0].seconds
    assert first.where.placed.on_device == second.where.placed.on_device == 80
    each = second.copied / 2 / 25e9  # both links are in use
    assert second.passes[0].seconds == pytest.approx(each, rel=0.05)
    assert each < first.copied / 25e9 / 2
    shares = "{} of 80 layers on CUDA0, {} of 80 layers on CUDA1, ".format(*[n for n, _ in both.where.placed.shares])
    assert shares in both.where.line
    gpus = (machine.gpus[0], replace(machine.gpus[1], memory_speed=machine.gpus[1].memory_speed / 10))
    fast, slow = (predict("qwen3-14b", replace(machine, gpus=some), "").found[0] for some in (machine.gpus, gpus))
    layers = {name: count for count, name in slow.where.placed.shares}
    assert slow.passes[0].seconds > fast.passes[0].seconds * (1 + 8 * layers["CUDA1"] / 40)


def test_a_model_that_is_here_is_planned_from_its_file(smollm2: Path) -> None:
    found = on(str(smollm2), "macbook-16")
    assert found.here
    assert found.found[0].where.placed.on_device == found.found[0].where.placed.layers == 30
    assert "not here" not in report(found)


def test_a_model_that_does_not_fit_is_one_line_and_exit_code_1(written: Callable[..., str]) -> None:
    found = asked("doctor", "llama-3.3-70b", "--machine", written("laptop-32", memory="4G", free="2G"))
    assert found.exit_code == 1
    assert "this cannot run, because 1.90 GiB of memory are too little" in found.output


def test_a_speed_that_is_not_known_is_no_speed(written: Callable[..., str]) -> None:
    found = asked("doctor", "qwen3-8b", "--machine", written("laptop-32", memory_speed=0))
    assert found.exit_code == 0
    assert "not known: the machine's description lacks the processor: memory_speed and operations" in found.output


def test_json_has_the_machine_and_every_engine() -> None:
    found = json.loads(asked("doctor", "llama-3.3-70b", "--machine", "macbook-24", "--json").output)
    assert found["described"]["platform"] == "darwin"
    engines = [one["where"]["engine"] for one in found["found"]]
    assert engines == ["llamacpp", "mlx"]
    assert all(one["computed"] and one["passes"] for one in found["found"])


@pytest.mark.parametrize("few_models", [{"qwen3-8b", "llama-3.3-70b"}], indirect=True)
def test_models_fit_another_machine(few_models: None) -> None:
    lines = asked("models", "--fit", "--machine", "macbook-16").output.splitlines()
    at = {line.split()[0]: lines[i + 1] for i, line in enumerate(lines[:-1]) if line and not line.startswith(" ")}
    assert "stays in memory" in at["qwen3-8b"]
    assert "GB per pass" in at["llama-3.3-70b"]
    assert list(at).index("qwen3-8b") < list(at).index("llama-3.3-70b")
    assert "computed, not measured" in lines[-1]


def test_a_head_is_predicted_by_the_tokens_of_a_head(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called, machine = find_machine("laptop-32")
    machine = replace(machine, memory_speed=1e18)  # operations limit every pass, so what rows cost is known

    def speeds() -> dict[str, float]:
        (found,) = predict(str(smollm2), machine, called, draft=str(smollm2)).found
        return dict(found.tokens_per_second)

    by_model = speeds()
    monkeypatch.setattr(predictor, "is_head", lambda path: True)
    by_head = speeds()
    assert by_head["specexec"] < by_model["specexec"]
    assert by_head["sssd"] == by_model["sssd"]


@pytest.mark.parametrize("draft", ["head", "layers"])
def test_a_draft_without_a_file_is_refused_by_its_name(draft: str) -> None:
    found = asked("doctor", "qwen3-8b", "--machine", "laptop-32", "--draft", draft)
    assert isinstance(found.exception, UsageError)
    assert str(found.exception).startswith(f"--draft {draft} goes without --machine")


@pytest.mark.parametrize("few_models", [{"qwen3-8b"}], indirect=True)
def test_a_folder_among_the_models_hides_no_other(few_models: None, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "models.yaml").write_text("models:\n  - {name: mine, target: 'file:folder'}\n")
    found = asked("models", "--fit", "--machine", "macbook-16", "--models", str(tmp_path / "models.yaml"))
    assert found.exit_code == 0
    assert "folder is a folder; speeds are computed for GGUF files" in found.output
    assert "qwen3-8b" in found.output


@pytest.mark.parametrize(("arch", "exact"), [("lfm2", False), ("mamba2", False), ("falcon-h1", False), ("", True)])
def test_only_models_without_recurrent_layers_are_exact(arch: str, exact: bool, smollm2: Path, tmp_path: Path) -> None:
    from hybrid_files import write_hybrid

    path = write_hybrid(tmp_path / "tiny.gguf", arch) if arch else smollm2
    assert on(str(path), "laptop-32").found[0].where.exact == exact


def test_this_machine_is_described_in_the_form_that_is_read(smollm2: Path, tmp_path: Path) -> None:
    machine = this_machine()
    (tmp_path / "mine.yaml").write_text(as_yaml(describe(machine, str(smollm2), operations=3e11)))
    called, found = find_machine(str(tmp_path / "mine.yaml"))
    assert "measured here" in called
    speeds = {"memory_speed": found.memory_speed, "operations": 3e11, "disk": found.disk}
    assert found == replace(machine, used=0, **speeds)  # type: ignore[arg-type]
    assert found.memory_speed > 0


def test_this_machine_is_described_as_json(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is read, too, as YAML."""
    monkeypatch.setattr(predictor, "measured_operations", lambda path: 3e11)
    (tmp_path / "mine.json").write_text(asked("doctor", str(smollm2), "--describe", "--json").stdout)
    assert json.loads((tmp_path / "mine.json").read_text())["machines"][0]["operations"] == 3e11
    assert find_machine(str(tmp_path / "mine.json"))[1].operations == 3e11


def test_cards_of_one_name_are_numbered(written: Callable[..., str]) -> None:
    (card,) = ENTRIES["rtx3060-32"]["gpus"]
    named = [card, card | {"name": "other"}, card]
    _, machine = find_machine(written("rtx3060-32", gpus=named))
    assert [gpu.name for gpu in machine.gpus] == [f"{card['name']}-0", "other", f"{card['name']}-1"]


def test_speeds_that_describe_has_measured_are_kept_for_the_next_plans(
    smollm2_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(described, "machine_is_busy", lambda: False)
    blank, entry = this_machine(), describe(this_machine(), str(smollm2_tiny), operations=3e11)
    kept = with_speeds(blank, "Apple M4")
    assert (kept.operations, kept.memory_speed) == (3e11, entry["machines"][0]["memory_speed"])
    remember(described._about_speeds(), ["fast", 3e11])
    assert with_speeds(blank, "Apple M4").operations == find_machine("macbook-16")[1].operations


def test_only_speeds_that_are_not_known_are_measured(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = find_machine("laptop-32")[1]
    blank = replace(machine, memory_speed=0.0, operations=0.0, disk=replace(machine.disk, speed=0.0))
    found = with_measured(blank, str(smollm2_tiny))
    assert min(found.memory_speed, found.operations) > 0
    assert with_measured(blank, str(smollm2_tiny.parent)).disk.speed == 0  # a folder cannot be read
    monkeypatch.setattr(described, "_shortest", lambda work: 1 / 0)
    assert with_measured(machine, "nowhere") == machine


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"memry": "16G"}, "unknown key 'memry'; did you mean memory"),
        ({"memory": "16 apples"}, "memory: '16 apples' is not a size"),
        ({"free": "99G"}, "free is 106300440576, but memory only"),
        ({"cores": "many"}, "cores is 'many', but must be a whole number"),
        ({"cores": -1}, "cores is -1, but must be a finite number, and not below 0"),
        ({"memory_speed": float("nan")}, "memory_speed is nan, but must be a finite number"),
        (
            {"memory_speed": float("inf"), "operations": float("inf")},
            "memory_speed is inf, but must be a finite number",
        ),
        ({"operations": "-1e9"}, "operations is -1000000000.0, but must be a finite number"),
        ({"disk": {"speed": "-1e9"}}, "disk: speed is -1000000000.0, but must be a finite number"),
        (
            {"gpus": [{"name": "x", "shared": False, "free": 0, "link_speed": "-1e9"}]},
            "gpus: link_speed is -1000000000.0",
        ),
        ({"memory": "gone"}, "memory is missing"),
        ({"disk": {"spd": 1}}, "disk: unknown key 'spd'; did you mean speed?"),
        ({"gpus": [{"name": "x"}]}, "gpus.0.shared is missing"),
        ({"gpus": "none"}, "gpus: 'none' must be a mapping"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_and_exit_code_2(
    changes: dict[str, Any], line: str, written: Callable[..., str]
) -> None:
    path = written("laptop-32", **changes)
    with pytest.raises(UsageError) as error:
        find_machine(path)
    text = str(error.value)
    assert text.startswith(path)
    assert line in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [", "line 1: is not YAML"),
        ("a: 1", "key machines"),
        ("machines: []", "has 0 machines"),
        ("machines: [foo]", "a machine is 'foo', but must be a mapping"),
        ("- 1", "mapping"),
        ("machines: 2024-13-45", "is not YAML: month must be"),
        ("machines: " + 1000 * "[", "is not YAML"),
    ],
)
def test_a_file_of_another_form(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=line) as error:
        find_machine(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("4090", "rtx4090-64 or rtx4090-laptop-32"), ("RTX 3060", "rtx3060-32 or rtx3060ti-32"), ("M3 Pro", "m3-pro-18")],
)
def test_a_machine_is_found_by_its_chip(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=rf"there is no machine '{name}'; did you mean {near}"):
        find_machine(name)


@pytest.mark.parametrize("command", ["doctor", "models"])
def test_all_machines_are_listed(command: str) -> None:
    shown = asked(command, "--machine", "list")
    assert (shown.exit_code, [line.split()[0] for line in shown.output.splitlines()]) == (0, [*ENTRIES])
    assert all(entry["description"] in shown.output for entry in ENTRIES.values())
    assert "--machine list" in " ".join(asked(command, "--help").output.split())


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="did you mean macbook-24"):
        find_machine("macbok-24")
    with pytest.raises(UsageError, match=r"--machine list shows all names \(or a file of"):
        find_machine("zzz")
    with pytest.raises(UsageError, match="only prints this machine: leave out --machine"):
        raise asked("doctor", "--describe", "--machine", "macbook-24").exception or AssertionError
    for arguments in (["doctor", "--backend", "mlx"], ["doctor", "--exact", "wide"], ["models", "--memory", "16G"]):
        found = asked(*arguments, "--machine", "macbook-24")
        assert isinstance(found.exception, UsageError)


def test_a_name_without_shape_or_file_is_one_line(tmp_path: Path) -> None:
    found = asked("doctor", "file:no.gguf", "--machine", "macbook-24")
    assert "no.gguf" in str(found.exception)
    assert "\n" not in str(found.exception)
    with pytest.raises(ModelError, match=r"models\.yaml has no shape of it"):
        on("hf:some/repository/x.gguf", "macbook-24")  # as the list of models does, which asks no hub


def test_an_error_names_the_model_and_not_the_file_made_of_its_shape() -> None:
    entry = find_model("qwen3-8b")
    with pytest.raises(ModelError, match=r"^qwen3-8b: is wrong"), path_of(entry, entry.target, ask=False) as path:
        raise ModelError(f"{path}: is wrong")


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", ["laptop-16", "macbook-24", "rtx4090-64"])
@pytest.mark.parametrize("name", [entry.name for entry in read_models(BUILT_IN)])
def test_every_named_model_has_a_speed_or_a_reason_why_it_cannot_run(name: str, machine: str) -> None:
    first = on(name, machine).found[0]
    assert first.tokens_per_second.get("none", 0) > 0 or "are too little for this model" in first.cannot_run


@pytest.mark.parametrize(
    ("experts", "says"), [(None, "has no tensors"), ("many", "expert_count is 'many'"), (4, "expert_used_count is 9")]
)
def test_a_damaged_file_is_one_line(tmp_path: Path, experts: str | int | None, says: str) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    if experts is not None:
        writer.add_key_value("llama.expert_count", experts, gguf.GGUFValueType.get_type(experts))
        writer.add_uint32("llama.expert_used_count", 9)
        writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=says):
        on(str(tmp_path / "x.gguf"), "laptop-32")
