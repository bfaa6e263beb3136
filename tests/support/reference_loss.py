"""Losses in plain Python floats, one token at a time: `penstock.train.loss` and `logits` must agree with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
