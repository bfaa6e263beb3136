"""A run recorded for good: every decision in order, and the frames of what was trained or evaluated, in segments."""

from penstock.archive.places import check_place, open_place
from penstock.archive.recorded import RecordedRun
from penstock.archive.segment import Front, GroupEntry, RecordEntry, StepEntry

__all__ = ["Front", "GroupEntry", "RecordEntry", "RecordedRun", "StepEntry", "check_place", "open_place"]
