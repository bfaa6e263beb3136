"""Parts of a training loop: tensors, log-probabilities, losses, images, agreement between ranks.

`import penstock.train` does not load torch. Everything but `to_torch` needs it and loads on first use.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
