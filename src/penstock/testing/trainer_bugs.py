"""The catalogue of bugs that `penstock.testing.trainer` simulates, to find the one that explains a gradient best.

A bug changes rows (masks, columns, boundaries, positions), coefficients (signs, ratios, clips), weights (denominators),
or the gradient at the end. `catalogue` has the ones without a free number. Those with one are in `trainer_fits`.
"""

# ruff: noqa: ARG001, ARG005   (functions of one kind have one signature, whether or not they need all of it)
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.testing.trainer_reference import Vector
from penstock.testing.trainer_simulated import Columns, Hypothesis, Place, Row, Rows

Mask: TypeAlias = NDArray[np.bool_]
Form: TypeAlias = Callable[[Vector, Vector, Mask], Vector]
"""advantages, ratios and mask of one sample -> coefficients"""
MaskChange: TypeAlias = Callable[[Mask, NDArray[np.int64]], Mask]
"""mask and token ids of one sample -> another mask"""

_MASK = "train exactly the tokens whose loss_mask is True; loss_mask[t] is about token t, which logits t - 1 predict"
_ADVANTAGE = "multiply the loss of token t with advantages[t] as it is given"
_RATIO = "the ratio of token t is exp(logprob of token t now - logprobs[t]), each token with its own"
_CLIP = "take the smaller of ratio * advantage and clipped ratio * advantage"
_COUNT = "divide the summed loss of every micro-batch by step.loss_tokens, the count of trained tokens of all ranks"
_ROWS = "cut attention, positions and the shift by one at sequence_lengths"
_TEMPERATURE = "divide the logits that predict token t by temperatures[t] before the softmax"


def catalogue(*, low: float, high: float, special_ids: Sequence[int]) -> list[Hypothesis]:
    found = [
        *_masks(special_ids),
        *_passes(),
        *_temperatures(),
        *_advantages(),
        *_ratios(low, high),
        *_weights(),
        *_micro_batches(),
    ]
    return [replace(one, order=place) for place, one in enumerate(found)]


# ------------------------------------------------------------------ masks


def spans_of(mask: Mask) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


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
    }
    found = []
    for name, change in rows.items():
        found.append(Hypothesis(name=name, fix=_MASK, row=change))
        found.append(Hypothesis(name=name, fix=_MASK, row=change, recount=True))
        if "mask" in name or "every token of a row" in name:
            found.append(Hypothesis(name=name, fix=_MASK, row=_across(change)))
            found.append(Hypothesis(name=name, fix=_MASK, row=_across(change), recount=True))
    for by, name in ((1, "mask one token late"), (-1, "mask one token early")):
        found.append(Hypothesis(name=name, fix=_MASK, row=_rolled(by, True)))
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
    """Keep the samples of a row for which `kept(index, count)`; counts those that train something."""
    mask, samples = row.mask.copy(), [(a, b) for a, b in row.samples if row.mask[a:b].any()]
    for place, (a, b) in enumerate(samples):
        mask[a:b] &= kept(place, len(samples))
    return row.with_columns(loss_mask=mask)


def _no_last(row: Row) -> Row:
    mask = row.mask.copy()
    mask[-1:] = False
    return row.with_columns(loss_mask=mask)


# ------------------------------------------------------------------ what the model sees


def _with_positions(change: Callable[[Row], NDArray[np.int64]]) -> Callable[[Row], Row]:
    return lambda row: row.with_columns(position_ids=change(row).astype(np.int64))


def _one_sequence(row: Row, padding: bool) -> Row:
    end = row.size if padding or not row.samples else row.samples[-1][1]
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
    out = np.zeros(row.size, np.int64)
    for a, b in row.bounds:
        out[a:b] = np.arange(b - a)
    return out


def _from_falls(row: Row) -> Row:
    """Boundaries where positions fall: a sample of one token has none behind it."""
    positions = row.columns["position_ids"]
    edges = [0, *(np.flatnonzero(np.diff(positions) < 0) + 1).tolist(), row.size]
    return replace(row, bounds=tuple(itertools.pairwise(edges)))


def _passes() -> list[Hypothesis]:
    whole = "attention sees the other samples of a row"
    changes: list[tuple[str, str, Callable[[Row], Row]]] = [
        (whole, _ROWS, lambda row: _one_sequence(row, False)),
        (
            "positions and attention run on through a row",
            _ROWS,
            lambda row: _with_positions(_restarted)(_one_sequence(row, False)),
        ),
        ("positions run on through a row", _ROWS, _with_positions(lambda row: np.arange(row.size))),
        ("positions begin at 1", _ROWS, _with_positions(lambda row: row.columns["position_ids"] + 1)),
        ("positions begin at 2", _ROWS, _with_positions(lambda row: row.columns["position_ids"] + 2)),
        ("all positions are 0", _ROWS, _with_positions(lambda row: row.columns["position_ids"] * 0)),
        ("positions are counted from the end", _ROWS, _with_positions(_reversed_positions)),
        ("boundaries are taken from falls of position_ids", _ROWS, _from_falls),
        ("the prompt is not seen", "pass the whole sample through the model, context included", _without_prompt),
        (
            "the prompt is not seen",
            "pass the whole sample through the model, context included",
            lambda row: _with_positions(_restarted)(_without_prompt(row)),
        ),
        ("earlier turns are not seen", "pass the whole sample through the model", _turns_alone),
        (
            "earlier turns are not seen",
            "pass the whole sample through the model",
            lambda row: _with_positions(_restarted)(_turns_alone(row)),
        ),
        (
            "token t is predicted from t - 2 (shifted twice)",
            "the logits of token t - 1 predict token t: shift once",
            lambda row: replace(row, shift=2),
        ),
        (
            "token t is predicted from t - 2 (shifted twice)",
            "the logits of token t - 1 predict token t: shift once",
            lambda row: replace(row, shift=2, across=True),
        ),
        (
            "token t is predicted from token t (not shifted)",
            "the logits of token t - 1 predict token t: shift once",
            lambda row: replace(row, shift=0),
        ),
        (
            "token t is predicted from t - 3",
            "the logits of token t - 1 predict token t: shift once",
            lambda row: replace(row, shift=3),
        ),
    ]
    return [Hypothesis(name=name, fix=fix, row=change) for name, fix, change in changes]


def _reversed_positions(row: Row) -> NDArray[np.int64]:
    out = np.zeros(row.size, np.int64)
    for a, b in row.bounds:
        out[a:b] = np.arange(b - a)[::-1]
    return out


def _temperatures() -> list[Hypothesis]:
    def changed(change: Callable[[Vector, Row], Vector]) -> Callable[[Row], Row]:
        return lambda row: row.with_columns(temperatures=change(row.columns["temperatures"], row))

    def of_samples(pick: Callable[[Vector], float]) -> Callable[[Vector, Row], Vector]:
        return lambda values, row: _spread(values, row, pick)

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
    return [Hypothesis(name=name, fix=_TEMPERATURE, row=changed(change)) for name, change in changes.items()]


def _spread(values: Vector, row: Row, pick: Callable[[Vector], float]) -> Vector:
    out = values.copy()
    for a, b in row.samples:
        out[a:b] = pick(values[a:b])
    return out


# ------------------------------------------------------------------ advantages and log-probabilities


def column(name: str, change: Callable[[Vector, Row], Vector]) -> Callable[[Row], Row]:
    """Return a change of one column of a row, where it has it."""

    return lambda row: row.with_columns(**{name: change(row.columns[name], row)})


def _advantages() -> list[Hypothesis]:
    def within(pick: Callable[[Vector, Mask], Vector | float]) -> Callable[[Vector, Row], Vector]:
        """Change the advantages of each sample that trains something."""

        def change(values: Vector, row: Row) -> Vector:
            out = values.copy()
            for a, b in row.samples:
                if row.mask[a:b].any():
                    out[a:b] = pick(values[a:b], row.mask[a:b])
            return out

        return change

    def along(pick: Callable[[Vector, Mask], Vector | float]) -> Callable[[Vector, Row], Vector]:
        """Change the advantages of a row."""
        return lambda a, row: np.broadcast_to(pick(a, row.mask), a.shape).copy() if row.mask.any() else a

    changes: dict[str, Callable[[Vector, Row], Vector]] = {
        "sign of the loss is wrong": lambda a, row: -a,
        "negative advantages are trained as positive ones": lambda a, row: np.abs(a),
        "negative advantages are clamped to 0": lambda a, row: np.maximum(a, 0),
        "positive advantages are clamped to 0": lambda a, row: np.minimum(a, 0),
        "only the sign of an advantage is used": lambda a, row: np.sign(a),
        "advantages are ignored": lambda a, row: np.ones_like(a),
        "advantages are squared": lambda a, row: a * a,
        "advantages of the token before": lambda a, row: np.roll(a, 1),
        "advantages of the token after": lambda a, row: np.roll(a, -1),
        "advantage of the sample's first token for all its tokens": within(lambda a, m: a[0]),
        "advantage of the sample's first trained token for all its tokens": within(lambda a, m: a[m][0]),
        "advantage of the sample's last token for all its tokens": within(lambda a, m: a[-1]),
        "advantage of the sample's last trained token for all its tokens": within(lambda a, m: a[m][-1]),
        "mean advantage of the sample for all its tokens": within(lambda a, m: a.mean()),
        "mean advantage of the sample's trained tokens for all of them": within(lambda a, m: a[m].mean()),
        "summed advantages of the sample for all its tokens": within(lambda a, m: a[m].sum()),
        "advantages are summed up to the end of the sample": within(lambda a, m: (a * m)[::-1].cumsum()[::-1]),
        "advantages are summed up from the start of the sample": within(lambda a, m: (a * m).cumsum()),
        "advantages of a sample in reverse order": within(lambda a, m: a[::-1]),
        "advantages are divided by the sample's trained tokens": within(lambda a, m: a / m.sum()),
        "advantages are multiplied by the sample's trained tokens": within(lambda a, m: a * m.sum()),
        "advantage of the row's first token for the row": along(lambda a, m: a[0]),
        "advantage of the row's first trained token for the row": along(lambda a, m: a[m][0]),
        "mean advantage of the row for the row": along(lambda a, m: a.mean()),
        "mean advantage of the row's trained tokens for the row": along(lambda a, m: a[m].mean()),
        "advantages are shifted by one sample": _of_neighbour,
    }
    for what, scope in (("row", along), ("sample", within)):
        for ddof in (0, 1):
            changes |= _normalized(what, scope, ddof)
    seen = [Hypothesis(name=name, fix=_ADVANTAGE, row=column("advantages", fn)) for name, fn in changes.items()]
    return [replace(one, name=one.name.split("|")[0]) for one in seen] + _normalized_over_steps()


def _normalized(what: str, scope: Any, ddof: int) -> dict[str, Callable[[Vector, Row], Vector]]:
    """Return advantages that are normalized again over a row or a sample."""

    def std(a: Vector) -> float:
        found = float(a.std(ddof=ddof)) if len(a) > ddof else 0.0
        # Equal values have a deviation of 0 up to rounding: what is divided by it cannot be predicted.
        return found if found > 1e-5 * float(np.abs(a).max()) else float("nan")

    changes: dict[str, Callable[[Vector, Row], Vector]] = {}
    for tokens, picked in (("trained tokens", lambda a, m: a[m]), ("tokens", lambda a, m: a)):
        for eps in (1e-8, 1e-6, 1e-4):
            name = f"advantages are divided by their deviation over the {what}"
            key = f"{tokens}{eps}"
            changes[f"{name}|{key}{ddof}"] = scope(lambda a, m, p=picked, e=eps: a / (std(p(a, m)) + e))
            name = f"advantages are normalized over the {what}"
            changes[f"{name}|{key}{ddof}"] = scope(
                lambda a, m, p=picked, e=eps: (a - p(a, m).mean()) / (std(p(a, m)) + e)
            )
        changes[f"mean advantage of the {what} is subtracted|{tokens}{ddof}"] = scope(
            lambda a, m, p=picked: a - p(a, m).mean()
        )
    return changes


def _normalized_over_steps() -> list[Hypothesis]:
    """Advantages that are normalized again over all rows of a rank or of the step."""

    def changed(scope: str, divide: bool, subtract: bool, ddof: int) -> Callable[[Rows], Rows]:
        def change(rows: Rows) -> Rows:
            ranks = [[rank] for rank in rows] if scope == "rank" else [rows]
            return tuple(own for part in ranks for own in _normalized_rows(part, divide, subtract, ddof))

        return change

    found = []
    for scope in ("step", "rank"):
        for ddof in (0, 1):
            for divide, subtract, what in ((True, True, "normalized"), (True, False, "divided by their deviation")):
                name = f"advantages are {what} over the {scope}"
                found.append(Hypothesis(name=name, fix=_ADVANTAGE, rows=changed(scope, divide, subtract, ddof)))
            name = f"mean advantage of the {scope} is subtracted"
            found.append(Hypothesis(name=name, fix=_ADVANTAGE, rows=changed(scope, False, True, ddof)))
    return found


def _normalized_rows(rows: Sequence[Sequence[Row]], divide: bool, subtract: bool, ddof: int) -> list[tuple[Row, ...]]:
    values = np.concatenate([row.columns["advantages"][row.mask] for rank in rows for row in rank])
    mean = values.mean() if subtract and len(values) else 0.0
    std = values.std(ddof=ddof) + 1e-8 if divide and len(values) > ddof else 1.0
    std = std if std > 1e-5 else np.nan
    return [
        tuple(row.with_columns(advantages=(row.columns["advantages"] - mean) / std) for row in rank) for rank in rows
    ]


def _of_neighbour(values: Vector, row: Row) -> Vector:
    out = values.copy()
    starts = [a for a, _ in row.samples]
    for (a, b), other in zip(row.samples, [*starts[1:], *starts[:1]], strict=True):
        out[a:b] = values[other]
    return out


# ------------------------------------------------------------------ ratios and clips


def _ratios(low: float, high: float) -> list[Hypothesis]:
    def parts(columns: Columns, logprobs: Vector) -> tuple[Vector, Vector]:
        return columns["advantages"], np.exp(logprobs - columns["logprobs"])

    def form(change: Form) -> Callable[[Columns, Vector, Vector], Vector]:
        """Return coefficients from advantage, ratio and mask in place of the right ones."""
        return lambda columns, logprobs, right: change(*parts(columns, logprobs), columns["loss_mask"])

    def inside(r: Vector) -> Mask:
        return (r >= 1 - low) & (r <= 1 + high)

    def kept(a: Vector, r: Vector) -> Mask:
        return ~(((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low)))

    clips: dict[str, Form] = {
        "ratios are not clipped": lambda a, r, m: -a * r,
        "ratios are clipped on both sides whatever the advantage": lambda a, r, m: -a * r * inside(r),
        "ratios are clipped from the wrong side": lambda a, r, m: (
            -a * r * ~(((a < 0) & (r > 1 + high)) | ((a > 0) & (r < 1 - low)))
        ),
        "ratios are clipped from above only": lambda a, r, m: -a * r * ~((a > 0) & (r > 1 + high)),
        "ratios are clipped from below only": lambda a, r, m: -a * r * ~((a < 0) & (r < 1 - low)),
        "ratios are clipped from above for both signs": lambda a, r, m: -a * r * (r <= 1 + high),
        "ratios are clipped from below for both signs": lambda a, r, m: -a * r * (r >= 1 - low),
        "clips are too wide: log-ratios are compared": lambda a, r, m: (
            -a * r * ~(((a > 0) & (np.log(r) > 1 + high)) | ((a < 0) & (np.log(r) < 1 - low)))
        ),
        "the ratio counts as a constant and is clipped": lambda a, r, m: -a * np.clip(r, 1 - low, 1 + high),
    }
    ratios: dict[str, Form] = {
        "the ratio is ignored": lambda a, r, m: -a * np.ones_like(r),
        "the ratio is ignored and clips are not": lambda a, r, m: -a * kept(a, r),
        "the ratio is inverted": lambda a, r, m: a / r * kept(a, 1 / r),
        "the ratio is inverted in the weight": lambda a, r, m: -a / r * kept(a, 1 / r),
        "the ratio is squared": lambda a, r, m: -2 * a * r * r * kept(a, r * r),
        "ratio of the sample's mean log-ratio": lambda a, r, m: _sequence_level(a, r, m, low, high, np.mean),
        "ratio of the sample's summed log-ratio": lambda a, r, m: _sequence_level(a, r, m, low, high, np.sum),
        "the ratio is averaged over the sample": lambda a, r, m: -a[m].mean() * r if m.any() else r * 0,
        "clipped tokens take their whole sample with them": lambda a, r, m: -a * r * bool(kept(a, r)[m].all()),
    }
    for cap in (1.0, 2.0, 3.0, 5.0, 10.0):
        ratios[f"ratios above {cap:g} are cut to it as constants"] = _capped(cap)
        ratios[f"ratios above {cap:g} are left out"] = _left_out(cap, kept, both=True)
        clips[f"ratios above {cap:g} are clipped where the advantage is negative (dual clip)"] = _left_out(
            cap, kept, both=False
        )
    for lo, hi in _USUAL:
        if (lo, hi) != (low, high):
            clips[f"ratios are clipped at {1 - lo:g} and {1 + hi:g}"] = _clip(lo, hi)
    found = [Hypothesis(name=name, fix=_CLIP, push=form(change)) for name, change in clips.items()]
    found += [Hypothesis(name=name, fix=_RATIO, push=form(change)) for name, change in ratios.items()]
    found += [
        Hypothesis(name=name.replace("sample", "row"), fix=_RATIO, push=form(change), by_row=True)
        for name, change in ratios.items()
        if "sample" in name
    ]
    changes: dict[str, Callable[[Vector, Row], Vector]] = {
        "logprobs of the token before": lambda s, row: np.roll(s, 1),
        "logprobs of the token after": lambda s, row: np.roll(s, -1),
        "logprobs are taken for probabilities": lambda s, row: np.exp(s),
        "logprobs of the sampler are ignored": lambda s, row: np.zeros_like(s),
        "mean logprob of the sample for all its tokens": lambda s, row: _spread(s, row, lambda v: float(v.mean())),
        "logprobs are in another base": lambda s, row: s / np.log(2),
    }
    return found + [Hypothesis(name=name, fix=_RATIO, row=column("logprobs", fn)) for name, fn in changes.items()]


_USUAL = ((0.1, 0.1), (0.2, 0.28), (0.3, 0.3), (0.28, 0.2), (0.2, 0.3), (0.5, 0.5), (0.2, 0.2), (0.02, 0.02))
"""Clips that trainers have as defaults."""


def _capped(cap: float) -> Form:
    return lambda a, r, m: -a * np.minimum(r, cap)


def _left_out(cap: float, kept: Callable[[Vector, Vector], Mask], *, both: bool) -> Form:
    return lambda a, r, m: -a * r * kept(a, r) * ~((both | (a < 0)) & (r > cap))


def _clip(low: float, high: float) -> Form:
    return lambda a, r, m: -a * r * ~(((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low)))


def _sequence_level(a: Vector, r: Vector, m: Mask, low: float, high: float, over: Any) -> Vector:
    """Coefficients of -A_t * exp(mean or sum of the sample's log-ratios)."""
    if not m.any():
        return a * 0
    ratio = float(np.exp(over(np.log(r[m]))))
    kept = ~(((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low)))
    total = float((-a * ratio * kept)[m].sum())
    return np.full_like(a, total / (m.sum() if over is np.mean else 1.0))


# ------------------------------------------------------------------ weights


def _counts(place: Place, count: Callable[[Row], float]) -> tuple[float, float, float]:
    """Return a count of this row, of this rank and of the step."""
    own = sum(count(row) for row in place.own)
    return count(place.row), own, sum(count(row) for rank in place.rows for row in rank)


def _trained(row: Row) -> float:
    return float(row.mask.sum())


def _weights() -> list[Hypothesis]:
    def tokens(row: Row) -> float:
        return float(sum(b - a for a, b in row.samples))

    def padded(row: Row) -> float:
        return float(row.size)

    def samples(row: Row) -> float:
        return float(len(row.samples))

    def trained_samples(row: Row) -> float:
        return float(sum(bool(row.mask[a:b].any()) for a, b in row.samples))

    def pushed(row: Row) -> float:
        return float((row.mask & (row.columns.get("advantages", np.ones(row.size)) != 0)).sum())

    def absolute(row: Row) -> float:
        return float(np.abs(row.columns["advantages"][row.mask]).sum())

    whats: list[tuple[str, Callable[[Row], float]]] = [
        ("trained tokens", _trained),
        ("all tokens of samples", tokens),
        ("all tokens with padding", padded),
        ("all tokens with padding", lambda row: 0.0 if row.dummy else padded(row)),
        ("samples", samples),
        ("trained samples", trained_samples),
        ("sequences with padding", lambda row: float(len(row.bounds))),
        ("tokens with an advantage", pushed),
        ("summed absolute advantages", absolute),
        ("turns", lambda row: float(len(spans_of(row.mask)))),
        (
            "tokens after the prompt",
            lambda row: float(sum((np.cumsum(row.mask[a:b]) > 0).sum() for a, b in row.samples)),
        ),
    ]
    found: list[Hypothesis] = []
    for what, count in whats:
        found += _denominators(what, count)
    return found + _other_weights()


def _denominators(what: str, count: Callable[[Row], float]) -> list[Hypothesis]:
    def safe(value: float) -> float:
        return max(value, 1e-9)

    def counted(place: Place, which: int) -> float:
        return safe(_counts(place, count)[which])

    def busy(place: Place) -> int:
        return max(sum(_trained(row) > 0 for row in place.own), 1)

    trained = what == "trained tokens"
    name = "denominator per micro-batch" if trained else f"divided by {what} of the micro-batch"
    forms: list[tuple[str, Callable[[Place], Vector | float]]] = [
        (f"{name}, summed", lambda p: 1 / counted(p, 0)),
        (f"{name}, summed", lambda p: 1 / counted(p, 0) / p.world),
        (f"{name}, averaged", lambda p: 1 / counted(p, 0) / len(p.own)),
        (f"{name}, averaged", lambda p: 1 / counted(p, 0) / len(p.own) / p.world),
        (f"{name}, averaged", lambda p: 1 / counted(p, 0) / busy(p) / p.world),
        (f"divided by {what} of the rank", lambda p: 1 / counted(p, 1)),
        (f"divided by {what} of the rank, averaged over ranks", lambda p: 1 / counted(p, 1) / p.world),
        (f"divided by {what} of the rank and of the micro-batches", lambda p: 1 / counted(p, 1) / len(p.own)),
    ]
    if not trained:
        forms += [
            (f"divided by {what} of the step", lambda p: 1 / counted(p, 2)),
            (f"divided by {what} of the step, not times the ranks", lambda p: 1 / counted(p, 2) / p.world),
            (f"divided by trained tokens and by {what} of the micro-batch", lambda p: p.right / counted(p, 0)),
            (f"divided by trained tokens and by {what} of the step", lambda p: p.right / counted(p, 2)),
        ]
    return [Hypothesis(name=name, fix=_COUNT, weights=weights) for name, weights in forms]


def _other_weights() -> list[Hypothesis]:
    def by_sample(weight: Callable[[float, float], float], denominator: Callable[[Place], float]) -> Any:
        """Weights from the trained tokens and the length of each sample."""

        def weights(place: Place) -> Vector:
            out = np.zeros(place.row.size)
            for a, b in place.row.samples:
                out[a:b] = weight(float(place.row.mask[a:b].sum()), float(b - a)) / max(denominator(place), 1e-9)
            return out

        return weights

    def step_tokens(p: Place) -> float:
        return float(p.step.loss_tokens)

    def trained_samples(p: Place) -> float:
        return float(sum(row.mask[a:b].any() for rank in p.rows for row in rank for a, b in row.samples))

    def in_row(p: Place) -> float:
        return float(len(p.row.samples))

    forms: list[tuple[str, Any]] = [
        ("ranks are forgotten: the step is smaller with every rank", lambda p: p.right / p.world),
        ("ranks are counted twice: the step is larger with every rank", lambda p: p.right * p.world),
        ("not divided by anything", lambda p: 1.0),
        ("not divided by anything, averaged over ranks", lambda p: 1.0 / p.world),
        ("divided by the number of micro-batches again", lambda p: p.right / len(p.own)),
        ("multiplied by the number of micro-batches", lambda p: p.right * len(p.own)),
        ("divided by trained tokens + 1", lambda p: 1 / (p.step.loss_tokens + 1)),
        ("divided by trained tokens - 1", lambda p: 1 / max(p.step.loss_tokens - 1, 1)),
        ("divided by the groups of the step", lambda p: 1 / max(p.step.denominators.groups, 1)),
        ("dummy micro-batches are counted", _with_dummies),
        ("mean over samples of the mean over their tokens", by_sample(lambda n, t: 1 / max(n, 1), trained_samples)),
        (
            "mean over samples of the mean over their tokens",
            by_sample(lambda n, t: 1 / max(n, 1), lambda p: p.step.denominators.samples),
        ),
        ("mean over a row's samples of the mean over their tokens", by_sample(lambda n, t: 1 / max(n, 1), in_row)),
        ("divided by each sample's trained tokens too", by_sample(lambda n, t: 1 / max(n, 1), step_tokens)),
        ("divided by each sample's length too", by_sample(lambda n, t: 1 / t, step_tokens)),
        ("divided by the root of each sample's length", by_sample(lambda n, t: t**-0.5, step_tokens)),
        ("divided by the root of each sample's trained tokens", by_sample(lambda n, t: max(n, 1) ** -0.5, step_tokens)),
        ("weighted by each sample's trained tokens", by_sample(lambda n, t: n, step_tokens)),
        ("weighted by each sample's length", by_sample(lambda n, t: t, step_tokens)),
        ("divided by the root of the trained tokens", lambda p: max(p.step.loss_tokens, 1) ** -0.5),
        ("divided by the longest sample", lambda p: 1 / max((b - a for a, b in p.row.samples), default=1)),
        ("largest count of a rank as the denominator", lambda p: 1 / max(max(map(_of_rank, p.rows)) * p.world, 1)),
    ]
    return [Hypothesis(name=name, fix=_COUNT, weights=weights) for name, weights in forms]


def _of_rank(rows: Sequence[Row]) -> float:
    return sum(map(_trained, rows))


def _with_dummies(place: Place) -> float:
    dummies = sum(row.size for rank in place.rows for row in rank if row.dummy)
    return 1 / (place.step.loss_tokens + dummies)


def _micro_batches() -> list[Hypothesis]:
    fix = "train every micro-batch of every rank once"
    kept: dict[str, Callable[[Place], float]] = {
        "only the first micro-batch is trained": lambda p: p.index == 0,
        "only the last micro-batch is trained": lambda p: p.index == len(p.own) - 1,
        "the last micro-batch is not trained": lambda p: p.index < len(p.own) - 1 or len(p.own) == 1,
        "the first micro-batch is not trained": lambda p: p.index > 0 or len(p.own) == 1,
        "only one rank is trained": lambda p: p.rank == 0,
        "only one rank is trained, not averaged": lambda p: (p.rank == 0) * p.world,
        "only the last rank is trained": lambda p: p.rank == p.world - 1,
        "the last rank is not trained": lambda p: p.rank < p.world - 1 or p.world == 1,
        "the first micro-batch is trained twice": lambda p: 1 + (p.index == 0),
        "the first of several micro-batches is trained twice": lambda p: 1 + (p.index == 0 and len(p.own) > 1),
        "the last of several micro-batches is trained twice": lambda p: (
            1 + (p.index == len(p.own) - 1 and len(p.own) > 1)
        ),
        "micro-batches are weighted by their place": lambda p: p.index + 1,
        "every other micro-batch is trained": lambda p: p.index % 2 == 0,
    }
    found = [Hypothesis(name=name, fix=fix, weights=_picked(pick)) for name, pick in kept.items()]
    return found + [Hypothesis(name=name, fix=fix, weights=_picked_alone(kept[name])) for name in list(kept)[:8]]


def _picked(pick: Callable[[Place], float]) -> Callable[[Place], Vector | float]:
    return lambda place: place.right * float(pick(place))


def _picked_alone(pick: Callable[[Place], float]) -> Callable[[Place], Vector | float]:
    """Divided by the tokens that are picked."""
    return lambda place: float(pick(place)) / max(_kept_tokens(place, pick), 1)


def _kept_tokens(place: Place, pick: Callable[[Place], float]) -> float:
    places = (
        (replace(place, rank=rank, index=index, row=row))
        for rank, rows in enumerate(place.rows)
        for index, row in enumerate(rows)
    )
    return sum(_trained(p.row) * float(pick(p)) for p in places)
