"""Layers: the code, the packages, and what a base's layers contain."""
