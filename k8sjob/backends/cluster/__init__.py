"""The back end of a cluster: jobs are PyTorchJobs there, kept by the training operator."""

from k8sjob.backends.cluster.backend import ClusterBackend

__all__ = ["ClusterBackend"]
