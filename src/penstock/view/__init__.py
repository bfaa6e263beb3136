"""Every token can be looked at: what the trainer did with it is exported, read back, shown and compared."""

from penstock.view.evaluation_runs import EVALUATION
from penstock.view.export import NoExport, TokenExporter
from penstock.view.keep_rules import EveryKth, Everything, First, Keep, Worst
from penstock.view.reader import Export, StepFolder
from penstock.view.record import Record

__all__ = [
    "EVALUATION",
    "EveryKth",
    "Everything",
    "Export",
    "First",
    "Keep",
    "NoExport",
    "Record",
    "StepFolder",
    "TokenExporter",
    "Worst",
]
