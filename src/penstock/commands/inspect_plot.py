"""`penstock inspect --plot`: a picture of how a frame's samples would be packed, or of how a run's step was."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import InvalidInput
from penstock.frames import decode
from penstock.packing import Cost, Packing, RankPlan, pack_with
from penstock.runs import planned_step
from penstock.view import draw, timing_of


def plot_frame(frame: Path, picture: Path, *, ranks: int, cap: int | None, trees: bool) -> str:
    """Draw the samples of a frame as one step; what was drawn, in a sentence."""
    samples = decode(frame.read_bytes())
    longest = int(samples.lengths.max(initial=1))
    packing = Packing(ranks=ranks, seq_len=longest, micro_batch_max_tokens=cap, long_rows=True, trees=trees)
    step = pack_with(packing, samples)
    title = f"{frame.name}, {ranks} ranks{', trees' if trees else ''}"
    return _drawn(title, [rank.rank_plan for rank in step.ranks], packing.cost, picture)


def plot_run(folder: Path, picture: Path, *, step: int | None) -> str:
    """Draw a step of a run, the last one unless given, whose plan is still kept."""
    number, plans = planned_step(folder, step)
    return _drawn(f"step {number}", [RankPlan.from_bytes(data) for data in plans], Cost(), picture)


def _drawn(title: str, plans: list[RankPlan], cost: Cost, picture: Path) -> str:
    if not plans or not len(plans[0]):
        raise InvalidInput(f"{title}: no micro-batches; there is nothing to draw")
    draw({title: timing_of(plans, cost)}, picture)
    total = plans[0].accounting.total
    shared = f", {total.shared_tokens:,} not computed twice" if total.shared_tokens else ""
    return f"{picture}: {title}, {total.samples:,} samples, {total.tokens:,} tokens{shared}"
