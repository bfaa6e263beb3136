"""Replay tables: items held between generation and training.

`Table` composes a sampler, a remover and a limiter; see docs/replay.md for how to choose them.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
