"""Packing: which sample goes into which micro-batch of which rank (plan), and gathering the arrays (fill)."""

from penstock.arrays.sample_facts import SampleFacts
from penstock.pack.accounting import Accounting, Counts
from penstock.pack.block_pool import BlockPool
from penstock.pack.cost import Cost, Observation
from penstock.pack.denominators import Denominators, Totals
from penstock.pack.fill import bytes_needed, fill
from penstock.pack.micro_batch import MicroBatch, Segments
from penstock.pack.packed_images import PackedImages
from penstock.pack.packing import Modalities, Packing
from penstock.pack.plan import check_columns, plan
from penstock.pack.rank_plan import Plan, RankPlan
from penstock.pack.step import RankStep, Step, StepOfRank, pack, pack_with

__all__ = [
    "Accounting",
    "BlockPool",
    "Cost",
    "Counts",
    "Denominators",
    "MicroBatch",
    "Modalities",
    "Observation",
    "PackedImages",
    "Packing",
    "Plan",
    "RankPlan",
    "RankStep",
    "SampleFacts",
    "Segments",
    "Step",
    "StepOfRank",
    "Totals",
    "bytes_needed",
    "check_columns",
    "fill",
    "pack",
    "pack_with",
    "plan",
]
