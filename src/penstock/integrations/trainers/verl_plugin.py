"""verl finds this module by its entry point and imports it in every process: the backend "Penstock" is known there.

Importing it is what registers; nothing else imports it. Where TransferQueue is not installed it does nothing.
"""

from __future__ import annotations

from importlib.util import find_spec

from penstock.integrations.transfer_queue.backend import register

if find_spec("transfer_queue") is not None:
    register()
