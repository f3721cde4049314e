"""Other kinds for what is a PyTorchJob elsewhere: the same commands, numbers and recovery."""

import json
import shutil
import uuid
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from strategies import FREE, examples, fitted, job_specs

from k8sjob.jobs.plan import plan_job
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import JobState, job_status
from k8sjob.rendering import render
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import TARGETS, by_name, replica_of

from .desk import SLEEP

TESTS = Path(__file__).resolve().parents[1]
LONG = {"epochs": 4, "dropout": 0.3, "pause": 0.5}
OTHERS = [target.name for target in TARGETS[1:]]
CONTROLLERS = {"jobset": "jobset", "trainjob": "trainer"}
"""The fixtures of the controllers that kinds need, beside those of every cluster."""
BELONGINGS = {"trainjob": "trainingruntimes"}
"""What belongs to a job, where it is no Service."""


@pytest.fixture
def controllers(request):
    """The controllers of all kinds run."""
    for fixture in set(CONTROLLERS.values()):
        request.getfixturevalue(fixture)


@pytest.fixture(params=OTHERS)
def target(request):
    """A kind of job; its controller runs."""
    if fixture := CONTROLLERS.get(request.param):
        request.getfixturevalue(fixture)
    return by_name(request.param)


@pytest.fixture
def programs(tmp_path):
    shutil.copy(TESTS / "dist/programs/train.py", tmp_path)
    return tmp_path


@pytest.fixture
def start(desk, programs, image_of):
    """Creates a job that runs train.py on three nodes: its reference."""

    def submit(target, options, **fields):
        spec = JobSpec(
            name=f"{target}-run",
            namespace=desk.namespace,
            target=target,
            image={"repository": "registry.example/tests/targets", "base": "debian"},
            replicas={"workers": 2},
            resources={"cpu": 1, "memory": "2Gi", "requests": {"cpu": "50m", "memory": "200Mi"}},
            run={
                "script": "train.py",
                "args": [json.dumps(options)],
                "env": {"OMP_NUM_THREADS": "1"},
            },
            **fields,
        )
        return desk.backend.create(plan_job(spec, programs, image=image_of(spec, programs)))

    return submit


@pytest.fixture
def ended(desk, eventually):
    """Waits for a job's end: its snapshot."""

    def wait(ref):
        over = lambda: job_status(desk.backend.snapshot(ref)).state.finished  # noqa: E731
        eventually(over, f"the end of {ref}", deadline=600)
        return desk.backend.snapshot(ref)

    return wait


def result(desk, ref):
    lines = [line.text for line in desk.backend.logs(ref, "master-0")]
    (found,) = [line for line in lines if line.startswith("RESULT ")] or [lines[-20:]]
    return json.loads(found.removeprefix("RESULT "))


def test_what_a_user_does_with_a_job(desk, target, eventually):
    file, tiny = desk.file(target=target.name), f"{desk.namespace}/tiny"
    assert desk.call("submit", file, "--dry-run", "server")[0]
    assert desk.call("submit", file)[0] == f"{desk.namespace}/tiny created\n"
    assert desk.call("submit", file)[0].startswith(f"{desk.namespace}/tiny already exists, the")
    assert desk.call("diff", file) == ("", "")
    beside = BELONGINGS.get(target.name, "services")
    belonging = eventually(lambda: desk.objects(beside).get("tiny"), "what belongs to it")
    (owner,) = belonging["metadata"]["ownerReferences"]
    uid = desk.objects(target.resource)["tiny"]["metadata"]["uid"]
    assert (owner["kind"], owner["uid"]) == (target.kind, uid)
    eventually(lambda: desk.status().state is JobState.RUNNING, "its pods")
    eventually(lambda: "hello" in desk.call("logs", tiny, "-r", "worker-0")[0], "its output")
    found = desk.backend.snapshot(desk.status().ref)
    (container,) = found.pods[1]["spec"]["containers"]
    env = {one["name"]: one.get("value", "1") for one in container["env"]}  # its rank
    assert target.injected_env(found.job, "Worker", 0).items() <= env.items()
    listed = json.loads(desk.call("list", "-n", desk.namespace, "-o", "json")[0])
    assert [(job["name"], job["state"]) for job in listed] == [("tiny", "Running")]

    desk.call("suspend", tiny)
    eventually(lambda: desk.status().state is JobState.SUSPENDED, "its suspension")
    desk.call("resume", tiny)
    eventually(lambda: desk.status().state is JobState.RUNNING, "its pods again")
    assert {replica.name for replica in desk.status().replicas} == {"master-0", "worker-0"}

    _, err = desk.call("submit", file, "--target", "pytorchjob", code=1)
    assert f"tiny already exists, and it is a {target.kind}" in err
    other = desk.file(f"echo other; {SLEEP}", target=target.name)
    assert "another job than this one" in desk.call("submit", other, code=1)[1]
    desk.call("submit", other, "--replace")
    eventually(lambda: "other" in desk.call("logs", tiny, "-r", "master-0")[0], "the other one")

    desk.call("delete", f"{desk.namespace}/tiny")
    left = lambda: [kind for kind in (target.resource, "jobs", beside) if desk.objects(kind)]  # noqa: E731
    eventually(lambda: not left(), "its end")


def test_what_is_rendered_is_what_kubectl_takes(desk, target, eventually):
    text, _ = desk.call("render", desk.file("exit 0", target=target.name))
    desk.cluster.kubectl("apply", "-n", desk.namespace, "-f", "-", stdin=text)
    eventually(lambda: desk.status().state is JobState.SUCCEEDED, "its end")
    desk.call("delete", f"{desk.namespace}/tiny")
    beside = BELONGINGS.get(target.name, "services")
    eventually(lambda: not desk.objects(beside), "the end of what belongs to it")


def test_nothing_is_left_of_a_job_that_is_refused(desk, target):
    counted = f"count/{target.resource}.{target.api_version.partition('/')[0]}"
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {counted: "0"}},
    }
    desk.cluster.kubectl("create", "-n", desk.namespace, "-f", "-", stdin=yaml.safe_dump(quota))
    _, err = desk.call("submit", desk.file(target=target.name), code=1)
    assert "quota" in err
    assert desk.objects(BELONGINGS.get(target.name, "services")) == {}


@pytest.mark.usefixtures("controllers")
@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
@given(spec=job_specs())
@settings(examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_spec_says_its_controller_accepts_it(cluster, namespace, kind, spec):
    own = {"name": f"a{uuid.uuid4().hex[:8]}", "namespace": None}
    text = render(fitted(spec.model_copy(update={**FREE, **own}), kind))
    strict = {"fieldValidation": "Strict"}
    for document in sorted(yaml.safe_load_all(text), key=lambda made: made["kind"] == kind.kind):
        tried = {"dryRun": "All"} if document["kind"] == kind.kind else {}
        cluster.create(document, namespace, **strict, **tried)


@pytest.mark.usefixtures("controllers")
def test_the_numbers_are_those_of_a_pytorchjob(desk, start, ended):
    refs = [start(target.name, {"epochs": 2, "dropout": 0.3}) for target in TARGETS]
    for ref in refs:
        assert job_status(ended(ref)).state is JobState.SUCCEEDED
    one, *others = (result(desk, ref) for ref in refs)
    for other in others:
        assert one["losses"] == other["losses"]
        assert one["weights"] == other["weights"]


@pytest.mark.usefixtures("controllers")
def test_a_lost_pod_comes_back_and_the_training_continues(
    desk, start, ended, checkpoints, eventually
):
    checkpoints("checkpoints")
    refs = [
        start(
            target,
            LONG,
            checkpoint={"dir": "/checkpoints", "every": 1},
            volumes=[
                {
                    "name": "checkpoints",
                    "mount": "/checkpoints",
                    "pvc": "checkpoints",
                    "sub_path": target,
                }
            ],
        )
        for target in OTHERS
    ]

    def saved(ref):
        return any(
            '"kind":"checkpoint"' in line.text for line in desk.backend.logs(ref, "master-0")
        )

    for ref in refs:
        eventually(lambda ref=ref: saved(ref), f"a checkpoint of {ref}")
        (lost,) = [p for p in desk.backend.snapshot(ref).pods if replica_of(p) == "worker-0"]
        desk.cluster.delete("pods", lost["metadata"]["name"], desk.namespace)
    undisturbed = start("pytorchjob", {**LONG, "pause": 0})
    ended(undisturbed)
    expected = result(desk, undisturbed)["losses"]
    for ref in refs:
        assert job_status(ended(ref)).state is JobState.SUCCEEDED
        assert result(desk, ref)["losses"] == pytest.approx(expected, rel=1e-9)


def test_an_error_of_the_script_ends_the_job_at_once(desk, target, ended):
    script = "test $RANK = 1 && exit 7; sleep 600 & wait"
    spec = yaml.safe_load(desk.file(script, target=target.name).read_text())
    policy = {"restart_policy": "ExitCode", "termination_grace": "2s"}
    made = JobSpec.model_validate({**spec, "policy": policy})
    ref = desk.backend.create(plan_job(made))
    snapshot = ended(ref)
    status = job_status(snapshot)
    assert (status.state, status.reason) == (JobState.FAILED, "PodFailurePolicy")
    first = diagnose(snapshot, last_lines(desk.backend, snapshot))[0]
    assert (first.cause, first.replica) == (Cause.CRASH, "worker-0")
