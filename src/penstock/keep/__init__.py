"""Frames kept durably, and what must be known of them: keepers hold bytes, facts travel to whoever decides."""

from penstock.keep.facts import GroupFacts, check_group, facts_of, facts_of_pieces
from penstock.keep.folder import FolderKeeper
from penstock.keep.in_memory import MemoryKeeper
from penstock.keep.keeper import Keeper, Pick

__all__ = [
    "FolderKeeper",
    "GroupFacts",
    "Keeper",
    "MemoryKeeper",
    "Pick",
    "check_group",
    "facts_of",
    "facts_of_pieces",
]
