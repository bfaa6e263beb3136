"""What a training loop does with micro-batches: tensors from them, without lists and with reused memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.train.tensors import to_torch

if TYPE_CHECKING:
    from penstock.train.agreement import agree

__all__ = ["agree", "to_torch"]


def __getattr__(name: str) -> object:
    # Imported when it is used: the module needs torch, `import penstock.train` does not.
    if name != "agree":
        raise AttributeError(f"penstock.train has no {name!r}; it has {', '.join(__all__)}")
    from penstock.train.agreement import agree

    return agree
