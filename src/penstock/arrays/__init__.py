"""The column table, ragged columns and their codings: arrays in, arrays out, nothing but numpy."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
