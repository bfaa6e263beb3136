"""The first catalogue of seeded bugs: see `seeded.py` for the form."""

from __future__ import annotations

from penstock.packing import MicroBatch
from tests.train.seeded import Seeded, Tensors, train

# ------------------------------------------------------------------ masks


def eos_dropped(columns: Tensors, batch: MicroBatch) -> Tensors:
    mask = columns["loss_mask"].clone()
    mask[batch.sequence_lengths.cumsum() - 1] = False
    return {**columns, "loss_mask": mask}


BUGS = [
    Seeded(
        "last token never trained",
        lambda step, world: train(step, world, columns=eos_dropped),
        about="the last token of every sample (EOS) is left out of the loss",
    ),
]
