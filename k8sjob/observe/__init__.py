"""The observation of jobs: their state, events, logs and problems."""
