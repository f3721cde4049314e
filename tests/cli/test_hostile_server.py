"""Whatever an apiserver sends, a command ends with its result or with one clear error."""

import json
import random
import threading
from contextlib import suppress
from itertools import islice

import observed
import pytest
from clusters import kubeconfig
from hostile import VALUES, Recorded, changed, places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.backends.record import RecordBackend, Records, write_record
from k8sjob.errors import K8sJobError
from k8sjob.observe.collector import Collector
from k8sjob.observe.findings import findings
from k8sjob.observe.status import job_status
from k8sjob.observe.timing import read_timing
from k8sjob.observe.usage import read_usage
from k8sjob.targets.object_types import typed_object
from k8sjob.view.json_output import job_document

PARTS = ("job", "pods", "events", "related")
RECORDED = {
    name: {part: [] for part in PARTS} | seen
    for name, seen in observed.RECORDED.items()
    if seen["job"]["kind"] != "Wrapper"  # no apiserver has such a kind by itself
}


def drawn(data):
    """A recorded job of which one or two values are others, as a test draws them."""
    seen = RECORDED[data.draw(st.sampled_from(sorted(RECORDED)))]
    for _ in range(data.draw(st.integers(1, 2))):
        every = [path for part in PARTS for path in places(seen[part], (part,))]
        seen = changed(seen, data.draw(st.sampled_from(every)), data.draw(st.sampled_from(VALUES)))
    return seen


def attempt(action, *arguments):
    """What it returns; None where it ends with an error of ours."""
    with suppress(K8sJobError):
        return action(*arguments)
    return None


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_job_that_a_live_read_accepts_can_be_kept_and_read_back(data, tmp_path_factory):
    transport = Recorded(drawn(data))
    backend = ClusterBackend(transport)
    for snapshot in attempt(lambda: backend.jobs(pods=True)) or ():
        assert json.dumps(job_document(snapshot))
    ref = attempt(backend.find, transport.name)
    snapshot = ref and attempt(backend.snapshot, ref)
    if not snapshot:
        return
    assert job_status(snapshot).state
    for finding in findings(backend, snapshot):
        assert finding.message
    read_usage(backend, snapshot)
    read_timing(backend, snapshot)
    file = tmp_path_factory.mktemp("kept") / "x.k8sjob"
    with file.open("wb") as out:
        write_record(backend, ref, out, snapshot=snapshot)
    kept = RecordBackend(file)
    again = kept.snapshot(ref)
    assert (again.job, [*again.pods], [*again.events]) == (
        snapshot.job, [*snapshot.pods], [*snapshot.events]
    )  # fmt: skip
    assert [*kept.related(again)] == json.loads(json.dumps(backend.related(snapshot)))


COMMANDS = (
    "list", "list -o json", "status NAME", "why NAME", "why NAME --timing", "usage NAME",
    "logs NAME", "report NAME -o page.html --force", "archive NAME -o kept.k8sjob --force",
    "metrics",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_no_command_ends_with_a_traceback(k8sjob, seed, monkeypatch, tmp_path):
    chance, codes = random.Random(seed), []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "https://hostile")))
    for command in COMMANDS:
        name = chance.choice(sorted(RECORDED))
        seen = RECORDED[name]
        every = [path for part in PARTS for path in places(seen[part], (part,))]
        path, value = chance.choice(every), chance.choice(VALUES)
        backend = ClusterBackend(Recorded(changed(seen, path, value)))
        monkeypatch.setattr("k8sjob.cli.find_job.connect", lambda backend=backend, **_: backend)
        word = seen.get("word")
        job = f"{word}/" * bool(word) + seen["job"]["metadata"]["name"]
        done = k8sjob(*command.replace("NAME", job).split())
        assert "bug in k8sjob" not in done.err, (command, name, path, value)
        assert "Traceback" not in done.err, (command, name, path, value)
        codes.append(done.code)
    assert codes.count(0) > len(codes) / 2, "they read the job, as most values matter little"


@pytest.mark.parametrize("items", [[None], [[]], ["x"], [7], [{"metadata": None}], [{"kind": []}]])
def test_an_object_that_is_none_is_left_out_with_one_warning(items, caplog):
    transport = Recorded(RECORDED["crash"])
    transport.objects["pytorchjobs"] = [*items, *transport.objects["pytorchjobs"]]
    backend = ClusterBackend(transport)
    for _ in range(2):
        (snapshot,) = backend.jobs(pods=True)
        assert snapshot.job.raw["metadata"]["name"] == transport.name
    (warning,) = caplog.messages
    assert "pytorchjobs in namespace" in warning
    assert "of https://hostile (context hostile): 1 of 2 objects are left out; of" in warning


def test_a_time_may_have_64_bits_and_trainer_may_choose_the_processes():
    spec = {"activeDeadlineSeconds": 2**40, "trainer": {"numProcPerNode": "auto"}}
    job = {"kind": "TrainJob", "metadata": {"name": "x", "namespace": "team"}, "spec": spec}
    pod = {"metadata": {"name": "x"}, "spec": {"terminationGracePeriodSeconds": 2**63 - 1}}
    for item in (job, {"kind": "Pod", **pod}):
        assert typed_object(item["kind"], item) == (item, "")
    pod["spec"]["terminationGracePeriodSeconds"] = 2**63
    assert typed_object("Pod", pod)[1].endswith("not a number of 64 bits")


@pytest.mark.parametrize("more", [{"items": {}}, {"items": 5}, {"metadata": []}, {"kind": {}}])
def test_a_list_that_is_none_is_one_error(more):
    transport = Recorded(RECORDED["crash"])
    transport.more = more
    with pytest.raises(K8sJobError, match=r"context hostile\) has sent a list of which .* address"):
        ClusterBackend(transport).jobs()


def test_a_list_that_never_ends_is_an_error():
    transport = Recorded(RECORDED["crash"])
    transport.more = {"metadata": {"continue": "again"}}
    with pytest.raises(K8sJobError, match="does not end after 2 pages"):
        ClusterBackend(transport).jobs()


def test_events_of_a_watch_are_checked_and_the_others_are_collected(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path))
    transport = Recorded(RECORDED["crash"])
    (job,) = transport.objects["pytorchjobs"]
    bad = ([], None, {"metadata": None}, changed(job, ("status",), 7))
    stop, backend = threading.Event(), ClusterBackend(transport)
    transport.objects["pytorchjobs"] = []  # until the watch begins
    transport.watched["pytorchjobs"] = [*bad, job]
    changes = islice(backend.watch_jobs(stop=stop), 2)  # SYNCED, and the good one
    Collector(backend, Records(), None, (), lambda _: None).run(changes, stop)
    assert "an object is left out; of '' it is [], not a mapping" in caplog.text
    (kept,) = tmp_path.glob("records/*/*.k8sjob")
    assert RecordBackend(kept).snapshot(None).job.raw["metadata"]["name"] == transport.name
