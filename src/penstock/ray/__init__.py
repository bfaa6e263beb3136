"""A plane as an actor of a Ray cluster: `penstock.open("ray://NAME", ...)` is the way in.

Ray places the plane's process, names it, starts it again and decides who may call it. The actor runs the same server
over the same sockets as `penstock serve`; log and frames are where the settings say. Nothing that was acknowledged
exists as an object of Ray. Nothing imports Ray until an address begins with ray://.
"""

from penstock.ray.local_cluster import LocalCluster
from penstock.ray.opening import connect_ray, end_ray, open_given, open_ray

__all__ = ["LocalCluster", "connect_ray", "end_ray", "open_given", "open_ray"]
