"""The output of replicas, from a node that answers as a kubelet does.

Each test lists what happens; the next thing happens when a reader has nothing more to read.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import clusters
import pytest

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.backends.cluster.instances import JobPods, Pace
from k8sjob.backends.cluster.logs import replica_logs, stamped
from k8sjob.errors import BackendError
from k8sjob.kube.client.transport import ApiError

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
JOB = JobRef("job", "ns", "job-uid")
QUICK = Pace(look=0.01, pause=0.01, linger=0.2)


class Pod:
    """A Pod and the files of its container's instances."""

    def __init__(self, cluster, replica, uid, owner="job-uid"):
        self.cluster, self.replica, self.uid, self.owner = cluster, replica, uid, owner
        self.files, self.state, self.restarts = [], None, 0
        self.leaving = False

    def start(self):
        self.files.append([])
        self.restarts, self.state = len(self.files) - 1, "running"

    def write(self, *texts, apart=0.4):
        for text in texts or [f"line {len(self.files[-1]) + 1}"]:
            self.cluster.clock += timedelta(seconds=apart)
            stamp = self.cluster.clock.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"
            self.files[-1].append((stamp, text))

    def writes(self, *texts, **options):
        return lambda: self.write(*texts, **options)

    def exit(self, state="terminated"):
        self.state = state

    def crash(self):
        self.exit("waiting")

    def as_json(self):
        role, _, index = self.replica.rpartition("-")
        began = {"startedAt": "2026-01-01T00:00:00Z"}
        over = {"exitCode": 1, "finishedAt": self.cluster.clock.strftime("%Y-%m-%dT%H:%M:%SZ")}
        state = {
            None: {"waiting": {"reason": "ContainerCreating"}},
            "waiting": {"waiting": {"reason": "CrashLoopBackOff"}},
            "running": {"running": began},
            "terminated": {"terminated": over},
        }[self.state]
        has_last = self.restarts or self.state == "waiting"
        container = {"name": "pytorch", "restartCount": self.restarts, "state": state}
        if has_last:
            container["lastState"] = {"terminated": over}
        label = "training.kubeflow.org/replica"
        meta = {
            "name": f"job-{self.replica}",
            "uid": self.uid,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {f"{label}-type": role, f"{label}-index": index},
            "ownerReferences": [{"uid": self.owner, "controller": True}],
        }
        if self.leaving:
            meta["deletionTimestamp"] = "2026-01-01T00:01:00Z"
        sidecar = {"name": "sidecar", "restartCount": 7, "state": {"running": began}}
        return {"metadata": meta, "status": {"containerStatuses": [sidecar, container]}}

    def file(self, *, previous):
        """What the apiserver returns, by the state of the container."""
        if not self.files:
            raise ApiError("waiting", code=400, reason="BadRequest", detail="is waiting to start")
        if not previous or self.state == "waiting":
            return self.files[-1]
        if not self.restarts:
            raise ApiError("none", code=400, reason="BadRequest", detail="previous ... not found")
        if self.state == "terminated" and self.restarts > 1:
            return "unable to retrieve container logs for containerd://0123"
        return self.files[-2]


class Cluster(clusters.Cluster):
    """A cluster with the Pods of one job."""

    def __init__(self):
        super().__init__()
        self.pods, self.clock = {}, BEGIN
        self.happenings, self.listings, self.streams = [], 0, []
        self.broken, self.hung_up, self.over, self.listed_in_vain = False, False, False, 0
        self.refusal, self.node_is_lost = None, False

    def pod(self, replica="worker-0", uid="first", **options):
        pod = self.pods[f"job-{replica}"] = Pod(self, replica, uid, **options)
        return pod

    def then(self, *happenings):
        """What happens next, one after the other; those of a list at once."""
        self.happenings += happenings

    def drop(self):
        """The connection breaks."""
        self.broken = True

    def hang_up(self):
        """The answer ends without an error, as when a kubelet is restarted."""
        self.hung_up = True

    def end(self):
        """The job ends."""
        self.over = True

    def lose_node(self):
        self.node_is_lost = True

    def answer(self, *_):
        self.listings += 1
        self.listed_in_vain += 1
        if self.listed_in_vain > 2:
            self._happens()
        return self.refusal or {"items": [pod.as_json() for pod in self.pods.values()]}

    def stream(self, path, *, query=None, idle=300.0, stop=None):
        self.streams.append(dict(query))
        name = path.split("/")[-2]
        if self.refusal:
            raise self.refusal
        if self.node_is_lost:
            raise ApiError("no route to host", code=500, reason="InternalError")
        if name not in self.pods:
            raise ApiError("gone", code=404, reason="NotFound", detail="not found")
        yield from self._lines(self.pods[name], query, stop)

    def _lines(self, pod, query, stop):
        file = pod.file(previous=query.get("previous") == "true")
        if isinstance(file, str):
            yield file.encode()
            return
        at = max(len(file) - int(query["tailLines"]), 0) if "tailLines" in query else 0
        while True:
            while at < len(file):
                stamp, text = file[at]
                at += 1
                if stamp[:19] + "Z" >= query.get("sinceTime", ""):
                    yield f"{stamp} {text}".encode() + (b"" if text.endswith("...") else b"\n")
            if query.get("follow") != "true" or stop.is_set():
                return
            if file is not pod.files[-1] or pod.state != "running":
                return
            if not self._happens() or self.hung_up:
                self.hung_up = False
                return
            if self.broken:
                self.broken = False
                raise ApiError("broken")

    def _happens(self):
        self.listed_in_vain = 0
        if self.happenings:
            now = self.happenings.pop(0)
            for happening in now if isinstance(now, list) else [now]:
                happening()
            return True
        return False


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def read(cluster):
    def call(replica="worker-0", **options):
        ended = options.pop("ended", lambda: cluster.over)
        pods = JobPods(cluster, JOB, ended, pace=QUICK)
        return list(replica_logs(pods, replica, **options))

    return call


@pytest.fixture
def started(cluster):
    """A Pod whose container runs and has written some lines."""

    def start(*texts, uid="first", owner="job-uid", **options):
        pod = cluster.pod(uid=uid, owner=owner)
        pod.start()
        if texts:
            pod.write(*texts, **options)
        return pod

    return start


def attempts(lines):
    return [(line.attempt, line.text) for line in lines]


def texts(lines):
    return [line.text for line in lines]


def missing(attempt):
    kept = "is missing here: its node has not kept it"
    return f"k8sjob: worker-0: output of attempt {attempt} {kept}"


# --- following ------------------------------------------------------------------------------------


def test_a_replica_is_followed_from_before_its_pod_until_the_job_has_ended(cluster, read):
    def step(*names):
        return lambda: [getattr(cluster.pods["job-worker-0"], name)() for name in names]

    cluster.then(cluster.pod, step("start", "write"), step("write", "write"), step("exit"))
    cluster.then(cluster.end)
    lines = read(follow=True)
    assert texts(lines) == ["line 1", "line 2", "line 3"]
    assert [line.attempt for line in lines] == [0, 0, 0]
    assert lines[0].timestamp == "2026-01-01T00:00:00.400000000Z"


def test_a_broken_connection_loses_and_repeats_nothing(cluster, read, started):
    pod = started("1", "2", "3", apart=0.3)
    cluster.then(
        cluster.drop,
        pod.writes("4", "5", apart=0.01),
        cluster.drop,
        pod.writes("6", apart=5),
        cluster.drop,
        pod.writes("7", apart=0.0),  # in the same instant as the line before
        pod.exit,
        cluster.end,
    )
    assert texts(read(follow=True)) == list("1234567")
    assert cluster.streams[-1]["sinceTime"] == "2026-01-01T00:00:00Z"


def test_lines_that_are_out_of_order_are_each_read_once(cluster, read, started):
    pod = started("out 1", "err 1", "out 2", apart=0.1)
    pod.files[-1][1], pod.files[-1][2] = pod.files[-1][2], pod.files[-1][1]

    def late():
        stamp, _ = pod.files[-1][0]
        pod.files[-1].append((stamp, "err 0"))

    cluster.then(cluster.drop, late, cluster.drop, pod.exit, cluster.end)
    assert texts(read(follow=True)) == ["out 1", "out 2", "err 1", "err 0"]


def test_a_line_that_a_broken_connection_has_cut_comes_whole(cluster, read, started):
    pod = started("whole", "half a ...")

    def complete():
        stamp, _ = pod.files[-1].pop()
        pod.files[-1].append((stamp, "half a line"))

    cluster.then(complete, pod.exit, cluster.end)
    assert texts(read(follow=True)) == ["whole", "half a line"]


def test_an_answer_that_ends_while_the_container_runs_is_requested_again(cluster, read, started):
    pod = started("before")
    cluster.then(cluster.hang_up, pod.writes("after"), cluster.hang_up, cluster.hang_up)
    cluster.then(pod.exit, cluster.end)
    assert texts(read(follow=True)) == ["before", "after"]


@pytest.mark.parametrize("silences", [0, 8])
def test_the_last_lines_are_read_after_the_end_of_the_container(cluster, read, started, silences):
    pod = started("seen")
    cluster.then(*[cluster.drop] * silences)
    cluster.then([pod.writes("unseen"), pod.exit, cluster.end, cluster.drop])
    assert texts(read(follow=True)) == ["seen", "unseen"]


def test_a_node_that_never_answers_again_is_given_up_after_the_end(cluster, read, started):
    pod = started("seen")
    cluster.then(cluster.drop, [cluster.lose_node, pod.exit, cluster.end, cluster.drop])
    first, gap = texts(read(follow=True))
    assert first == "seen"
    assert gap.endswith("the rest of its output can no longer be read")


def test_an_apiserver_that_is_away_for_a_while(cluster, read, started):
    pod = started("before")

    def away(error):
        cluster.refusal = error

    cluster.then([lambda: away(ApiError("refused")), cluster.drop])
    cluster.then([lambda: away(None), pod.writes("meanwhile")], pod.exit, cluster.end)
    assert texts(read(follow=True)) == ["before", "meanwhile"]


def test_what_may_not_be_read_is_an_error_at_once(cluster, read, started):
    started()
    cluster.refusal = ApiError("pods/log is forbidden", code=403, reason="Forbidden")
    with pytest.raises(ApiError, match="forbidden"):
        read(follow=True)


# --- restarts -------------------------------------------------------------------------------------


def test_restarts_in_place_are_attempts_one_after_the_other(cluster, read, started):
    pod = started("a1", "a2")
    cluster.then(pod.exit, [pod.start, pod.writes("b1", "b2")])
    cluster.then(pod.exit, [pod.start, pod.writes("c1")], pod.exit, cluster.end)
    assert attempts(read(follow=True)) == [(0, "a1"), (0, "a2"), (1, "b1"), (1, "b2"), (2, "c1")]


def test_an_instance_that_was_read_after_its_end_is_not_missed(cluster, read, started):
    pod = started("a1")
    pod.exit("waiting")
    cluster.then([pod.start, pod.writes("b1"), pod.crash], cluster.end)
    assert attempts(read(follow=True)) == [(0, "a1"), (1, "b1")]


def test_an_instance_that_has_ended_is_not_followed_repeatedly(cluster, read, started):
    pod = started("only")
    cluster.then(pod.crash, [], [], cluster.end)
    assert texts(read(follow=True)) == ["only"]
    assert len(cluster.streams) == 2  # followed, and read once more after its end


def test_the_rest_of_an_instance_is_read_from_the_one_before(cluster, read, started):
    pod = started("a1")
    cluster.then([pod.writes("a2"), pod.start, pod.writes("b1"), cluster.drop])
    cluster.then(pod.exit, cluster.end)
    assert attempts(read(follow=True)) == [(0, "a1"), (0, "a2"), (1, "b1")]
    assert [query.get("previous") for query in cluster.streams].count("true") == 1


def test_two_restarts_at_once_are_a_gap(cluster, read, started):
    pod = started("a1")
    again = [pod.start, pod.writes("b1"), pod.start, pod.writes("c1")]
    cluster.then([pod.writes("a2"), *again, cluster.drop], pod.exit, cluster.end)
    assert texts(read(follow=True)) == ["a1", missing(0), "b1", "c1"]


def test_an_instance_that_crashed_unseen_is_a_gap(cluster, read, started):
    pod = started("a1")
    # Waiting to be restarted: the node only has the newest, however it is asked.
    crashed = [pod.start, pod.writes("b1"), pod.crash]
    cluster.then([pod.writes("a2"), *crashed, cluster.drop], cluster.end)
    assert texts(read(follow=True)) == ["a1", missing(0), "b1"]


# --- replaced Pods --------------------------------------------------------------------------------


def test_a_replaced_pod_continues_with_the_next_attempt(cluster, read, started):
    pod = started("a1")

    def is_replaced():
        cluster.clock -= timedelta(hours=1)  # on a node whose clock is slow
        second = started("b1", "b2", uid="second")
        cluster.then(second.exit, cluster.end)

    cluster.then([pod.writes("a2"), pod.exit], is_replaced)
    assert attempts(read(follow=True)) == [(0, "a1"), (0, "a2"), (1, "b1"), (1, "b2")]


def test_a_pod_that_is_gone_after_the_end_of_its_output_leaves_no_gap(cluster, read, started):
    pod = started("a1")
    cluster.then([pod.writes("stopping"), pod.exit, cluster.pods.clear], cluster.end)
    assert texts(read(follow=True)) == ["a1", "stopping"]


def test_a_pod_deleted_while_the_connection_was_down_is_a_gap(cluster, read, started):
    started("a1")
    cluster.then([cluster.pods.clear, cluster.drop], cluster.end)
    first, gap = texts(read(follow=True))
    assert first == "a1"
    assert gap.endswith("may be missing here: the pod was deleted before all of it was read")


def test_pods_of_another_job_of_the_name_are_not_its_own(cluster, read, started):
    started("not this", owner="another-job")
    cluster.then(cluster.end)
    assert read(follow=True) == []
    assert [line.gap for line in read()] == [True]


# --- rotation -------------------------------------------------------------------------------------


def test_a_log_rotated_while_the_connection_was_down_is_a_gap(cluster, read, started):
    pod = started("1", "2")
    rotates = [pod.writes("3"), pod.files[-1].clear, pod.writes("4"), cluster.drop]
    cluster.then(cluster.drop, rotates, pod.exit, cluster.end)
    gap = "k8sjob: worker-0: output may be missing here: its log was rotated"
    assert texts(read(follow=True)) == ["1", "2", gap, "4"]


def test_no_gap_where_the_new_lines_follow_on(cluster, read, started):
    pod = started(*map(str, range(50)), apart=0.7)
    cluster.then(*[cluster.drop, pod.writes("more", apart=7)] * 3, pod.exit, cluster.end)
    lines = read(follow=True)
    assert not [line for line in lines if line.gap]
    assert len(lines) == 53


# --- the end --------------------------------------------------------------------------------------


def test_a_container_that_is_not_stopped_is_left_after_a_while(cluster, read, started):
    pod = started()

    def runs_on():
        pod.write("still here")
        cluster.then(runs_on)

    cluster.then(runs_on)
    assert set(texts(read(follow=True, ended=lambda: True))) == {"still here"}


def test_a_container_that_is_being_stopped_is_followed_to_its_end(cluster, read, started):
    pod = started()
    pod.leaving = True
    saves = [lambda: time.sleep(2 * QUICK.linger), pod.writes("saving")]
    cluster.then(saves, saves, pod.writes("saved"), pod.exit)
    assert texts(read(follow=True, ended=lambda: True)) == ["saving", "saving", "saved"]


# --- without following ----------------------------------------------------------------------------


@pytest.fixture
def crashed(cluster):
    """A container in its third attempt."""
    pod = cluster.pod()
    for attempt in "abc":
        pod.start()
        pod.write(f"{attempt}1", f"{attempt}2", apart=10)
    return pod


def test_all_that_the_node_still_has(crashed, read):
    lines = read()
    assert texts(lines) == [missing(0), "b1", "b2", "c1", "c2"]
    assert [line.attempt for line in lines[1:]] == [1, 1, 2, 2]
    assert [line.timestamp for line in lines] == sorted(line.timestamp for line in lines)


def test_a_message_of_the_node_that_it_has_no_log_is_not_output(crashed, read):
    crashed.exit()
    assert texts(read()) == [missing(0), missing(1), "c1", "c2"]


@pytest.mark.parametrize(("tail", "expected"), [(1, ["c2"]), (3, ["b2", "c1", "c2"]), (0, [])])
def test_only_the_last_lines_are_requested(cluster, crashed, read, tail, expected):
    assert texts(read(tail=tail)) == expected
    assert all("tailLines" in query for query in cluster.streams)


def test_what_is_older_is_not_requested(cluster, crashed, read):
    assert texts(read(since=BEGIN + timedelta(seconds=45))) == ["c1", "c2"]
    assert texts(read(since=BEGIN + timedelta(seconds=61))) == []
    assert all(query["sinceTime"] >= "2026-01-01T00:00:45Z" for query in cluster.streams)


def test_the_attempt_before_the_last_one(crashed, read):
    assert texts(read(previous=True)) == ["b1", "b2"]
    for state, message in (
        ("waiting", "waits to be restarted"),
        ("terminated", "has not kept the output"),
    ):
        crashed.exit(state)
        with pytest.raises(BackendError, match=message):
            read(previous=True)


def test_without_an_attempt_before(read, started):
    with pytest.raises(BackendError, match="worker-0 has no pod"):
        read(previous=True)
    started()
    with pytest.raises(BackendError, match="worker-0 was started only once"):
        read(previous=True)


def test_a_pod_that_has_not_started_has_no_output(cluster, read):
    assert read() == []
    cluster.pod()
    assert read() == []
    cluster.then(cluster.pods.clear, cluster.end)
    assert read(follow=True) == []  # nor has one that goes without having run


@pytest.mark.parametrize(
    "options", [{}, {"tail": 1}, {"tail": 0}, {"follow": True}, {"since": BEGIN}]
)
def test_output_that_went_with_its_pod_is_reported(cluster, read, options):
    cluster.pod("worker-1", uid="other").start()
    cluster.end()
    (line,) = read(**options)
    assert line.text == "k8sjob: worker-0: its pod is gone, and its output with it"
    assert line.gap
    assert line.timestamp > "2026-01-01T00:00:00.000000000Z"


# --- the shared list of Pods ----------------------------------------------------------------------


def test_many_readers_share_one_list(cluster):
    pods = JobPods(cluster, JOB)
    for index in range(64):
        cluster.pod(f"worker-{index}", uid=str(index)).start()
        pods.instance(f"worker-{index}")
    cluster.listings = 0
    assert {pods.instance(f"worker-{index}").uid for index in range(64)} == set(map(str, range(64)))
    assert cluster.listings <= 1


def test_new_readers_that_come_at_once_share_a_list(cluster, monkeypatch):
    names = [f"worker-{index}" for index in range(16)]
    for name in names:
        cluster.pod(name, uid=name).start()
    everybody, answer = threading.Barrier(len(names)), cluster.answer

    def slow(*request):
        time.sleep(0.1)
        return answer(*request)

    def uid(name):
        everybody.wait()
        return pods.instance(name).uid

    monkeypatch.setattr(cluster, "answer", slow)
    pods = JobPods(cluster, JOB)
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(uid, names)) == names
    assert cluster.listings < len(names) // 2


def test_pods_that_were_just_read_are_not_listed(cluster, started):
    pod, backend = started("a", "b"), ClusterBackend(cluster)
    backend.transport = cluster
    read = partial(backend.logs, JOB, "worker-0", tail=2)
    assert texts(read(pods={"worker-0": pod.as_json()})) == ["a", "b"]
    assert texts(read(pods={})) == []
    assert cluster.listings == 0


def test_a_newer_list_can_be_requested(cluster, started):
    pods, pod = JobPods(cluster, JOB), started()
    assert pods.instance("worker-0").state == "running"
    pod.exit()
    assert pods.instance("worker-0", after=time.monotonic()).state == "terminated"


def test_the_pods_of_a_trainjob_carry_the_uid_of_its_jobset():
    """Their labels are of the JobSet that Trainer made."""
    labels = {
        "batch.kubernetes.io/job-name": "tiny-node-0",
        "jobset.sigs.k8s.io/jobset-name": "tiny",
        "jobset.sigs.k8s.io/jobset-uid": "of-the-jobset",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    owners = [{"kind": "Job", "name": "tiny-node-0", "uid": "of-the-job", "controller": True}]
    meta = {"name": "tiny-node-0-0-abcde", "uid": "pod", "labels": labels}
    meta |= {"creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": owners}
    listed = {"items": [{"metadata": meta, "spec": {}, "status": {}}]}
    reference = JobRef("tiny", "team", "of-the-trainjob", "TrainJob")
    pods = JobPods(clusters.Cluster(lambda *_: listed), reference)
    assert pods.instance("master-0").uid == "pod"


# --- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"2026-01-01T00:00:01.123456789Z text\n", ("2026-01-01T00:00:01.123456789Z", b"text\n")),
        (b"2026-01-01T00:00:01.5Z \n", ("2026-01-01T00:00:01.500000000Z", b"\n")),
        (b"2026-01-01T00:00:01Z a b", ("2026-01-01T00:00:01.000000000Z", b"a b")),
        (b"2026-01-01T01:30:01.5+01:30 x\r\n", ("2026-01-01T00:00:01.500000000Z", b"x\r\n")),
        (
            b"2026-01-01T00:00:01Z \xff\x1b[2J\n",
            ("2026-01-01T00:00:01.000000000Z", b"\xff\x1b[2J\n"),
        ),
        (b"unable to retrieve container logs for containerd://0", ("", b"")),
        (b"\n", ("", b"")),
    ],
)
def test_a_line_of_a_node(raw, expected):
    assert stamped(raw) == expected
