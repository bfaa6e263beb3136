"""Every token can be looked at: what the trainer did with it is exported, read back, shown and compared."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
