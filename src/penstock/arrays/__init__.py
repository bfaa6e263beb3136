"""The column table, ragged columns and their codings: arrays in, arrays out, nothing but numpy."""

from penstock.arrays.columns import COLUMNS, MODES, TOKEN_COLUMNS, Column
from penstock.arrays.images import ImageSpan
from penstock.arrays.own_columns import teacher_topk
from penstock.arrays.ragged import Ragged, offsets_of
from penstock.arrays.rollout import RolloutInfo, read_rollout
from penstock.arrays.sample import Sample
from penstock.arrays.samples import Samples

__all__ = [
    "COLUMNS",
    "MODES",
    "TOKEN_COLUMNS",
    "Column",
    "ImageSpan",
    "Ragged",
    "RolloutInfo",
    "Sample",
    "Samples",
    "offsets_of",
    "read_rollout",
    "teacher_topk",
]
