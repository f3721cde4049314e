"""Why a job is in its state: objects and last lines of output in, findings out. Pure."""

from k8sjob.observe.diagnose.causes import diagnose
from k8sjob.observe.diagnose.finding import Cause, Finding

__all__ = ["Cause", "Finding", "diagnose"]
