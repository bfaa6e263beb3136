"""Convert a trajectory to samples: one per branch, every sampled token trained exactly once.

A branch runs from a root to the end of a turn that nothing continues. Its first turn not shared with an earlier branch
opens it. Of several turns that continue the same turn, the first stays on the branch and the others open new ones. A
sampled span shared by several branches is trained in the first one and is context in the others: mask False,
log-probability 0.0. Otherwise its gradient would count once per branch.

    turns    A  b  C  d  |  E  f        (E goes back to b)
    sample 0   A b C d      trains b d
    sample 1   A b E f      trains f
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import (
    MAX_ERROR,
    MODE_WEIGHTS,
    NO_COLUMNS,
    NO_VERSION,
    TOKEN_COLUMNS,
    WEIGHTS,
    Array,
    Cells,
    Column,
    ImageSpan,
    Own,
    Ragged,
    Roles,
    RolloutInfo,
    Sample,
    check_version,
    coerce_cells,
    joined,
    joined_own,
    known,
)
from penstock.capture import Trajectory, Turn
from penstock.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Part:
    """The first `keep` tokens of a turn, on one branch. The first `taken` of them belong to an earlier branch."""

    turn: Turn
    keep: int
    taken: int

    def fresh_mask(self) -> NDArray[np.bool_]:
        """Return [keep], True where sampled and not trained by an earlier branch."""
        mask = self.turn.sampled_mask[: self.keep]
        if self.taken:
            mask = mask.copy()
            mask[: self.taken] = False
        return mask

    def fresh_logprobs(self) -> Array:
        """Return the log-probabilities of the tokens in `fresh_mask`."""
        assert self.turn.logprobs is not None
        if self.taken == 0 and self.keep == self.turn.num_tokens:
            return self.turn.logprobs
        mask = self.turn.sampled_mask
        # Log-probabilities exist for sampled tokens only. With mask 0 1 1 1, taken 2 and keep 3, the sampled tokens
        # before them number 1 and 2, so the log-probabilities are [1:2].
        first, last = (int(np.count_nonzero(mask[:n])) for n in (self.taken, self.keep))
        return self.turn.logprobs[first:last]


def openers_of(trajectory: Trajectory) -> tuple[list[int], dict[int, int]]:
    """Return the turn that opens each branch, and for every turn the one that continues it on the same branch."""
    turns, parents, keeps = trajectory.turns, trajectory.parents, trajectory.keeps
    assert parents is not None and keeps is not None
    onward: dict[int, int] = {}
    openers = []
    for i, (parent, keep) in enumerate(zip(parents, keeps, strict=True)):
        # A turn that keeps only part of its parent goes back into it, so it opens a branch even if it is the first
        # child.
        if parent >= 0 and keep == turns[parent].num_tokens and parent not in onward:
            onward[parent] = i
        else:
            openers.append(i)
    return openers, onward


def paths(trajectory: Trajectory) -> list[list[tuple[int, int]]]:
    """Return every branch as (turn, number of its tokens) from the root to the leaf, in the order they were opened."""
    turns, parents, keeps = trajectory.turns, trajectory.parents, trajectory.keeps
    assert parents is not None and keeps is not None
    openers, onward = openers_of(trajectory)
    found = []
    for leaf in openers:
        while leaf in onward:
            leaf = onward[leaf]
        path, node, kept = [], leaf, turns[leaf].num_tokens
        while node >= 0:
            path.append((node, kept))
            node, kept = parents[node], keeps[node] or 0
        found.append(path[::-1])
    return found


def to_samples(
    trajectory: Trajectory,
    *,
    group: str = "",
    prompt: str = "",
    id: str = "",  # noqa: A002 - the field's own name
    policy_version: int | None = None,
    advantage: float | None = None,
    columns: Own = NO_COLUMNS,
) -> list[Sample]:
    """Return the samples of a trajectory, in the order its branches were opened.

    The first branch is named `id` (by default the trajectory's own), later branches `id.1`, `id.2` and so on. A branch
    with nothing to train is left out, unless the trajectory has nothing to train at all: then all stay, with every mask
    False, as for a rollout that failed. A sequence's first token is never trained, because nothing predicts it.
    `columns` declares the turns' columns that Penstock does not know.

    >>> from penstock.capture import Trajectory, Turn
    >>> chain = Trajectory(turns=[Turn([1, 2]), Turn([3], logprobs=[-0.5])], reward=1.0)
    >>> [sample] = to_samples(chain, id="17/0")
    >>> sample.token_ids.tolist(), sample.loss_mask.tolist(), sample["logprobs"].tolist()
    ([1, 2, 3], [False, False, True], [0.0, 0.0, -0.5])
    """
    name = id or trajectory.id
    version = trajectory.policy_version if policy_version is None else policy_version
    version = check_version(version, f"{trajectory.where}.policy_version")
    taken = [0] * len(trajectory.turns)
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, path in enumerate(paths(trajectory)):
        if not any(keep for _, keep in path):
            continue  # a model call without any token
        parts = [Part(trajectory.turns[t], keep, taken[t]) for t, keep in path]
        rows.append((number, _row(parts, trajectory, version) | {"columns": own_columns(parts, columns)}))
        rows[-1][1]["rollout"] = _rollout(parts, trajectory)
        for turn, keep in path:
            # Tokens of a turn that this branch holds are taken: later branches see them as context. A branch that keeps
            # 7 of 10 tokens leaves 3 for a later branch that keeps them all.
            taken[turn] = max(taken[turn], keep)
    if any(row["loss_mask"].any() for _, row in rows):
        # Numbers stay those of the branches, so a sample's name does not depend on what its siblings train.
        rows = [(number, row) for number, row in rows if row["loss_mask"].any()]
    shared: dict[str, Any] = {"group": group, "prompt": prompt}
    shared |= {name: getattr(trajectory, name) for name in ("env", "run", "mode")}
    if trajectory.reward is not None:
        shared["rewards"] = trajectory.reward
    if advantage is not None:
        shared["advantages"] = advantage
    return [Sample(id=_name(name, number), **{**row, **shared}) for number, row in rows]


def _rollout(parts: Sequence[Part], trajectory: Trajectory) -> str:
    """Return the rollout's text, with the roles along this branch."""
    named = any(part.turn.role for part in parts)
    return RolloutInfo(
        metrics=dict(trajectory.metrics),
        info=dict(trajectory.info),
        stop_condition=trajectory.stop_condition,
        truncated=trajectory.truncated,
        error=_failure(trajectory.error),
        agent=trajectory.agent,
        seconds=trajectory.seconds,
        roles=Roles.of((part.turn.role, part.keep) for part in parts) if named else None,
    ).to_text(trajectory.where)


def _failure(error: str | None) -> str:
    """Return the text of an error, never empty: `str(TimeoutError())` is, and would say that nothing failed."""
    if error is None:
        return ""
    # The text of an exception may hold half of a surrogate pair, from a file name that is not UTF-8.
    return error[:MAX_ERROR].encode(errors="replace").decode() or "unknown"


def _name(name: str, number: int) -> str | None:
    if not name:
        return None  # the sample generates a unique one
    return f"{name}.{number}" if number else name


def _row(parts: Sequence[Part], trajectory: Trajectory, version: int | None) -> dict[str, Any]:
    """Return the columns of one branch."""
    sampled = np.concatenate([part.fresh_mask() for part in parts])
    row: dict[str, Any] = {"token_ids": np.concatenate([p.turn.token_ids[: p.keep] for p in parts])}
    if any(part.turn.logprobs is not None for part in parts):
        row["logprobs"] = np.zeros(len(sampled), np.float32)
        row["logprobs"][sampled] = np.concatenate([p.fresh_logprobs() for p in parts if p.turn.logprobs is not None])
    for name in TOKEN_COLUMNS:
        if any(name in part.turn.columns for part in parts):
            row.update(_joined(name, parts, sampled, trajectory.mode, version))
    row["loss_mask"] = _trained(row, sampled, trajectory)
    row["images"] = _images(parts)
    row["policy_version"] = _oldest(row, sampled, version)
    return row


def _joined(
    name: str, parts: Sequence[Part], sampled: NDArray[np.bool_], mode: str, version: int | None
) -> dict[str, Any]:
    """Return one column along the branch, or nothing if it must be complete and is not."""
    if name == "routed_experts":
        # No fill value means "route freely": a branch has routed experts for all of its tokens or none.
        complete = all(name in part.turn.columns for part in parts if part.keep)
        rows = [part.turn.columns[name][: part.keep] for part in parts if part.keep] if complete else []
        return {name: np.concatenate(rows)} if rows else {}
    column = TOKEN_COLUMNS[name]
    if name == "sampling_mask":
        # Tokens that an earlier branch trains are context here, so the sets they were drawn from are not needed.
        return {name: along(column, parts).only(sampled)}
    if column.ragged or column.trailing:
        return {name: along(column, parts)}
    fill = column.fill
    if name == "weight_versions":  # a turn without versions was sampled by the rollout's version
        fill = _version_fill(version)
    if name in WEIGHTS:
        return {name: np.concatenate([_weights(part, name, mode) for part in parts])}
    values = np.concatenate([_piece(part, name, fill) for part in parts])
    if name in ("temperatures", "weight_versions") and sampled.any():
        # Tokens that were not sampled have no temperature and no version. Giving them a sampled token's keeps the
        # column constant in the usual case, and then it is stored as one number.
        values[~sampled] = values[sampled][0] if name == "temperatures" else values[sampled].min()
        if (values == values[0]).all():
            return {name: values[0]} if name == "temperatures" else {"policy_version": known(int(values[0]))}
    return {name: values}


def _version_fill(version: int | None) -> int:
    """Return the version of tokens whose turn has none. Versions per token are stored as int32."""
    if version is not None and version > np.iinfo(np.int32).max:
        raise InvalidInput(f"policy_version: {version}; beside turns with weight_versions it must be at most 2**31 - 1")
    return NO_VERSION if version is None else version


def _piece(part: Part, name: str, fill: Any) -> Array:
    given = part.turn.columns.get(name)
    if given is None:
        return np.full(part.keep, fill, TOKEN_COLUMNS[name].numpy)
    return np.full(part.keep, given) if given.ndim == 0 else given[: part.keep]


def _weights(part: Part, name: str, mode: str) -> Array:
    """Return a turn's weights. Without any, sampled tokens have the mode's, and only these: the others are context."""
    fill = TOKEN_COLUMNS[name].fill
    values = _piece(part, name, fill).copy()
    if name not in part.turn.columns:
        values[part.fresh_mask()] = _weight_of(name, mode)
    values[: part.taken] = fill  # an earlier branch trains these with their weights
    return values


def _weight_of(name: str, mode: str) -> float:
    return MODE_WEIGHTS[mode][WEIGHTS.index(name)]


def _trained(row: dict[str, Any], sampled: NDArray[np.bool_], trajectory: Trajectory) -> NDArray[np.bool_]:
    """Return the trained tokens: sampled ones, and others that a weight asks for, such as observations under
    cross-entropy.
    """
    trained = sampled.copy()
    for name in ("ce_weights", "ref_kl_weights"):
        if name in row:
            trained |= row[name] != 0
    extra = trained & ~sampled
    if extra.any():
        for name in WEIGHTS:
            if name not in row and _weight_of(name, trajectory.mode):  # that of the mode would train the extra tokens
                row[name] = np.where(extra, 0.0, _weight_of(name, trajectory.mode)).astype(np.float32)
        if "rl_weights" in row:
            row["rl_weights"][extra] = 0.0  # the policy gradient needs a log-probability of the sampler
    trained[:1] = False
    return np.zeros_like(trained) if trajectory.error is not None else trained


def _images(parts: Sequence[Part]) -> list[ImageSpan]:
    spans, offset = [], 0
    for part in parts:
        inside = [span for span in part.turn.images if span.end <= part.keep]
        spans += [span.shifted(offset) for span in inside]
        offset += part.keep
    return spans


def _oldest(row: dict[str, Any], sampled: NDArray[np.bool_], version: int | None) -> int | None:
    """Return the oldest version that sampled a token of the branch; the tokens' own versions precede the rollout's."""
    if "weight_versions" in row:
        own = row["weight_versions"]
        return known(int((own[sampled] if sampled.any() else own).min()))
    oldest: int | None = row.get("policy_version", version)
    return oldest


def own_columns(parts: Sequence[Part], declared: Own) -> dict[Column, Cells]:
    """Return the columns that Penstock does not know, as declared, or as the turns have them.

    One number of a turn applies to each of its tokens. For a column declared per sample, all turns must agree.
    """
    seen = [part.turn.own for part in parts if part.turn.own]
    known = {name: declared[name] for own in seen for name in own if name in declared}
    rest = joined_own(({n: _per_token(c) for n, c in own.items() if n not in known} for own in seen), "turns")
    return {column: along(column, parts) for column in (*known.values(), *rest.values())}


def _per_token(column: Column) -> Column:
    """Return the column that a number per turn becomes along a branch."""
    if column.per != "sample":
        return column
    return Column(column.name, dtype=column.dtype, fill=column.fill, pad=column.pad)


def along(column: Column, parts: Sequence[Part]) -> Cells:
    """Return one column along the branch: the turns' values end to end, and the fill where a turn has none."""
    if column.per == "sample":
        return _once(column, parts)
    shape: tuple[int, ...] = ()
    pieces: list[Cells | None] = []
    for part in parts:
        given = part.turn.columns.get(column.name)
        piece = None if given is None else _turn_values(column, given, part)
        if piece is not None and not column.ragged and part.turn.num_tokens:
            if shape and piece.shape[1:] != shape:
                raise InvalidInput(f"turns: {column.name} has shapes {shape} and {piece.shape[1:]}; give it one shape")
            shape = piece.shape[1:]
        pieces.append(piece)
    return joined(
        [
            _filled(column, part.keep, shape) if piece is None or not part.turn.num_tokens else piece
            for piece, part in zip(pieces, parts, strict=True)
        ]
    )


def _filled(column: Column, count: int, shape: tuple[int, ...]) -> Cells:
    return Ragged.empty(count, column.numpy) if column.ragged else np.full((count, *shape), column.fill, column.numpy)


def _turn_values(column: Column, given: Cells, part: Part) -> Cells:
    once = not isinstance(given, Ragged) and given.ndim == 0
    values = coerce_cells(column, given.reshape(1) if once else given, f"turn.{column.name}")
    if not once:
        return values[: part.keep]
    repeated: Array = np.full(part.keep, values[0])
    return repeated


def _once(column: Column, parts: Sequence[Part]) -> Array:
    """Return the number that the turns agree on."""
    given = [part.turn.columns[column.name] for part in parts if column.name in part.turn.columns]
    values = [coerce_cells(column, one, f"turn.{column.name}") for one in given]
    if any(value.tobytes() != values[0].tobytes() for value in values):
        raise InvalidInput(
            f"turns: {column.name} is {values[0]} in one and another in the next; it was declared per sample"
        )
    number: Array = values[0]
    return number
