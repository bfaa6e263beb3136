"""The commented plane.toml that `penstock serve --write-config` writes: every setting, with its default."""

from __future__ import annotations

TEMPLATE = """\
# The settings of a plane. Start it with:  penstock serve --config plane.toml
# Lines that begin with "#" followed by a name show the default. An unknown name is an error. Where a setting may be
# switched off, "none" does it. Sizes are bytes, or text such as "4 GiB". Relative paths start at this file's folder.

# Where the run is kept: its durable log, one folder per run. "memory:" keeps nothing.
folder = "runs/demo"

# Where ranks and workers connect. Addresses that other hosts can reach need `keys`.
#   tcp://127.0.0.1:7440    sockets; also tcp://0.0.0.0:7440 and the like, with keys
#   ipc:///path/to/socket   the same within one host
#   shm+ipc:///path/socket  payloads through shared memory: the fastest way within one host
#   file:///shared/folder   files, where a filesystem is all that the hosts share
# listen = ["tcp://127.0.0.1:7440"]

# A key folder, made with `penstock keys DIR`.
# keys = "none"

# The run's name. Ranks and workers that name another run are refused.
# run = "run"

# Processes per data rank (tensor or context parallel); each gets the rank's data.
# replicas = 1

# Groups of one run that no step could be made with, after which the run is evicted (see [shares]). "none": never.
# evict_after = 3

# Encoded bytes that may wait for training. Beyond, puts wait or raise Overloaded.
# max_held_bytes = "4 GiB"

# Bytes the log may take on disk. Beyond, puts raise DiskFull. "none": whatever the disk has.
# max_disk_bytes = "none"

# Committed steps that can still be served again to a trainer that resumes from an older checkpoint.
# retain_steps = 64

# Decisions (groups, steps, reports) after which the plane's memory is written down. A restart does again only what
# came later.
# snapshot_every = 20000

# Prometheus text at http://HOST:PORT/metrics, on a loopback address only; port 0 picks a free one. "none": off.
# metrics = "none"

# Write log lines there instead of to stderr.
# log_file = "none"

[packing]
# Data ranks that take part in every step.
ranks = 1
# Samples are cut to this many tokens.
seq_len = 4096
# Tokens of a micro-batch, padding included. "none": seq_len.
# micro_batch_max_tokens = "none"
# Micro-batches are padded to a multiple of this many tokens.
# pad_to_multiple_of = 1
# Token id of padding.
# pad_id = 0
# Samples, and image patches, that a micro-batch may hold.
# max_samples = "none"
# max_patches = "none"
# A sample beyond a cap: "soft" gives it a micro-batch of its own, "strict" is an error.
# over_cap = "soft"
# What all ranks share at a micro-batch index: "modality", or "run" as well.
# rows_by = "modality"
# Allow micro_batch_max_tokens above seq_len.
# long_rows = false

[packing.cost]
# What a micro-batch costs, in any unit: overhead + per_token * tokens + per_token_squared * sum(length^2)
# + per_patch * patches. Ranks are balanced by it.
# overhead = 0.0
# per_token = 24576.0
# per_token_squared = 1.0
# per_patch = 0.0

[packing.modalities]
# Modalities that may share a micro-batch: name two or three of "text", "image", "video", or none.
# together = []

[target]
# When a step is full: exactly one of groups, samples, tokens.
groups = 4
# samples = "none"
# tokens = "none"

[replay]
# How groups wait for training. By default a queue: each group once, in order, nothing dropped.
# A run keeps the replay settings it began with.
# Groups.
# capacity = 65536
# What is drawn: "fifo", "lifo", "uniform", "freshest", "prioritized", "min_priority", "max_priority";
# with parameters: { kind = "prioritized", exponent = 0.6 }, { kind = "freshest", window = 2 }
# sampler = "fifo"
# What makes room when it is full, chosen as above. "none": nothing, puts wait.
# remover = "none"
# Who waits for whom: { kind = "min_size", min_size = 64 }, { kind = "queue", size = 64 },
# { kind = "samples_per_insert", ratio = 2.0, min_size = 64, error_buffer = 64.0, batch_size = 4 }
# limiter = "none"
# Uses after which a group leaves. "none": it stays until it is removed or stale.
# max_times_sampled = 1
# Policy versions behind the trainer's published one beyond which a group is dropped. "none": any.
# max_staleness = "none"
# Of the random draws.
# seed = 0

[shares]
# Runs or adapters that share the trainer, as named in their samples' `run`, each with its weight: every step takes
# tokens from them in these proportions, and each may hold its part of max_held_bytes. Groups of other runs are refused.
# Without any, runs are not kept apart. `penstock runs` shows and changes them while the plane runs.
#   alpha = 2.0
#   beta = 1.0

[timeouts]
# Seconds. Ranks and plane tell each other that they live, this often.
# heartbeat_s = 2.0
# Silence after which a process counts as dead; every other rank then fails with the same error.
# peer_s = 11.0
# From sending a step to the rank's word that it has it.
# delivery_s = 30.0
# How long ranks and workers wait for a lost plane to come back.
# plane_s = 30.0
# An unanswered question is asked again after this.
# resend_s = 1.0

[watchdog]
# A second process that ends a plane whose loop no longer turns: its stacks go to the log, then SIGKILL.
# Seconds without a turn. "none": no watchdog.
# stall_s = 300.0
# Seconds from SIGTERM until the plane is given up, should it not manage to end.
# end_s = 7.0
# Seconds for writing the stacks, before SIGKILL.
# grace_s = 2.0
"""
