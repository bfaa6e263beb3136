"""One thread per worker process for every native library that would otherwise start one per core.

Dozens of workers that each start a thread pool per core spend their time switching, and each pool keeps its
own memory. The caps must be in the environment before the library is loaded, so they are given to the child
at its start, and the parent's own environment stays as it is.
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
    """The environment to start a worker with: `subprocess.Popen(..., env=worker_environment(os.environ))`.

    >>> worker_environment({"HOME": "/root", "OMP_NUM_THREADS": "64"})["OMP_NUM_THREADS"]
    '1'
    """
    return {**environment, **THREAD_CAPS}
