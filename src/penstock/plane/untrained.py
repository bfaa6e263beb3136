"""Groups that cannot train anything: no token is trained, or trained tokens have no log-probabilities."""

from __future__ import annotations

from penstock.errors import InvalidInput
from penstock.frames import WITHOUT, GroupMetadata

_ACCEPT = "or open the plane with untrained_groups='accept'"


def check_trained(metadata: GroupMetadata) -> None:
    """Reject a group that cannot train anything."""
    why = why_untrained(metadata)
    if why:
        raise InvalidInput(f"group {metadata.group!r}: {why}, {_ACCEPT}")


def why_untrained(metadata: GroupMetadata) -> str:
    """Return why a group cannot train anything and what to do about it, or ""."""
    if metadata.kinds.get("logprobs") == WITHOUT:
        return "its trained tokens have no logprobs; ask the inference server for log-probabilities"
    # Counts are int64 as bytes: all bytes are 0 where all counts are.
    if any(metadata.kept_loss_tokens):
        return ""
    if any(metadata.loss_tokens):
        return f"every trained token lies beyond seq_len {metadata.seq_len}; shorten the prompt, raise seq_len"
    return (
        f"no token of its {metadata.num_samples} samples is trained, loss_mask is False throughout; give the "
        "logprobs= of what the model sampled"
    )
