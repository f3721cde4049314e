"""Back ends, which run jobs: this machine, or a cluster."""
