"""What rollouts recorded, as trajectories: each token once, exactly, whatever the producer's format."""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
