"""Variants of a planner in the benchmark: their names, and their speeds against each other."""

import pytest

from benchmarks.side_by_side import parse_variant, ratio
from edgespec.errors import UsageError


def test_a_variants_name_says_its_settings():
    assert parse_variant("specexec") == ("specexec", {})
    assert parse_variant("specexec+ahead") == ("specexec", {"ahead": True})
    with pytest.raises(UsageError, match="no setting 'fast'"):
        parse_variant("specexec+fast")


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
