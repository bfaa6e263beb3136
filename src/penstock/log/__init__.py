"""The decision log: every accepted group, every decision and every planned step, in SQLite or in PostgreSQL.

`Log` is what a plane writes, `LogReader` what everybody else reads. `SqliteLog` is a file in the run's folder,
`PostgresLog` a schema in a database. `reading(folder)` opens either of them to read, as the folder says.
"""

from penstock.log.decision_log import FORMAT, Guard, Log
from penstock.log.finding import is_run, open_existing, reading
from penstock.log.log_reader import LogReader
from penstock.log.log_rows import GroupRow, SegmentRow, State
from penstock.log.sqlite_log import SqliteLog

__all__ = [
    "FORMAT",
    "GroupRow",
    "Guard",
    "Log",
    "LogReader",
    "SegmentRow",
    "SqliteLog",
    "State",
    "is_run",
    "open_existing",
    "reading",
]
