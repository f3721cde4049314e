"""Where jobs run: this machine, or a cluster."""
