"""Variants take turns, and their speeds are compared on the same questions."""

import pytest

from benchmarks.turns import ratio, turns


def test_every_variant_has_each_question_once_and_all_have_the_first_part_first():
    said = []
    found = [(name, variant, list(part)) for name, variant, part in turns({"a": 1, "b": 2}, 5, 2, said.append)]
    assert found == [("a", 1, [0, 2, 4]), ("b", 2, [0, 2, 4]), ("a", 1, [1, 3]), ("b", 2, [1, 3])]
    assert said == ["a, part 1 of 2", "b, part 1 of 2", "a, part 2 of 2", "b, part 2 of 2"]


def test_no_part_is_empty_but_where_nothing_is_asked():
    assert [list(part) for _, _, part in turns({"a": 1}, 2, 3, print)] == [[0], [1]]
    assert [list(part) for _, _, part in turns({"a": 1}, 0, 3, print)] == [[], [], []]


def test_the_ratio_is_of_sums_and_its_interval_of_prompts():
    base = [{"tokens": 10, "seconds": 2.0}, {"tokens": 30, "seconds": 3.0}, {"tokens": 20, "seconds": 5.0}]
    twice = [{"tokens": run["tokens"], "seconds": run["seconds"] / 2} for run in base]
    assert ratio(twice, base) == pytest.approx((2.0, 2.0, 2.0))
    some = [twice[0], *base[1:]]
    value, low, high = ratio(some, base)
    assert value == pytest.approx(10 / 9)
    assert low == pytest.approx(1.0)  # draws without the first prompt
    assert high == pytest.approx(2.0)  # draws of it alone
    with pytest.raises(ValueError, match="shorter"):
        ratio(some, base[:2])
