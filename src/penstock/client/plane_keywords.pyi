"""The keyword arguments of `penstock.open`. Made by scripts/make_settings.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from penstock.arrays.columns import Column
from penstock.packing.cost import Cost
from penstock.packing.settings import Modalities, PackedImages
from penstock.plane.settings import Watch
from penstock.protocol.timeouts import Timeouts
from penstock.replay.limiters import Limiter
from penstock.replay.selector import Selector

class PlaneKeywords(TypedDict, total=False):
    """The keyword arguments of `penstock.open`. Made by scripts/make_settings.py."""

    ranks: int
    """Data ranks that take part in every step."""
    seq_len: int
    """Tokens of a sample at most; `over_length` says what happens to longer ones."""
    micro_batch_max_tokens: int | None
    """Tokens of a micro-batch, padding included; none: seq_len."""
    pad_to_multiple_of: int
    """Micro-batches are padded to a multiple of this many tokens."""
    max_samples: int | None
    """Samples per micro-batch at most; none: any."""
    max_patches: int | None
    """Image patches per micro-batch at most; none: any."""
    cost: Cost
    """What a micro-batch costs, by which ranks are balanced, in any unit: overhead + per_token * tokens +
    per_token_squared * sum(length ** 2) + per_patch * patches."""
    over_cap: Literal["soft", "strict"]
    """A sample beyond a cap: soft, alone in its micro-batch and counted; strict, an error."""
    modalities: Modalities
    """Which modalities may share a micro-batch."""
    packed_images: PackedImages
    """What the trainer declares; without it a sample with images is alone in its micro-batch."""
    rows_by: Literal["modality", "tenant"]
    """What all ranks share at a micro-batch index: the modality, or the tenant as well."""
    pad_id: int
    """Token id of padding."""
    long_rows: bool
    """Allow micro_batch_max_tokens above seq_len."""
    columns: Sequence[Column]
    """Columns that samples may have beside those that Penstock knows."""
    trees: bool
    """Compute what samples of a group share once: micro-batches have a forest."""
    groups_per_step: int | None
    """Groups that make a step."""
    samples_per_step: int | None
    """Samples that make a step: complete groups are drawn until there are that many."""
    tokens_per_step: int | None
    """Tokens that make a step: complete groups are drawn until there are that many."""
    run: str
    """The run's name; ranks and workers that name another are rejected."""
    listen: Sequence[str]
    """Addresses where ranks and workers connect: tcp://HOST:PORT; ipc://PATH within one host; file://FOLDER over a
    shared filesystem; addresses that other hosts can reach need `keys`."""
    keys: str | Path | None
    """Key folder made by `penstock keys`; needed where other hosts can connect."""
    replicas: int
    """Processes per data rank (tensor or context parallel); each gets the rank's data."""
    needs: Sequence[str]
    """Columns that every trained sample must have, such as logprobs or rewards, whatever its mode; a put without one
    is rejected, or waits for it if `needs_deadline_s` is given and the column may be attached later: rewards,
    advantages, teacher_logprobs, teacher_topk_logprobs, rl_weights, ce_weights, ref_kl_weights, or one of your
    own."""
    needs_deadline_s: float | None
    """Seconds that a group may wait for columns that are attached after its put, counted again after a restart; none:
    a put without a needed column is rejected."""
    on_missing: Literal["drop", "train"]
    """What happens to a group that lacks a needed column at the deadline: drop it, or train it without; both are
    counted."""
    over_length: Literal["reject", "truncate", "drop"]
    """What happens to a sample longer than `seq_len`: reject the put, truncate the sample, or drop it from its group;
    truncated and dropped samples and tokens are counted in the ledger."""
    untrained_groups: Literal["reject", "accept"]
    """What happens to a group in which no token is trained, or whose trained tokens have no `logprobs` in a mode that
    needs them: reject the put, or accept the group, warn once and count it."""
    max_group_tokens: int | None
    """Tokens that a group may decode to; none: 256 times seq_len, and at least 1,048,576."""
    max_group_bytes: int | None
    """Bytes that a group may decode to; none: 2 GiB."""
    max_held_bytes: int
    """Encoded bytes that may wait for training; beyond, puts wait or raise Overloaded."""
    storage: str | Path | None
    """Where frames are kept: a folder on a local disk or on a filesystem that all hosts share, or s3://BUCKET/PREFIX,
    gs://BUCKET/PREFIX, az://CONTAINER/PREFIX; none: `storage` in the run's folder."""
    log: str | None
    """Database of the log: postgresql://USER@HOST/DATABASE, where the run has a schema of its own, named after it
    (`run`); the password is in PGPASSWORD, PGPASSFILE or a service file, never here; none: SQLite in the run's
    folder."""
    direct: bool
    """Whether workers and ranks that see the storage write and read frames there themselves; off: all bytes pass the
    plane."""
    sign_puts_s: float | None
    """Seconds for which URLs are valid that the plane signs for workers, so that they write frames to s3:// or az://
    without credentials; 600 is a good value; none: workers need credentials, or send their frames to the plane."""
    max_disk_bytes: int | None
    """Bytes the run may take on disk; beyond, puts raise DiskFull; none: what the disk has."""
    disk_reserve_bytes: int
    """Bytes kept free of puts on the disk, so that what was accepted can still be trained."""
    retain_steps: int
    """Committed steps that can still be served again, to a trainer that resumes from an older checkpoint."""
    retain_eval_bytes: int
    """Bytes of evaluation groups that are kept; beyond, and while the disk is full, the oldest are freed."""
    retain: Literal["steps", "all"]
    """What is kept of trained groups: "steps": as `retain_steps` says; "all": every frame and every plan, forever, so
    that the run is its own archive; a run that began to keep everything continues to until `penstock storage
    forget`."""
    traces: bool
    """Whether to send a span to OpenTelemetry when a group is put, planned, delivered and committed: by the tracer
    provider of the program, or else over OTLP/HTTP as OTEL_EXPORTER_OTLP_* say."""
    snapshot_every: int
    """Decisions (groups, steps, reports) between snapshots of the plane's memory; a restart applies only the
    decisions after the last one."""
    shares: Mapping[str, float]
    """Tenants that share the trainer, as named in their samples' `run`, each with its weight; groups of other tenants
    are rejected; empty: one table for all groups."""
    max_token_staleness: int | None
    """Policy versions that a token may be behind the published one; older tokens are left out of the loss when a step
    is planned, and counted in the ledger; none: all are trained."""
    capacity: int
    """Items held at most; in a plane an item is a group."""
    sampler: Selector
    """Chooses what is trained on next."""
    remover: Selector | None
    """Chooses what makes room when it is full; none: nothing is dropped, puts wait."""
    limiter: Limiter
    """Decides who waits for whom."""
    max_times_sampled: int | None
    """Uses after which an item leaves; none: it stays."""
    max_staleness: int | None
    """Policy versions behind the published one beyond which an item is dropped; none: any."""
    seed: int
    """Of the random draws."""
    timeouts: Timeouts
    """How long a process may be silent."""
    env_weights: Mapping[str, float]
    """Environments that share each step, as named in their samples' `env`, each with its weight: a step takes from
    each in proportion and waits for one that has too few groups; groups of other environments are rejected; empty:
    steps do not look at environments."""
    folder: str | Path
    """Of ray://: where the run is kept; on a disk of one host, the plane stays on that host; empty: ~/.penstock/NAME,
    on the head node unless `log` and `storage` are shared."""
    metrics: str | None
    """HOST:PORT of a page with /metrics for Prometheus, /healthz and /readyz; beyond loopback /metrics needs
    `metrics_token`; port 0 picks a free one; none: off."""
    metrics_token: str | Path | None
    """File with the token that /metrics asks for; none: no token, loopback only."""
    http: str | None
    """ADDRESS:PORT of the HTTP API, where groups are put as JSON or frames; port 0 picks a free one; beyond loopback
    it needs `http_token`; none: off."""
    http_token: str | Path | None
    """File with the token that every HTTP request must carry; none: one is made, and kept in the run's folder as
    http-token."""
    log_file: str | Path | None
    """Write log lines there instead of to stderr."""
    watchdog: Watch
    """A second process that ends a plane whose loop no longer turns."""
    movable: bool | None
    """Of ray://: whether Ray may start the plane on another host; none: if log and storage are shared: a PostgreSQL
    log or a shared filesystem, and storage on a shared filesystem; on: `storage` is seen by every node although the
    type of its filesystem does not say so, and the log is in PostgreSQL."""
