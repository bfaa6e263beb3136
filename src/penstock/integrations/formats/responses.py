"""Convert samples to and from prompt and response, the form of most trainers, and back into trajectories.

The response begins at the first trained token. Most trainers store columns for the response only: writing cuts the
prompt's part off, reading puts fill values in front.

    token_ids  p p p r r      their logprobs        x y
    loss_mask  0 0 0 1 1      our logprobs    0 0 0 x y
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.arrays import COLUMNS, Array, Ragged, Sample, coerce, offsets_of, read_rollout
from penstock.capture import TURN_COLUMNS, Trajectory, from_arrays
from penstock.errors import InvalidInput


def prompt_length(sample: Sample) -> int:
    """Count the tokens before the first trained one; all tokens if none is trained.

    >>> prompt_length(Sample(token_ids=[1, 2, 3, 4], loss_mask=[0, 0, 1, 0]))
    2
    """
    mask = sample.loss_mask
    return int(mask.argmax()) if mask.any() else sample.num_tokens


def behind_prompt(name: str, values: Any, start: int, count: int, where: str) -> Array:
    """Extend values of the response, which begins at `start`, to a column of `count` tokens."""
    tail = coerce(COLUMNS[name], values, where)
    if len(tail) != count - start:
        raise InvalidInput(f"{where}: {len(tail)} values for a response of {count - start} tokens; give one each")
    return np.concatenate([np.full(start, COLUMNS[name].fill, tail.dtype), tail])


def lists_behind_prompt(lists: Ragged, start: int, count: int, where: str) -> Ragged:
    """Extend lists of the response, which begins at `start`, to one list per token."""
    if len(lists) != count - start:
        raise InvalidInput(f"{where}: {len(lists)} lists for a response of {count - start} tokens; give one each")
    return Ragged(lists.values, offsets_of([*[0] * start, *lists.lengths.tolist()]))


def per_token(sample: Sample, name: str) -> Array | None:
    """[T] Return a column per token, also if it was given once per sample. None if the sample lacks it."""
    cells = sample.get(name)
    return None if cells is None else np.broadcast_to(cells, sample.num_tokens) if cells.ndim == 0 else cells


def one_number(sample: Sample, name: str) -> float | None:
    """Return the number that a column has on all trained tokens; None if it is absent or has several."""
    cells = sample.get(name)
    if cells is None or cells.ndim == 0:
        return None if cells is None else float(cells)
    found: Array = cells[sample.loss_mask] if sample.loss_tokens else cells
    return float(found[0]) if bool((found == found[0]).all()) else None


def once(values: Array, mask: Array) -> Array:
    """Return one number for a column with one value on all trained tokens, and that or 0 on the others."""
    trained = values[mask] if mask.any() else values
    one = trained[:1].reshape(())
    return one if bool((trained == one).all() and ((values == one) | (values == 0))[~mask].all()) else values


def to_trajectory(sample: Sample, **fields: Any) -> Trajectory:
    """Convert a sample back into a trajectory; trained tokens count as sampled. `fields` are those of `Trajectory`.

    Use it to score rewards or compute advantages again with `penstock.convert.make_group`. So it has no advantages.

    >>> sample = Sample(token_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -0.5, -0.25], rewards=1.0, env="math")
    >>> to_trajectory(sample)
    Trajectory(2 turns, 3 tokens, 2 sampled, reward=1.0, id='', env='math')
    """
    columns = {name: cells for name, cells in sample.columns.items() if name in TURN_COLUMNS and name != "advantages"}
    reward = one_number(sample, "rewards")
    facts: dict[str, Any] = {"env": sample.env, "run": sample.run, "mode": sample.mode}
    facts |= {"policy_version": sample.policy_version, "reward": None if reward != reward else reward}
    known = read_rollout(sample.rollout)
    facts |= {name: getattr(known, name) for name in ("metrics", "info", "stop_condition", "truncated", "seconds")}
    facts |= {"agent": known.agent, "error": known.error or None}
    logprobs = sample.get("logprobs") if sample.loss_tokens else None
    return from_arrays(
        sample.token_ids,
        sample.loss_mask,
        logprobs=logprobs,
        columns=columns,
        images=sample.images,
        **{**facts, **fields},
    )
