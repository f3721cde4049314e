"""A wait for what becomes true, with a deadline that fails the test."""

import time


def until(condition, seconds=60):
    """What the condition returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.01)
    return found
