"""A way to write a PyTorchJob down to what a test is about."""

import pytest
import pytorchjobs


@pytest.fixture
def pytorchjob():
    """A function that makes a sound PyTorchJob: its containers' fields, its pods', its own."""

    def make(container=None, pod=None, *, workers=3, **spec):
        policy = {"backoffLimit": 3 * (workers + 1) + 1, "cleanPodPolicy": "Running"}
        spec = {"runPolicy": policy, **spec}
        return pytorchjobs.pytorchjob(container, pod, workers=workers, **spec)

    return make
