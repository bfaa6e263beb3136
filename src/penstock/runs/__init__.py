"""Recorded runs: read, check, copy, recover and rerun a run from its log and storage, without a plane."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
