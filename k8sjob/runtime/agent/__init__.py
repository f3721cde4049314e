"""The agent of a node: starts, restarts and stops its ranks; and the first code of a rank."""
