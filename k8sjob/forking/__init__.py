"""Runs of a script on this machine for `prove` and `fit`, in ranks forked from one process."""
