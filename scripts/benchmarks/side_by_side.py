"""Variants of a planner on the same prompts: `specexec+ahead` is specexec with the setting `ahead`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgespec.errors import UsageError

SETTINGS: dict[str, dict[str, Any]] = {
    "ahead": {"ahead": True},
}
DRAWS = 4000  # of the bootstrap


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """
    Raises:
        UsageError: there is no such setting.
    """
    name, *settings = text.split("+")
    options: dict[str, Any] = {}
    for setting in settings:
        if setting not in SETTINGS:
            raise UsageError(f"{text}: there is no setting {setting!r}; there are: {', '.join(SETTINGS)}")
        options |= SETTINGS[setting]
    return name, options


def ratio(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Tokens per second in proportion to another variant's, and the ends of the 95 % interval (bootstrap over prompts).

    Args:
        runs: `tokens` and `seconds` of each prompt.
        base: the same prompts.
    """
    figures = np.array(
        [[run["tokens"], run["seconds"], was["tokens"], was["seconds"]] for run, was in zip(runs, base, strict=True)]
    )
    draws = np.random.default_rng(0).integers(len(figures), size=(DRAWS, len(figures)))
    sums = np.vstack([figures.sum(0), figures[draws].sum(1)])
    found = sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])
    low, high = np.quantile(found[1:], [0.025, 0.975])
    return float(found[0]), float(low), float(high)
