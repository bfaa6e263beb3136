"""Packing: which sample goes into which micro-batch of which rank (plan), and gathering the arrays (fill)."""

from penstock.arrays.sample_facts import SampleFacts
from penstock.packing.accounting import Accounting, Counts
from penstock.packing.block_pool import BlockPool
from penstock.packing.cost import Cost, Observation
from penstock.packing.denominators import Denominators, Totals
from penstock.packing.fill import bytes_needed, fill
from penstock.packing.micro_batch import MicroBatch, Segments
from penstock.packing.packed_images import PackedImages
from penstock.packing.plan import check_columns, plan
from penstock.packing.rank_plan import Plan, RankPlan
from penstock.packing.settings import Modalities, Packing
from penstock.packing.step import RankStep, Step, StepOfRank, pack, pack_with

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
