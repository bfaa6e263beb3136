"""May this model compute a shared prefix once? Refused by what it is made of, then proven by what it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.packing import grow, positions_of
from penstock.train.model import TOLERANCE, difference

_PER_TOKEN = ("full_attention", "sliding_attention", "moe", "dense")
"""Kinds of layers that see a path through attention alone; all others carry a state from token to token."""
_OFF = "set packing.trees = false"


def check_trees(model: Any, *, vocabulary: int, longest: int) -> float:
    """The largest difference in log-probability between a forest and its samples one by one.

    Raises a ConfigError when it is more than rounding, and before that where the model cannot: a layer that carries a
    state from one token to the next has one state, and not one per branch; a sliding window that is shorter than
    samples of `longest` tokens is not reproduced here.
    """
    name = type(model).__name__
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    for number, kind in enumerate(kinds):
        if kind not in _PER_TOKEN:
            raise ConfigError(
                f"model {name}: layer {number} is {kind}, whose state follows one sequence and cannot branch; {_OFF}"
            )
    window = getattr(text, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None
    if window is not None and window < longest:
        raise ConfigError(
            f"model {name}: a sliding window of {window} tokens with samples of up to {longest} is not supported; "
            f"{_OFF}, or seq_len to at most {window}"
        )
    worst = _measured(model, vocabulary)
    if not worst <= TOLERANCE:
        raise ConfigError(
            f"model {name}: log-probabilities of samples that share tokens differ by {worst:.3g} from those of the "
            f"samples alone; it does not compute each token from its path, so {_OFF}"
        )
    return worst


def _measured(model: Any, vocabulary: int) -> float:
    """Of a forest that branches twice, has a sample that ends within another, and a second root."""
    lengths, shared = np.array([9, 7, 6, 4, 3]), np.array([0, 5, 3, 3, 0])
    own = int((lengths - shared).sum())
    ids = torch.randint(0, vocabulary, (own,), generator=torch.Generator().manual_seed(0))
    forest = grow(lengths, shared, columns={})
    index = torch.from_numpy(forest.index)
    row = {
        "forest.token_ids": ids,
        "forest.position_ids": torch.from_numpy(positions_of(lengths, shared, 0)),
        "forest.lengths": torch.from_numpy(forest.lengths),
        "forest.parents": torch.from_numpy(forest.parents),
    }
    return difference(model, row, list(ids[index].split(lengths.tolist())), index)
