"""Measurement of the memory that a rank allocates in the first steps of a script."""
