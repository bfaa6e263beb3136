"""The figures of the README, each measured again: one row per claim, met if it holds in this run.

Runs the benchmarks that have these figures and picks their rows. Under ten minutes; nothing else should run meanwhile.
What the README says about kills is not here: `scripts/torture` takes hours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks import path, replay, trees, wire
from benchmarks.report import Row

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A figure of the README."""

    quote: str
    """Words of the README that have the figure."""
    bench: str
    row: str
    """What the row's name begins with."""
    rival: str = ""
    figure: float
    """The least ratio that rounds to the figure, or the size."""
    value: Literal["ratio", "ours", "rival"] = "ratio"
    """What the figure is: how many times better ours is, or a size of ours or of the rival, in bytes."""

    def is_of(self, row: Row) -> bool:
        return row.name.startswith(self.row) and row.rival_name.startswith(self.rival)


_GROUP = "group of 16 x (15k shared + 15k)"
_QUEUE = "TransferQueue"
CLAIMS = (
    Claim(
        quote="routed experts (router replay): 2.6 to 3.9 times as fast",
        bench="path",
        row="router replay",
        rival=_QUEUE,
        figure=2.55,
    ),
    Claim(
        quote="text of different lengths 2.5 to 2.9 times as fast",
        bench="path",
        row="text 512 x up to 4k",
        rival=_QUEUE,
        figure=2.45,
    ),
    Claim(quote="of one length 1.4 to 1.7", bench="path", row="text 512 x 4k", rival=_QUEUE, figure=1.35),
    Claim(
        quote="a batch in one call 1.3 to 2.1",
        bench="path",
        row="text 512 x 4k, 2 ranks, put_many",
        rival=f"{_QUEUE}, whole batch",
        figure=1.25,
    ),
    Claim(
        quote="received bytes to packed tensors: 76 to 91 times as fast",
        bench="wire",
        row="received bytes to packed tensors",
        figure=76,
    ),
    Claim(quote="3.1 to 3.7", bench="replay", row="sample 512 of 1,000,000", rival="cpprb", figure=3.1),
    Claim(quote="and 1.5 times as fast", bench="replay", row="sample 512 of 1,000,000", rival="torchrl", figure=1.5),
    Claim(
        quote="1.6 to 4 times less work in a GRPO step",
        bench="trees",
        row="grpo 16 x (2k + 2k), 4,096 samples, 8 ranks, cap 65,536: barrier cost",
        rival="today's rows",
        figure=1.6,
    ),
    Claim(
        quote="1.6 to 4 times less work in a GRPO step",
        bench="trees",
        row="grpo 16 x (15k + 2k), 4,096 samples, 8 ranks, cap 65,536: barrier cost",
        rival="today's rows",
        figure=4,
    ),
    Claim(quote="1.53 MB, lossless", bench="wire", row=f"{_GROUP}, fast", rival="byte", figure=1.54e6, value="ours"),
    Claim(quote="0.92 MB with", bench="wire", row=f"{_GROUP}, small", rival="byte", figure=0.925e6, value="ours"),
    Claim(quote="take 2.94 MB", bench="wire", row=f"{_GROUP}, fast", rival="byte", figure=2.935e6, value="rival"),
    Claim(quote="and lists 3.46 MB", bench="wire", row=f"{_GROUP}, fast", rival="lists", figure=3.455e6, value="rival"),
)


def run(*, full: bool, progress: Progress, rivals: str | None = None, baseline: str | None = None) -> list[Row]:
    found = {
        "wire": wire.run(full=full, progress=progress),
        "replay": replay.run(full=full, progress=progress),
        "trees": trees.run(full=full, progress=progress),
        "path": path.run(full=full, progress=progress, rivals=rivals, baseline=baseline, only=path.settings(full=full)),
    }
    return [checked(claim, found[claim.bench]) for claim in CLAIMS]


def checked(claim: Claim, rows: list[Row]) -> Row:
    """The row of a claim, with the claim as its target."""
    name = f"{claim.quote!r} ({claim.bench})"
    row = next((row for row in rows if claim.is_of(row)), None)
    if row is None:
        lacking = f"bench {claim.bench} has no row {claim.row!r} against {claim.rival or 'anything'!r}"
        return Row(name=name, ours=None, ratio=0.0, target=claim.figure, note=lacking)
    if row.skipped:
        return replace(row, name=name, target=claim.figure, bound="ratio", note="")
    if claim.value == "ratio":
        return replace(row, name=name, target=claim.figure, bound="ratio", note="")
    size = row.ours if claim.value == "ours" else row.rival
    bound: Literal["max", "min"] = "max" if claim.value == "ours" else "min"
    return Row(name=name, ours=size, unit=row.unit, target=claim.figure, bound=bound)
