"""Tests for what you build on Penstock: strategies, conformance suites and a check of trainers.

    strategies       `samples`, `batches` (Hypothesis)
    storage          `StorageSuite`: subclass it and run it over your storage engine (pytest)
    log              `LogSuite`: the same for a decision log (pytest)
    transport        `TransportSuite`, `RestartableSuite`, `UnreliableClient`
    selectors        `check_selector`: a sampler or remover of your own for a replay table
    blob stores      `STORE_CHECKS`: one check per promise, for a store of images
    trainers         `penstock.testing.trainer.check`: which of the field's published bugs does your trainer have?
    frames           `read_frame`: a reader in plain Python, written from docs/internals/wire-format.md alone
    images           `draw_screenshot`, `as_data_uri`: pictures to try things with
    TRL on a CPU     `trl_on_cpu`, `NoTransfer`, `VllmStandIn`, `byte_model`

Names are loaded when they are used: nothing here needs pytest, Hypothesis or torch until you import what needs it.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
