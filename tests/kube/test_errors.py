"""What to do about an answer of the apiserver, by the kind of object that it is about."""

import pytest

from k8sjob.kube.api_resources import ResourcePath
from k8sjob.kube.client.errors import explained
from k8sjob.kube.client.transport import ApiError
from k8sjob.targets.jobs import TARGETS, job_path

CONTROLLERS = {ResourcePath.of(job_path(t)).plural: t.controller for t in TARGETS}


@pytest.mark.parametrize(
    ("group", "resource", "options"),
    [
        ("kubeflow.org", "pytorchjobs", "-n team`"),
        ("trainer.kubeflow.org", "trainjobs", "-n team --target trainjob`"),
        ("trainer.kubeflow.org", "trainingruntimes", "-n team --target trainjob`"),
        ("jobset.x-k8s.io", "jobsets", "-n team --target jobset`"),
        ("batch", "jobs", "-n team --target job`"),
        ("batch.volcano.sh", "jobs", "-n team`"),
        ("", "pods", "-n team`"),
    ],
)
def test_a_refusal_advises_doctor_for_the_kind_of_job(group, resource, options):
    detail = f'{resource} is forbidden: User "a" cannot create resource "{resource}"'
    error = ApiError("refused", code=403, detail=detail)
    target = ResourcePath(group, resource=resource, namespace="team")
    assert f"`k8sjob doctor {options}" in str(explained(error, "POST", target, "c", CONTROLLERS))
