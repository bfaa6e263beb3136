"""Limit native libraries in worker processes to one thread each, instead of one per core.

Dozens of workers with a thread pool per core each spend their time on context switches, and each pool has its own
memory. The limits must be in the environment before a library is loaded, so they are passed to the child at its start.
The parent's own environment does not change.
"""

from __future__ import annotations

from collections.abc import Mapping

THREAD_CAPS: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "OMP_THREAD_LIMIT": "1",
    "OMP_DYNAMIC": "FALSE",
    "MKL_NUM_THREADS": "1",
    "MKL_DYNAMIC": "FALSE",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "2",
}


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a worker: `subprocess.Popen(..., env=worker_environment(os.environ))`.

    >>> worker_environment({"HOME": "/root", "OMP_NUM_THREADS": "64"})["OMP_NUM_THREADS"]
    '1'
    """
    return {**environment, **THREAD_CAPS}
