"""What to do about an answer of the apiserver, by the kind of object that it is about."""

import pytest

from k8sjob.kube.api_resources import ResourcePath
from k8sjob.kube.client.errors import explained
from k8sjob.kube.client.transport import ApiError
from k8sjob.targets.jobs import TARGETS

CONTROLLERS = {target.resource: target.controller for target in TARGETS}


@pytest.mark.parametrize(
    ("resource", "options"),
    [
        ("pytorchjobs", "-n team`"),
        ("trainjobs", "-n team --target trainjob`"),
        ("trainingruntimes", "-n team --target trainjob`"),
        ("jobsets", "-n team --target jobset`"),
        ("jobs", "-n team --target job`"),
        ("pods", "-n team`"),
    ],
)
def test_a_refusal_advises_doctor_for_the_kind_of_job(resource, options):
    detail = f'{resource} is forbidden: User "a" cannot create resource "{resource}"'
    error = ApiError("refused", code=403, detail=detail)
    target = ResourcePath(resource=resource, namespace="team")
    assert f"`k8sjob doctor {options}" in str(explained(error, "POST", target, "c", CONTROLLERS))
