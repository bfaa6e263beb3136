"""What a training loop does with micro-batches: tensors, log-probabilities, losses, images, agreement of all ranks.

Everything here but `to_torch` is imported when it is used: it needs torch, `import penstock.train` does not.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
