"""Training scripts, read and never executed: `lint_script`, and `job_draft` for `init --from`.

Whoever checks files imports this package alone; `init` imports `job_draft`, which needs the spec.
"""

from k8sjob.checks.scripts.facts import Setting
from k8sjob.checks.scripts.lint import CHECKS, SYNTAX, lint_script
from k8sjob.checks.scripts.modules import read_text, refusal

__all__ = ["CHECKS", "SYNTAX", "Setting", "lint_script", "read_text", "refusal"]
