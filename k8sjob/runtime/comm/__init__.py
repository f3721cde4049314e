"""Communication of the ranks: rendezvous, process group, mesh, common stop, watchdog."""
