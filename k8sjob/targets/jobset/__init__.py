"""JobSets, of the JobSet controller 0.12."""
