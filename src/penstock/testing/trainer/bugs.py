"""The catalogue of bugs that `penstock.testing.trainer` simulates, to find the one that explains a gradient best.

A bug changes rows (masks, columns, boundaries, positions), coefficients (signs, ratios, clips), weights (denominators),
or the gradient at the end. `catalogue` has the ones without a free number. Those with one are in `fits`.
"""

# ruff: noqa: ARG001, ARG005   (functions of one kind have one signature, whether or not they need all of it)
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.testing.trainer.bugs_loss import advantage_bugs, ratio_bugs
from penstock.testing.trainer.bugs_weights import weight_bugs
from penstock.testing.trainer.reference import Vector
from penstock.testing.trainer.simulated import Fix, Hypothesis, Mask, Row, spans_of, spread

MaskChange: TypeAlias = Callable[[Mask, NDArray[np.int64]], Mask]
"""mask and token ids of one sample -> another mask"""

_ROWS = "cut attention, positions and the shift by one at sequence_lengths"


def catalogue(*, low: float, high: float, special_ids: Sequence[int]) -> list[Hypothesis]:
    found = [
        *_masks(special_ids),
        *_passes(),
        *_temperatures(),
        *advantage_bugs(),
        *ratio_bugs(low, high),
        *weight_bugs(),
    ]
    return [replace(one, order=place) for place, one in enumerate(found)]


# ------------------------------------------------------------------ masks


def _by_sample(change: MaskChange) -> Callable[[Row], Row]:
    def changed(row: Row) -> Row:
        mask = row.mask.copy()
        for a, b in row.samples:
            mask[a:b] = change(mask[a:b], row.columns["token_ids"][a:b])
        return row.with_columns(loss_mask=mask)

    return changed


def _without(picked: Callable[[list[tuple[int, int]], int], Sequence[int]]) -> MaskChange:
    """Leave out the tokens that `picked` returns for the spans of a sample and its length."""

    def change(mask: Mask, ids: NDArray[np.int64]) -> Mask:
        out = mask.copy()
        if mask.any():
            out[list(picked(spans_of(mask), len(mask)))] = False
        return out

    return change


def _between(mask: Mask, ids: NDArray[np.int64]) -> Mask:
    out = mask.copy()
    if mask.any():
        out[np.flatnonzero(mask)[0] : np.flatnonzero(mask)[-1] + 1] = True
    return out


def _from_first(mask: Mask, ids: NDArray[np.int64]) -> Mask:
    return np.cumsum(mask) > 0


def _everything(mask: Mask, ids: NDArray[np.int64]) -> Mask:
    return (np.arange(len(mask)) > 0) if mask.any() else mask


def _context(mask: Mask, ids: NDArray[np.int64]) -> Mask:
    return ~mask & (np.arange(len(mask)) > 0)


def _one_span(which: int) -> MaskChange:
    def change(mask: Mask, ids: NDArray[np.int64]) -> Mask:
        out = np.zeros_like(mask)
        for a, b in spans_of(mask)[which:][:1]:
            out[a:b] = True
        return out

    return change


def _rolled(by: int, inside: bool) -> Callable[[Row], Row]:
    def changed(row: Row) -> Row:
        mask = np.roll(row.mask, by)
        if inside:
            mask = row.mask.copy()
            for a, b in row.samples:
                mask[a:b] = np.roll(row.mask[a:b], by)
        return row.with_columns(loss_mask=mask)

    return changed


def _across(change: Callable[[Row], Row]) -> Callable[[Row], Row]:
    return lambda row: replace(change(row), across=True)


def _whole_row(row: Row) -> Row:
    return row.with_columns(loss_mask=np.arange(row.size) > 0) if not row.dummy else row


def _masks(special_ids: Sequence[int]) -> list[Hypothesis]:
    by_sample: dict[str, MaskChange] = {
        "the last token of a sample is never trained": _without(lambda spans, n: [n - 1]),
        "the last trained token of a sample is not trained": _without(lambda spans, n: [spans[-1][1] - 1]),
        "the last trained token of every turn is not trained": _without(lambda spans, n: [b - 1 for _, b in spans]),
        "the first trained token of a sample is not trained": _without(lambda spans, n: [spans[0][0]]),
        "the first trained token of every turn is not trained": _without(lambda spans, n: [a for a, _ in spans]),
        "only the last turn is trained": _one_span(-1),
        "only the first turn is trained": _one_span(0),
        "the last turn is not trained": _without(lambda spans, n: range(*spans[-1]) if len(spans) > 1 else []),
        "tool output between turns is trained": _between,
        "everything after the first trained token is trained": _from_first,
        "the prompt is trained as well": _everything,
        "the prompt is trained as well, untrained samples too": lambda mask, ids: np.arange(len(mask)) > 0,
        "context is trained instead of sampled tokens": _context,
        "the token after every turn is trained as well": lambda mask, ids: mask | np.append(False, mask[:-1]),
        "samples with one trained token are left out": lambda mask, ids: mask & (mask.sum() > 1),
        "samples with several turns are left out": lambda mask, ids: mask & (len(spans_of(mask)) < 2),
        "only every other trained token is trained": lambda mask, ids: mask & (np.cumsum(mask) % 2 == 1),
        "repeated ids are trained once": lambda mask, ids: mask & _first_ones(ids),
    }
    for token in special_ids:
        by_sample |= {
            f"the id {token} is never trained": _never(token),
            f"nothing is trained after the first id {token}": _until(token, sampled=False),
            f"nothing is trained after the first sampled id {token}": _until(token, sampled=True),
        }
    rows: dict[str, Callable[[Row], Row]] = {name: _by_sample(change) for name, change in by_sample.items()}
    rows |= {
        "mask one token late": _rolled(1, False),
        "mask one token early": _rolled(-1, False),
        "mask two tokens late": _rolled(2, False),
        "mask two tokens early": _rolled(-2, False),
        "every token of a row is trained, padding as well": _whole_row,
        "only the first sample of a row is trained": lambda row: _only(row, lambda i, n: i == 0),
        "only the last sample of a row is trained": lambda row: _only(row, lambda i, n: i == n - 1),
        "the last sample of a row is not trained": lambda row: _only(row, lambda i, n: i < n - 1 or n == 1),
        "the first sample of a row is not trained": lambda row: _only(row, lambda i, n: i > 0 or n == 1),
        "the last token of a row is never trained": _no_last,
        "the last sequence of a row is not trained, padding or not": _no_last_sequence,
    }
    found = []
    for name, change in rows.items():
        is_rolled = "mask" in name or "every token of a row" in name
        for form in (change, _across(change)) if is_rolled else (change,):
            found += [Hypothesis(name=name, fix=Fix.MASK, row=form, recount=recount) for recount in (False, True)]
    for by, name in ((1, "mask one token late"), (-1, "mask one token early")):
        found.append(Hypothesis(name=name, fix=Fix.MASK, row=_rolled(by, True)))
    return found


def _never(token: int) -> MaskChange:
    return lambda mask, ids: mask & (ids != token)


def _until(token: int, sampled: bool) -> MaskChange:
    def change(mask: Mask, ids: NDArray[np.int64]) -> Mask:
        ends = (ids == token) & (mask | (not sampled))
        kept: Mask = mask & (np.cumsum(ends) - ends == 0)
        return kept

    return change


def _first_ones(ids: NDArray[np.int64]) -> Mask:
    first = np.zeros(len(ids), bool)
    first[np.unique(ids, return_index=True)[1]] = True
    return first


def _only(row: Row, kept: Callable[[int, int], bool]) -> Row:
    """Keep the samples of a row for which `kept(index, count)`. Only samples that train something are counted."""
    mask, samples = row.mask.copy(), [(a, b) for a, b in row.samples if row.mask[a:b].any()]
    for place, (a, b) in enumerate(samples):
        mask[a:b] &= kept(place, len(samples))
    return row.with_columns(loss_mask=mask)


def _no_last(row: Row) -> Row:
    mask = row.mask.copy()
    mask[-1:] = False
    return row.with_columns(loss_mask=mask)


def _no_last_sequence(row: Row) -> Row:
    mask = row.mask.copy()
    mask[row.bounds[-1][0] :] = False
    return row.with_columns(loss_mask=mask)


# ------------------------------------------------------------------ what the model sees


def _with_positions(change: Callable[[Row], NDArray[np.int64]]) -> Callable[[Row], Row]:
    return lambda row: row.with_columns(position_ids=change(row).astype(np.int64))


def _one_sequence(row: Row) -> Row:
    end = row.samples[-1][1] if row.samples else row.size
    rest = tuple(bound for bound in row.bounds if bound[0] >= end)
    return replace(row, bounds=((0, end), *rest))


def _without_prompt(row: Row) -> Row:
    """Every sample begins at its first trained token, as when completions alone go through the model."""
    bounds = []
    for a, b in row.bounds:
        first = a + int(np.argmax(row.mask[a:b])) - 1 if row.mask[a:b].any() else a
        bounds += [(a, first), (first, b)] if first > a else [(a, b)]
    return replace(row, bounds=tuple(bounds))


def _turns_alone(row: Row) -> Row:
    """Every turn begins a sequence, with the token before it."""
    bounds = []
    for a, b in row.bounds:
        starts = [a + start - 1 for start, _ in spans_of(row.mask[a:b])]
        edges = sorted({a, b, *(start for start in starts if start > a)})
        bounds += list(itertools.pairwise(edges))
    return replace(row, bounds=tuple(bounds))


def _restarted(row: Row) -> NDArray[np.int64]:
    return np.concatenate([np.arange(b - a) for a, b in row.bounds])


def _from_falls(row: Row) -> Row:
    """Put boundaries where positions fall. They do not fall after a sample of one token, so it gets none."""
    positions = row.columns["position_ids"]
    edges = [0, *(np.flatnonzero(np.diff(positions) < 0) + 1).tolist(), row.size]
    return replace(row, bounds=tuple(itertools.pairwise(edges)))


def _moved_bounds(row: Row, by: int) -> Row:
    """Move the start of every sequence but the first. The last edge stays."""
    edges = [0, *(min(max(b + by, 0), row.size) for _, b in row.bounds[:-1]), row.size]
    return replace(row, bounds=tuple(pair for pair in itertools.pairwise(edges) if pair[0] < pair[1]), across=True)


def _since_turn(row: Row) -> NDArray[np.int64]:
    """Positions that begin at 0 again after every trained span."""
    out = row.columns["position_ids"].copy()
    for a, b in row.samples:
        for _, end in spans_of(row.mask[a:b]):
            out[a + end : b] = np.arange(b - a - end)
    return out


def _passes() -> list[Hypothesis]:
    restarted = _with_positions(_restarted)
    cut: dict[str, Callable[[Row], Row]] = {
        "attention sees the other samples of a row": _one_sequence,
        "positions and attention run on through a row": lambda row: restarted(_one_sequence(row)),
        "positions run on through a row": _with_positions(lambda row: np.arange(row.size)),
        "positions begin at 1": _with_positions(lambda row: row.columns["position_ids"] + 1),
        "positions begin at 2": _with_positions(lambda row: row.columns["position_ids"] + 2),
        "all positions are 0": _with_positions(lambda row: row.columns["position_ids"] * 0),
        "positions are counted from the end": _with_positions(_reversed_positions),
        "positions begin at 0 again after every turn": _with_positions(_since_turn),
        "boundaries are taken from falls of position_ids": _from_falls,
        "boundaries of attention are one token late": lambda row: _moved_bounds(row, 1),
        "boundaries of attention are one token early": lambda row: _moved_bounds(row, -1),
    }
    seen: list[tuple[str, Callable[[Row], Row]]] = [
        ("the prompt is not seen", _without_prompt),
        ("the prompt is not seen", lambda row: restarted(_without_prompt(row))),
        ("earlier turns are not seen", _turns_alone),
        ("earlier turns are not seen", lambda row: restarted(_turns_alone(row))),
    ]
    shifted: list[tuple[str, Callable[[Row], Row]]] = [
        ("token t is predicted from t - 2 (shifted twice)", lambda row: replace(row, shift=2)),
        ("token t is predicted from t - 2 (shifted twice)", lambda row: replace(row, shift=2, across=True)),
        ("token t is predicted from token t (not shifted)", lambda row: replace(row, shift=0)),
        ("token t is predicted from t - 3", lambda row: replace(row, shift=3)),
    ]
    by_fix = (
        (_ROWS, cut.items()),
        ("pass the whole sample through the model, context included", seen),
        (Fix.SHIFT, shifted),
    )
    return [Hypothesis(name=name, fix=fix, row=change) for fix, changes in by_fix for name, change in changes]


def _reversed_positions(row: Row) -> NDArray[np.int64]:
    return np.concatenate([np.arange(b - a)[::-1] for a, b in row.bounds])


def _temperatures() -> list[Hypothesis]:
    def changed(change: Callable[[Vector, Row], Vector]) -> Callable[[Row], Row]:
        return lambda row: row.with_columns(temperatures=change(row.columns["temperatures"], row))

    def of_samples(pick: Callable[[Vector], float]) -> Callable[[Vector, Row], Vector]:
        return lambda values, row: spread(values, row, pick)

    changes: dict[str, Callable[[Vector, Row], Vector]] = {
        "temperature ignored": lambda t, row: np.ones_like(t),
        "logits are multiplied by the temperature": lambda t, row: 1 / t,
        "logits are divided by the temperature twice": lambda t, row: t * t,
        "logits are divided by the root of the temperature": lambda t, row: np.sqrt(t),
        "temperature of the token before": lambda t, row: np.roll(t, 1),
        "temperature of the token after": lambda t, row: np.roll(t, -1),
        "temperature of the first token of the row": lambda t, row: np.full_like(t, t[0]),
        "temperature of the first token of the sample": of_samples(lambda t: float(t[0])),
        "mean temperature of the sample": of_samples(lambda t: float(t.mean())),
        "mean temperature of the row": lambda t, row: np.full_like(t, t.mean()),
        "highest temperature of the row": lambda t, row: np.full_like(t, t.max()),
    }
    return [Hypothesis(name=name, fix=Fix.TEMPERATURES, row=changed(change)) for name, change in changes.items()]
