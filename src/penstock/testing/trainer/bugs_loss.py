"""The simulated bugs of `penstock.testing.trainer` in advantages, log-probabilities, ratios and clips."""

# ruff: noqa: ARG001, ARG005   (functions of one kind have one signature, whether or not they need all of it)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from penstock.testing.trainer.reference import Vector
from penstock.testing.trainer.simulated import Columns, Fix, Hypothesis, Mask, Row, Rows, spread

Form: TypeAlias = Callable[[Vector, Vector, Mask], Vector]
"""advantages, ratios and mask of one sample -> coefficients"""
_RATIO = "the ratio of token t is exp(logprob of token t now - logprobs[t]), each token with its own"
_CLIP = "take the smaller of ratio * advantage and clipped ratio * advantage"


_TIMES = Hypothesis(
    name="the loss is multiplied by the advantages once more, or though it has none",
    fix="leave advantages out of a loss without them",
    push=lambda columns, t, right: right * columns["advantages"],
)


def column(name: str, change: Callable[[Vector, Row], Vector]) -> Callable[[Row], Row]:
    """Return a change of one column of a row, where it has it."""

    return lambda row: row.with_columns(**{name: change(row.columns[name], row)}) if name in row.columns else row


def advantage_bugs() -> list[Hypothesis]:
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
    seen = [Hypothesis(name=name, fix=Fix.ADVANTAGES, row=column("advantages", fn)) for name, fn in changes.items()]
    return [*(replace(one, name=one.name.split("|")[0]) for one in seen), *_normalized_over_steps(), _TIMES]


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
                found.append(Hypothesis(name=name, fix=Fix.ADVANTAGES, rows=changed(scope, divide, subtract, ddof)))
            name = f"mean advantage of the {scope} is subtracted"
            found.append(Hypothesis(name=name, fix=Fix.ADVANTAGES, rows=changed(scope, False, True, ddof)))
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


def ratio_bugs(low: float, high: float) -> list[Hypothesis]:
    changes: dict[str, Callable[[Vector, Row], Vector]] = {
        "logprobs of the token before": lambda s, row: np.roll(s, 1),
        "logprobs of the token after": lambda s, row: np.roll(s, -1),
        "logprobs are taken for probabilities": lambda s, row: np.exp(s),
        "logprobs of the sampler are ignored": lambda s, row: np.zeros_like(s),
        "mean logprob of the sample for all its tokens": lambda s, row: spread(s, row, lambda v: float(v.mean())),
        "logprobs are in another base": lambda s, row: s / np.log(2),
    }
    swapped = "teacher_logprobs[t] are the reference's, logprobs[t] the sampler's"
    ratios = _forms_of_ratio(low, high)
    found = [Hypothesis(name=name, fix=_CLIP, push=_form(change)) for name, change in _clips(low, high).items()]
    found += [Hypothesis(name=name, fix=_RATIO, push=_form(change)) for name, change in ratios.items()]
    found += [
        Hypothesis(name=name.replace("sample", "row"), fix=_RATIO, push=_form(change), by_row=True)
        for name, change in ratios.items()
        if "sample" in name
    ]
    found += [Hypothesis(name=name, fix=_RATIO, row=column("logprobs", fn)) for name, fn in changes.items()]
    found.append(
        Hypothesis(
            name="the sampler's logprobs are read in place of teacher_logprobs",
            fix=swapped,
            row=column("teacher_logprobs", lambda v, row: row.columns["logprobs"]),
        )
    )
    for name in ("rl_weights", "ce_weights", "ref_kl_weights", "teacher_logprobs"):
        fix = f"{name}[t] belongs to token t"
        found += [
            Hypothesis(name=f"{name} are ignored", fix=fix, row=column(name, lambda v, row: v * 0 + 1)),
            Hypothesis(name=f"{name} of the token before", fix=fix, row=column(name, lambda v, row: np.roll(v, 1))),
            Hypothesis(name=f"{name} of the token after", fix=fix, row=column(name, lambda v, row: np.roll(v, -1))),
        ]
    return found


def _form(change: Form) -> Callable[[Columns, Vector, Vector], Vector]:
    """Return coefficients from advantage, ratio and mask in place of the right ones."""

    def push(columns: Columns, logprobs: Vector, right: Vector) -> Vector:
        return change(columns["advantages"], np.exp(logprobs - columns["logprobs"]), columns["loss_mask"])

    return push


def _kept(a: Vector, r: Vector | float, low: float, high: float) -> Mask:
    kept: Mask = ~(((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low)))
    return kept


def _clips(low: float, high: float) -> dict[str, Form]:
    def inside(r: Vector) -> Mask:
        return (r >= 1 - low) & (r <= 1 + high)

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
    for cap in _CAPS:
        clips[f"ratios above {cap:g} are clipped where the advantage is negative (dual clip)"] = _left_out(
            cap, low, high, both=False
        )
    for lo, hi in _USUAL:
        if (lo, hi) != (low, high):
            clips[f"ratios are clipped at {1 - lo:g} and {1 + hi:g}"] = _clip(lo, hi)
    return clips


def _forms_of_ratio(low: float, high: float) -> dict[str, Form]:
    def kept(a: Vector, r: Vector) -> Mask:
        return _kept(a, r, low, high)

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
    for cap in _CAPS:
        ratios[f"ratios above {cap:g} are cut to it as constants"] = _capped(cap)
        ratios[f"ratios above {cap:g} are cut to it, and nothing else is clipped"] = _clip(10.0, cap - 1)
        ratios[f"ratios above {cap:g} are left out for both signs, and nothing else is clipped"] = _below(cap)
        ratios[f"ratios above {cap:g} are left out"] = _left_out(cap, low, high, both=True)
    for cap in _CAPS[1:]:
        ratios[f"ratios above {cap:g} or below {1 / cap:.3g} are left out"] = _between(cap, low, high)
    return ratios


_CAPS = (1.0, 2.0, 3.0, 5.0, 10.0)
_USUAL = ((0.1, 0.1), (0.2, 0.28), (0.3, 0.3), (0.28, 0.2), (0.2, 0.3), (0.5, 0.5), (0.2, 0.2), (0.02, 0.02))
"""Clips that trainers have as defaults."""


def _below(cap: float) -> Form:
    return lambda a, r, m: -a * r * (r <= cap)


def _capped(cap: float) -> Form:
    return lambda a, r, m: -a * np.minimum(r, cap)


def _left_out(cap: float, low: float, high: float, *, both: bool) -> Form:
    return lambda a, r, m: -a * r * _kept(a, r, low, high) * ~((both | (a < 0)) & (r > cap))


def _between(cap: float, low: float, high: float) -> Form:
    return lambda a, r, m: -a * r * _kept(a, r, low, high) * (r < cap) * (r > 1 / cap)


def _clip(low: float, high: float) -> Form:
    return lambda a, r, m: -a * r * _kept(a, r, low, high)


def _sequence_level(a: Vector, r: Vector, m: Mask, low: float, high: float, over: Any) -> Vector:
    """Coefficients of -A_t * exp(mean or sum of the sample's log-ratios)."""
    if not m.any():
        return a * 0
    ratio = float(np.exp(over(np.log(r[m]))))
    total = float((-a * ratio * _kept(a, ratio, low, high))[m].sum())
    return np.full_like(a, total / (m.sum() if over is np.mean else 1.0))
