"""`penstock serve`: the process around a plane, with its watchdog, HTTP API and metrics page."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
