"""Training operator 1.9: the environment it injects, its webhook, its schema."""
