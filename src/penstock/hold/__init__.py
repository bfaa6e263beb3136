"""Replay tables: items held between generation and training.

`Table` composes a sampler, a remover and a limiter; see docs/replay.md for how to choose them.
"""

from penstock.hold.arrival import Fifo, Lifo
from penstock.hold.batch import Batch
from penstock.hold.extreme import MaxPriority, MinPriority
from penstock.hold.freshest import Freshest
from penstock.hold.limiters import Limiter, MinSize, Queue, SamplesPerInsert
from penstock.hold.metrics import Reason
from penstock.hold.prioritized import Prioritized
from penstock.hold.selector import Draw, Index, Selector
from penstock.hold.settings import Settings
from penstock.hold.slots import Key
from penstock.hold.table import Table
from penstock.hold.uniform import Uniform
from penstock.hold.weights import importance_weights

__all__ = [
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
    "SamplesPerInsert",
    "Selector",
    "Settings",
    "Table",
    "Uniform",
    "importance_weights",
]
