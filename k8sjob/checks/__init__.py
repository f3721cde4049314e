"""Checks before anything runs: of scripts and manifests (lint), of a cluster (doctor)."""
