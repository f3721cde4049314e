"""A real Kubernetes with the real training operator, for tests: see `Bed`."""

from .bed import Bed
from .cluster import Cluster, ClusterError

__all__ = ["Bed", "Cluster", "ClusterError"]
