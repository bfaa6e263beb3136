"""Sees the tensors that are made while something runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestFloat32(TorchDispatchMode):  # type: ignore[misc]
    """How many numbers the largest float32 tensor had that was made inside the block, forward or backward."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.numel = max(self.numel, out.numel())
        return out
