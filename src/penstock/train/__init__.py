"""What a training loop does with micro-batches: tensors from them, without lists and with reused memory."""

from penstock.train.tensors import to_torch

__all__ = ["to_torch"]
