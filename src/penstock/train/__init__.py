"""What a training loop does with micro-batches: tensors, log-probabilities, losses, images, agreement of all ranks.

Everything here but `to_torch` is imported when it is used: it needs torch, `import penstock.train` does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.train.tensors import to_torch

if TYPE_CHECKING:
    from penstock.train.agreement import agree
    from penstock.train.image_policies import MaskSample
    from penstock.train.logits import token_logprobs
    from penstock.train.loss import Dppo
    from penstock.train.materialize import Materializer, check_image_tokens, mask_segments
    from penstock.train.mrope import mrope_positions
    from penstock.train.terms import Terms

__all__ = [
    "Dppo",
    "MaskSample",
    "Materializer",
    "Terms",
    "agree",
    "check_image_tokens",
    "mask_segments",
    "mrope_positions",
    "to_torch",
    "token_logprobs",
]

_HOME = {
    "Dppo": "loss",
    "MaskSample": "image_policies",
    "Materializer": "materialize",
    "Terms": "terms",
    "agree": "agreement",
    "check_image_tokens": "materialize",
    "mask_segments": "materialize",
    "mrope_positions": "mrope",
    "token_logprobs": "logits",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"penstock.train has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"penstock.train.{_HOME[name]}"), name)
