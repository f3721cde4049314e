"""Indexed Jobs, and what the kinds that are made of one share."""
