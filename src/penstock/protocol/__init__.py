"""Messages and the state machines that exchange them. No I/O and no clock: simulations drive the same code."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
