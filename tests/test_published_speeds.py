"""Published speeds, with their sources (data/published_speeds.jsonl), beside those that are computed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.machine.described import find_machine
from edgespec.measure.fit import fit
from edgespec.measure.paces import Pace, pace
from edgespec.models.registry import find_model

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from benchmarks.commands.speeds import Answer, answered, read, verdict
from benchmarks.published import machines_like
from edgespec.measure.predictor import Speeds, Weights, predict
from edgespec.models.shapes import file_of

FILE = Path(__file__).parent / "data" / "published_speeds.jsonl"
DGX = "ggml-org/llama.cpp benches/dgx-spark.md (batched-bench, PP 512 TG 32, build 6918)"
OF_MI50 = "mxxm-t/mx-llama.cpp issue #10"
ROWS = {"kind": "b", "rows": 8, "pass_cost_vs_one_row": 2.0}


def row(**changes: Any) -> dict[str, Any]:
    of_one = {
        "kind": "a",
        "machine": "M4 Max",
        "memory_gb": 64,
        "engine": "llama.cpp",
        "engine_version_or_date": "",
        "model": "Qwen3-14B",
        "where": "all GPU",
        "quant": "Q4_K_M",
        "rows": 1,
        "tg_tok_s": 40.0,
        "source": "somebody",
        "doubt": "",
        "device_class": "",
        "file_gb": 0,
    }
    return of_one | changes


def test_computed_speeds_are_as_near_the_published_ones_as_they_were(
    bench: Callable[..., tuple[int, str, str]],
) -> None:
    """Kind f fails by one source, which is a mixture that was perhaps paged."""
    code, printed, _ = bench("speeds", FILE)
    lines = dict(re.findall(r"^([a-g]), (.+)$", printed, re.MULTILINE))
    near = {kind: int(re.findall(r"(\d+) % within 1.5", line)[0]) for kind, line in lines.items()}
    assert code == 1
    assert {kind for kind, line in lines.items() if line.endswith(": fail")} == {"f"}
    assert {kind for kind, line in lines.items() if "not judged: fewer than 8 sources" in line} == set("acdeg")
    assert near == {"a": 100, "b": 100, "c": 100, "d": 0, "e": 100, "f": 88, "g": 100}
    assert lines["b"] == "cost of rows: 74 of 83 answered, 9 sources, median 0.93, 100 % within 1.5: pass"
    assert lines["a"].startswith("Macs in memory: 12 of 12 answered, 3 sources, median 0.9")


def test_the_readme_says_how_near_the_speeds_of_macs_are() -> None:
    ratios = [max(one.ratio, 1 / one.ratio) for one in answered(read(FILE)) if one.row["kind"] == "a"]
    assert (len(ratios), sum(ratio <= 1.5 for ratio in ratios)) == (12, 10)
    assert max(ratios) < 1.7


def test_kinds_that_are_near_have_exit_code_0(bench: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]
    good = [
        one for one in rows if one["kind"] in "bf" and not re.search("kernels|bug|another|paging", one["doubt"] or "")
    ]
    (tmp_path / "good.jsonl").write_text("\n".join(map(json.dumps, good)))
    code, printed, _ = bench("speeds", tmp_path / "good.jsonl")
    assert code == 0
    assert re.search(r"^b, .+ 100 % within 1.5: pass$", printed, re.MULTILINE)


def test_a_source_has_one_vote_and_four_of_five_rows_must_be_answered() -> None:
    near = [Answer(row(source=str(n)), 1.0, 1.0) for n in range(8)]
    far = [Answer(row(source="0"), 1.0, 9.0)] * 2
    assert verdict("a", near) == (
        "a, Macs in memory: 8 of 8 answered, 8 sources, median 1.00, 100 % within 1.5: pass",
        True,
    )
    assert verdict("a", [*near, Answer(row(source="0"), 1.0, 9.0)])[0].endswith("88 % within 1.5: fail")
    assert not verdict("a", [*near, *[Answer(row(source="9"), 1.0, why="x")] * 3])[1]
    assert verdict("a", far) == (
        "a, Macs in memory: 2 of 2 answered, 1 sources, median 9.00, 0 % within 1.5: not judged: fewer than 8 sources",
        True,
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"machine": "Q900 of 2031"}, "the machine is not known"),
        ({"model": "a model of 7B"}, "the model's shape is not known"),
        ({"quant": "Q9"}, "the type of the weights is not known"),
        ({"where": "somewhere"}, "where the weights lie is not known"),
        ({**ROWS, "machine": "Arc B580"}, "what rows cost there is not known"),
        ({**ROWS, "engine_version_or_date": "2024-11-28"}, "its kernels were replaced by llama.cpp PR #10581"),
        ({**ROWS, "engine": "mlx"}, "another project's server on mlx batches itself"),
        (
            {**ROWS, "engine": "mlx", "engine_version_or_date": "2026-06", "source": "ml-explore/mlx issue #1"},
            "its kernels were replaced by mlx PR #3764",
        ),
        ({"kind": "c", "draft": "DFlash", "tg_with_draft_tok_s": 2.0}, "the draft is not known"),
    ],
)
def test_what_cannot_be_computed_says_why(changes: dict[str, Any], why: str) -> None:
    assert [(one.computed, one.why) for one in answered([row(**changes)])] == [(0.0, why)]


@pytest.mark.parametrize(
    "changes", [{"machine": "CPU (not named)"}, {"engine": "ollama"}, {"tg_tok_s": 0}, {"kind": "b"}]
)
def test_rows_of_another_engine_or_without_a_machine_do_not_count(changes: dict[str, Any]) -> None:
    assert not list(answered([{"pass_cost_vs_one_row": 1.0} | row(**changes)]))


def test_a_drafts_passes_and_more_bytes_take_time() -> None:
    def speed(**changes: Any) -> float:
        (found,) = answered([row(**changes)])
        return found.computed

    plain = speed()
    assert speed(quant="Q8_0") < plain < speed(machine="M3 Ultra")
    assert speed(machine="RTX 3060 + Ryzen 7 5800X", where="ngl=10") < speed(machine="RTX 3060", where="ngl=30")
    about = {"kind": "c", "tg_with_draft_tok_s": 1.0, "model": "Qwen3.8-27B"}
    few, many = (speed(**about, draft=f"own MTP head, n-max {n}") for n in (2, 40))
    assert few > many
    assert speed(**about, draft="Qwen3-0.6B Q8_0, 4 tokens") > speed(**about, draft="Qwen3-8B Q8_0, 4 tokens")


def test_experts_on_a_processor_are_read_at_a_share_of_the_speed_by_all_sources_but_the_one_compared() -> None:
    slow, fast = "ggml-org/llama.cpp PR #13435", "ggml-org/llama.cpp PR #15077"
    about = {"model": "gpt-oss-20b", "quant": "MXFP4", "where": "CPU", "machine": "Ryzen 7 5800X"}
    without_slow, without_none, without_fast = (
        one.computed for one in answered(row(**about, source=source) for source in (slow, "nobody", fast))
    )
    assert without_slow > without_none > without_fast
    dense = [next(answered([row(where="CPU", machine="Ryzen 7 5800X", source=one)])).computed for one in (slow, fast)]
    assert dense[0] == dense[1]
    assert find_machine("desktop-64")[1].memory_speed == round(pace("the processor", "llamacpp").share * 89.6, 1) * 1e9


@pytest.mark.parametrize("version", ["", "2024-11-29", "b4222", "2f68ce7cf", "20240abc"])
def test_rows_of_todays_kernels_are_computed(version: str) -> None:
    assert [one.why for one in answered([row(**ROWS, engine_version_or_date=version)])] == [""]
    assert [one.why for one in answered([row(engine_version_or_date="2023-12-24")])] == [""]


def test_a_row_without_a_date_is_read(tmp_path: Path) -> None:
    about = json.loads(FILE.read_text("utf-8").splitlines()[0])
    (tmp_path / "x.jsonl").write_text(json.dumps({**about, "engine_version_or_date": None}))
    dated = list(read(tmp_path / "x.jsonl"))
    del about["engine_version_or_date"]
    (tmp_path / "x.jsonl").write_text(json.dumps(about))
    assert list(read(tmp_path / "x.jsonl")) == dated


def test_a_processor_is_limited_by_decoding_where_weights_of_few_bits_take_long() -> None:
    def speeds(**changes: Any) -> list[float]:
        both = [row(**{"machine": "RTX 3060, DDR5-6000", "quant": quant} | changes) for quant in ("IQ3_XXS", "Q3_K_M")]
        return [one.computed for one in answered(both)]

    on_gpu, on_processor, of_unknown_cores = speeds(), speeds(where="CPU"), speeds(where="CPU", machine="DDR5-6000")
    assert on_gpu[0] > on_gpu[1]
    assert on_processor[0] < on_processor[1]
    assert of_unknown_cores[0] > of_unknown_cores[1]


def test_weights_are_counted_and_decoded_by_their_type() -> None:
    entry = find_model("qwen3-14b")
    with file_of({**entry.files[entry.target].shape, "types": {"output": "IQ3_XXS"}}) as path:
        model = Weights(path)
    (output,) = (tensor for tensor in model.tensors if tensor.name == "output.weight")
    known = Speeds("the processor", 1e18, 1e18, Pace(decoded={"IQ3_XXS": 1e9}), cores=4)
    assert model.numbers(output) == 5120 * 151936
    assert model.seconds(model.part(model.tensors), 2, known) == 2 * 5120 * 151936 / 4e9


@pytest.mark.parametrize(
    ("text", "speed"),
    [("M4 Pro (14 cores)", 273e9), ("M3 Max 30-core GPU", 300e9), ("2x RTX 4070 Ti", 504e9), ("M4", 120e9)],
)
def test_a_machine_is_found_by_the_longest_name_of_a_chip(text: str, speed: float) -> None:
    assert machines_like(text)[0].gpus[0].memory_speed == speed


def test_a_line_that_is_no_row_is_named(bench: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": 1}\n')
    code, _, said = bench("speeds", tmp_path / "x.jsonl")
    assert code == 2
    assert "x.jsonl, line 1: must be an object with the keys id, kind, machine" in said


def test_a_source_that_is_compared_has_no_part_in_the_medians() -> None:
    every, without = pace("CUDA0", "llamacpp"), pace("CUDA0", "llamacpp", DGX)
    assert every.rows != without.rows
    assert every.share == without.share
    assert pace("ROCm0", "llamacpp", OF_MI50).rows != pace("ROCm0", "llamacpp").rows
    assert pace("Vulkan0", "llamacpp").rows == ()
    assert pace("CUDA0", "llamacpp", "nobody") == every
    assert any(one["source"] == DGX for one in read(FILE))


@pytest.mark.parametrize(
    ("gpu", "engine"), [("MTL0", "llamacpp"), ("gpu", "mlx"), ("CUDA0", "llamacpp"), ("cuda:0", "torch")]
)
def test_more_rows_never_take_less_time(gpu: str, engine: str) -> None:
    known = pace(gpu, engine)
    costs = [known.bytes_more(rows) for rows in range(1, 130)]
    assert costs[0] == 0 < costs[1]
    assert costs == sorted(costs)
    assert known.bytes_more(2 * known.rows[-1][0]) == pytest.approx(2 * known.bytes_more(known.rows[-1][0]))
    assert Pace().bytes_more(64) == 0


@pytest.mark.parametrize(("model", "machine"), [("qwen3-14b", "macbook-24"), ("qwen3-coder-30b-a3b", "laptop-32")])
def test_models_fit_and_doctor_compute_the_same(model: str, machine: str) -> None:
    described = find_machine(machine)[1]
    computed = predict(model, described, "").found[0].tokens_per_second["none"]
    assert fit(find_model(model), described).tokens_per_second == computed
