"""Samples to bytes and back: one frame per batch, every column in its cheapest lossless coding."""

from penstock.frames.assembly import StepMemory, assemble
from penstock.frames.frame_files import by_group, read_frames, write_frames
from penstock.frames.front import digest_of, front_of, front_size
from penstock.frames.head import ANY_SIZE, Head, Limits, read_head
from penstock.frames.metadata import GroupFacts, check_group, facts_of, facts_of_pieces
from penstock.frames.ranges import Pieces, RangedFrame
from penstock.frames.reading import decode
from penstock.frames.writing import FramePieces, encode, encode_group

__all__ = [
    "ANY_SIZE",
    "FramePieces",
    "GroupFacts",
    "Head",
    "Limits",
    "Pieces",
    "RangedFrame",
    "StepMemory",
    "assemble",
    "by_group",
    "check_group",
    "decode",
    "digest_of",
    "encode",
    "encode_group",
    "facts_of",
    "facts_of_pieces",
    "front_of",
    "front_size",
    "read_frames",
    "read_head",
    "write_frames",
]
