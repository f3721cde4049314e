"""Adopt, then render: the same meaning, whatever the manifest; and k8sjob's own come back."""

import contextlib
import copy
import json
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st
from pytorchjobs import manifests
from strategies import examples, job_specs

from k8sjob.adopt import adopt, same_meaning
from k8sjob.errors import SpecError
from k8sjob.kube.objects import QUEUE
from k8sjob.rendering.manifest import manifest, render
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import TARGETS, config_of
from k8sjob.targets.readers import reader_of
from k8sjob.yamldoc import dump, parse, parse_all


@given(manifests())
@examples(60)
def test_any_manifest_is_rendered_with_its_meaning(job):
    adopted = adopt(dump(job))
    written = JobSpec.from_yaml(adopted.spec.to_yaml())
    assert written == adopted.spec
    assert same_meaning(manifest(written).document, job)


@given(job_specs(), st.sampled_from(TARGETS))
@examples(60)
def test_what_k8sjob_rendered_comes_back(spec, target):
    spec = spec.model_copy(update={"target": target.name})
    assume(not list(target.refusals(spec)))
    rendered = render(spec)
    again = adopt(rendered).spec
    assert same_meaning(authored(again), authored(spec))
    assert config_of(manifest(again).document) == config_of(manifest(spec).document)
    assert adopt(render(again)).spec == again


def authored(spec):
    """The job that a spec renders, in the layout in which kinds are compared."""
    *beside, job = manifest(spec).objects
    return reader_of(job).authored(job, beside).job


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
@examples(100)
def test_a_changed_value_is_a_changed_meaning(job, data):
    """What `same_meaning` is worth: no scalar may change unseen."""
    path = data.draw(st.sampled_from(sorted(leaves(job), key=str)))
    changed = copy.deepcopy(job)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    # The old name of serviceAccountName counts only where the new one is not there.
    assume(path[-1] != "serviceAccount" or "serviceAccountName" not in holder)
    assume(path[-1] != "suspend" or QUEUE not in job["metadata"].get("labels", {}))
    holder[path[-1]] = "another-value"
    # Of two variables with one name only the last counts, but here no name is there twice.
    assert not same_meaning(changed, job)
    assert same_meaning(parse(dump(job)).data, job)


ROOT = Path(__file__).parents[2]
KEPT = sorted(file for target in TARGETS for file in ROOT.glob(f"manifests/*/{target.file}"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([10**99, 1.5, "", "x", "9" * 5000, "\u0663", "$(A)", "$$", "a/b", "[" * 3000])
    | st.sampled_from(["pytorch", "Master", "Memory", "/dev/shm", '{"strategy": 1}']),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "value", "kind", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def holders(value):
    """All mappings and lists that are not empty."""
    if isinstance(value, dict | list) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from holders(item)


def mutate(job, data):
    """Replace, drop, double or nest one value."""
    holder = data.draw(st.sampled_from(list(holders(job))))
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    key = data.draw(st.sampled_from(keys))
    match data.draw(st.sampled_from(["replace", "replace", "drop", "double", "nest"])):
        case "replace":
            holder[key] = data.draw(JSON)
        case "drop":
            del holder[key]
        case "double" if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        case "double":
            holder[f"{key}x"] = copy.deepcopy(holder[key])
        case "nest":
            holder[key] = data.draw(st.sampled_from([[holder[key]], {str(key): holder[key]}]))


@given(st.data())
@examples(25)
def test_any_mutation_of_a_manifest_is_adopted_or_refused(data):
    text = data.draw(st.sampled_from(KEPT)).read_text()
    job = parse_all(text, "")[-1].data
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(job, data)
    with contextlib.suppress(SpecError):
        adopt(json.dumps(job)).spec.to_yaml()
