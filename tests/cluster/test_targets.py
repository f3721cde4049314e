"""Other kinds for what is a PyTorchJob elsewhere: the same commands, numbers and recovery."""

import json
import re
import time
import uuid
from pathlib import Path

import pytest
import yaml
from baseimage import NEWER, SUITE
from hypothesis import HealthCheck, given, settings
from strategies import FREE, examples, fitted, job_specs

from k8sjob.contract import Event
from k8sjob.jobs.plan import plan_job
from k8sjob.kube.client.transport import ApiError
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import JobState, job_status
from k8sjob.rendering.manifest import render
from k8sjob.spec import Elastic, Image, Resources, load
from k8sjob.targets.jobs import TARGETS, by_name

from .bed.components import webhook_secret
from .desk import SLEEP, shortened

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "manifests"
IMAGE = Image(repository="registry.example/tests/targets", base="debian", requirements="needs.txt")
SMALL = Resources(cpu=1, memory="2Gi", requests={"cpu": "50m", "memory": "200Mi"})
UID = 1000750000
LONG = {"epochs": 4, "dropout": 0.3, "pause": 0.5}
PAIR = {"workers": 1}
OTHERS = [target.name for target in TARGETS[1:]]
BELONGINGS = {"trainjob": "trainingruntimes"}
"""What belongs to a job, where it is no Service."""


@pytest.fixture(params=OTHERS)
def target(request, controllers):
    """A kind of job; its controller runs."""
    return by_name(request.param)


@pytest.fixture
def ended(desk, eventually):
    """Waits for a job's end: its snapshot."""

    def wait(ref):
        over = lambda: job_status(desk.backend.snapshot(ref)).state.finished  # noqa: E731
        eventually(over, f"the end of {ref}", deadline=600)
        return desk.backend.snapshot(ref)

    return wait


@pytest.fixture
def submitted(desk):
    """Submits a job of each other kind, of that name: what was said of each."""

    def submit(script, **fields):
        files = {kind: desk.file(script, kind, target=kind, **fields) for kind in OTHERS}
        return {kind: desk.call("submit", file)[1] for kind, file in files.items()}

    return submit


def test_what_a_user_does_with_a_job(desk, target, eventually):
    file, tiny = desk.file(target=target.name), f"{desk.namespace}/tiny"
    assert desk.call("submit", file, "--dry-run", "server")[0]
    assert desk.call("submit", file)[0] == f"{desk.namespace}/tiny created\n"
    assert desk.call("submit", file)[0].startswith(
        f"{desk.namespace}/tiny already exists as the same job"
    )
    assert desk.call("diff", file) == ("", "")
    assert "a job of that name exists in" in desk.call("doctor", file)[0]
    assert desk.call("lint", file)[1] == "nothing found\n"
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
    assert found.job.injected_env("Worker", 0).items() <= env.items()
    listed = json.loads(desk.call("list", "-n", desk.namespace, "-o", "json")[0])
    assert [(job["name"], job["kind"], job["state"]) for job in listed] == [
        ("tiny", target.kind, "Running")
    ]
    assert "tiny is Running; nothing wrong was found" in desk.call("why", tiny)[0]
    assert "container started" in desk.call("why", tiny, "--timing")[0]

    desk.call("suspend", tiny)
    eventually(lambda: desk.status().state is JobState.SUSPENDED, "its suspension")
    desk.call("resume", tiny)
    eventually(lambda: desk.status().state is JobState.RUNNING, "its pods again")
    assert {replica.name for replica in desk.status().replicas} == {"master-0", "worker-0"}
    assert "all times are from the suspension on" in desk.call("why", tiny, "--timing")[0]
    (used,) = json.loads(desk.call("usage", tiny, "-o", "json")[0])
    assert used["seconds"]["unknown"] > 0  # what ran before is gone

    _, err = desk.call("submit", file, "--target", "pytorchjob", code=1)
    assert f"tiny already exists, and it is a {target.kind}" in err
    other = desk.file(f"echo other; {SLEEP}", target=target.name)
    assert "a different job" in desk.call("submit", other, code=1)[1]
    desk.call("submit", other, "--replace")
    eventually(lambda: "other" in desk.call("logs", tiny, "-r", "master-0")[0], "the other one")

    desk.call("delete", f"{desk.namespace}/tiny")
    left = lambda: [kind for kind in (target.resource, "jobs", beside) if desk.objects(kind)]  # noqa: E731
    eventually(lambda: not left(), "its end")


@pytest.mark.usefixtures("controllers")
def test_of_two_who_replace_a_job_by_other_kinds_at_once_one_wins(desk, eventually):
    files = [
        desk.file(name="tiny", target=target).rename(desk.folder / f"{target}.yaml")
        for target in ("jobset", "pytorchjob", "job", "trainjob")
    ]
    desk.call("submit", files[0])
    for pair in (files[1:3], files[2:4], files[:3:2]):
        clients = [desk.start("submit", file, "--replace") for file in pair]
        ends = [(*client.communicate(timeout=180), client.returncode) for client in clients]
        for out, err, code in ends:
            if code:
                assert code == 1
                # Or the Service of the other one's JobSet is still there, or its Pods are.
                seen = (
                    "tiny already exists",
                    "tiny was not created by k8sjob",
                    "see what they are waiting for",
                )
                assert any(one in err for one in seen), err
            else:
                assert out.startswith(f"{desk.namespace}/tiny ")
        assert [code for *_, code in ends].count(0) >= 1, ends
        listed = lambda: json.loads(desk.call("list", "-n", desk.namespace, "-o", "json")[0])  # noqa: E731
        eventually(lambda listed=listed: len(listed()) == 1, "that one job is left")
        eventually(lambda: desk.status().state is JobState.RUNNING, "that it runs")


@pytest.mark.usefixtures("jobset")
def test_each_pod_of_a_jobset_of_unlike_jobs_is_shown(desk, eventually):
    def replicated(name, jobs, pods, script):
        main = {
            "name": "main",
            "image": desk.cluster.base_image,
            "command": ["sh", "-c", script],
        }
        pod = {"containers": [main], "restartPolicy": "Never"}
        of_job = {"completions": pods, "parallelism": pods, "template": {"spec": pod}}
        return {"name": name, "replicas": jobs, "template": {"spec": {**of_job, "backoffLimit": 0}}}

    fails = 'echo "I am $JOB_INDEX"; [ $JOB_COMPLETION_INDEX = 0 ] || exit 7; sleep 600 & wait'
    parts = [replicated("leader", 1, 1, SLEEP), replicated("actors", 2, 2, fails)]
    about = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "rl"}}
    desk.cluster.create({**about, "spec": {"replicatedJobs": parts}}, desk.namespace)
    names = {"leader-0-0", *(f"actors-{job}-{index}" for job in (0, 1) for index in (0, 1))}
    job = f"{desk.namespace}/rl"
    shown = lambda: {one.name for one in desk.status("rl").replicas}  # noqa: E731
    eventually(lambda: shown() == names, "its replicas")
    eventually(lambda: "hello" in desk.call("logs", job, "-r", "leader")[0], "the leader's output")
    eventually(lambda: desk.status("rl").state is JobState.FAILED, "its end")
    assert "actors-" in desk.call("why", job)[0]
    assert "exit code 7" in desk.call("why", job)[0]


@pytest.mark.usefixtures("controllers")
def test_all_kinds_are_listed_in_one_table_and_watched(desk, eventually):
    for one in TARGETS:
        desk.call("submit", desk.file("echo hello; sleep 3", name=one.name, target=one.name))
    for one in TARGETS:
        shown, _ = desk.call("watch", f"{desk.namespace}/{one.name}")
        assert "master-0 | hello\n" in shown
        assert f"{one.name} Succeeded after " in shown
    header, *rows = desk.call("list", "-n", desk.namespace)[0].splitlines()
    assert header.split()[:3] == ["NAME", "KIND", "STATE"]
    assert sorted(row.split()[1:3] for row in rows) == sorted(
        [one.kind, "Succeeded"] for one in TARGETS
    )


@pytest.mark.usefixtures("controllers")
def test_what_is_rendered_is_what_kubectl_takes(desk, eventually):
    for kind in OTHERS:
        text, _ = desk.call("render", desk.file("exit 0", kind, target=kind))
        desk.cluster.kubectl("apply", "-n", desk.namespace, "-f", "-", stdin=text)
    for kind in OTHERS:
        eventually(lambda kind=kind: desk.status(kind).state is JobState.SUCCEEDED, "its end")
        desk.call("delete", f"{desk.namespace}/{kind}")
        beside = BELONGINGS.get(kind, "services")
        left = lambda kind=kind, beside=beside: kind in desk.objects(beside)  # noqa: E731
        eventually(lambda left=left: not left(), "the end of what belongs to it")


@pytest.mark.usefixtures("controllers")
def test_nothing_is_left_of_a_job_that_is_refused(desk):
    groups = {one.resource: one.api_version.partition("/")[0] for one in map(by_name, OTHERS)}
    hard = {f"count/{resource}.{group}": "0" for resource, group in groups.items()}
    about = {"kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": hard}}
    desk.cluster.create({"apiVersion": "v1", **about}, desk.namespace)
    for kind in OTHERS:
        _, err = desk.call("submit", desk.file(target=kind), code=1)
        assert "quota" in err
        assert desk.objects(BELONGINGS.get(kind, "services")) == {}


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
        _created(cluster, kind, document, namespace, **strict, **tried)


def _created(cluster, kind, document, namespace, **query):
    """Create an object; a webhook learns of the companion from its own watch, a moment later."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return cluster.create(document, namespace, **query)
        except ApiError as error:
            missed = kind.companion and kind.companion.is_missed(error.detail)
            if not missed or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


# What each example has here instead of its own, so that it trains on two nodes for seconds.
SHAPES = {
    "digits-ddp": {},
    "transformer-fsdp": {},
    "pipeline": {},
    "own-script": {"args": ("--epochs", "2")},
    "elastic": {"script": "digits-ddp.py"},
}
SUITES = {"transformer-fsdp": NEWER}
# Every other kind trains digits-ddp; one of them is enough beside a PyTorchJob for these.
BESIDE = {"transformer-fsdp": ["jobset"], "pipeline": ["trainjob"], "own-script": ["job"]}


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """A folder with the examples, shortened, and losses with all their digits."""
    home = tmp_path_factory.mktemp("examples")
    for name in SHAPES:
        if (file := EXAMPLES / name / "main.py").exists():
            text = shortened(file.read_text()).replace(":.4f}", ":.9f}")
            (home / f"{name}.py").write_text(text)
    (home / IMAGE.requirements).write_text("scikit-learn>=1.4\n")
    return home


def reported(desk, ref, replicas):
    """(each number of its epochs, test losses, starts of the group), whichever node has rank 0."""
    numbers, losses, starts = [], [], []
    for replica in replicas:
        for line in desk.backend.logs(ref, replica.name):
            event = Event.decode(line.text)
            if event and event.kind == "started":
                starts.append((event.data["strategy"], event.data["world_size"]))
            found = event.data if event and event.kind == "metrics" else {}
            numbers += [one for one in found.values() if isinstance(one, float)]
            losses += [found["test_loss"]] if found else []
            numbers += map(float, re.findall(r"^epoch \d+: loss ([\d.]+)", line.text))
    return numbers, losses, starts


@pytest.mark.usefixtures("controllers")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_job_has_the_same_numbers_as_every_kind(desk, shapes, image_of, ended, shape):
    elastic = {"min": 2, "max": 2} if shape == "elastic" else None
    example = load(EXAMPLES / ("digits-ddp" if elastic else shape) / "job.yaml")
    run = {"script": f"{shape}.py", "env": {"OMP_NUM_THREADS": "1"}, **SHAPES[shape]}
    replicas = {"workers": 1, "nproc_per_node": None, "elastic": elastic and Elastic(**elastic)}
    refs, suite = {}, SUITES.get(shape, SUITE)
    for target in map(by_name, ("pytorchjob", *BESIDE.get(shape, OTHERS))):
        spec = example.model_copy(
            update={
                "name": f"{target.name}-{shape}",
                "namespace": desk.namespace,
                "target": target.name,
                "image": IMAGE,
                "resources": SMALL,
                "replicas": example.replicas.model_copy(update=replicas),
                "run": example.run.model_copy(update=run),
                "checkpoint": None,
                "volumes": (),
            }
        )
        if any(target.refusals(spec)):
            assert (shape, target.name) == ("elastic", "trainjob")
            continue
        refs[target.name] = desk.backend.create(plan_job(spec, image=image_of(spec, shapes, suite)))
    curves = {}
    for kind, ref in refs.items():
        status = job_status(found := ended(ref))
        assert status.state is JobState.SUCCEEDED, (kind, last_lines(desk.backend, found))
        curves[kind], losses, starts = reported(desk, ref, status.replicas)
        if shape != "own-script":
            assert set(starts) == {(example.strategy.kind, 2)}, kind
            assert losses[-1] < losses[0], kind
    assert len(curves["pytorchjob"]) >= 2
    for kind, numbers in curves.items():
        assert numbers == pytest.approx(curves["pytorchjob"], rel=1e-6), kind


@pytest.mark.usefixtures("controllers")
def test_a_lost_pod_comes_back_and_the_training_continues_as_any_user(
    desk, train, ended, checkpoints, eventually
):
    checkpoints("checkpoints", group=UID)
    # OpenShift's admission adds these ids to Pods that name none, and this cluster has it not.
    ids = {"runAsUser": UID, "fsGroup": UID}
    volume = {"name": "checkpoints", "mount": "/checkpoints", "pvc": "checkpoints"}
    refs = [
        train(
            f"run-{target.name}",
            LONG,
            target=target.name,
            replicas=PAIR,
            security="openshift",
            pod_template={"spec": {"securityContext": ids}},
            checkpoint={"dir": "/checkpoints", "every": 1},
            volumes=[{**volume, "sub_path": target.name}],
        )
        for target in TARGETS
    ]

    def saved(ref):
        return any(
            '"kind":"checkpoint"' in line.text for line in desk.backend.logs(ref, "master-0")
        )

    for ref in refs:
        eventually(lambda ref=ref: saved(ref), f"a checkpoint of {ref}")
        now = desk.backend.snapshot(ref)
        (lost,) = [pod for pod in now.pods if now.job.replica_of(pod) == "worker-0"]
        desk.cluster.delete("pods", lost["metadata"]["name"], desk.namespace)
    undisturbed = train("undisturbed", {**LONG, "pause": 0}, replicas=PAIR)
    ended(undisturbed)
    expected = desk.result(undisturbed)["losses"]
    for ref in refs:
        assert job_status(ended(ref)).state is JobState.SUCCEEDED
        assert any('"kind":"resumed"' in line.text for line in desk.backend.logs(ref, "master-0"))
        assert desk.result(ref)["losses"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.usefixtures("trainer")
def test_trainer_has_the_progress_of_a_training_in_its_status(bed, desk, train, ended, eventually):
    # What Trainer has in a Pod: a token, for its issuer, and the Secret of its webhook, for the CA.
    token = bed.kubectl("create", "token", "default", "-n", desk.namespace).stdout.strip()
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    bed.inside("sh", "-c", f"mkdir -p {folder} && echo {token} > {folder}/token")
    secret = {"kind": "Secret", "metadata": {"name": "kubeflow-trainer-webhook-cert"}}
    bed.create({**secret, "data": webhook_secret(bed.folder / "pki")}, "kubeflow-system")
    bed.add("trainer", featureGates={"TrainJobStatus": True})
    ref = train("run", LONG, target="trainjob", replicas=PAIR)
    status = lambda: bed.read("trainjobs", ref.name, ref.namespace).get("status", {})  # noqa: E731
    early = eventually(lambda: status().get("trainerStatus"), "its progress")
    assert 0 <= early["progressPercentage"] < 100
    ended(ref)
    late = status()["trainerStatus"]
    assert (late["progressPercentage"], late["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {metric["name"]: float(metric["value"]) for metric in late["metrics"]}
    assert metrics["epoch_loss"] == pytest.approx(desk.result(ref)["losses"][-1], rel=1e-5)
    assert all("did not accept" not in line.text for line in desk.backend.logs(ref, "master-0"))


@pytest.mark.usefixtures("controllers")
def test_an_error_of_the_script_ends_the_job_at_once(desk, submitted, ended):
    policy = {"restart_policy": "ExitCode", "termination_grace": "2s"}
    for kind in submitted("test $RANK = 1 && exit 7; sleep 600 & wait", policy=policy):
        snapshot = ended(desk.backend.find(kind))
        status = job_status(snapshot)
        assert (status.state, status.reason) == (JobState.FAILED, "PodFailurePolicy")
        first = diagnose(snapshot, last_lines(desk.backend, snapshot))[0]
        assert (first.id, first.replica) == (Cause.CRASH, "worker-0")


@pytest.mark.usefixtures("controllers")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_cause_and_the_output_of_a_command_stay(desk, submitted, ended, workers):
    shape = {"policy": {"max_restarts": 1, "termination_grace": "2s"}}
    shape["replicas"] = {"workers": workers}
    for kind in submitted('echo "rank $RANK: lost"; exit 7', **shape):
        status = job_status(ended(desk.backend.find(kind)))
        assert status.state is JobState.FAILED
        assert len(status.replicas) == workers + 1
        assert "exit code 7" in desk.call("why", f"{desk.namespace}/{kind}")[0]
        assert "rank 0: lost" in desk.call("logs", f"{desk.namespace}/{kind}")[0]


@pytest.mark.usefixtures("controllers")
def test_under_a_written_on_failure_only_a_watch_shows_the_cause(desk, submitted, eventually):
    policy = {"restart_policy": "OnFailure", "max_restarts": 1, "termination_grace": "2s"}
    warnings = submitted("sleep 5; echo lost; exit 7", policy=policy)
    watches = {kind: desk.start("watch", f"{desk.namespace}/{kind}") for kind in warnings}
    for kind, watch in watches.items():
        assert "deletes its pods" in warnings[kind]
        assert "exit code 7" in "".join(watch.communicate(timeout=180))
        assert watch.returncode == 100

        def explained(kind=kind):  # once the Job controller has deleted the pods
            found = "".join(desk.call("why", f"{desk.namespace}/{kind}"))
            return "without policy.restart_policy OnFailure" in found

        eventually(explained, "why says how to keep the cause")
