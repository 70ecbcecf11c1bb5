"""Train the predictor of the planner specbranch: which nodes of its likeliest path the target accepts."""

from collections.abc import Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from edgespec.cli.terminal import Bars
from edgespec.loading.pair import DEFAULT_BUDGET
from edgespec.loop.backend import Backend
from edgespec.loop.tree import FloatArray
from edgespec.measure.replay import Recording, replay
from edgespec.planners.spec_branch import SpecBranchPlanner, chances, features

CONFIDENCE = np.array([0.0, 1.0, 0.0, 0.0])  # weights that predict the draft's own probability
STEPS, RIDGE = 30, 1e-3


def steps(draft: Backend, recordings: Sequence[Recording]) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Features of nodes of likeliest paths, up to the first that the target left out, and if it accepted them."""
    rows, accepted = [np.zeros((0, len(CONFIDENCE)))], list[bool]()

    class Watched(SpecBranchPlanner):
        def _learn(self, right: int) -> None:
            assert self._search
            rows.append(features(self._search, self._path[: right + 1], self._share))
            accepted.extend([True] * right + [False] * (len(rows[-1]) - right))
            super()._learn(right)

    with closing(Watched(draft)) as planner, Bars() as bars:
        for number, one in enumerate(recordings):
            bars.update("drafting", number, len(recordings))
            replay(planner, one.prompt_ids, one.output_ids, DEFAULT_BUDGET, draft.vocab.size)
        bars.update("drafting", len(recordings), len(recordings))
    return np.vstack(rows), np.array(accepted)


def loss(weights: FloatArray, rows: FloatArray, accepted: NDArray[np.bool_]) -> float:
    """
    Returns:
        Mean surprise at what was accepted, in nats.
    """
    chance = np.clip(chances(rows, weights), 1e-9, 1 - 1e-9)
    return -float(np.mean(np.log(np.where(accepted, chance, 1 - chance))))


def fit(rows: FloatArray, accepted: NDArray[np.bool_]) -> FloatArray:
    """
    Returns:
        Weights with the least loss, by Newton's method.
    """
    weights = np.zeros(rows.shape[1])
    for _ in range(STEPS):
        chance = chances(rows, weights)
        hessian = rows.T @ (rows * (chance * (1 - chance))[:, None]) + RIDGE * np.eye(len(weights))
        weights += np.linalg.solve(hessian, rows.T @ (accepted - chance) - RIDGE * weights)
    return weights
