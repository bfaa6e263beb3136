"""What the step page and the run page draw: the packed grid of a step, and numbers over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.view.reader import StepFolder
from penstock.view.tally import Tally, tally


def step_grid(step: StepFolder) -> list[dict[str, Any]]:
    """Per rank its micro-batches, as the exporter saw them; empty for exports without markers."""
    return [
        {"rank": rank, "micro_batches": done.micro_batches, "records": done.records, "skipped": done.skipped}
        for rank, done in step.done().items()
    ]


def run_curves(steps: Sequence[StepFolder]) -> list[dict[str, Any]]:
    """One point per finished step."""
    return [_point(step) for step in steps]


def _point(step: StepFolder) -> dict[str, Any]:
    marks = list(step.done().values())
    if marks:
        total = Tally()
        for mark in marks:
            total.merge(mark.summary)
    else:
        total = tally(step.records())
    summary = total.as_dict()
    computed = sum(batch["tokens"] for mark in marks for batch in mark.micro_batches)
    seconds = max((mark.seconds for mark in marks if mark.seconds), default=None)
    metrics: dict[str, float] = {}
    for mark in marks:
        metrics.update(mark.metrics)
    return {
        "step": step.number,
        "tokens": summary["tokens"],
        "loss_tokens": summary["loss_tokens"],
        "waste": 1 - summary["tokens"] / computed if computed else None,
        "tokens_per_s": summary["tokens"] / seconds if seconds else None,
        "masked_fraction": summary["masked_fraction"].get("is_masked"),
        **{name: summary[name] for name in ("reward", "mismatch_kl", "entropy", "staleness", "length")},
        "metrics": metrics,
    }
