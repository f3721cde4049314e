"""Jobs as processes of this machine, run as the training operator and a kubelet would."""

from k8sjob.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
