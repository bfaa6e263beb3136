"""Replay tables: items held between generation and training.

`Table` composes a sampler, a remover and a limiter; see docs/replay.md for how to choose them.
"""

from penstock.hold.batch import Batch
from penstock.hold.by_priority import MaxPriority, MinPriority
from penstock.hold.fifo_lifo import Fifo, Lifo
from penstock.hold.freshest import Freshest
from penstock.hold.importance import importance_weights
from penstock.hold.limiters import Limiter, MinSize, Queue, SamplesPerInsert
from penstock.hold.prioritized import Prioritized
from penstock.hold.registry import LIMITERS, SELECTORS
from penstock.hold.selector import Draw, Index, Selector
from penstock.hold.slots import Key
from penstock.hold.table import Table
from penstock.hold.table_metrics import Reason
from penstock.hold.table_settings import Replay, Settings
from penstock.hold.uniform import Uniform

__all__ = [
    "LIMITERS",
    "SELECTORS",
    "Batch",
    "Draw",
    "Fifo",
    "Freshest",
    "Index",
    "Key",
    "Lifo",
    "Limiter",
    "MaxPriority",
    "MinPriority",
    "MinSize",
    "Prioritized",
    "Queue",
    "Reason",
    "Replay",
    "SamplesPerInsert",
    "Selector",
    "Settings",
    "Table",
    "Uniform",
    "importance_weights",
]
