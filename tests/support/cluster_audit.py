"""Who wrote what, and when: triggers in the database of a run, and the request logs of its planes.

Every plane connects with a name of its own (`penstock.who`, by PGOPTIONS) and reaches the object store by a port of its
own. So it can be said of each write which plane made it, also of one that was paused and taken for dead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.log.log_rows import TABLES
from tests.support.object_proxy import ObjectProxy
from tests.support.postgres_server import PostgresServer

_MAKE = """
CREATE SCHEMA audit;
CREATE TABLE audit.writes (who text, xid bigint, at double precision, PRIMARY KEY (who, xid));
CREATE TABLE audit.commits (step bigint PRIMARY KEY, who text, at double precision);
CREATE FUNCTION audit.write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit.writes VALUES (coalesce(current_setting('penstock.who', true), ''), txid_current(),
        extract(epoch FROM clock_timestamp())) ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE FUNCTION audit.commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    -- The same number again is a session that begins, not a step.
    INSERT INTO audit.commits VALUES (NEW.value::bigint - 1, coalesce(current_setting('penstock.who', true), ''),
        extract(epoch FROM clock_timestamp())) ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
INSERT INTO audit.commits SELECT value::bigint - 1, '', 0 FROM {schema}.meta WHERE name = 'next_step';
CREATE TRIGGER commits AFTER INSERT OR UPDATE ON {schema}.meta FOR EACH ROW WHEN (NEW.name = 'next_step')
    EXECUTE FUNCTION audit.commit();
"""
_GRACE_S = 1.0
"""A plane that moved the marker may delete for this long, whoever moved it since."""
_WATCH = (
    "CREATE TRIGGER writes AFTER INSERT OR UPDATE OR DELETE ON {schema}.{table} FOR EACH ROW "
    "EXECUTE FUNCTION audit.write();"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneStart:
    """One process of the plane."""

    who: str
    proxy: ObjectProxy
    """Its way to the object store."""
    at: float
    """Unix time at which the process was started."""
    moves: bool
    """Whether all ranks could reach it from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A fault, from its beginning until it was mended, in Unix time."""

    kind: str
    began: float
    ended: float


class Audit:
    """What the triggers wrote."""

    def __init__(self, server: PostgresServer, schema: str) -> None:
        """Make the triggers; the tables of the run must be there."""
        self._server = server
        made = "".join(_WATCH.format(schema=schema, table=table) for table in ("run", *TABLES))
        server.execute(_MAKE.format(schema=schema) + made)

    def commits(self) -> list[float]:
        """When steps were committed."""
        return [at for (at,) in self._server.execute("SELECT at FROM audit.commits ORDER BY at")]

    def first_steps(self, starts: Sequence[PlaneStart]) -> list[float]:
        """For each plane that ranks could reach: seconds from the start of the process to its first committed step."""
        query = "SELECT who, min(at) FROM audit.commits GROUP BY who"
        found = dict(self._server.execute(query))
        return [found[one.who] - one.at for one in starts if one.moves and one.who in found]

    def check_seen(self, one: PlaneStart) -> None:
        """Raise AssertionError unless writes of this plane were seen, in the database and in the store: else it proves
        nothing that none were seen later."""
        assert one.who in self._begins(), f"{one.who}: no transaction of it was seen"
        assert one.proxy.changes, f"{one.who}: no write of it to the object store was seen"

    def late_rows(self, starts: Sequence[PlaneStart]) -> int:
        """Transactions of planes that were committed after a later plane had begun to write."""
        found = self._server.execute("SELECT who, at FROM audit.writes")
        begin = self._begins()
        late = [who for who, at in found if any(at > first for first in _later(who, starts, begin))]
        return len(late)

    def _begins(self) -> dict[str, float]:
        return dict(self._server.execute("SELECT who, min(at) FROM audit.writes GROUP BY who"))


def late_changes(starts: Sequence[PlaneStart], resumed: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """What planes changed in the object store after they were resumed, and after a later plane had moved the marker:
    who, method, path. One that works on meanwhile may end a deletion that it began before, for a second."""
    begin = {one.who: one.proxy.changes[0][0] + _GRACE_S for one in starts if one.proxy.changes}
    begin_of = {one.who: [*_later(one.who, starts, begin), resumed.get(one.who, math.inf)] for one in starts}
    return [
        (one.who, method, path)
        for one in starts
        for at, method, path in one.proxy.changes
        if at > min(begin_of[one.who])
    ]


def _later(who: str, starts: Sequence[PlaneStart], begin: dict[str, float]) -> list[float]:
    """When the planes that were started after this one began to write."""
    names = [one.who for one in starts]
    return [begin[name] for name in names[names.index(who) + 1 :] if name in begin]


def outage(span: Span, commits: Sequence[float]) -> float:
    """The longest time without a committed step, from the fault until the first one after it was mended.

    >>> outage(Span(kind="x", began=1.0, ended=3.0), [0.5, 1.2, 1.5, 4.0, 9.0])
    2.5
    """
    last, longest = span.began, 0.0
    for at in commits:
        if at <= span.began:
            continue
        longest = max(longest, at - last)
        last = at
        if at > span.ended:
            break
    return longest
