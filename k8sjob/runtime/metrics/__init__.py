"""Loss, metrics and progress of a run, and where they are reported."""
