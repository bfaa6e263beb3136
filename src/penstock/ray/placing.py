"""Where a plane of a cluster may run: on the host that has its folder, or on any host if all of it is shared."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from penstock.config import settings_of
from penstock.errors import ConfigError
from penstock.plane import ClusterSettings
from penstock.storage import address_of, is_object_url, is_shared

_SESSION = re.compile(r"/session_\d[^/]*/")
"""Within Ray's own temporary folder: it is removed with the cluster, and a job's working folder with the job."""


def absolute(address: str, settings: ClusterSettings) -> ClusterSettings:
    """With paths that mean the same in every process. Raises ConfigError for a path that Ray will remove."""
    paths: dict[str, Any] = {}
    for setting in settings_of(ClusterSettings):
        given = getattr(settings, setting.name)
        if setting.extra.get("path") and given:
            paths[setting.name] = path = address_of(given)
            if _SESSION.search(path):
                raise ConfigError(
                    f"{address}: {setting.name}: {path} is in a folder that Ray removes when the job or the cluster "
                    "ends; give an absolute path outside Ray's temporary folder"
                )
    return replace(settings, **paths)


def is_movable(settings: ClusterSettings) -> bool:
    """Whether the plane may be started on another host: both its log and its storage are seen from there.

    >>> from penstock.packing import Packing
    >>> from penstock.plane.settings import Target
    >>> plane = ClusterSettings(packing=Packing(ranks=1, seq_len=16), target=Target(groups=1), storage="/tmp/frames")
    >>> is_movable(plane), is_movable(replace(plane, log="postgresql://db/runs", movable=True))
    (False, True)
    """
    if settings.movable is not None:
        return settings.movable
    is_folder_shared = bool(settings.folder) and is_shared(settings.folder)
    is_log_shared = settings.log is not None or is_folder_shared
    if settings.storage is None:
        return is_log_shared and is_folder_shared
    return is_log_shared and (is_object_url(settings.storage) or is_shared(settings.storage))
