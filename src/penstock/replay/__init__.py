"""Replay tables: items held between generation and training.

`Table` composes a sampler, a remover and a limiter; see docs/replay.md for how to choose them.
"""

from penstock.replay.batch import Batch
from penstock.replay.by_priority import MaxPriority, MinPriority
from penstock.replay.fifo_lifo import Fifo, Lifo
from penstock.replay.freshest import Freshest
from penstock.replay.importance import importance_weights
from penstock.replay.limiters import Limiter, MinSize, Queue, SamplesPerInsert
from penstock.replay.prioritized import Prioritized
from penstock.replay.registry import LIMITERS, SELECTORS
from penstock.replay.selector import Draw, Index, Selector
from penstock.replay.slots import Key
from penstock.replay.table import Table
from penstock.replay.table_metrics import Reason
from penstock.replay.table_settings import Replay, Settings
from penstock.replay.uniform import Uniform

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
