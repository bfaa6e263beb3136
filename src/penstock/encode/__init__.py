"""Samples to bytes and back: one frame per batch, every column in its cheapest lossless coding."""

from penstock.encode.frame_files import by_group, read_frames, write_frames
from penstock.encode.head import Head, Limits, read_head
from penstock.encode.reading import decode
from penstock.encode.writing import encode

__all__ = ["Head", "Limits", "by_group", "decode", "encode", "read_frames", "read_head", "write_frames"]
