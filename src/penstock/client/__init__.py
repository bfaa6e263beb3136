"""The API for programs: `open` and `connect`, a `Plane` for producers and a `Source` for each rank."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
