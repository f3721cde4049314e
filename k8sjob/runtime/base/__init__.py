"""The base of agent and ranks: environment, settings, termination message, heartbeat."""
