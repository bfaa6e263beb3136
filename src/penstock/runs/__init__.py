"""Recorded runs: read, check, copy, recover and rerun a run from its log and storage, without a plane.

read_run, RecordedRun              what the log says, as plain data or decision by decision
check                              compare log and storage
plan_recovery, recover             put frames that the log has lost back into it
RunCopy                            copy a run, even while its plane works
rerun                              decide a run again and compare every step
settle_offline, forget             decisions for a run whose plane is stopped
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
