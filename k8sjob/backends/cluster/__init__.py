"""The back end of a cluster, where jobs are objects that a controller works on."""

from k8sjob.backends.cluster.backend import ClusterBackend

__all__ = ["ClusterBackend"]
