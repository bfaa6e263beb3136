"""A plane and its keepers as actors of a Ray cluster: `penstock.open("ray://NAME", ...)` is the way in.

Ray places processes, names them, starts them again and says who may call whom. What moves, what is decided and what
is durable is ours: the plane actor runs the same server over the same sockets as `penstock serve`, a keeper actor the
same one as `penstock keep`. Nothing that was acknowledged exists as an object of Ray. Nothing imports Ray until an
address begins with ray://.
"""

from penstock.ray.calls import my_node_name
from penstock.ray.local_cluster import LocalCluster
from penstock.ray.opening import connect_ray, open_given, open_ray

__all__ = ["LocalCluster", "connect_ray", "my_node_name", "open_given", "open_ray"]
