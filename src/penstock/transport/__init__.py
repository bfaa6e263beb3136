"""Moves messages between a plane and its clients: within a process, through files, over sockets. Also keys."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
