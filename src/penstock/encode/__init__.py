"""Samples to bytes and back: one frame per batch, every column in its cheapest lossless coding."""

from penstock.encode.front import Front, Limits, read_front
from penstock.encode.reading import decode
from penstock.encode.writing import encode

__all__ = ["Front", "Limits", "decode", "encode", "read_front"]
