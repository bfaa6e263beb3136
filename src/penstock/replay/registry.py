"""The parts a table may be made of, by the names that files, flags and checkpoints give them."""

from __future__ import annotations

from penstock.config import Kinds
from penstock.replay.by_priority import MaxPriority, MinPriority
from penstock.replay.fifo_lifo import Fifo, Lifo
from penstock.replay.freshest import Freshest
from penstock.replay.limiters import MinSize, Queue, SamplesPerInsert
from penstock.replay.prioritized import Prioritized
from penstock.replay.uniform import Uniform

SELECTORS = Kinds(
    fifo=Fifo,
    lifo=Lifo,
    uniform=Uniform,
    freshest=Freshest,
    prioritized=Prioritized,
    min_priority=MinPriority,
    max_priority=MaxPriority,
)
LIMITERS = Kinds(min_size=MinSize, queue=Queue, samples_per_insert=SamplesPerInsert)
