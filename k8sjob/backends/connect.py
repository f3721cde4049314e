"""Which cluster is meant, and by which client it is spoken to."""
