"""What becomes of a job: its state, its events as they come, its logs, what is wrong with it."""
