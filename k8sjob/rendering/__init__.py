"""A job spec as what others run: a manifest, a Dockerfile, the environment of a replica.

All of it is pure, except `write_context`, which writes the folder that an image is built from.
"""
