"""Penstock: the data plane for RL post-training of language and vision-language models.

This module has what most programs need. The docs describe the rest (`penstock.train`, `penstock.integrations`, ...).
Names are imported when they are first used, so `import penstock` is cheap: it loads no torch, no ray and no image
library, and a rollout worker never loads the server.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
