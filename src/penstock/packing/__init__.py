"""Packing: which sample goes into which micro-batch of which rank (plan), and gathering the arrays (fill)."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
