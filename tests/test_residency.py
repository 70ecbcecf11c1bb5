"""What is pinned and what is streamed: the plan, as a pure function of the tensors and the memory."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import UsageError
from edgespec.machine.memory import parse_size
from edgespec.weights.plan import (
    MORE_SLOTS,
    PART,
    SLOTS,
    SMALL,
    SMALL_PART,
    Extent,
    Layer,
    Plan,
    Tensor,
    make_plan,
)

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
EXPERT = "ffn_up_exps"
HUGE = 1 << 50


def pack(sizes: list[tuple[str, int]], file: int = 0, start: int = 1000 * 32) -> list[Tensor]:
    """Tensors as a GGUF file has them: one after the other, each padded to 32 bytes."""
    tensors = []
    for name, size in sizes:
        tensors.append(Tensor(name, file, start, size))
        start += -(-size // 32) * 32
    return tensors


def model(layers: int, size: int = MIB, *, order: list[int] | None = None, embedding: int = MIB) -> list[Tensor]:
    """A dense model; all layers have `size` bytes in whole pages, and a page more that is shared."""
    names = [f"blk.{i}" for i in (order or range(layers))]
    pieces = [(f"{n}.{part}", each) for n in names for part, each in (("attn_norm", 64), ("ffn_up", size + PAGE - 64))]
    return pack([("token_embd.weight", embedding), *pieces, ("output_norm.weight", 64)])


def total(tensors: list[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def minimum(tensors: list[Tensor], needed: int = 0, **options: int) -> int:
    """The least memory that has a plan, by bisection."""
    low, high = 0, total(tensors) + needed  # does not work, works
    while high - low > 1:
        middle = (low + high) // 2
        try:
            make_plan(tensors, middle, needed, page=PAGE, **options)
            high = middle
        except UsageError:
            low = middle
    return high


def plan_of(tensors: list[Tensor], memory: int, needed: int = 0, **options: int) -> Plan:
    plan = make_plan(tensors, memory, needed, page=PAGE, **options)
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("bandwidth", "text", "warning"),
    [
        (0.0, "is read from disk in every pass", ""),
        (1.8e9, "is read from disk in every pass, about 0.93 s at 1.8 GB/s", ""),
        (860e6, "is read from disk in every pass, about 2.0 s at 0.86 GB/s", ""),
        (
            800e6,
            "is read from disk in every pass, about 2.1 s at 0.80 GB/s",
            "slow: the disk allows 0.48 tokens/s, more only with accepted draft tokens; "
            "a faster disk, more memory or a smaller model would help",
        ),
        (
            5e6,
            "is read from disk in every pass, about 336 s at 0.0050 GB/s",
            "slow: the disk allows 0.0030 tokens/s, more only with accepted draft tokens; "
            "a faster disk, more memory or a smaller model would help",
        ),
    ],
)
def test_what_a_disk_makes_of_a_plan(bandwidth: float, text: str, warning: str) -> None:
    layers = tuple(Layer(i, (Extent(0, i << 30, (i << 30) + 400 * MIB),)) for i in range(4))
    plan = Plan(1 << 30, 0, (), layers, (), 2, 8)
    assert plan.line(bandwidth).endswith(text)
    assert plan.warning(bandwidth) == warning


def test_nothing_streamed_needs_no_disk() -> None:
    plan = Plan(1 << 30, 0, (Extent(0, 0, MIB),), (), (Extent(0, MIB, MIB << 8),), 0, 8)
    assert plan.line(1e9) == plan.line()
    assert plan.warning(1.0) == ""


@st.composite
def models(draw: st.DrawFn) -> list[Tensor]:
    """Layers of any sizes, in any order, in one or more files, with small tensors and experts in between."""
    big = st.integers(SMALL - 2 * PAGE, 3 * SMALL)
    small = st.integers(1, 2 * PAGE)
    pieces = [("token_embd.weight", draw(big | small)), ("output.weight", draw(big | small))]
    for layer in range(draw(st.integers(0, 14))):
        pieces += [(f"blk.{layer}.w{i}", draw(big | small)) for i in range(draw(st.integers(0, 4)))]
        if draw(st.integers(0, 5)) == 0:
            pieces.append((f"blk.{layer}.{EXPERT}.weight", draw(big | small)))
    order = draw(st.sampled_from(["written", "names", "any"]))
    if order == "names":
        pieces.sort()
    elif order == "any":
        pieces = draw(st.permutations(pieces))
    cuts = sorted(draw(st.lists(st.integers(0, len(pieces)), max_size=2)))
    tensors = []
    for file, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(pieces)], strict=True)):
        tensors += pack(pieces[start:stop], file, 32 * draw(st.integers(1, 300)))
    return tensors


def covered(extents: list[Extent] | tuple[Extent, ...], counts: dict[int, np.ndarray]) -> None:
    for extent in extents:
        assert extent.start % PAGE == extent.stop % PAGE == 0
        assert extent.size > 0
        counts[extent.file][extent.start // PAGE : extent.stop // PAGE] += 1


def layer_of(tensor: Tensor) -> int:
    found = re.match(r"blk\.(\d+)\.", tensor.name)
    return int(found[1]) if found else -1


def pages_of(tensor: Tensor) -> range:
    return range(tensor.start // PAGE, (tensor.start + tensor.size - 1) // PAGE + 1)


@pytest.mark.parametrize("own_output", [False, True])
def test_an_output_that_stays_here_counts(own_output: bool) -> None:
    tensors = [*model(12, embedding=8 * MIB), *([Tensor("output.weight", 0, 1 << 30, 8 * MIB)] if own_output else [])]
    here = sum(t.size for t in tensors if layer_of(t) < 10)
    assert make_plan(tensors, here, 0, on_device=2, output_here=True, page=PAGE) is None
    plan = make_plan(tensors, here - MIB, 0, on_device=2, output_here=True, page=PAGE)
    assert bool(plan.looked_up) == own_output  # else the embedding is the output


@given(models(), st.floats(0, 1.1), st.integers(0, MIB), st.integers(0, 3))
def test_every_page_has_one_place_and_all_fit(tensors: list[Tensor], share: float, needed: int, on_device: int) -> None:
    count = max(map(layer_of, tensors)) + 1
    on_device = min(on_device, count)
    host = [t for t in tensors if layer_of(t) < count - on_device and not (on_device and t.name.startswith("output"))]
    memory = int(share * (total(tensors) + needed))
    try:
        plan = make_plan(tensors, memory, needed, on_device=on_device, page=PAGE)
    except UsageError:
        return
    assert (plan is None) == (total(host) + needed <= memory)
    if plan is None:
        return

    files = {tensor.file for tensor in tensors}
    wanted = {file: np.zeros(20 * MIB // PAGE * 4, int) for file in files}
    for tensor in host:
        wanted[tensor.file][pages_of(tensor)] = 1
    found = {file: np.zeros_like(pages) for file, pages in wanted.items()}
    for extents in (plan.pinned, plan.cached, plan.looked_up, *(layer.extents for layer in plan.streamed)):
        covered(extents, found)
    for file in files:
        np.testing.assert_array_equal(found[file], wanted[file])

    # What moves holds nothing of anybody else, not even of layers that lie on a device.
    users: dict[tuple[int, int], set[object]] = {}
    for tensor in tensors:
        owner = "experts" if EXPERT in tensor.name and layer_of(tensor) < count - on_device else layer_of(tensor)
        for page in pages_of(tensor):
            users.setdefault((tensor.file, page), set()).add(owner)
    for owner, extents in [("experts", plan.cached), *((layer.index, layer.extents) for layer in plan.streamed)]:
        assert owner == "experts" or sum(extent.size for extent in extents) >= SMALL
        for extent in extents:
            for page in range(extent.start // PAGE, extent.stop // PAGE):
                assert users[extent.file, page] == {owner}

    assert plan.pinned_bytes + plan.slots * plan.slot_bytes + plan.needed <= plan.memory == memory
    indices = [layer.index for layer in plan.streamed]
    assert indices == sorted(set(indices))
    assert plan.slots == min(SLOTS, len(indices))
    assert plan.layers == count


@given(models(), st.integers(0, MIB))
def test_more_memory_never_streams_more(tensors: list[Tensor], needed: int) -> None:
    streamed = []
    for memory in np.linspace(0, total(tensors) + needed, 40, dtype=int).tolist():
        try:
            plan = make_plan(tensors, memory, needed, page=PAGE)
        except UsageError:
            assert not streamed  # what was enough stays enough
            continue
        streamed.append(plan.streamed_bytes if plan else 0)
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[-1] == 0


@given(models(), st.integers(0, MIB))
def test_the_error_names_the_minimum(tensors: list[Tensor], needed: int) -> None:
    least = minimum(tensors, needed)
    plan = make_plan(tensors, least, needed, page=PAGE)
    if plan and not plan.cached:
        assert plan.pinned_bytes + plan.slots * plan.slot_bytes + needed == least  # so a page less cannot do
    with pytest.raises(UsageError) as caught:
        make_plan(tensors, least - 1, needed, page=PAGE)
    text = str(caught.value)
    assert "\n" not in text
    named = re.search(r"are too little for this model: it needs at least ([\d.]+ \w+) \(", text)
    assert least <= parse_size(named[1]) <= least + MIB + least // 100  # what is named works


def test_everything_fits() -> None:
    tensors = model(4)
    assert make_plan(tensors, total(tensors) + 500, 500, page=PAGE) is None
    assert make_plan(tensors, total(tensors) + 499, 500, page=PAGE) is not None
    assert make_plan([], 0, 0) is None


def test_the_least_is_all_layers_in_slots_and_a_page_less_is_too_little() -> None:
    tensors = model(12)
    least = minimum(tensors, 5000)
    plan = plan_of(tensors, least, 5000)
    assert [layer.index for layer in plan.streamed] == list(range(12))
    assert {layer.size for layer in plan.streamed} == {MIB}
    assert plan.slots == SLOTS
    with pytest.raises(
        UsageError, match=r"^3 MiB of memory are too little .* needs at least 4 MiB \(1 MiB for the output"
    ):
        plan_of(tensors, least - PAGE, 5000)


def test_of_one_large_layer_no_more_is_streamed_than_of_the_others() -> None:
    """A larger part would only make the slots larger."""
    tensors = pack([("token_embd.weight", PAGE)] + [(f"blk.{i}.w", 40 * MIB if i == 0 else MIB) for i in range(9)])
    least = minimum(tensors)
    assert least < 44 * MIB
    plan = plan_of(tensors, least)
    assert [layer.index for layer in plan.streamed] == list(range(9))
    assert plan.slot_bytes < MIB


@pytest.mark.parametrize(("free", "slots"), [(300 * MIB, MORE_SLOTS), (900 * MIB, SLOTS)])
def test_parts_of_all_layers_are_streamed_rather_than_whole_ones(free: int, slots: int) -> None:
    """To free E bytes, parts of n layers take n / (n - slots) x E; the slots hold two parts, or four small ones."""
    tensors = model(24, 64 * MIB)
    plan = plan_of(tensors, total(tensors) - free)
    count = len(plan.streamed)
    assert count > 18
    assert plan.slots == slots
    assert free <= plan.streamed_bytes - slots * plan.slot_bytes
    assert free * 24 / (24 - slots) <= plan.streamed_bytes < 1.1 * free * 24 / (24 - slots)
    assert plan.slot_bytes == plan.streamed_bytes // count
    assert (plan.slot_bytes <= SMALL_PART) == (slots == MORE_SLOTS)


def test_parts_of_large_layers_are_whole_huge_pages_of_the_file() -> None:
    """The page cache keeps one of which anything is pinned, so its other bytes would take memory for nothing."""
    tensors = model(24, 64 * MIB)
    for free in (100 * MIB, 700 * MIB):
        extents = [e for layer in plan_of(tensors, total(tensors) - free).streamed for e in layer.extents]
        assert all(extent.start % PART == extent.stop % PART == 0 for extent in extents)
    assert any(e.start % PART for layer in plan_of(tensors, minimum(tensors)).streamed for e in layer.extents)


def test_little_is_streamed_in_few_parts() -> None:
    """A stop before each of 24 layers would cost more than the bytes it saves."""
    tensors = model(24, 64 * MIB)
    for free, count in ((1, 5), (2 * PART - 8 * PAGE, 6), (4 * PART - 8 * PAGE, 8)):
        plan = plan_of(tensors, total(tensors) - free)
        assert len(plan.streamed) == count
        assert plan.streamed_bytes <= (count + 1) * PART


def test_everything_but_the_looked_up_rows_fits() -> None:
    """Then nothing is streamed, and rows are read as they are needed: what plain mapping would come to."""
    tensors = pack([("token_embd.weight", 4 * MIB), *((f"blk.{i}.w", MIB) for i in range(12)), ("output.weight", MIB)])
    plan = plan_of(tensors, total(tensors) - 3 * MIB)
    assert plan.streamed == ()
    assert plan.looked_up_bytes > 3 * MIB


def test_layers_come_in_the_order_of_computation_whatever_the_files_order() -> None:
    order = sorted(range(12), key=str)
    assert order[:4] == [0, 1, 10, 11]
    tensors = model(12, order=order)
    plan = plan_of(tensors, minimum(tensors))
    assert [layer.index for layer in plan.streamed] == list(range(12))
    starts = [layer.extents[0].start for layer in plan.streamed]
    assert starts[10] < starts[2]


@pytest.mark.parametrize("count", [4, 5, 6, 10, 23, 24])
def test_streamed_layers_lie_evenly(count: int) -> None:
    tensors = model(24)
    plan = plan_of(tensors, total(tensors) - count * MIB + SLOTS * MIB + 2 * PAGE)
    assert len(plan.streamed) == count
    gaps = np.diff([layer.index for layer in plan.streamed])
    assert gaps.max() - gaps.min() <= 1
    assert plan.streamed[0].index <= 24 // count
    assert plan.streamed[-1].index >= 23 - 24 // count


def test_a_small_tensor_of_another_layer_in_between_is_not_streamed() -> None:
    """The page it lies on stays, however small it is."""
    for between in ("blk.1.scale", "rope_freqs.weight"):
        tensors = pack(
            [("token_embd.weight", PAGE), ("blk.0.a", MIB), (between, 4), ("blk.0.b", MIB)]
            + [(f"blk.{i}.a", 2 * MIB) for i in range(1, 8)]
        )
        page = next(tensor.start for tensor in tensors if tensor.name == between) // PAGE * PAGE
        plan = plan_of(tensors, minimum(tensors))
        assert plan.streamed[0].index == 0
        assert len(plan.streamed[0].extents) == 2
        assert any(extent.start <= page < extent.stop for extent in plan.pinned)
        assert not any(e.start <= page < e.stop for layer in plan.streamed for e in layer.extents)


def test_norms_between_matrices_of_one_layer_do_not_split_it() -> None:
    tensors = pack([("token_embd.weight", PAGE)] + [(f"blk.{i}.{n}", s) for i in range(9) for n, s in
                   (("attn_norm", 2304), ("down", MIB), ("ffn_norm", 2304), ("up", MIB))])  # fmt: skip
    plan = plan_of(tensors, minimum(tensors))
    assert {len(layer.extents) for layer in plan.streamed} == {1}


def test_small_weights_stay() -> None:
    tensors = pack([("token_embd.weight", MIB)] + [(f"blk.{i}.w", SMALL - 1) for i in range(50)])
    with pytest.raises(UsageError):
        plan_of(tensors, total(tensors) - 1)


def test_layers_that_a_gpu_shares_stay_and_count() -> None:
    tensors = model(12)
    plan = plan_of(tensors, minimum(tensors, kept=4), kept=4)
    assert [layer.index for layer in plan.streamed] == list(range(8))
    assert plan.pinned_bytes > 4 * MIB
    assert minimum(tensors, kept=4) > minimum(tensors) + 3 * MIB


def test_files_of_a_split_model() -> None:
    first = pack([("token_embd.weight", MIB), *((f"blk.{i}.w", MIB) for i in range(6)), ("blk.6.a", MIB // 2)], file=0)
    second = pack([("blk.6.b", MIB), *((f"blk.{i}.w", MIB) for i in range(7, 12)), ("output.weight", MIB)], file=1)
    plan = plan_of([*first, *second], minimum([*first, *second]))
    assert [layer.index for layer in plan.streamed] == list(range(12))
    assert [[extent.file for extent in layer.extents] for layer in plan.streamed] == [[0]] * 6 + [[0, 1]] + [[1]] * 5
    assert {extent.file for extent in plan.pinned} == {0, 1}


def test_experts_are_left_to_the_page_cache() -> None:
    layers = [(f"blk.{i}.{n}", s) for i in range(8) for n, s in (("attn", MIB), (EXPERT + ".weight", 8 * MIB))]
    shared = [("blk.0.ffn_up_shexp.weight", MIB), ("blk.0.ffn_gate_inp.weight", SMALL // 2)]
    tensors = pack([("token_embd.weight", MIB), *layers, *shared])
    plan = plan_of(tensors, total(tensors) // 2)
    assert plan.streamed == ()
    assert plan.slots == 0
    assert 63 * MIB < plan.cached_bytes <= 64 * MIB
    shexp = next(t for t in tensors if "shexp" in t.name)
    assert any(e.start <= shexp.start and shexp.start + shexp.size <= e.stop for e in plan.pinned)
    assert "of experts as the page cache keeps them" in plan.line()
    assert "from disk in every pass" not in plan.line()
    tight = plan_of(tensors, minimum(tensors))  # even the others do not fit
    assert tight.streamed
    assert all(extent.size < 3 * MIB for layer in tight.streamed for extent in layer.extents)
    assert tight.cached == plan.cached


def test_an_embedding_that_is_not_the_output_is_read_by_rows() -> None:
    layers = [(f"blk.{i}.w", MIB) for i in range(12)]
    tied = pack([("token_embd.weight", 4 * MIB), *layers])
    apart = pack([("token_embd.weight", 4 * MIB), *layers, ("output.weight", MIB)])
    assert minimum(tied) > minimum(apart) + 2 * MIB
    assert plan_of(tied, minimum(tied)).looked_up == ()
    plan = plan_of(apart, minimum(apart))
    assert 3 * MIB < plan.looked_up_bytes <= 4 * MIB
    assert not any(extent.start <= 3 * MIB < extent.stop for extent in plan.pinned)
    assert "of embeddings row by row" in plan.line()


def test_chunked_experts_are_experts_too() -> None:
    tensors = pack([("token_embd.weight", MIB), *((f"blk.{i}.ffn_up_chexps.weight", MIB) for i in range(4))])
    assert plan_of(tensors, 2 * MIB).cached_bytes > 3 * MIB


def test_layers_on_a_device_are_left_out() -> None:
    tensors = model(12)
    whole, half = plan_of(tensors, minimum(tensors)), minimum(tensors, on_device=6)
    plan = plan_of(tensors, half, on_device=6)
    assert [layer.index for layer in plan.streamed] == list(range(6))
    assert plan.pinned_bytes < whole.pinned_bytes
    last = max(extent.stop for extent in (*plan.pinned, *(e for layer in plan.streamed for e in layer.extents))
               if extent.stop < tensors[-1].start // PAGE * PAGE)  # fmt: skip
    assert last <= -(-next(t.start for t in tensors if t.name.startswith("blk.6.")) // PAGE) * PAGE
    assert not plan_of(tensors, half, on_device=10).streamed
    assert make_plan(tensors, total(tensors) // 2, 0, on_device=12, page=PAGE) is None


def test_per_layer_embeddings_are_read_by_rows() -> None:
    """Gemma 3n and 4: 39 % of a file. No layer is streamed where giving them up is enough."""
    layers = [(f"blk.{i}.w", MIB) for i in range(12)]
    tensors = pack([("token_embd.weight", MIB), ("per_layer_token_embd.weight", 8 * MIB), *layers])
    plan = plan_of(tensors, total(tensors) - 7 * MIB)
    assert plan.streamed == ()
    assert 7 * MIB < plan.looked_up_bytes <= 8 * MIB
    assert minimum(tensors) < total(tensors) - 8 * MIB


def test_a_head_that_is_not_loaded_needs_no_memory_and_counts_as_a_layer() -> None:
    """Tensors of size 0, wherever they lie in the file."""
    tensors = model(12)
    heads = [replace(tensor, size=0) for tensor in tensors if layer_of(tensor) in (11,)]
    tensors = [tensor for tensor in tensors if layer_of(tensor) != 11] + heads
    assert make_plan(tensors, total(tensors), 0, page=PAGE) is None
    plan = plan_of(tensors, minimum(tensors))
    assert plan.layers == 12
    (first, *_), touched = heads, (*plan.pinned, *(e for layer in plan.streamed for e in layer.extents))
    stop = first.start + MIB
    assert not any(e.start < stop - PAGE and e.stop > first.start + PAGE for e in touched)
    assert total(tensors) - plan_of(tensors, total(tensors) - 3 * MIB, on_device=0).total_bytes <= PAGE * 2
    on_device = sum(tensor.size for tensor in tensors if layer_of(tensor) == 10)
    assert make_plan(tensors, total(tensors) - on_device, 0, on_device=2, page=PAGE) is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"experts_here": True},
        {"on_device": 1, "experts_here": True},
        {"on_device": 4, "experts_here": True},
        {"kept": 4, "experts_here": True},
    ],
)
def test_the_experts_of_a_head_stay_wherever_its_layer_is_computed(options: dict[str, int]) -> None:
    """No pool has them. Without the head, its weights need no room."""
    layers = [(f"blk.{i}.{part}.weight", size) for i in range(4) for part, size in (("w", MIB), (EXPERT, 4 * MIB))]
    tensors = pack([("token_embd.weight", MIB), *layers, ("output.weight", MIB)], start=8 * PAGE)
    plan = plan_of(tensors, 12 * MIB, head=1, **options)
    of_head = next(tensor.extent for tensor in tensors if tensor.name == f"blk.3.{EXPERT}.weight")
    assert any(extent.start <= of_head.start and of_head.stop <= extent.stop for extent in plan.pinned)
    assert 11 * MIB < plan.cached_bytes <= 12 * MIB
    here = options.get("on_device", 0) < 1
    assert plan.head_bytes == (5 if here else 4) * MIB
    room = plan.total_bytes - plan.head_bytes
    assert [replace(plan, memory=memory).fits_without_draft for memory in (room, room - 1)] == [True, False]


@pytest.mark.parametrize("names", [("token_embd.weight", "output.weight"), ("token_embd.weight",)])
def test_the_output_is_on_the_device_and_the_embedding_read_by_rows(names: tuple[str, ...]) -> None:
    """Also where one is the other: a device has a copy of its own."""
    ends = [(name, 3 * MIB) for name in (*names, "output_norm.weight")]
    tensors = pack([*ends, *((f"blk.{i}.ffn_up.weight", MIB) for i in range(8))])
    plan = plan_of(tensors, minimum(tensors, on_device=4), on_device=4)
    assert plan.streamed
    assert plan.looked_up_bytes > 2 * MIB
    output = [tensor for tensor in tensors if tensor.name.startswith("output")]
    first, last = output[0].start // PAGE * PAGE + PAGE, (output[-1].start + output[-1].size) // PAGE * PAGE - PAGE
    assert not [extent for extent in plan.pinned if extent.start < last and extent.stop > first]
    assert make_plan(tensors, 8 * MIB, 0, on_device=4, page=PAGE) is None


def test_larger_pages() -> None:
    """As on a Mac, and on some ARM machines with Linux."""
    tensors = model(12, 4 * MIB)
    for page in (16 * KIB, 64 * KIB):
        plan = make_plan(tensors, total(tensors) // 2, 0, page=page)
        assert all(e.start % page == e.stop % page == 0 for layer in plan.streamed for e in layer.extents)
        assert plan.pinned_bytes + plan.slots * plan.slot_bytes <= plan.memory


def test_weights_padded_to_more_than_a_page() -> None:
    tensors = []
    for i in range(12):
        tensors += [Tensor(f"blk.{i}.{n}", 0, (2 * i + j) * 2 * MIB + MIB, MIB + 7) for j, n in enumerate("ab")]
    plan = plan_of(tensors, total(tensors) // 2)
    assert {len(layer.extents) for layer in plan.streamed} == {2}
    assert plan.pinned_bytes + plan.slots * plan.slot_bytes <= plan.memory
    assert plan.pinned_bytes + plan.streamed_bytes < total(tensors) + 24 * PAGE


def test_sizes_are_what_they_say() -> None:
    extents = Extent(0, 0, 5 * PAGE), Extent(1, PAGE, 3 * PAGE)
    plan = plan_of(model(12), minimum(model(12)))
    assert [extent.size for extent in extents] == [5 * PAGE, 2 * PAGE]
    assert plan.streamed_bytes == 12 * MIB
    assert plan.slot_bytes == MIB
    assert plan.cached_bytes == 0


def test_the_line_for_a_person() -> None:
    tensors = model(12, 64 * MIB, embedding=100 * MIB)
    plan = plan_of(tensors, total(tensors) // 2)
    assert plan.line() == (
        f"model of {total(tensors) / MIB:.0f} MiB in {total(tensors) / 2 / MIB:.0f} MiB of memory: "
        f"{plan.pinned_bytes / MIB:.0f} MiB stays, {plan.streamed_bytes / MIB:.0f} MiB (from 12 of 12 layers) "
        f"is read from disk in every pass"
    )


def test_a_model_of_126_layers_is_planned_at_once() -> None:
    """As large as the largest open models, with two extents in each layer."""
    tensors = pack([("token_embd.weight", MIB)] + [(f"blk.{i}.{n}", s) for i in range(126) for n, s in
                   (("a", MIB), (EXPERT + ".weight", 2 * SMALL), ("b", MIB))])  # fmt: skip
    plan = plan_of(tensors, minimum(tensors) + 20 * MIB)
    assert len(plan.streamed) < 126
    assert {len(layer.extents) for layer in plan.streamed} == {2}
    assert len(plan.cached) == 126
