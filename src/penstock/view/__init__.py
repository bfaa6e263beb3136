"""Export what the trainer did with every token, and read, show and compare exports."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
