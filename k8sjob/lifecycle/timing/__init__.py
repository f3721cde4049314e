"""Where the time from a submission to the first training step went."""

from k8sjob.lifecycle.timing.hearing import hear, listen
from k8sjob.lifecycle.timing.moments import Heard
from k8sjob.lifecycle.timing.split import Phase, Row, Timing, timing

__all__ = ["Heard", "Phase", "Row", "Timing", "hear", "listen", "timing"]
