"""The decision log: every accepted group, every decision and every planned step, in SQLite or in PostgreSQL.

`Log` is what a plane writes, `LogReader` what everybody else reads. `SqliteLog` is a file in the run's folder,
`PostgresLog` a schema in a database. `reading(folder)` opens either of them to read, as the folder says.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
