"""Samples to bytes and back: one frame per batch, every column in its cheapest lossless coding."""

from penstock.encode.assembly import StepMemory, assemble
from penstock.encode.frame_files import by_group, read_frames, write_frames
from penstock.encode.front import digest_of, front_of, front_size
from penstock.encode.head import Head, Limits, read_head
from penstock.encode.ranges import Pieces, RangedFrame
from penstock.encode.reading import decode
from penstock.encode.writing import FramePieces, encode, encode_group

__all__ = [
    "FramePieces",
    "Head",
    "Limits",
    "Pieces",
    "RangedFrame",
    "StepMemory",
    "assemble",
    "by_group",
    "decode",
    "digest_of",
    "encode",
    "encode_group",
    "front_of",
    "front_size",
    "read_frames",
    "read_head",
    "write_frames",
]
