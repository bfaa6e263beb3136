"""What a plane counts as it runs: one line for each name, with what it means.

`status()["counts"]` and the Prometheus page show every name from the first moment, zeros too: an alert on something
that was never counted would otherwise miss the first time it happens.
"""

from __future__ import annotations

COUNTS = {
    "groups": "groups accepted",
    "samples": "samples accepted",
    "tokens": "tokens accepted",
    "groups_direct": "groups that their worker wrote to storage itself",
    "urls_signed": "URLs signed for workers that write to storage without credentials",
    "groups_stale": "groups dropped at put because they were too old",
    "groups_untrained": "groups accepted in which nothing is trained",
    "groups_quarantined": "groups set aside because no step could be made with them",
    "groups_lost": "groups whose bytes storage no longer has",
    "truncated_samples": "samples cut to seq_len",
    "truncated_tokens": "tokens cut off",
    "dropped_samples": "samples dropped because they were longer than seq_len",
    "dropped_tokens": "tokens of these",
    "puts_repeated": "puts of a group that was accepted before",
    "puts_refused": "puts refused: the group, or its sender, is at fault",
    "puts_overloaded": "puts that found no room in time",
    "puts_failed": "puts that could not be written",
    "steps_replanned": "steps planned again because a group of theirs was damaged or lost",
    "steps_freeing_early": "committed steps forgotten before retain_steps to make room",
    "eval_groups_freeing_early": "evaluation groups forgotten to make room",
    "ranks_served_inline": "times a rank could not read storage that the plane could",
    "deletions_failed": "deletions that storage refused; they are tried again",
    "decisions_failed": "decisions that failed and were reported",
    "snapshots_skipped": "snapshots of state not written; a restart takes longer",
    "resumes_rewound": "trainers that resumed behind the newest step",
    "resumes_ahead": "trainers that resumed ahead of what was committed",
    "runs_evicted": "tenants evicted",
    "messages_corrupt": "messages that could not be read",
    "messages_failed": "messages that could not be handled",
    "messages_foreign": "messages of another run",
    "metrics_refused": "reported metrics that were not kept",
    "reports_refused": "priorities that were refused",
    "priorities_unknown": "priorities of ids that the step does not have",
}
"""Name and meaning. A test holds that nothing else is counted."""
