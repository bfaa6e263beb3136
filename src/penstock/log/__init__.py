"""The decision log: every accepted group, every decision and every planned step, in SQLite or in PostgreSQL.

A plane writes to a `Log`; other processes read it through a `LogReader`. `SqliteLog` is a file in the run's folder,
`PostgresLog` a schema in a database. `reading(folder)` opens the log of a folder to read, whichever it is.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
