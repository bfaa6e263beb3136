"""The tables of a log in PostgreSQL: the same as in SQLite, and one with a single row that names the run's owner.

Text is compared by its bytes (collation "C"), as in SQLite.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.log.log_rows import TABLES, definitions

TYPES = {
    "int": "bigint",
    "small": "smallint",
    "real": "double precision",
    "text": "text",
    "blob": "bytea",
    "any": "text",
}
_BY_BYTES = dict.fromkeys(("text", "any"), 'text COLLATE "C"')
_BLOBS = {"facts": "facts", "records": "data", "snapshots": "data", "steps": "manifest"}
FENCED = "PS001"
"""SQL state of the error that `begin_commit` raises."""
OWNER = """
CREATE TABLE run (
    is_it boolean PRIMARY KEY DEFAULT true CHECK (is_it),
    name text NOT NULL, format bigint NOT NULL, run_id text NOT NULL,
    epoch bigint NOT NULL, commits bigint NOT NULL,
    pid integer NOT NULL, began timestamptz NOT NULL, holder text NOT NULL);
CREATE FUNCTION begin_commit(mine bigint, last bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE owner record;
BEGIN
    -- Locks the row until the transaction ends. A plane that takes over waits for it, or this one waits and is fenced.
    UPDATE run SET commits = last + 1 WHERE epoch = mine AND commits = last;
    IF NOT FOUND THEN
        SELECT epoch, commits INTO owner FROM run;
        RAISE EXCEPTION 'epoch %, transaction %', owner.epoch, owner.commits USING ERRCODE = 'PS001';
    END IF;
END $$;
"""

MIGRATIONS: dict[int, tuple[str, ...]] = {}
"""Format -> the statements that make the next one of it, in the run's schema. A plane that takes a run over applies
them in one transaction. It reads `run`, `groups.location` and `segments` before, so they must keep these names. The
first format in PostgreSQL was 5."""


def migrations(found: int, wanted: int) -> list[str] | None:
    """Return the statements between two formats, or None if some are missing.

    >>> migrations(5, 5), migrations(2, 5)
    ([], None)
    """
    steps = [MIGRATIONS.get(number) for number in range(found, wanted)]
    if found > wanted or None in steps:
        return None
    return [statement for step in steps if step for statement in step]


def create_tables(existing: Collection[str] = ()) -> str:
    """Return the statements that create a log's tables in the current schema, without those that exist.

    A log that an earlier version began lacks the tables that came since. They begin empty, so its format stays."""
    made = [] if "run" in existing else [OWNER]
    for table in (name for name in TABLES if name not in existing):
        made.append(f"CREATE TABLE {table} ({definitions(table, TYPES | _BY_BYTES)});")
        # Metadata, plans and snapshots are compressed already. EXTERNAL stores blobs as they are: compressing again
        # costs more than it saves.
        if table in _BLOBS:
            made.append(f"ALTER TABLE {table} ALTER {_BLOBS[table]} SET STORAGE EXTERNAL;")
    return "\n".join(made)
