"""The kinds of jobs that a spec can become in a cluster, behind one Protocol."""

from typing import Final

MANIFEST_FILES: Final = ("pytorchjob.yaml", "indexed-job.yaml", "jobset.yaml", "trainjob.yaml")
"""The files that the kinds in jobs.TARGETS are rendered to."""
