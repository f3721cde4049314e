"""Training in pods: every replica takes part, and what is lost comes back with the same curve."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import yaml

from k8sjob.backends.api import JobRef
from k8sjob.contract import Event
from k8sjob.kube.objects import Pod
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import job_status, reporting_replica
from k8sjob.rendering.manifest import render
from k8sjob.spec import Image, JobSpec, Resources, load
from k8sjob.targets.jobs import job_of

from .desk import shortened

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "manifests"
# A test's node has few cores.
SMALL = Resources(cpu=1, memory="2Gi", requests={"cpu": "50m", "memory": "200Mi"})
ENV = {"OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
# One for all that trains here.
IMAGE = Image(repository="registry.example/tests/programs", base="debian", requirements="needs.txt")


class Training:
    """A job, and the lines that its speaker, the Master mostly, has written so far."""

    def __init__(self, desk, job, eventually):
        self.desk, self.ref = desk, JobRef.of(desk.backend.create_manifest(job))
        self.lines, self._eventually, self._over = [], eventually, threading.Event()
        self._follower = threading.Thread(target=self._follow, args=[reporting_replica(job)])

    def __enter__(self):
        self._follower.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._follower.join()

    def _follow(self, speaker):
        for line in self.desk.backend.logs(self.ref, speaker, follow=True, stop=self._over):
            self.lines.append(line.text)

    def pods(self):
        """What there is of each replica's pod."""
        snapshot = self.desk.backend.snapshot(self.ref)
        return {snapshot.job.replica_of(pod): pod for pod in snapshot.pods}

    def delete(self, *replicas):
        """Delete pods as a node's drain would."""
        for replica in replicas:
            self.desk.cluster.delete("pods", f"{self.ref.name}-{replica}", self.desk.namespace)

    def finish(self, state="Succeeded"):
        """Wait for the job's end, and for its last line."""
        status = lambda: job_status(self.desk.backend.snapshot(self.ref))  # noqa: E731
        self._eventually(lambda: status().state.finished, "the end of the job", deadline=900)
        self._follower.join()
        assert status().state == state, "\n".join([str(self.cause()), *self.lines[-40:]])

    def cause(self):
        """The first finding of `why`."""
        backend = self.desk.backend
        snapshot = backend.snapshot(self.ref)
        return diagnose(snapshot, last_lines(backend, snapshot), backend.related(snapshot))[0]

    def events(self, kind):
        """Events of one kind, in the order in which they were told."""
        events = [Event.decode(line) for line in self.lines]
        return [event for event in events if event and event.kind == kind]

    def await_epoch(self, epoch):
        self._eventually(
            lambda: any(event.data["epoch"] >= epoch for event in self.events("progress")),
            f"epoch {epoch}",
            deadline=300,
        )

    def result(self):
        """What train.py printed at its end: losses, weights, steps."""
        (line,) = [line for line in self.lines if line.startswith("RESULT ")]
        return json.loads(line.removeprefix("RESULT "))

    def curve(self):
        """The metrics of each epoch; of one that was told twice, the last."""
        told = {event.data["epoch"]: event.data for event in self.events("metrics")}
        return [told[epoch] for epoch in sorted(told)]


def small(spec, **run):
    """The example, so that a test's node has room and time for it."""
    run = spec.run.model_copy(update={"script": f"{spec.name}.py", "env": ENV, **run})
    policy = spec.policy.model_copy(update={"clean_pod_policy": "None"})  # pods keep their logs
    fields = {"resources": SMALL, "image": IMAGE, "run": run, "policy": policy}
    if spec.strategy.kind != "parameter_server":  # two servers and a trainer
        fields["replicas"] = spec.replicas.model_copy(update={"workers": 1})
    return spec.model_copy(update=fields)


@pytest.fixture
def start(desk, eventually, image_of, programs):
    """Starts a job: a Training to be used in a `with`."""

    def submit(spec):
        spec = spec.model_copy(update={"namespace": desk.namespace})
        text = render(spec, image=image_of(spec, programs))
        return Training(desk, job_of(yaml.safe_load(text)), eventually)

    return submit


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """A folder with the examples, shortened, and trainings of which every step is told."""
    home = tmp_path_factory.mktemp("programs")
    for program in (TESTS / "dist/programs/train.py", TESTS / "cluster/programs/failing.py"):
        shutil.copy(program, home)
    for name in (*TRAINED, *RAW):
        (home / f"{name}.py").write_text(shortened((EXAMPLES / name / "main.py").read_text()))
    (home / IMAGE.requirements).write_text("keras>=3.11\njax>=0.7\nscikit-learn>=1.4\n")
    return home


def told(name, options, workers=1, **fields):
    """A job that runs train.py with these options."""
    return JobSpec(
        name=name,
        image=IMAGE.model_dump(exclude_unset=True),
        replicas={"workers": workers},
        resources=SMALL.model_dump(exclude_unset=True),
        **{
            "run": {
                "script": "train.py",
                "args": [json.dumps(options)],
                "env": ENV,
            },
            "checkpoint": {"dir": "/checkpoints", "every": "epoch"},
            "volumes": [{"name": "checkpoints", "mount": "/checkpoints", "pvc": "checkpoints"}],
            **fields,
        },
    )


# The metric of an example; what it comes to is shown on one machine, see tests/docs.
# digits-ddp and pipeline train in pods in test_targets.py, as every kind of job.
TRAINED = {
    "torch-mesh": "test_loss",
    "parameter-server": "test_loss",
    "keras-fit": "val_loss",
    "keras-mesh": "val_loss",
}


@pytest.mark.parametrize("name", TRAINED)
def test_an_example_trains_in_pods(start, checkpoints, name):
    spec = small(load(EXAMPLES / name / "job.yaml"))
    nodes = spec.replicas.workers + 1
    checkpoints(spec.volumes[0].pvc)
    with start(spec) as training:
        training.finish()
        (started,) = training.events("started")
        assert started.data["strategy"] == spec.strategy.kind
        assert started.data["world_size"] == nodes - (name == "parameter-server")  # it serves alone
        assert (started.data["backend"] == "jax") is (name == "keras-mesh")
        for index in range(1, nodes):
            lines = training.desk.backend.logs(training.ref, f"worker-{index - 1}")
            assert f"node {index} of {nodes}, " in "\n".join(line.text for line in lines)
        first, last = (point[TRAINED[name]] for point in training.curve())
        assert last < first


# Two processes in each of two pods, and one in each; what rank 0's pod writes.
RAW = {
    "own-script": ("rank 0 of 4, local rank 0", "rank 1 of 4, local rank 1", "epoch 5: loss"),
    "fashion-ddp": ("epoch 5/5 loss",),
}


@pytest.mark.parametrize("name", RAW)
def test_an_ordinary_script_trains_in_pods(start, checkpoints, name):
    spec = small(load(EXAMPLES / name / "job.yaml"), args=("--epochs", "5")).with_(preflight=True)
    for volume in spec.volumes:
        checkpoints(volume.pvc)
    with start(spec) as training:
        training.finish()
        detail = "\n".join(training.lines)
        for words in (*RAW[name], " nodes fine in "):  # the line of the preflight
            assert words in detail
        assert float(detail.partition("accuracy ")[2].split()[0]) > 0.7


LONG = {"epochs": 5, "dropout": 0.3, "pause": 0.4}  # 4 steps an epoch with 3 ranks


@pytest.fixture(scope="module")
def known():
    """The result of the undisturbed run, once there is one."""
    return []


@pytest.fixture
def undisturbed(start, known):
    """What the same training comes to when nobody touches it."""
    if not known:
        options = {**LONG, "pause": 0}
        with start(told("undisturbed", options, 2, checkpoint=None, volumes=[])) as training:
            training.finish()
            known.append(training.result())
    return known[0]


def same(one, other):
    """Equal but for the order in which the ranks' numbers were added up."""
    assert one["steps"] == other["steps"]
    for part in ("losses", "weights"):
        assert one[part] == pytest.approx(other[part], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("lost", [["worker-0", "worker-1"], ["master-0"]], ids=["two", "master"])
def test_lost_replicas_come_back_and_the_curve_is_that_of_an_undisturbed_run(
    start, checkpoints, undisturbed, lost
):
    checkpoints("checkpoints")
    with start(told("lost", LONG, 2)) as training:
        training.await_epoch(2)
        training.delete(*lost)
        training.finish()
        (resumed,) = training.events("resumed")
        (stopping,) = training.events("stopping")
        assert resumed.data["step"] == stopping.data["step"]  # what SIGTERM has saved
        (_, second) = training.events("started")
        assert second.data["world_size"] == 3
        same(training.result(), undisturbed)


@pytest.fixture
def fail(start):
    """Runs a job to its end in which rank 1 fails in one way; what is found, and its node's end."""

    def run(how, *, script="failing.py", **policy):
        fields = {"volumes": [], "checkpoint": None, "policy": policy}
        fields["run"] = {"script": script, "env": {**ENV, "FAILS": how}, "hang_timeout": "10s"}
        with start(told(how, {}, **fields)) as training:
            training.finish("Failed")
            pod = training.pods().get("worker-0")  # what still runs is removed at the end
            ended = pod and pod["status"]["containerStatuses"][0]["state"].get("terminated")
            return training.cause(), ended

    return run


def test_a_rank_that_raises_fails_the_job_with_its_reason(fail):
    finding, end = fail("raises")
    assert end["exitCode"] == 1
    assert "no sample 41 on rank 1" in json.loads(end["message"])["message"]
    assert (finding.id, finding.replica) == (Cause.CRASH, "worker-0")
    assert "no sample 41 on rank 1" in finding.message


def test_a_rank_that_hangs_is_named(fail):
    finding, _ = fail("hangs", max_restarts=0)
    assert finding.id == Cause.HUNG
    assert finding.message.startswith("rank 1 hung")


def test_a_network_that_is_too_slow_ends_the_job_before_its_script(start):
    fields = {"checkpoint": None, "volumes": [], "preflight": {"min_bandwidth": "9Ti"}}
    with start(told("slow", {}, policy={"max_restarts": 0}, **fields)) as training:
        training.finish("Failed")
        finding = training.cause()
        assert finding.id == Cause.PREFLIGHT
        assert "preflight.min_bandwidth is 9,437,184.0 MiB/s; no node" in finding.message
        assert not training.events("started")


def test_settings_that_cannot_work_are_reported_as_such(fail):
    finding, _ = fail("settings", script="not-in-the-image.py", max_restarts=0)
    assert finding.id == Cause.CONFIGURATION
    assert "not-in-the-image.py" in finding.message


def test_a_worker_lost_at_the_very_end_does_not_stay(start, checkpoints, eventually):
    checkpoints("checkpoints")
    options = {"epochs": 1, "linger": 4}
    with start(told("late", options)) as training:
        eventually(lambda: any("RESULT" in line for line in training.lines), "the training's end")
        training.delete("worker-0")
        training.finish()

        live = lambda: [pod for pod in training.pods().values() if Pod(pod).live]  # noqa: E731
        eventually(lambda: not live(), "the end of its pods")
