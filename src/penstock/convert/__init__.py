"""From trajectories to samples: branches, advantages, filters, groups, and columns that come later."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
