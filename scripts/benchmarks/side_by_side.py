"""Variants of a planner that have written the same prompts: `specexec+ahead` is specexec with the setting `ahead`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgespec.errors import UsageError

# Settings of variants, for `make_planner`.
SETTINGS: dict[str, dict[str, Any]] = {
    "ahead": {"ahead": True},  # the draft goes on while the target works
    "preverify": {"top_up": False},  # the target starts at once
    "forks": {"forks": 4},  # it reads the likeliest exits first
}
DRAWS = 4000  # of the bootstrap


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """A planner's name, and options.

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
    """Tokens per second against those of another variant, and its 95 % interval, by bootstrap over prompts.

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
