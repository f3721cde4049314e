"""Kubernetes' own Job, Indexed, with a headless Service: no operator is needed."""
