"""Training in pods: every replica takes part, and what is lost comes back with the same curve."""

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import yaml
from learnt import LEARNT

from k8sjob.backends.connect import connect
from k8sjob.contract import Event
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import speaker
from k8sjob.rendering import render
from k8sjob.spec import JobSpec, Requests, load

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "manifests"
EPOCHS = 12  # of the 30 of the example: enough for an accuracy of 0.9
SMALL = Requests(cpu="50m", memory="200Mi")  # a test's node has few cores


class Training:
    """One job of the namespace, and everything that its speaker, the Master mostly, has said."""

    def __init__(self, cluster, namespace, name, eventually, speaker="master-0"):
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self.speaker = speaker
        self._said = {}  # container id -> lines
        self._eventually = eventually
        self._over = threading.Event()
        self._follower = threading.Thread(target=self._follow)

    def __enter__(self):
        self._follower.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._follower.join()

    def kubectl(self, *args, **options):
        return self.cluster.kubectl(*args, "-n", self.namespace, **options)

    @property
    def lines(self):
        """What all its pods have said, one after the other."""
        return [line for lines in [*self._said.values()] for line in [*lines]]

    def _follow(self):
        """Read the log of each container that the speaker has, once."""
        while not self._over.wait(0.2):
            states = (self.pod(self.speaker) or {}).get("status", {}).get("containerStatuses", [{}])
            container = states[0].get("containerID")
            if container is None or container in self._said:
                continue
            lines = self._said[container] = []
            argv = [self.cluster.kubectl_path, "logs", "-f", f"{self.name}-{self.speaker}"]
            with subprocess.Popen(
                [*map(str, argv), "-n", self.namespace],
                env=self.cluster.env,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as process:
                lines.extend(process.stdout)

    def pod(self, replica):
        """A replica's pod as it is now, or None."""
        text = self.kubectl(
            "get", "pod", f"{self.name}-{replica}", "-o", "json", "--ignore-not-found"
        ).stdout
        return json.loads(text) if text else None

    def logs(self, replica):
        return self.kubectl("logs", f"{self.name}-{replica}").stdout

    def delete(self, *replicas):
        """Delete pods as a node's drain would; the time at which it was asked for."""
        moment = time.time()
        names = [f"{self.name}-{replica}" for replica in replicas]
        self.kubectl("delete", "pod", *names, "--wait=false")
        return moment

    def state(self):
        """The conditions that hold."""
        status = json.loads(self.kubectl("get", "pytorchjob", self.name, "-o", "json").stdout).get(
            "status", {}
        )
        return {c["type"] for c in status.get("conditions", ()) if c["status"] == "True"}

    def finish(self, state="Succeeded"):
        """Wait for the job's end."""
        ended = self._eventually(
            lambda: self.state() & {"Succeeded", "Failed"}, "the end of the job", deadline=900
        )
        assert ended == {state}, self.describe()

    def describe(self):
        """What a person would look at after a surprise."""
        parts = ["".join(self.lines[-40:])]
        for pod in self.kubectl("get", "pods", "-o", "name").stdout.split():
            for previous in ("--previous=true", "--previous=false"):
                log = self.kubectl("logs", "--tail=12", previous, pod, check=False).stdout
                parts.append(f"--- {pod} {previous}\n{log}")
        parts.append(self.kubectl("get", "pytorchjob", self.name, "-o", "yaml").stdout)
        parts.append(self.kubectl("get", "pods", "-o", "wide").stdout)
        return "\n".join(parts)

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

    def show_recovery(self, moment):
        """Print when what happened after a loss, in seconds; see `pytest -s`."""
        for event in map(Event.decode, self.lines):
            if event and event.time > moment:
                print(f"{event.time - moment:6.2f} {event.kind} {event.data}")  # noqa: T201

    def result(self):
        """What train.py printed at its end: losses, weights, steps."""
        (line,) = [line for line in self.lines if line.startswith("RESULT ")]
        return json.loads(line.removeprefix("RESULT "))

    def curve(self):
        """The metrics of each epoch; of one that was told twice, the last."""
        told = {event.data["epoch"]: event.data for event in self.events("metrics")}
        return [told[epoch] for epoch in sorted(told)]


def small(spec):
    """The example, so that a test's node has room for it."""
    resources = spec.resources.model_copy(update={"requests": SMALL})
    return spec.model_copy(update={"resources": resources})


@pytest.fixture
def start(cluster, namespace, eventually, image_of):
    """Starts a job: a Training to be used in a `with`."""

    def submit(spec, home, **how):
        text = render(spec, image=image_of(spec, home, **how))
        cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=text)
        return Training(cluster, namespace, spec.name, eventually, speaker(yaml.safe_load(text)))

    return submit


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """A folder with small trainings of which every step is told."""
    home = tmp_path_factory.mktemp("programs")
    for program in (TESTS / "dist/programs/train.py", TESTS / "cluster/programs/failing.py"):
        shutil.copy(program, home)
    return home


def told(name, options, *, workers=3, **fields):
    """A job that runs train.py with these options."""
    return JobSpec(
        name=name,
        image={"repository": "registry.example/tests/programs", "base": "debian"},
        replicas={"workers": workers},
        resources={"cpu": 1, "memory": "2Gi", "requests": SMALL.model_dump()},
        **{
            "run": {
                "script": "train.py",
                "args": [json.dumps(options)],
                "env": {"OMP_NUM_THREADS": "1"},
            },
            "checkpoint": {"dir": "/checkpoints", "every": "epoch"},
            "volumes": [{"name": "checkpoints", "mount": "/checkpoints", "pvc": "checkpoints"}],
            **fields,
        },
    )


def test_four_replicas_train_one_model(start, checkpoints, tmp_path):
    home = tmp_path / "digits-ddp"
    shutil.copytree(EXAMPLES / "digits-ddp", home)
    main = home / "main.py"
    main.write_text(main.read_text().replace("epochs(30)", f"epochs({EPOCHS})"))
    checkpoints("digits-checkpoints")
    with start(small(load(home / "job.yaml")), home) as training:
        training.await_epoch(1)
        for index in range(3):
            log = training.logs(f"worker-{index}")
            assert f"node {index + 1} of 4, 1 process of 4" in log
        training.finish()
        (started,) = training.events("started")
        assert started.data["world_size"] == 4
        curve = training.curve()
        assert [point["epoch"] for point in curve] == list(range(1, EPOCHS + 1))
        assert curve[-1]["test_accuracy"] > 0.9
        assert curve[-1]["test_loss"] < curve[0]["test_loss"] / 2


def test_the_master_serves_and_the_workers_train(start, checkpoints):
    home = EXAMPLES / "parameter-server"
    checkpoints("parameter-server-checkpoints")
    with start(small(load(home / "job.yaml")), home) as training:
        training.await_epoch(1)
        assert "node 0 of 3, 3 processes of 5" in training.logs("master-0")
        assert "node 2 of 3, 1 process of 5" in training.logs("worker-1")
        training.finish()
        (started,) = training.events("started")
        assert (started.data["world_size"], started.data["strategy"]) == (2, "parameter_server")
        curve = training.curve()
        assert [point["epoch"] for point in curve] == list(range(1, 7))
        assert curve[-1]["test_accuracy"] > 0.75


def test_a_keras_model_is_divided_over_four_pods(start, checkpoints):
    home = EXAMPLES / "keras-mesh"
    checkpoints("keras-mesh-checkpoints")
    with start(small(load(home / "job.yaml")), home) as training:
        training.finish()
        (started,) = training.events("started")
        assert (started.data["world_size"], started.data["backend"]) == (4, "jax")
        curve = training.curve()
        assert [point["epoch"] for point in curve] == [1, 2, 3, 4, 5]
        assert curve[-1]["val_accuracy"] > 0.85


ELSEWHERE = {  # the parameter server has a test of its own, see above
    **{name: limit for name, limit in LEARNT.items() if name != "parameter-server"},
    "keras-mnist": ("test_loss", 0.5),
    "keras-fit": ("val_loss", 0.5),
}


@pytest.fixture(scope="session")
def examples(tmp_path_factory):
    """A folder with the scripts of several examples, by the example's name: one image for all."""
    home = tmp_path_factory.mktemp("examples")
    for name in ELSEWHERE:
        shutil.copy(EXAMPLES / name / "main.py", home / f"{name}.py")
    (home / "requirements.txt").write_text("keras>=3.11\nscikit-learn>=1.4\n")
    return home


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_example_learns_in_pods(start, checkpoints, examples, name):
    spec = small(load(EXAMPLES / name / "job.yaml"))
    run = spec.run.model_copy(update={"script": f"{name}.py", "env": {"OMP_NUM_THREADS": "1"}})
    resources = spec.resources.model_copy(update={"gpus": 0})
    checkpoints(spec.volumes[0].pvc)
    spec = spec.model_copy(update={"run": run, "resources": resources})
    with start(spec, examples, newer=spec.strategy.kind == "fsdp") as training:
        training.finish()
        (started,) = training.events("started")
        assert started.data["strategy"] == spec.strategy.kind
        assert started.data["world_size"] == spec.replicas.workers + 1
        metric, limit = ELSEWHERE[name]
        assert training.curve()[-1][metric] < limit


def test_a_script_of_ones_own_runs_as_two_processes_in_each_of_two_pods(start):
    home = EXAMPLES / "own-script"
    spec = small(load(home / "job.yaml"))
    # The image has torch already.
    image = spec.image.model_copy(update={"requirements": None, "pip": ("scikit-learn>=1.4",)})
    with start(spec.model_copy(update={"image": image}), home) as training:
        training.finish()
        said = "".join(training.lines)
        for rank in (0, 1):
            assert f"rank {rank} of 4, local rank {rank}" in said
        assert float(said.partition("accuracy ")[2].split()[0]) > 0.9


def test_an_ordinary_script_trains_on_four_replicas(start, checkpoints):
    home = EXAMPLES / "fashion-ddp"
    spec = load(home / "job.yaml")
    checkpoints("fashion-data")
    image = spec.image.model_copy(update={"pip": ("scikit-learn>=1.4",), "pull_secrets": ()})
    resources = spec.resources.model_copy(
        update={"gpus": 0, "gpu_type": None, "cpu": "1", "memory": "2Gi", "shm": None}
    )
    run = spec.run.model_copy(update={"args": ("--epochs", "5"), "env": {"OMP_NUM_THREADS": "1"}})
    fields = {"namespace": None, "image": image, "resources": resources, "run": run}
    with start(small(spec.model_copy(update=fields)), home) as training:
        training.finish()
        said = "".join(training.lines)
        assert "epoch 5/5 loss" in said
        assert float(said.partition("accuracy ")[2].split()[0]) > 0.7


LONG = {"epochs": 6, "dropout": 0.3, "pause": 0.4}  # 3 steps an epoch with 4 ranks


@pytest.fixture(scope="module")
def known():
    """Results of undisturbed runs, by their world size."""
    return {}


@pytest.fixture
def undisturbed(start, programs, known):
    """What the same training comes to when nobody touches it."""

    def run(options, workers):
        if workers not in known:
            spec = told(
                "undisturbed",
                {**options, "pause": 0},
                workers=workers,
                checkpoint=None,
                volumes=[],
            )
            with start(spec, programs) as training:
                training.finish()
                known[workers] = training.result()
        return known[workers]

    return run


def same(one, other):
    """Equal but for the order in which four ranks' numbers were added up."""
    assert one["steps"] == other["steps"]
    for part in ("losses", "weights"):
        assert one[part] == pytest.approx(other[part], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        (3, ["worker-1"]),
        (3, ["worker-0", "worker-2"]),
        (3, ["master-0"]),
        pytest.param((7, ["worker-2", "worker-5"]), marks=pytest.mark.slow),
    ],
    ids=["one", "two", "master", "two of eight"],
)
def test_lost_replicas_come_back_and_the_curve_is_that_of_an_undisturbed_run(
    start, programs, checkpoints, undisturbed, case
):
    workers, lost = case
    checkpoints("checkpoints")
    with start(told("lost", LONG, workers=workers), programs) as training:
        training.await_epoch(2)
        moment = training.delete(*lost)
        training.finish()
        training.show_recovery(moment)
        (resumed,) = training.events("resumed")
        (stopping,) = training.events("stopping")
        assert resumed.data["step"] == stopping.data["step"]  # what SIGTERM has saved
        (_, second) = training.events("started")
        assert second.data["world_size"] == workers + 1
        same(training.result(), undisturbed(LONG, workers))


@pytest.fixture
def fail(start, programs):
    """Runs a job to its end in which rank 2 fails in one way; what is found, and its node's end."""

    def run(how, *, script="failing.py", **policy):
        fields = {"volumes": [], "checkpoint": None, "policy": policy}
        env = {"OMP_NUM_THREADS": "1", "FAILS": how}
        fields["run"] = {"script": script, "env": env, "hang_timeout": "10s"}
        with start(told(how, {}, **fields), programs) as training:
            training.finish("Failed")
            pod = training.pod("worker-1")  # one that still runs is removed with the job's end
            ended = pod and pod["status"]["containerStatuses"][0]["state"].get("terminated")
            backend = connect(kubeconfig=training.cluster.kubeconfig, namespace=training.namespace)
            snapshot = backend.snapshot(backend.find(how))
            found = diagnose(snapshot, last_lines(backend, snapshot), backend.related(snapshot))
            return found[0], ended

    return run


def test_a_rank_that_raises_fails_the_job_with_its_reason(fail):
    finding, end = fail("raises")
    assert end["exitCode"] == 1
    assert "no sample 41 on rank 2" in json.loads(end["message"])["message"]
    assert (finding.cause, finding.replica) == (Cause.CRASH, "worker-1")
    assert "no sample 41 on rank 2" in finding.message


def test_a_rank_that_hangs_is_named(fail):
    finding, _ = fail("hangs", max_restarts=0)
    assert finding.cause == Cause.HUNG
    assert finding.message.startswith("rank 2 hung")


def test_settings_that_cannot_work_are_told_as_such(fail):
    finding, _ = fail("settings", script="not-in-the-image.py", max_restarts=0)
    assert finding.cause == Cause.CONFIGURATION
    assert "not-in-the-image.py" in finding.message


def test_a_worker_lost_at_the_very_end_does_not_stay(start, programs, checkpoints, eventually):
    checkpoints("checkpoints")
    options = {"epochs": 1, "linger": 4}
    with start(told("late", options, workers=2), programs) as training:
        eventually(lambda: any("RESULT" in line for line in training.lines), "the training's end")
        training.delete("worker-1")
        training.finish()

        def waiting():
            pods = json.loads(training.kubectl("get", "pods", "-o", "json").stdout)["items"]
            return [
                pod["metadata"]["name"]
                for pod in pods
                if pod["metadata"]["name"].startswith("late-")
                and pod["status"]["phase"] in {"Pending", "Running"}
            ]

        eventually(lambda: not waiting(), "the end of its pods")
