"""The plane: accepts groups, draws and plans steps, records each decision in the log, follows what ranks report."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
