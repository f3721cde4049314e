"""Images without a builder: the code as one layer, appended to its base in the registry."""
