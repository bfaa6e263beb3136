"""A plane as an actor of a Ray cluster: open it with `penstock.open("ray://NAME", ...)`.

Ray places the plane's process, names it, restarts it and decides which jobs may call it. The actor runs the same server
over the same sockets as `penstock serve`; log and frames are where the settings put them. Nothing that was acknowledged
exists only in Ray's object store. Ray is imported when an address begins with ray://, not before.
"""

from penstock.ray.local_cluster import LocalCluster
from penstock.ray.ray_plane import connect_ray, end_ray, open_given, open_ray

__all__ = ["LocalCluster", "connect_ray", "end_ray", "open_given", "open_ray"]
