"""The Python client as a transport: the only module that imports it, and late."""
