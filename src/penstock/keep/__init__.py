"""What must be known of a group without reading its frame."""

from penstock.keep.facts import GroupFacts, check_group, facts_of, facts_of_pieces

__all__ = ["GroupFacts", "check_group", "facts_of", "facts_of_pieces"]
