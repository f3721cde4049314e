"""Can I submit here? What `k8sjob doctor` looks at: pure checks over facts that are gathered once.

Nothing in the cluster is changed: what would be made is asked for as a dry run.
"""

from k8sjob.checks.doctor.check import Check, Facts, Verdict
from k8sjob.checks.doctor.examine import Report, examine, examine_needs
from k8sjob.checks.doctor.gather import gather, gather_needs

__all__ = [
    "Check",
    "Facts",
    "Report",
    "Verdict",
    "examine",
    "examine_needs",
    "gather",
    "gather_needs",
]
