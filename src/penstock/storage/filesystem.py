"""Whether a folder lies on a filesystem that other hosts see."""

from __future__ import annotations

from pathlib import Path

_SHARED = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ocfs2",
        "gfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "virtiofs",
        "wekafs",
        "efs",
    ]
)
"""Types as the kernel names them. Two hosts may have the same files open there."""


def is_shared(folder: str | Path, mounts: str | None = None) -> bool:
    """Whether other hosts may see this folder. `mounts` is what /proc/self/mountinfo holds.

    >>> mounts = "36 35 98:0 / / rw - ext4 /dev/sda rw\\n40 36 0:45 / /mnt/all rw,noatime shared:1 - nfs4 host:/ rw"
    >>> is_shared("/mnt/all/runs", mounts), is_shared("/mnt/other", mounts)
    (True, False)
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:  # not Linux: taken for local
            return False
    path, best, kind = Path(folder).resolve(), -1, ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))  # spaces are written as \\040
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), rest.split()[0]
    return kind in _SHARED
