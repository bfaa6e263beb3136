"""The tables of a log in PostgreSQL: those of SQLite, and one row that says which plane owns the run.

Text is compared by its bytes (collation "C"), as in SQLite.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.log.log_rows import COLUMNS_OF_GROUPS

COLUMNS = {
    "meta": {"name": "text", "value": "text"},
    "groups": {name: column.postgres for name, column in COLUMNS_OF_GROUPS.items()},
    "facts": {"op": "bigint", "facts": "bytea"},
    "records": {"op": "bigint", "data": "bytea"},
    "discards": {"name": "text"},
    "snapshots": {"op": "bigint", "data": "bytea"},
    "steps": {"step": "bigint", "op": "bigint", "manifest": "bytea", "state": "smallint"},
    "segments": {
        "name": "text",
        "writer": "text",
        "epoch": "bigint",
        "sealed_at": "double precision",
        "clean": "smallint",
    },
    "frees": {"name": "text"},
    "prompts": {"number": "bigint", "name": "text", "payload": "bytea"},
    "summaries": {"op": "bigint", "data": "bytea"},
    "outcomes": {"number": "bigint", "data": "bytea"},
}
"""Table -> column -> type. The first column of a table is its key."""

_DEFAULTS = {("groups", name): column.rule for name, column in COLUMNS_OF_GROUPS.items()}
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
    """The statements between two formats; None where some are missing.

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
    for table, columns in COLUMNS.items():
        if table in existing:
            continue
        lines = []
        for number, (name, kind) in enumerate(columns.items()):
            rule = "PRIMARY KEY" if not number else _DEFAULTS.get((table, name), "NOT NULL")
            order = 'COLLATE "C"' if kind == "text" else ""
            lines.append(f"{name} {kind} {order} {rule}")
        made.append(f"CREATE TABLE {table} ({', '.join(lines)});")
        # Metadata, plans and snapshots are compressed already. EXTERNAL stores blobs as they are: compressing again
        # costs more than it saves.
        if table in _BLOBS:
            made.append(f"ALTER TABLE {table} ALTER {_BLOBS[table]} SET STORAGE EXTERNAL;")
    if "groups" not in existing:
        made.append("CREATE UNIQUE INDEX groups_id ON groups (id);")
    return "\n".join(made)
