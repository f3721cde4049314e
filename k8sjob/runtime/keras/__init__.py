"""Keras: `model.fit` over all ranks, on torch or JAX."""
