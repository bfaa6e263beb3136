"""The cost of a micro-batch: a fixed part, and parts per token, per token squared and per image patch.

    cost = overhead + per_token * tokens + per_token_squared * sum(n_i ** 2) + per_patch * patches

With trees a token that samples share counts once. A sample of n tokens that shares its first s adds n ** 2 - s ** 2.

Attention is quadratic in the length of a sample, not of the micro-batch, so two micro-batches with equal tokens may
differ much in cost. A wrong constant costs little (1 to 7 % if planned with half or twice the right one). Ignoring
attention costs 4 to 41 %.

The planner does not depend on the unit. `Cost.fit` takes seconds and so returns a cost in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from penstock.config import check
from penstock.errors import ConfigError, InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Coefficients of the cost of a micro-batch. The defaults have the ratio of a dense 7B model, 6 * hidden.

    >>> cost = Cost(per_token=10.0, per_token_squared=1.0)
    >>> cost.of_samples(np.array([2, 3])).tolist()
    [24.0, 39.0]
    """

    overhead: Annotated[float, Meta(ge=0, description="of each micro-batch, whatever is in it")] = 0.0
    per_token: Annotated[float, Meta(ge=0, description="of each token")] = 24576.0
    per_token_squared: Annotated[
        float, Meta(ge=0, description="times the sum over samples of the squared length: attention")
    ] = 1.0
    per_patch: Annotated[float, Meta(ge=0, description="of each image patch: the vision tower")] = 0.0

    def __post_init__(self) -> None:
        check(self, "cost")
        if self.per_token == 0 and self.per_token_squared == 0:
            raise ConfigError("cost: per_token and per_token_squared are both 0; every sample would be free")

    @staticmethod
    def from_model(*, hidden: int, layers: int, active_parameters: float | None = None) -> Cost:
        """Count the floating point operations, forward and backward, of a transformer of this shape.

        Six per parameter and token, and twelve per layer, hidden unit and pair of tokens. Without `active_parameters`
        (a mixture of experts has far fewer than parameters) a dense layer's 12 * hidden ** 2 is assumed, so that
        per_token / per_token_squared is 6 * hidden.

        >>> dense = Cost.from_model(hidden=4096, layers=32)
        >>> dense.per_token / dense.per_token_squared
        24576.0
        """
        parameters = 12.0 * layers * hidden**2 if active_parameters is None else active_parameters
        return Cost(per_token=6.0 * parameters, per_token_squared=12.0 * layers * hidden)

    @staticmethod
    def fit(observations: Sequence[Observation]) -> Cost:
        """Fit the non-negative coefficients that explain the measured times best, in seconds.

        >>> seen = [Observation(seconds=1e-3 * n + 1e-6 * n * n, tokens=n, squares=n * n) for n in (100, 500, 900)]
        >>> round(Cost.fit(seen).per_token, 9), round(Cost.fit(seen).per_token_squared, 9)
        (0.001, 1e-06)
        """
        table = np.array([(o.micro_batches, o.tokens, o.squares, o.patches) for o in observations], np.float64)
        seconds = np.array([o.seconds for o in observations], np.float64)
        if len(seconds) == 0 or not (np.isfinite(seconds) & (seconds > 0)).all():
            raise InvalidInput(f"observations: seconds {seconds.tolist()[:5]}; give at least one finite, positive time")
        found = _non_negative_least_squares(table, seconds)
        if found[1] == 0 and found[2] == 0:
            raise InvalidInput(
                f"observations: {len(seconds)} times do not grow with tokens; observe steps of different sizes"
            )
        overhead, per_token, per_token_squared, per_patch = found.tolist()
        return Cost(overhead=overhead, per_token=per_token, per_token_squared=per_token_squared, per_patch=per_patch)

    def of_samples(self, lengths: NDArray[Any], patches: NDArray[Any] | int = 0) -> NDArray[np.float64]:
        """Return what each sample adds to its micro-batch."""
        n = np.asarray(lengths, np.float64)
        return self.per_token * n + self.per_token_squared * n * n + self.per_patch * np.asarray(patches, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A measured time and what was computed in it: one micro-batch, or the costliest of each index of a step."""

    seconds: float
    tokens: int
    squares: int
    """Sum over samples of the squared length."""
    patches: int = 0
    micro_batches: int = 1


def _non_negative_least_squares(table: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve exactly by trying every set of columns: with four there are fifteen."""
    scale = np.sqrt((table**2).sum(axis=0))
    used = [i for i in range(table.shape[1]) if scale[i] > 0]
    best, best_error = np.zeros(table.shape[1]), math.inf
    for size in range(1, len(used) + 1):
        for columns in combinations(used, size):
            part = table[:, columns] / scale[list(columns)]
            values, *_ = np.linalg.lstsq(part, seconds, rcond=None)
            error = float(((part @ values - seconds) ** 2).sum())
            # A larger set must earn its place: rounding alone always lets it fit a hair better.
            if (values >= 0).all() and error < best_error * (1 - 1e-9):
                best = np.zeros(table.shape[1])
                best[list(columns)] = values / scale[list(columns)]
                best_error = error
    return best
