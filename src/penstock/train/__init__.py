"""What a training loop does with micro-batches: tensors, log-probabilities, losses, images, agreement of all ranks.

Everything here but `to_torch` is imported when it is used: it needs torch, `import penstock.train` does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.train.tensors import to_torch

if TYPE_CHECKING:
    from penstock.train.agreement import agree
    from penstock.train.attention import register_attention
    from penstock.train.image_policies import MaskSample
    from penstock.train.kept_ids import kept_of
    from penstock.train.loader import step_loader
    from penstock.train.logits import token_logprobs
    from penstock.train.loss import Dppo
    from penstock.train.materialize import Materializer, check_image_tokens, mask_segments
    from penstock.train.model import check_packing, forward
    from penstock.train.modes import ByMode
    from penstock.train.mrope import mrope_positions
    from penstock.train.predictions import predictions_of
    from penstock.train.published_weights import Weights
    from penstock.train.teacher_kl import TeacherKl, forward_kl, kl_to_teacher, reverse_kl, topk_kl
    from penstock.train.terms import Terms

__all__ = [
    "ByMode",
    "Dppo",
    "MaskSample",
    "Materializer",
    "TeacherKl",
    "Terms",
    "Weights",
    "agree",
    "check_image_tokens",
    "check_packing",
    "forward",
    "forward_kl",
    "kept_of",
    "kl_to_teacher",
    "mask_segments",
    "mrope_positions",
    "predictions_of",
    "register_attention",
    "reverse_kl",
    "step_loader",
    "to_torch",
    "token_logprobs",
    "topk_kl",
]

_HOME = {
    "ByMode": "modes",
    "Dppo": "loss",
    "MaskSample": "image_policies",
    "Materializer": "materialize",
    "TeacherKl": "teacher_kl",
    "Terms": "terms",
    "Weights": "published_weights",
    "agree": "agreement",
    "check_image_tokens": "materialize",
    "check_packing": "model",
    "forward": "model",
    "forward_kl": "teacher_kl",
    "kept_of": "kept_ids",
    "kl_to_teacher": "teacher_kl",
    "mask_segments": "materialize",
    "mrope_positions": "mrope",
    "predictions_of": "predictions",
    "register_attention": "attention",
    "reverse_kl": "teacher_kl",
    "step_loader": "loader",
    "token_logprobs": "logits",
    "topk_kl": "teacher_kl",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"penstock.train has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"penstock.train.{_HOME[name]}"), name)
