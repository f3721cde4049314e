"""Adopt: an existing job becomes a job.yaml whose rendering means the same.

What a job spec has a field for goes there. The rest is computed, not listed: the difference between
what the fields render and what the manifest says becomes `pod_template` and `overlay`, and the
result is rendered once more and compared, so nothing can be dropped.
"""

from __future__ import annotations

from k8sjob.adopt.adopting import Adopted, adopt
from k8sjob.adopt.equivalence import same_meaning

__all__ = ["Adopted", "adopt", "same_meaning"]
