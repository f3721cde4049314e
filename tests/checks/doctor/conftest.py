"""Facts about a cluster in which all is well, but for what a test changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healthy import HealthyCluster
from pytorchjobs import pytorchjob

from k8sjob.checks.doctor import gather
from k8sjob.kube.client.transport import ApiError
from k8sjob.targets.jobs import job_of


@pytest.fixture
def cluster():
    return HealthyCluster()


@pytest.fixture
def facts(cluster):
    """Facts about the healthy cluster; with other answers, and a job, as a test says."""

    def make(answers=None, *, job=None, **changes):
        cluster.answers |= answers or {}
        return replace(gather(cluster, "team", job and job_of(job)), **changes)

    return make


@pytest.fixture
def make_job():
    """A PyTorchJob of a Master and Workers that are alike."""

    def make(*, workers=1, requests=None, container=None, **pod):
        resources = {"requests": requests or {}, "limits": requests or {}}
        return pytorchjob({"resources": resources, **(container or {})}, pod, workers=workers)

    return make


@pytest.fixture
def refused():
    """What the apiserver says to those who may not look."""
    detail = 'User "eve" cannot list resource "x"'
    return ApiError(f"forbidden: {detail}", code=403, reason="Forbidden", detail=detail)
