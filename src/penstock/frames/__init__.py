"""Samples to bytes and back: one frame per batch, every column in its cheapest lossless coding."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
