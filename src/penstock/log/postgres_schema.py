"""The tables of a log in PostgreSQL: those of SQLite, and one row that says which plane owns the run.

Text is compared by its bytes (collation "C"), as in SQLite.
"""

from __future__ import annotations

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
}
"""Table -> column -> type. The first column of a table is its key."""

ADDED = ("prompts",)
"""Tables that logs of this format may lack: an earlier version made them. A plane that opens such a log adds them."""
_DEFAULTS = {("groups", name): column.rule for name, column in COLUMNS_OF_GROUPS.items()}
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


def create_table(table: str) -> str:
    """Return the statement that creates a table, unless it is there."""
    lines = []
    for number, (name, kind) in enumerate(COLUMNS[table].items()):
        rule = "PRIMARY KEY" if not number else _DEFAULTS.get((table, name), "NOT NULL")
        order = 'COLLATE "C"' if kind == "text" else ""
        lines.append(f"{name} {kind} {order} {rule}")
    return f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(lines)});"


def create_tables() -> str:
    """Return the statements that create an empty log in the current schema."""
    made = [OWNER, *map(create_table, COLUMNS)]
    made.append("CREATE UNIQUE INDEX groups_id ON groups (id);")
    # Metadata, plans and snapshots are compressed already. EXTERNAL stores them as they are: compressing again costs
    # more than it saves.
    for table, column in (("facts", "facts"), ("records", "data"), ("snapshots", "data"), ("steps", "manifest")):
        made.append(f"ALTER TABLE {table} ALTER {column} SET STORAGE EXTERNAL;")
    return "\n".join(made)
