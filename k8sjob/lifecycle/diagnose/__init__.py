"""Why a job stands where it stands: objects and last lines of output in, findings out. Pure."""

from k8sjob.lifecycle.diagnose.diagnosis import diagnose
from k8sjob.lifecycle.diagnose.finding import Cause, Finding

__all__ = ["Cause", "Finding", "diagnose"]
