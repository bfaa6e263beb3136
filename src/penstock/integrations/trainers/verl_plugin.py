"""Registers TransferQueue's backend "Penstock" when imported. verl imports it in every process, by its entry point.

Does nothing if TransferQueue is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec

from penstock.integrations.transfer_queue.backend import register

if find_spec("transfer_queue") is not None:
    register()
