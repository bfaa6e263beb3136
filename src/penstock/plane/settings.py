"""The settings of a plane and of the process that serves one, each declared once.

`penstock.config` derives the rest from these declarations: the keyword arguments of `penstock.open`, `plane.toml` and
its template, the flags of `penstock serve`, the tables in docs/settings.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from penstock.arrays import run_name_problem, table_with
from penstock.config import Given, build, check, unknown
from penstock.errors import ConfigError
from penstock.frames import LATE_COLUMNS, LATE_IN_FRAME, is_late
from penstock.log import check_address
from penstock.packing import Packing
from penstock.protocol import MAX_HEADER, MAX_NAME, Timeouts
from penstock.replay import Replay as Replay
from penstock.replay import WindowedFifo
from penstock.storage import SIGNED_SCHEMES, address_of

_BESIDE_BYTES = 1 << 20
"""Bytes of a message beside its largest part."""

_SIGNED = tuple(f"{scheme}://" for scheme in SIGNED_SCHEMES)

Unit: TypeAlias = Literal["groups", "samples", "tokens"]
Listen = Annotated[
    tuple[str, ...],
    Meta(
        description="addresses where ranks and workers connect: tcp://HOST:PORT; ipc://PATH within one host; "
        "file://FOLDER over a shared filesystem; addresses that other hosts can reach need `keys`"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """When a step is full. Exactly one of the three is set."""

    groups: Annotated[
        int | None, Meta(ge=1, description="groups that make a step", extra={"keyword": "groups_per_step"})
    ] = None
    samples: Annotated[
        int | None,
        Meta(
            ge=1,
            description="samples that make a step: complete groups are drawn until there are that many",
            extra={"keyword": "samples_per_step"},
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Meta(
            ge=1,
            description="tokens that make a step: complete groups are drawn until there are that many",
            extra={"keyword": "tokens_per_step"},
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        given = {n: v for n in ("groups", "samples", "tokens") if (v := getattr(self, n)) is not None}
        if len(given) != 1:
            raise ConfigError(
                f"step target: {given or 'none'}; give exactly one of groups_per_step, samples_per_step, "
                "tokens_per_step"
            )

    @property
    def unit(self) -> Unit:
        """The unit of the target."""
        if self.groups is not None:
            return "groups"
        return "tokens" if self.samples is None else "samples"

    @property
    def amount(self) -> int:
        """Number of units that fill a step."""
        amount: int = getattr(self, self.unit)
        return amount

    def measure(self, samples: int, tokens: int) -> int:
        """Return what a group with these samples and tokens counts towards the target."""
        return {"groups": 1, "samples": samples, "tokens": tokens}[self.unit]

    def __str__(self) -> str:
        return f"{self.amount} {self.unit}"


PackingSection = Annotated[Packing, Meta(description="how a step is packed", extra={"flat": True})]
StepTarget = Annotated[
    Target,
    Meta(description="when a step is full: exactly one of groups, samples, tokens", extra={"flat": True, "unit": True}),
]
ReplaySection = Annotated[
    Replay,
    Meta(
        description="how groups wait for training; a run keeps the replay settings it began with", extra={"flat": True}
    ),
]
TimeoutsSection = Annotated[Timeouts, Meta(description="how long a process may be silent")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSettings:
    """The settings of a plane."""

    packing: PackingSection
    target: StepTarget
    run: Annotated[
        str,
        Meta(min_length=1, description="the run's name; ranks and workers that name another are rejected"),
    ] = "run"
    listen: Listen = ()
    keys: Annotated[
        str | None,
        Meta(
            description="key folder made by `penstock keys`; needed where other hosts can connect", extra={"path": True}
        ),
    ] = None
    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="processes per data rank (tensor or context parallel); each gets the rank's data",
        ),
    ] = 1
    needs: Annotated[
        tuple[str, ...],
        Meta(
            description="columns that every trained sample must have, such as logprobs or rewards, whatever its mode; "
            "a put without one is rejected, or waits for it if `needs_deadline_s` is given and the column may be "
            f"attached later: {', '.join((*LATE_COLUMNS, *LATE_IN_FRAME))}, or one of your own"
        ),
    ] = ()
    needs_deadline_s: Annotated[
        float | None,
        Meta(
            gt=0,
            le=31_536_000,
            description="seconds that a group may wait for columns that are attached after its put, counted again "
            "after a restart; none: a put without a needed column is rejected",
        ),
    ] = None
    on_missing: Annotated[
        Literal["drop", "train"],
        Meta(
            description="what happens to a group that lacks a needed column at the deadline: drop it, or train it "
            "without; both are counted"
        ),
    ] = "drop"
    over_length: Annotated[
        Literal["reject", "truncate", "drop"],
        Meta(
            description="what happens to a sample longer than `seq_len`: reject the put, truncate the sample, or drop "
            "it from its group; truncated and dropped samples and tokens are counted in the ledger"
        ),
    ] = "reject"
    untrained_groups: Annotated[
        Literal["reject", "accept"],
        Meta(
            description="what happens to a group in which no token is trained, or whose trained tokens have no "
            "`logprobs` in a mode that needs them: reject the put, or accept the group, warn once and count it"
        ),
    ] = "reject"
    max_group_tokens: Annotated[
        int | None,
        Meta(ge=1, description="tokens that a group may decode to; none: 256 times seq_len, and at least 1,048,576"),
    ] = None
    max_group_bytes: Annotated[int | None, Meta(ge=1, description="bytes that a group may decode to; none: 2 GiB")] = (
        None
    )
    max_held_bytes: Annotated[
        int, Meta(ge=1, description="encoded bytes that may wait for training; beyond, puts wait or raise Overloaded")
    ] = 4 << 30
    storage: Annotated[
        str | None,
        Meta(
            description="where frames are kept: a folder on a local disk or on a filesystem that all hosts share, or "
            "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX; none: `storage` in the run's folder",
            extra={"path": True},
        ),
    ] = None
    log: Annotated[
        str | None,
        Meta(
            description="database of the log: postgresql://USER@HOST/DATABASE, where the run has a schema of its own, "
            "named after it (`run`); the password is in PGPASSWORD, PGPASSFILE or a service file, never here; none: "
            "SQLite in the run's folder"
        ),
    ] = None
    direct: Annotated[
        bool,
        Meta(
            description="whether workers and ranks that see the storage write and read frames there themselves; off: "
            "all bytes pass the plane"
        ),
    ] = True
    sign_puts_s: Annotated[
        float | None,
        Meta(
            ge=1,
            le=604_800,
            description="seconds for which URLs are valid that the plane signs for workers, so that they write frames "
            "to s3:// or az:// without credentials; 600 is a good value; none: workers need credentials, or send their "
            "frames to the plane",
        ),
    ] = None
    max_disk_bytes: Annotated[
        int | None,
        Meta(ge=1, description="bytes the run may take on disk; beyond, puts raise DiskFull; none: what the disk has"),
    ] = None
    disk_reserve_bytes: Annotated[
        int,
        Meta(ge=0, description="bytes kept free of puts on the disk, so that what was accepted can still be trained"),
    ] = 64 << 20
    retain_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="committed steps that can still be served again, to a trainer that resumes from an older "
            "checkpoint",
        ),
    ] = 64
    retain_eval_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="bytes of evaluation groups that are kept; beyond, and while the disk "
            "is full, the oldest are freed",
        ),
    ] = 1 << 30
    retain: Annotated[
        Literal["steps", "all"],
        Meta(
            description='what is kept of trained groups: "steps": as `retain_steps` says; "all": every frame and every '
            "plan, forever, so that the run is its own archive; a run that began to keep everything continues to "
            "until `penstock storage forget`"
        ),
    ] = "steps"
    traces: Annotated[
        bool,
        Meta(
            description="whether to send a span to OpenTelemetry when a group is put, planned, delivered and "
            "committed: by the tracer provider of the program, or else over OTLP/HTTP as OTEL_EXPORTER_OTLP_* say"
        ),
    ] = False
    snapshot_every: Annotated[
        int,
        Meta(
            ge=1,
            description="decisions (groups, steps, reports) between snapshots of the plane's memory; a restart applies "
            "only the decisions after the last one",
        ),
    ] = 20_000
    shares: Annotated[
        dict[str, Annotated[float, Meta(gt=0)]],
        Meta(
            description="tenants that share the trainer, as named in their samples' `run`, each with its weight; "
            "groups of other tenants are rejected; empty: one table for all groups"
        ),
    ] = field(default_factory=dict)
    max_token_staleness: Annotated[
        int | None,
        Meta(
            ge=0,
            le=1 << 31,
            description="policy versions that a token may be behind the published one; older tokens are left out of "
            "the loss when a step is planned, and counted in the ledger; none: all are trained",
        ),
    ] = None
    replay: ReplaySection = field(default_factory=Replay)
    timeouts: TimeoutsSection = field(default_factory=Timeouts)
    env_weights: Annotated[
        dict[str, Annotated[float, Meta(ge=1e-6, le=1e6)]],
        Meta(
            description="environments that share each step, as named in their samples' `env`, each with its weight: a "
            "step takes from each in proportion and waits for one that has too few groups; groups of other "
            "environments are rejected; empty: steps do not look at environments"
        ),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        tokens, groups = self.max_token_staleness, self.replay.max_staleness
        if tokens is not None and groups is not None and tokens >= groups:
            raise ConfigError(
                f"max_token_staleness: {tokens} with max_staleness {groups}; a group with older tokens is dropped "
                "first, so none would ever be masked; give less, or leave max_staleness out"
            )
        for setting, name in (("run", self.run), *(("shares", share) for share in self.shares)):
            if problem := run_name_problem(name):
                raise ConfigError(f"{setting}: {problem}")
        for env in self.env_weights:
            if not 0 < len(env) <= MAX_NAME or not env.isprintable():
                raise ConfigError(f"env_weights: {env[:40]!a}; a name has 1 to {MAX_NAME} printable characters")
        if self.shares and self.env_weights:
            raise ConfigError(
                f"shares: {self.shares} with env_weights {self.env_weights}; groups wait in tables by tenant or by "
                "environment: give one of the two"
            )
        if self.log is not None:
            check_address(self.log)
        address = None if self.storage is None else address_of(self.storage)  # raises where credentials are in it
        if self.sign_puts_s is not None and not (address or "").startswith(_SIGNED):
            raise ConfigError(
                f"sign_puts_s: {self.sign_puts_s:g} with storage {address!r}; URLs can be signed for "
                f"{' and '.join(_SIGNED)}; give such a storage, or leave sign_puts_s out"
            )
        if "" in self.shares:
            raise ConfigError(f"shares: '' has {self.shares['']}; give each tenant a name")
        table = table_with(self.packing.own)
        for name in self.needs:
            if name not in table:
                raise ConfigError(f"needs: {name!r}: {unknown(name, table, 'column')}")
        if self.needs_deadline_s is not None and not self.late_columns:
            raise ConfigError(
                f"needs_deadline_s: {self.needs_deadline_s:g} with needs {self.needs!r}; name a column that may be "
                f"attached later ({', '.join((*LATE_COLUMNS, *LATE_IN_FRAME))}, or one of your own), or leave it out"
            )
        object.__setattr__(self, "replay", _with_window(self.replay, self.target))
        if self.target.groups is not None and self.target.groups > self.replay.capacity:
            raise ConfigError(
                f"groups_per_step: {self.target.groups} with capacity {self.replay.capacity}; "
                "a step could never be filled; raise the capacity"
            )
        self._check_batch()

    def _check_batch(self) -> None:
        """Reject a limiter that allows no batch of a step's size."""
        most, groups = self.replay.limiter.max_batch, self.target.groups
        if most is not None and groups is not None and groups > most:
            raise ConfigError(
                f"groups_per_step: {groups} with {type(self.replay.limiter).__name__} of batch_size {most}, which "
                f"takes no larger batch; give it batch_size={groups}"
            )

    @property
    def late_columns(self) -> tuple[str, ...]:
        """The columns that a group may wait for."""
        if self.needs_deadline_s is None:
            return ()
        return tuple(name for name in self.needs if is_late(name, self.packing.own))

    @property
    def env_unit(self) -> Unit | None:
        """The unit in which environments share a step; None if groups do not wait by environment."""
        return self.target.unit if self.env_weights else None

    @property
    def max_message_bytes(self) -> int:
        """Bytes of the largest message that the plane accepts: a group that may be held, or a header."""
        return max(min(self.max_group_bytes or 2 << 30, self.max_held_bytes), MAX_HEADER) + _BESIDE_BYTES


def _with_window(replay: Replay, target: Target) -> Replay:
    """Tell `WindowedFifo` how many groups make a step."""
    sampler = replay.sampler
    if not isinstance(sampler, WindowedFifo):
        return replay
    if target.groups is not None and sampler.groups_per_step not in (None, target.groups):
        raise ConfigError(
            f"sampler: {sampler} in a plane with groups_per_step {target.groups}; leave it out of the sampler"
        )
    if target.groups is None and sampler.groups_per_step is None:
        raise ConfigError(
            f"sampler: {sampler} in a plane with {target.unit}_per_step {target.amount}; give it groups_per_step, "
            "about how many groups make a step: the window follows from it"
        )
    return replace(replay, sampler=replace(sampler, groups_per_step=sampler.groups_per_step or target.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """When the watchdog process ends the plane: it logs the plane's stacks, then sends SIGKILL."""

    stall_s: Annotated[
        float | None, Meta(gt=0, description="seconds without a turn of the loop; none: no watchdog")
    ] = 300.0
    end_s: Annotated[float, Meta(gt=0, description="seconds from SIGTERM until the plane is killed")] = 7.0
    grace_s: Annotated[float, Meta(gt=0, description="seconds for writing the stacks, before SIGKILL")] = 2.0

    def __post_init__(self) -> None:
        check(self, "watchdog")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(PlaneSettings):
    """The settings of a server process: those of its plane, and where it stores and serves things."""

    folder: Annotated[
        str,
        Meta(
            description='where the run is kept; "memory:" keeps nothing; empty: in no folder, with `log` in a database '
            "and `storage` given",
            extra={"path": True},
        ),
    ] = ""
    listen: Listen = ("tcp://127.0.0.1:7440",)
    metrics: Annotated[
        str | None,
        Meta(
            description="HOST:PORT of a page with /metrics for Prometheus, /healthz and /readyz; beyond loopback "
            "/metrics needs `metrics_token`; port 0 picks a free one; none: off"
        ),
    ] = None
    metrics_token: Annotated[
        str | None,
        Meta(
            description="file with the token that /metrics asks for; none: no token, loopback only",
            extra={"path": True},
        ),
    ] = None
    http: Annotated[
        str | None,
        Meta(
            description="ADDRESS:PORT of the HTTP API, where groups are put as JSON or frames; port 0 picks a free "
            "one; beyond loopback it needs `http_token`; none: off"
        ),
    ] = None
    http_token: Annotated[
        str | None,
        Meta(
            description="file with the token that every HTTP request must carry; none: one is made, and kept in the "
            "run's folder as http-token",
            extra={"path": True},
        ),
    ] = None
    log_file: Annotated[
        str | None, Meta(description="write log lines there instead of to stderr", extra={"path": True})
    ] = None
    watchdog: Annotated[Watch, Meta(description="a second process that ends a plane whose loop no longer turns")] = (
        field(default_factory=Watch)
    )

    def __post_init__(self) -> None:
        PlaneSettings.__post_init__(self)
        if not self.folder and (self.log is None or self.storage is None):
            raise ConfigError("folder: missing; give the run's folder, or both log=postgresql://... and storage=...")
        if not self.listen or "" in self.listen:
            raise ConfigError("listen: empty; give at least one address where clients can connect")


CLUSTER_TIMEOUTS = Timeouts(plane_s=120.0)
"""Ray takes 20 s to notice that a node is gone, and then starts the plane on another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings(ServerSettings):
    """The settings of a plane on a Ray cluster: those of a server process, with defaults for a cluster."""

    folder: Annotated[
        str,
        Meta(
            description="of ray://: where the run is kept; on a disk of one host, the plane stays on that host; empty: "
            "~/.penstock/NAME, on the head node unless `log` and `storage` are shared",
            extra={"path": True},
        ),
    ] = ""
    listen: Listen = ()
    movable: Annotated[
        bool | None,
        Meta(
            description="of ray://: whether Ray may start the plane on another host; none: if log and storage are "
            "shared: a PostgreSQL log or a shared filesystem, and storage on a shared filesystem; on: `storage` is "
            "seen by every node although the type of its filesystem does not say so, and the log is in PostgreSQL"
        ),
    ] = None
    timeouts: TimeoutsSection = field(default_factory=lambda: CLUSTER_TIMEOUTS)

    def __post_init__(self) -> None:
        PlaneSettings.__post_init__(self)
        if self.movable and (self.log is None or self.storage is None):
            raise ConfigError(
                f"movable: on with log {self.log!r} and storage {self.storage!r}; a plane that may move needs "
                "log=postgresql://... and storage=FOLDER that every node sees"
            )


EXAMPLE = ServerSettings(folder="runs/demo", packing=Packing(ranks=1, seq_len=4096), target=Target(groups=4))
"""What `penstock serve --write-config` writes."""
TITLE = """\
The settings of a plane. Start it with:  penstock serve --config plane.toml
Values in comments are the defaults. An unknown name is an error. "none" switches off what may be off.
Sizes are bytes, or text such as "4 GiB". Relative paths start at this file's folder.
"""


def read_settings(path: str | Path) -> Given:
    """Read the tables of plane.toml and make its paths absolute. `build` checks them."""
    return Given.read(path, hint="write one with `penstock serve --write-config PATH`", paths_of=ServerSettings)


def server_settings(given: Given | Mapping[str, Any], where: str = "settings") -> ServerSettings:
    """Make settings from tables. ConfigError names the path of the key, and `where`.

    >>> packing = {"ranks": 2, "seq_len": 4096}
    >>> settings = server_settings({"folder": "runs/demo", "packing": packing, "target": {"groups": 4}})
    >>> settings.packing.ranks, settings.listen
    (2, ('tcp://127.0.0.1:7440',))
    """
    return build(ServerSettings, given, where)
