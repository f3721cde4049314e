"""Whatever runs Pods and is no kind of job: it is read, and never rendered."""
