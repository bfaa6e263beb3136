"""Plain references for what happens to a step: packing and forests, losses in Python floats, one token at a time.

Slow, and short enough to check by eye. `penstock.packing`, `penstock.train.loss` and `penstock.train.logits` must agree
with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.arrays import Sample
from penstock.packing import PackedStep, RankPlan

# ------------------------------------------------------------------ packing


WEIGHTS = {
    "rl": {"rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0},
    "opd": {"rl_weights": 0.0, "ce_weights": 0.0, "ref_kl_weights": 1.0},
    "sft": {"rl_weights": 0.0, "ce_weights": 1.0, "ref_kl_weights": 0.0},
}


def best_fit(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Pack longest first, into the fullest bin with room; among equally full ones, the oldest."""
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [cap - sum(lengths[j] for j in b) for b in bins]
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[i]]
        if fitting:
            bins[min(fitting, key=lambda b: (room[b], b))].append(i)
        else:
            bins.append([i])
    return bins


def spread(
    lengths: Sequence[int], costs: Sequence[float], targets: Sequence[float], cap: int
) -> list[list[int]] | None:
    """Pack costliest first, into the bin with room that is furthest below its target; among equals, the first.

    Returns None if one does not fit anywhere."""
    bins: list[list[int]] = [[] for _ in targets]
    above = [-target for target in targets]
    for i in sorted(range(len(lengths)), key=lambda i: (-costs[i], -lengths[i], i)):
        fitting = [b for b in range(len(bins)) if cap - sum(lengths[j] for j in bins[b]) >= lengths[i]]
        if not fitting:
            return None
        b = min(fitting, key=lambda b: (above[b], b))
        bins[b].append(i)
        above[b] += costs[i]
    return bins


def cheapest_step(lengths: Sequence[int], costs: Sequence[float], ranks: int, cap: int) -> float:
    """Return the lowest possible cost of a step, by trying every partition into bins.

    A step is rows of `ranks` micro-batches, and a row costs as much as its costliest one. With bins sorted by cost and
    two ranks, bins 0, 2, 4... are the costliest of their rows: `sums[::ranks]`.
    """
    best = float("inf")

    def put(i: int, bins: list[list[int]]) -> None:
        nonlocal best
        if i == len(lengths):
            sums = sorted((sum(costs[j] for j in b) for b in bins), reverse=True)
            best = min(best, sum(sums[::ranks]))
            return
        for b in bins:
            if sum(lengths[j] for j in b) + lengths[i] <= cap:
                b.append(i)
                put(i + 1, bins)
                b.pop()
        bins.append([i])
        put(i + 1, bins)
        bins.pop()

    put(0, [])
    return best


def token_rows(samples: Sequence[Sample], rank_plan: RankPlan, m: int) -> list[dict[str, Any]]:
    """Return micro-batch `m` of a rank plan as one record per token, read column by column from the samples."""
    rows: list[dict[str, Any]] = []
    dummy = bool(rank_plan.dummy[m])
    for s in range(int(rank_plan.starts[m]), int(rank_plan.starts[m + 1])):
        sample = samples[int(rank_plan.order[s])]
        for t in range(int(rank_plan.cuts[s])):
            row: dict[str, Any] = {"position_ids": t}
            for name in rank_plan.columns:
                row[name] = _borrowed(sample, name, t, rank_plan) if dummy else _value(sample, name, t, rank_plan)
            rows.append(row)
    padding = int(rank_plan.padded[m]) - len(rows)
    for t in range(padding):
        row = {"position_ids": t}
        for name in rank_plan.columns:
            row[name] = rank_plan.pad_id if name == "token_ids" else _padding(name, rank_plan)
        rows.append(row)
    return rows


def _value(sample: Sample, name: str, t: int, rank_plan: RankPlan) -> Any:
    cells = sample.get(name)
    if cells is None:
        return _constant(name, WEIGHTS[sample.mode].get(name, rank_plan.table[name].fill), rank_plan)
    once = not rank_plan.table[name].ragged and cells.ndim == 0
    return cells.tolist() if once else cells[t].tolist()


def _borrowed(sample: Sample, name: str, t: int, rank_plan: RankPlan) -> Any:
    if name in ("token_ids", "mm_token_type_ids") and sample.get(name) is not None:
        return sample[name][t].tolist()
    return _padding(name, rank_plan)


def _padding(name: str, rank_plan: RankPlan) -> Any:
    return _constant(name, rank_plan.table[name].pad, rank_plan)


def _constant(name: str, value: Any, rank_plan: RankPlan) -> Any:
    """Return the value for a token that has none: an empty list, or `value` in the shape of the column's rows."""
    if rank_plan.table[name].ragged:
        return []
    for size in reversed(rank_plan.shapes[name][1] if rank_plan.table[name].trailing else ()):
        value = [value] * size
    return value


def count_step(step: PackedStep) -> dict[str, int]:
    """Count the contents of a step in its filled micro-batches, token by token."""
    counts = dict.fromkeys(
        ("tokens", "loss_tokens", "samples", "micro_batches", "dummy_micro_batches", "padding_tokens", "dummy_tokens"),
        0,
    )
    longest = 0
    for rank in step.ranks:
        for batch in rank:
            own = [int(n) for n in batch.segments.lengths]
            length = len(batch["token_ids"].tolist())
            counts["tokens"] += sum(own)
            counts["loss_tokens"] += sum(batch["loss_mask"].tolist())
            counts["samples"] += len(own)
            counts["micro_batches"] += 1
            counts["dummy_micro_batches"] += batch.is_dummy
            counts["dummy_tokens" if batch.is_dummy else "padding_tokens"] += length - sum(own)
            longest = max(longest, length)
    return {**counts, "max_micro_batch_tokens": longest}


# ------------------------------------------------------------------ forests


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForest:
    index: list[list[int]]
    """Per sample, the place of each of its tokens in the forest."""
    sources: list[int]
    """Per place, the place before it on its path; -1 for a first token."""
    sees: list[set[int]]
    """Per place, the places on its path, itself included."""
    segments: list[list[int]]
    """Maximal chains of places that no sample ends or branches inside of."""
    parents: list[int]
    """Per segment, the segment before it; -1 for a root."""
    paths: list[list[int]]
    """Per sample, its segments."""


def plain_forest(lengths: Sequence[int], shared: Sequence[int]) -> PlainForest:
    """Build the forest of samples in depth-first order. Sample i shares its first `shared[i]` tokens with sample i - 1.

    Lengths [3, 4] and shared [0, 2]: places 0, 1, 2 are the first sample; 0, 1, 3, 4 the second, which branches at 1.
    """
    index: list[list[int]] = []
    sources: list[int] = []
    for n, s in zip(lengths, shared, strict=True):
        path = index[-1][:s] if index else []
        while len(path) < n:
            sources.append(path[-1] if path else -1)
            path = [*path, len(sources) - 1]
        index.append(path)
    sees: list[set[int]] = []
    for place, source in enumerate(sources):
        sees.append({place} | (sees[source] if source >= 0 else set()))
    ends = {path[-1] for path in index}
    children = [sources.count(place) for place in range(len(sources))]
    segments: list[list[int]] = []
    for place, source in enumerate(sources):
        if source >= 0 and source not in ends and children[source] == 1:
            segments[-1].append(place)
        else:
            segments.append([place])
    of = {place: k for k, own in enumerate(segments) for place in own}
    return PlainForest(
        index=index,
        sources=sources,
        sees=sees,
        segments=segments,
        parents=[of[sources[own[0]]] if sources[own[0]] >= 0 else -1 for own in segments],
        paths=[sorted({of[place] for place in path}) for path in index],
    )


def unique_prefixes(paths: Sequence[Sequence[object]]) -> int:
    """Return the number of tokens in a trie of these paths: the fewest that any method can compute."""
    return len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})


# ------------------------------------------------------------------ losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The inputs of a loss, for one token."""

    trained: bool
    trainer: float
    """Log-probability under the model being trained."""
    sampler: float
    advantage: float = 0.0
    teacher: float = 0.0
    rl: float = 1.0
    ce: float = 0.0
    ref_kl: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    loss: float
    masked: bool
    masked_high: bool = False
    masked_low: bool = False


def gap(token: Token) -> dict[str, float]:
    """Return the four measures of how far trainer and sampler are apart."""
    log_ratio = token.trainer - token.sampler
    ratio = math.exp(log_ratio)
    return {
        "log_ratio": log_ratio,
        "ratio": ratio,
        "mismatch_kl": math.expm1(log_ratio) - log_ratio,
        "prob_delta": math.exp(token.trainer) - math.exp(token.sampler),
    }


def _two_sided(token: Token, signal: float, high: float, low: float, kl_tau: float) -> Outcome:
    if not token.trained:
        return Outcome(loss=0.0, masked=False)
    measured = gap(token)
    above, below = measured["prob_delta"] > high, measured["prob_delta"] < -low
    masked = above if signal > 0 else below
    loss = kl_tau * measured["log_ratio"] ** 2
    if not masked:
        loss -= signal * measured["ratio"]
    return Outcome(loss=loss, masked=masked, masked_high=signal > 0 and above, masked_low=signal < 0 and below)


def dppo(token: Token, high: float = 0.2, low: float = 0.2, kl_tau: float = 1e-3) -> Outcome:
    return _two_sided(token, token.advantage, high, low, kl_tau)


def opd(token: Token, kl_tau: float = 1e-3) -> Outcome:
    return _two_sided(token, token.teacher - token.trainer, 0.2, 0.2, kl_tau)


def ref_kl(token: Token, low: float = 0.2, kl_tau: float = 1e-3) -> Outcome:
    if not token.trained:
        return Outcome(loss=0.0, masked=False)
    measured = gap(token)
    masked = measured["prob_delta"] < -low
    loss = kl_tau * measured["log_ratio"] ** 2
    if not masked:
        loss -= (token.teacher - token.trainer) * measured["ratio"]
    return Outcome(loss=loss, masked=masked, masked_low=masked)


def ipo(token: Token, threshold: float = 0.1, kl_tau: float = 1e-3) -> Outcome:
    if not token.trained:
        return Outcome(loss=0.0, masked=False)
    measured = gap(token)
    masked = abs(measured["prob_delta"]) > threshold
    loss = kl_tau * measured["log_ratio"] ** 2
    if not masked:
        loss -= token.advantage * measured["ratio"]
    high = measured["prob_delta"] > threshold
    return Outcome(loss=loss, masked=masked, masked_high=high, masked_low=masked and not high)


def ppo(token: Token, high: float = 0.2, low: float = 0.2, beta: float = 0.0) -> Outcome:
    if not token.trained:
        return Outcome(loss=0.0, masked=False)
    ratio = gap(token)["ratio"]
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = -min(token.advantage * ratio, token.advantage * clipped)
    away = token.teacher - token.trainer
    loss += beta * (math.expm1(away) - away)
    cut_high, cut_low = token.advantage > 0 and ratio > 1 + high, token.advantage < 0 and ratio < 1 - low
    return Outcome(loss=loss, masked=cut_high or cut_low, masked_high=cut_high, masked_low=cut_low)


def sft(token: Token) -> Outcome:
    return Outcome(loss=-token.trainer if token.trained else 0.0, masked=False)


def mean_loss(tokens: Sequence[Token], counts: Mapping[str, int]) -> float:
    """Return the default loss of a mixed step: each part divided by its own count of tokens."""
    rl = sum(t.rl * dppo(t).loss for t in tokens if t.rl)
    ce = sum(t.ce * sft(t).loss for t in tokens if t.ce)
    kl = sum(t.ref_kl * opd(t).loss for t in tokens if t.ref_kl)
    return rl / max(counts["rl"], 1) + ce / max(counts["ce"], 1) + kl / max(counts["ref_kl"], 1)


def token_logprobs(
    logits: Sequence[Sequence[float]],
    token_ids: Sequence[int],
    sequence_lengths: Sequence[int],
    temperatures: Sequence[float],
    kept: Sequence[Sequence[int]] | None = None,
) -> list[tuple[float, float]]:
    """Return log-probability and entropy of each token, predicted by the one before it in the same segment.

    With `kept`, over the ids in each token's list only; an empty list means all ids.
    """
    out: list[tuple[float, float]] = []
    start = 0
    for length in sequence_lengths:
        for i in range(start, start + length):
            if i == start:  # a first token has no prediction: count it as uniform
                out.append((-math.log(len(logits[0])), math.log(len(logits[0]))))
                continue
            ids = kept[i] if kept and kept[i] else range(len(logits[0]))
            scaled = [v / temperatures[i] if j in ids else -math.inf for j, v in enumerate(logits[i - 1])]
            top = max(scaled)
            norm = top + math.log(sum(math.exp(value - top) for value in scaled))
            entropy = -sum(math.exp(v - norm) * (v - norm) for v in scaled if v != -math.inf)
            out.append((scaled[token_ids[i]] - norm, entropy))
        start += length
    return out


def topk_kl(
    logits: Sequence[Sequence[float]],
    topk_ids: Sequence[Sequence[int]],
    topk_logprobs: Sequence[Sequence[float]],
    sequence_lengths: Sequence[int],
    temperatures: Sequence[float],
    *,
    forward: bool,
    min_tail: float = 1e-6,
) -> list[float]:
    """Return each token's divergence between the model and a teacher's k best ids, with all other ids in one bucket."""
    out: list[float] = []
    start = 0
    for length in sequence_lengths:
        out.append(0.0)
        for i in range(start + 1, start + length):
            weights = [math.exp(value / temperatures[i]) for value in logits[i - 1]]
            model = [weights[token] / sum(weights) for token in topk_ids[i]]
            teacher = [math.exp(value) for value in topk_logprobs[i]]
            others = [w for token, w in enumerate(weights) if token not in topk_ids[i]]
            if others:
                model.append(sum(others) / sum(weights))
                teacher.append(max(1 - sum(teacher), min_tail))
            if forward:
                out.append(sum(q * math.log(q / p) for p, q in zip(model, teacher, strict=True)))
            else:
                out.append(sum(p * math.log(p / q) for p, q in zip(model, teacher, strict=True)))
        start += length
    return out
