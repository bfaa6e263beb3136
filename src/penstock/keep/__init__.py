"""What must be known of a group without reading its frame."""

from penstock.keep.facts import GroupFacts, check_group

__all__ = ["GroupFacts", "check_group"]
