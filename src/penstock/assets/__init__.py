"""Images by reference: each image stored once by content hash; pixels exist only on the rank that trains on them."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
