"""Job specs for the tests of rendering."""

import pytest

from k8sjob.spec import JobSpec

BUILT = {"repository": "registry.example/team/digits", "base": "python:3.12-slim"}


@pytest.fixture
def job():
    """Makes a JobSpec from what matters to the test."""

    def make(**fields):
        return JobSpec(
            **{
                "name": "digits",
                "image": "registry.example/digits:1",
                "run": {"script": "main.py"},
                **fields,
            }
        )

    return make


@pytest.fixture
def built(job):
    """Makes a JobSpec whose image is to be built."""

    def make(image=None, **fields):
        return job(image={**BUILT, **(image or {})}, **fields)

    return make
