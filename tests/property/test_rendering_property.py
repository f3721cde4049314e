"""Whatever a valid spec says, hostile text included, arrives: in YAML and in a Dockerfile."""

import copy
import json
import re
import shlex

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import FREE, fitted, job_specs, json_values

from k8sjob.errors import RenderError, SpecError
from k8sjob.kube.pod_security import restricted_violations
from k8sjob.rendering.dockerfile import dockerfile
from k8sjob.rendering.manifest import container_argv, container_env, literal, manifest, render
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import TARGETS
from k8sjob.targets.pytorchjob.operator import webhook_problems

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(spec=job_specs())
@SLOW
def test_every_value_arrives(spec):
    text = render(spec)
    assert text == render(spec)
    manifest = yaml.load(text, Loader=yaml.CSafeLoader)
    assert manifest == yaml.safe_load(text)
    command, args = container_argv(spec)
    pods = manifest["spec"]["pytorchReplicaSpecs"]
    assert pods
    for replica in pods.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == [literal(word) for word in command]
        assert container.get("args", []) == [literal(word) for word in args]
        env = {item["name"]: item["value"] for item in container["env"]}
        assert env == {name: literal(text) for name, text in container_env(spec).items()}
        assert pod.get("affinity") == spec.affinity
        assert pod.get("tolerations", []) == list(spec.tolerations)
        assert pod.get("topologySpreadConstraints", []) == list(spec.topology_spread)
        annotations = replica["template"]["metadata"].get("annotations", {})
        given = {key: value for key, value in spec.annotations.items() if value is not None}
        assert given.items() <= annotations.items()
        mounted = {mount["name"]: mount for mount in container.get("volumeMounts", [])}
        assert set(mounted) == {volume["name"] for volume in pod.get("volumes", [])}
        for volume in spec.volumes:
            assert mounted[volume.name]["mountPath"] == volume.mount
            assert mounted[volume.name].get("subPath") == volume.sub_path
    assert sum(replica["replicas"] for replica in pods.values()) == spec.nnodes


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@given(spec=job_specs())
@SLOW
def test_an_apiserver_and_the_operators_webhook_accept_it(crd_problems, target, spec):
    spec = fitted(spec.model_copy(update=FREE), target)
    assert target.problems(manifest(spec).document) == []
    for document in yaml.load_all(render(spec), Loader=yaml.CSafeLoader):
        if document["kind"] != "Service":
            assert crd_problems(document) == []


@given(spec=job_specs())
@SLOW
def test_restricted_passes_the_pod_security_standard(spec):
    manifest = yaml.load(render(spec), Loader=yaml.CSafeLoader)
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        violations = list(restricted_violations(replica["template"]["spec"]))
        assert bool(violations) == (spec.security != "restricted"), violations


@given(spec=job_specs())
@SLOW
def test_a_dockerfile_says_what_the_spec_says(spec):
    if not spec.builds_image:
        with pytest.raises(RenderError, match="nothing to build"):
            dockerfile(spec)
        return
    steps = instructions(dockerfile(spec))
    image = spec.image
    platform = [f"--platform={image.platform}"] if image.platform else []
    assert steps[0] == ("FROM", " ".join([*platform, image.base]))
    assert [name for name, _ in steps].count("FROM") == 1
    command, args = container_argv(spec)
    assert steps[-2] == ("USER", "1000:1000")
    assert steps[-1][0] == "CMD"
    assert steps[-1][1].isascii()
    assert json.loads(steps[-1][1]) == [*command, *args]
    installs = [
        shlex.split(body)[-1 - len(image.pip) :] for name, body in steps if "pip install" in body
    ]
    if image.pip:
        assert installs[0][1:] == list(image.pip)
    assert len(installs) == bool(image.pip) + (image.requirements is not None)
    apt = [shlex.split(body) for name, body in steps if name == "RUN" and "apt-get" in body]
    assert len(apt) == bool(image.apt)
    for words in apt:
        start = words.index("--no-install-recommends") + 1
        assert words[start : start + len(image.apt)] == list(image.apt)
    copies = [json.loads(body) for name, body in steps if name == "COPY" and body[0] == "["]
    requirements = [source for source, _ in copies if source != ".k8sjob"]
    assert requirements == ([image.requirements] if image.requirements else [])


def instructions(text):
    """(NAME, rest) of each instruction, as a builder splits them: comments out, lines joined."""
    lines = [line for line in text.split("\n") if not re.match(r"\s*(#|$)", line)]
    joined = re.sub(r"\\[ \t]*\n", "", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.split("\n")]


def overlays():
    """Overlays that hit the manifest's own fields, with whatever values."""
    keys = st.sampled_from(
        [
            *("metadata", "annotations", "name", "spec", "runPolicy", "pytorchReplicaSpecs"),
            *("Master", "Worker", "replicas", "template", "containers", "env", "$patch"),
        ]
    )
    return st.dictionaries(
        keys,
        st.recursive(
            json_values(3),
            lambda inner: st.dictionaries(keys, inner, max_size=3) | st.lists(inner, max_size=3),
            max_leaves=8,
        ),
        max_size=3,
    )


@given(overlay=overlays())
@SLOW
def test_an_overlay_is_merged_or_refused(overlay):
    spec = JobSpec(name="a", image="b", run={"script": "c.py"}, replicas={"workers": 1})
    before = copy.deepcopy(overlay)
    text, problems = attempt(spec.model_copy(update={"overlay": overlay}))
    assert overlay == before
    assert bool(text) != bool(problems)
    assert all(problem.field.startswith("overlay") for problem in problems)
    if text:
        manifest = yaml.load(text, Loader=yaml.CSafeLoader)
        assert webhook_problems(manifest) == []
        assert manifest["metadata"]["name"] == "a"


def attempt(spec):
    try:
        return render(spec), []
    except SpecError as error:
        return "", error.findings
