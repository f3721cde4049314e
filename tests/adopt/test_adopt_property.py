"""Adopt, then render: the same meaning, whatever the manifest; and k8sjob's own come back."""

import copy

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pytorchjobs import manifests
from strategies import job_specs

from k8sjob.adopt import adopt, same_meaning
from k8sjob.adopt.normal import config_of
from k8sjob.document import dump, parse
from k8sjob.rendering import render
from k8sjob.rendering.manifest import manifest
from k8sjob.spec import JobSpec

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(manifests())
@settings(deadline=None, max_examples=60, suppress_health_check=SLOW)
def test_any_manifest_is_rendered_with_its_meaning(job):
    adopted = adopt(dump(job))
    written = JobSpec.from_yaml(adopted.spec.to_yaml())
    assert written == adopted.spec
    assert same_meaning(manifest(written), job)


@given(job_specs())
@settings(deadline=None, max_examples=60, suppress_health_check=SLOW)
def test_what_k8sjob_rendered_comes_back(spec):
    rendered = render(spec)
    again = adopt(rendered).spec
    assert same_meaning(manifest(again), manifest(spec))
    assert config_of(manifest(again)) == config_of(manifest(spec))
    assert adopt(render(again)).spec == again


def leaves(value, path=()):
    """The paths of all scalars."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif value is not None:
        yield path


@given(manifests(), st.data())
@settings(deadline=None, max_examples=100, suppress_health_check=SLOW)
def test_a_changed_value_is_a_changed_meaning(job, data):
    """What `same_meaning` is worth: no scalar may change unseen."""
    path = data.draw(st.sampled_from(sorted(leaves(job), key=str)))
    changed = copy.deepcopy(job)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    # The old name of serviceAccountName counts only where the new one is not there.
    assume(path[-1] != "serviceAccount" or "serviceAccountName" not in holder)
    holder[path[-1]] = "another-value"
    # Of two variables with one name only the last counts, but here no name is there twice.
    assert not same_meaning(changed, job)
    assert same_meaning(parse(dump(job)).data, job)
