"""Packing: which sample goes into which micro-batch of which rank (plan), and gathering the arrays (fill)."""

from penstock.pack.account import Accounting, Counts
from penstock.pack.cost import Cost, Observation
from penstock.pack.fill import bytes_needed, fill
from penstock.pack.micro_batch import MicroBatch, Segments
from penstock.pack.packing import Modalities, Packing
from penstock.pack.plan import check_columns, plan
from penstock.pack.share import Plan, Share
from penstock.pack.step import RankStep, Step, pack, pack_with
from penstock.pack.totals import Denominators, Totals
from penstock.pack.traits import Traits

__all__ = [
    "Accounting",
    "Cost",
    "Counts",
    "Denominators",
    "MicroBatch",
    "Modalities",
    "Observation",
    "Packing",
    "Plan",
    "RankStep",
    "Segments",
    "Share",
    "Step",
    "Totals",
    "Traits",
    "bytes_needed",
    "check_columns",
    "fill",
    "pack",
    "pack_with",
    "plan",
]
