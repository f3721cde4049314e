"""Records: what is read from one is what was read from the job."""

import copy
import io
import json
import os
import re
import zipfile
from unittest.mock import Mock

import pytest
from observed import RECORDED, Script, of_recorded

from k8sjob.backends import record as record_module
from k8sjob.backends import record_storage
from k8sjob.backends.api import JobRef, LogLine
from k8sjob.backends.record import RecordBackend, Records, write_record
from k8sjob.backends.record_storage import StoredRecords
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError, JobTooLarge, K8sJobError
from k8sjob.jobs.result import read_reached
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.targets.jobs import job_of, replica_names

STAMP = "2026-01-01T00:05:00.000000000Z"


def recorded(name="crash"):
    return copy.deepcopy(RECORDED[name])


def written(seen, path, lines=()):
    unread = []
    with path.open("wb") as out:
        write_record(of_recorded(seen, lines), None, out, lambda *what: unread.append(what))
    assert not unread
    return RecordBackend(path)


def why(backend):
    snapshot = backend.snapshot(None)
    return diagnose(snapshot, last_lines(backend, snapshot), backend.related(snapshot))


def messages(backend):
    return [one.message for one in why(backend)]


@pytest.mark.parametrize("name", [name for name in RECORDED if "word" not in RECORDED[name]])
def test_the_causes_are_those_of_the_job(name, tmp_path):
    seen = recorded(name)
    record, job = written(seen, tmp_path / "job.k8sjob"), of_recorded(seen)
    found = why(record)
    assert found
    assert messages(record) == messages(job)
    (snapshot,) = job.snapshots
    job.snapshots = [snapshot._replace(record=record.snapshot(None).record)]
    assert found == why(job)


def test_the_next_step_reads_the_record_and_not_a_job_that_may_be_gone(tmp_path):
    (found,) = why(written(recorded("crash"), tmp_path / "the job.k8sjob"))
    assert f"k8sjob logs '{tmp_path}/the job.k8sjob' -r master-0" in found.next_step


def test_output_is_read_as_it_was_written(tmp_path):
    lines = [
        LogLine("master-0", 0, STAMP, "first"),
        LogLine("master-0", 1, STAMP, "\x1b[31mred \u2028 é"),
        LogLine("master-0", 2, STAMP, "gone", gap=True),
        LogLine.of("master-0", 2, STAMP, b"\xff no text"),
    ]
    record = written(recorded(), tmp_path / "job.k8sjob", lines)
    ref = record.find("any")
    assert ref == JobRef.of(job_of(recorded()["job"]))
    assert list(record.logs(ref, "master-0"))[:4] == lines
    assert list(record.logs(ref, "master-0", previous=True)) == lines[1:2]


def test_the_end_of_a_job_is_followed_and_nothing_else(tmp_path):
    done = written(recorded("leftover"), tmp_path / "done.k8sjob")
    assert list(done.watch(None)) == [done.snapshot(None)]
    waits = written(recorded("gpus"), tmp_path / "waits.k8sjob")
    with pytest.raises(BackendError, match="that had not ended"):
        list(waits.watch(None))


def test_output_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("k8sjob.backends.record.replica_names", lambda _job: ["lost", "master-0"])
    unread = []
    cluster = of_recorded(recorded())
    cluster.errors["lost"] = BackendError("no")
    with (tmp_path / "a.k8sjob").open("wb") as out:
        write_record(cluster, None, out, lambda *failure: unread.append(failure))
    assert unread == [("lost", "no")]
    assert list(RecordBackend(tmp_path / "a.k8sjob").logs(None, "master-0"))


TRACEBACK = ["Traceback (most recent call last):", "ValueError: no such class: 11"]


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("length", [10, 900])
def test_both_ends_of_much_output_are_kept(tmp_path, monkeypatch, brief, length):
    """The traceback is at the end; what is left out is counted."""
    monkeypatch.setattr("k8sjob.backends.record._MOST_OUTPUT", 50_000)
    monkeypatch.setattr("k8sjob.backends.record._KEPT_OUTPUT", 10_000)
    monkeypatch.setattr("k8sjob.backends.record._MOST_LINE", 1_500)
    texts = [f"line {n} {'x' * length}" for n in range(2000)]
    texts.insert(1999, "too long" * 500)
    lines = [LogLine("master-0", 0, STAMP, text) for text in [*texts, *TRACEBACK]]
    file = tmp_path / "job.k8sjob"
    with file.open("wb") as out:
        job = of_recorded({**recorded(), "logs": {}}, lines)
        write_record(job, None, out, lambda *_: None, brief=brief)
    kept = list(RecordBackend(file).logs(None, "master-0"))
    ends = [line for line in kept if not line.gap]
    (middle, *long) = [line for line in kept if line.gap and "too long" not in line.text]
    count, size = re.match(r"([\d,]+) lines \(([\d.]+) MiB\)", middle.text).groups()
    assert not long
    assert kept.index(middle) > 1
    assert [line.text for line in ends[-2:]] == TRACEBACK
    assert int(count.replace(",", "")) + len(kept) - 1 == len(lines)
    whole, shown = (sum(len(line.text.encode()) for line in part) for part in (lines, ends))
    assert float(size) == pytest.approx((whole - shown) / (1 << 20), abs=0.06)  # it is rounded


def test_the_end_is_kept_where_output_stops_to_be_readable(tmp_path, monkeypatch):
    monkeypatch.setattr("k8sjob.backends.record._MOST_OUTPUT", 2000)

    class Breaks(Script):
        def logs(self, _ref, replica):
            yield from (LogLine(replica, 0, STAMP, f"line {n}") for n in range(500))
            raise BackendError("the node is gone")

    unread = []
    with (tmp_path / "a.k8sjob").open("wb") as out:
        write_record(
            Breaks(of_recorded(recorded()).snapshots), None, out, lambda *what: unread.append(what)
        )
    kept = list(RecordBackend(tmp_path / "a.k8sjob").logs(None, "master-0"))
    assert (kept[0].text, kept[-1].text) == ("line 0", "line 499")
    assert ("master-0", "the node is gone") in unread


def test_output_that_went_with_its_pod_is_missed_also_where_the_job_still_has_it(tmp_path):
    class Removed(Script):
        def logs(self, _ref, replica, *, pods=None):
            if pods is None:  # by those of the snapshot it is there, and nothing is read of it
                yield LogLine(replica, 0, STAMP, "its pod is gone", gap=True)

    with (tmp_path / "job.k8sjob").open("wb") as out:
        write_record(Removed(of_recorded(recorded()).snapshots), None, out)
    record = RecordBackend(tmp_path / "job.k8sjob")
    assert [line.gap for line in record.logs(None, "master-0")] == [True]


def test_a_record_with_too_much_output_is_refused(tmp_path, monkeypatch):
    record = written(
        recorded(), tmp_path / "job.k8sjob", [LogLine("master-0", 0, STAMP, "x" * 900)]
    )
    monkeypatch.setattr("k8sjob.backends.record._MOST_OUTPUT", 100)
    monkeypatch.setattr("k8sjob.backends.record._MOST_LINE", 200)
    with pytest.raises(K8sJobError, match="has over"):
        list(record.logs(None, "master-0"))


def test_the_last_lines_are_read_without_the_others(tmp_path):
    lines = [LogLine("master-0", n // 50, STAMP, f"line {n}") for n in range(100)]
    path = tmp_path / "job.k8sjob"
    every = list(written(recorded(), path, lines).logs(None, "master-0"))
    for tail in (1, 3, 101, 1000):
        assert list(RecordBackend(path).logs(None, "master-0", tail=tail)) == every[-tail:]
    rest = json.dumps([0, STAMP, "the end", False])
    members = {"record.json": json.dumps(recorded_objects(path)), "logs/master-0": f"{{\n{rest}\n"}
    path.write_bytes(zipped(**members))
    (last,) = RecordBackend(path).logs(None, "master-0", tail=1)
    assert last.text == "the end"
    with pytest.raises(K8sJobError, match="cannot be read"):
        list(RecordBackend(path).logs(None, "master-0", tail=2))


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("k8sjob.backends.record._MOST_LINE", 1000)
    path = tmp_path / "job.k8sjob"
    written(recorded(), path)
    members = {"record.json": json.dumps(recorded_objects(path)), "logs/master-0": "x" * 10**6}
    path.write_bytes(zipped(**members))
    for tail in (None, 1):
        with pytest.raises(K8sJobError, match="a line of the output of master-0 has over 1000"):
            list(RecordBackend(path).logs(None, "master-0", tail=tail))


@pytest.mark.parametrize("row", ["{}", "7", "[0]", f'[0, "{STAMP}", "", false, 1]'])
def test_a_line_of_another_form_is_refused(row, tmp_path):
    path = tmp_path / "job.k8sjob"
    written(recorded(), path)
    members = {"record.json": json.dumps(recorded_objects(path)), "logs/master-0": f"{row}\n"}
    path.write_bytes(zipped(**members))
    with pytest.raises(K8sJobError, match="logs/master-0: "):
        list(RecordBackend(path).logs(None, "master-0"))


def test_more_than_a_line_has_is_passed_over(tmp_path):
    path = tmp_path / "job.k8sjob"
    written(recorded(), path)
    row = json.dumps([0, STAMP, "text", False, "eA==", "x"])
    members = {"record.json": json.dumps(recorded_objects(path)), "logs/master-0": f"{row}\n"}
    path.write_bytes(zipped(**members))
    assert [line.raw for line in RecordBackend(path).logs(None, "master-0")] == [b"x"]


def recorded_objects(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("record.json"))


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "."), text)
    return out.getvalue()


WELL = {"format": 1, "at": STAMP, "pods": [], "events": [], "related": []}
MANY = {"kind": "Job", "metadata": {"name": "x"}, "spec": {"completions": 10**9}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "File is not a zip file"),
        (zipped(other="{}"), "There is no item named 'record.json' in the archive"),
        (zipped(record__json="{"), "cannot be read"),
        (zipped(record__json="[]"), "does not have the format of a record"),
        (zipped(record__json=json.dumps({**WELL, "job": {}, "at": "2026-01-01"})), "no time zone"),
        (zipped(record__json="[" * 100_000), "cannot be read"),
        (zipped(record__json=json.dumps(WELL)), "'job' is missing from record.json"),
        (zipped(record__json=json.dumps({**WELL, "job": [], "at": "x"})), "cannot be read"),
        (zipped(record__json=json.dumps({**WELL, "job": {}, "pods": 3})), "cannot be read"),
        (zipped(record__json=json.dumps({**WELL, "job": MANY})), "more than 100,000"),
        (zipped(record__json=json.dumps({**WELL, "format": 2})), "it has format 2, and"),
        (zipped(record__json=json.dumps({**WELL, "job": {}, "pods": [{}] * 9})), "several Pods of"),
        (zipped(record__json=f"[{'{},' * 30_000}0]"), "its values would take 8 MiB, more than 3"),
        (zipped(record__json='{"a":' * 9_000 + "1" + "}" * 9_000), "nested deeper than 100"),
        (zipped(record__json=" " * (10**6 + 1)), "over 1000000 bytes"),
    ],
    ids=range(15),
)
def test_what_is_no_record_is_refused(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr("k8sjob.kube.json_text.MAX_MEMORY", 3 << 20)
    monkeypatch.setattr("k8sjob.backends.record._MOST_OBJECTS", 10**6)
    file = tmp_path / "x.k8sjob"
    file.write_bytes(content)
    with pytest.raises(BackendError, match=message):
        RecordBackend(file)


def test_a_record_that_could_not_be_read_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr("k8sjob.kube.json_text.MAX_MEMORY", 1000)
    with pytest.raises(JobTooLarge, match=r"too large for a record: its values would take"):
        written(recorded(), tmp_path / "x.k8sjob")


def test_of_much_output_only_reports_are_decoded_to_know_what_ran(monkeypatch, tmp_path):
    report = Event(EventKind.STARTED, {"world_size": 2}, time=1.0).encode()
    lines = [LogLine("master-0", 0, STAMP, text) for text in (report, *["loss 0.5"] * 1000)]
    record = written(recorded(), tmp_path / "x.k8sjob", lines)
    decode = Mock(side_effect=record_module._decoded)
    monkeypatch.setattr(record_module, "_decoded", decode)
    assert read_reached(record, record.snapshot(None)).group == {"world_size": 2}
    assert decode.call_count == 1


SOUND = {"kind": "PyTorchJob", "metadata": {"name": "x", "namespace": "ns", "uid": "u"}}
SOUND["spec"] = {"pytorchReplicaSpecs": {"Master": {"replicas": 1}}}
NODE = {"kind": "Node", "metadata": {"name": "n"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": {"name": "../../x"}}, "'../../x' is not a valid name in Kubernetes"),
        ({"metadata": {"name": "/tmp/x"}}, "not a valid name"),
        ({"metadata": {"name": "x", "namespace": "a; rm -rf ~"}}, "not a valid name"),
        ({"metadata": {"name": "x", "uid": "\x1b[2J"}}, "not a valid name"),
        ({"status": {"conditions": {}}}, "status.conditions is {}, not a list"),
        ({"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": "1"}}}}, "not a whole number"),
    ],
)
def test_objects_that_kubernetes_would_not_write_are_refused(changes, message, tmp_path):
    file = tmp_path / "x.k8sjob"
    file.write_bytes(zipped(record__json=json.dumps({**WELL, "job": SOUND})))
    RecordBackend(file)
    file.write_bytes(zipped(record__json=json.dumps({**WELL, "job": {**SOUND, **changes}})))
    with pytest.raises(BackendError, match=re.escape(message)):
        RecordBackend(file)
    odd = {"kind": "Node", "metadata": {"name": "$(x)"}}
    for related in (odd, {"kind": "Status", "details": "gone"}, {**NODE, "status": "Ready"}):
        record = {**WELL, "job": SOUND, "related": [related]}
        file.write_bytes(zipped(record__json=json.dumps(record)))
        with pytest.raises(BackendError, match="cannot be read as a record"):
            RecordBackend(file)


def test_a_record_is_a_file_that_ends(tmp_path):
    (tmp_path / "zero.k8sjob").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo.k8sjob")
    with zipfile.ZipFile(tmp_path / "bzip.k8sjob", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("record.json", json.dumps({**WELL, "job": SOUND}))
    for file in tmp_path.iterdir():
        with pytest.raises(BackendError, match="it is not"):
            RecordBackend(file)


def test_damage_is_noticed_wherever_it_is(tmp_path):
    lines = [LogLine("master-0", 0, STAMP, f"line {n}") for n in range(50)]
    file = tmp_path / "job.k8sjob"
    before = [
        written(recorded(), file, lines),
        *of_recorded(recorded(), lines).logs(None, "master-0"),
    ][1:]
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            found = list(RecordBackend(file).logs(None, "master-0"))
        except K8sJobError:
            continue
        assert found == before  # the damage is in a date of the archive's


def test_nothing_of_it_can_be_changed(tmp_path):
    record = written(recorded(), tmp_path / "job.k8sjob")
    for change in (
        lambda: record.create(None),
        lambda: record.suspend(None, value=True),
        lambda: record.delete(None),
    ):
        with pytest.raises(BackendError, match="is the record of a job"):
            change()


class TestRecordsThatAreKept:
    @pytest.fixture(autouse=True)
    def _state(self, tmp_path, monkeypatch):
        monkeypatch.setenv("K8SJOB_STATE", str(tmp_path / "state"))

    def keep(self, name, uid="12345678-9", namespace="team", **limits):
        Records(**limits).keep(of_recorded(recorded()), JobRef(name, namespace, uid))

    def test_the_newest_one_of_a_name_is_found(self):
        assert Records().find("digits") is None
        self.keep("digits", "aaaaaaaa-1")
        self.keep("digits", "bbbbbbbb-1", "other")
        self.keep("digits-2")
        assert Records().find("digits").name == "digits@bbbbbbbb.k8sjob"
        assert Records().find("digits", "team").name == "digits@aaaaaaaa.k8sjob"
        assert Records().find("digit") is None
        assert Records().find("digits", "nowhere") is None
        assert messages(RecordBackend(Records().find("digits"))) == messages(
            of_recorded(recorded())
        )

    def test_the_oldest_ones_give_way(self, tmp_path):
        for number in range(5):
            self.keep(f"job-{number}", most=3)
            os.utime(Records().find(f"job-{number}"), (number, number))
        kept = sorted(path.stem for path in (tmp_path / "state/records/team").iterdir())
        assert kept == [f"job-{number}@12345678" for number in (2, 3, 4)]
        self.keep("large", most_bytes=1)
        kept = [path.stem for path in (tmp_path / "state/records/team").iterdir()]
        assert kept == ["large@12345678"]

    def test_a_namespace_with_many_removes_no_others(self, tmp_path):
        for number, namespace in enumerate(["small", *["many"] * 5]):
            self.keep(f"job-{number}", namespace=namespace, most=3)
            os.utime(Records().find(f"job-{number}"), (number, number))
        records = sorted((tmp_path / "state/records").glob("*/*"))
        kept = [f"{one.parent.name}/{one.stem.partition('@')[0]}" for one in records]
        assert kept == ["many/job-4", "many/job-5", "small/job-0"]
        room = sum(one.stat().st_size for one in records)
        self.keep("job-6", namespace="many", most_bytes=room)
        records = sorted((tmp_path / "state/records").glob("*/*"))
        kept = [f"{one.parent.name}/{one.stem.partition('@')[0]}" for one in records]
        assert kept == ["many/job-5", "many/job-6", "small/job-0"]

    def test_they_are_whole_and_for_their_user_only(self):
        self.keep("digits")
        path = Records().find("digits")
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0
        with pytest.raises(BackendError):
            Records().keep(Script([]), JobRef("gone", "team", "12345678"))
        assert [one.name for one in path.parent.iterdir()] == ["digits@12345678.k8sjob"]

    @pytest.mark.parametrize("where", ["folder", "memory"])
    def test_a_message_is_kept_until_it_is_dropped(self, where, monkeypatch):
        # fsspec's own file system raises for a missing file, as those of gs:// and az:// do.
        monkeypatch.setitem(record_storage._PACKAGES, "memory", "fsspec")
        records = Records() if where == "folder" else StoredRecords("memory://records/messages")
        records.keep_message("one", "text")
        assert records.messages() == {"one": "text"}
        for _ in range(2):
            records.drop_message("one")
            assert records.messages() == {}

    def test_output_of_a_pod_that_is_gone_stays_from_the_record_before(self, monkeypatch):
        """At the backoff limit the operator deletes the Pods, and their output goes with them."""
        seen, ref = recorded("leftover"), JobRef("digits", "team", "12345678")
        name, *_ = replica_names(job_of(seen["job"]))
        lost = LogLine(name, 0, STAMP, "the pod is gone", gap=True)
        Records().keep(of_recorded(seen, [lost]), ref)
        assert [line.text for line in Records().open(ref).logs(ref, name)] == ["the pod is gone"]
        Records().keep(of_recorded(seen, [LogLine(name, 0, STAMP, "ValueError: bad shard")]), ref)
        for _ in range(2):
            Records().keep(of_recorded(seen, [lost]), ref)
            kept = [line.text for line in Records().open(ref).logs(ref, name)]
            assert kept == ["ValueError: bad shard", "the pod is gone"]
        Records().keep(of_recorded(seen, [lost, LogLine(name, 1, STAMP, "epoch 2")]), ref)
        kept = [line.text for line in Records().open(ref).logs(ref, name)]
        assert kept == ["the pod is gone", "epoch 2"]
        damaged = K8sJobError("damaged")
        monkeypatch.setattr(RecordBackend, "_lines", Mock(side_effect=damaged))
        Records().keep(of_recorded(seen, [lost]), ref)

    def test_of_a_large_job_the_output_of_what_failed_is_kept(self, monkeypatch):
        monkeypatch.setattr("k8sjob.backends.record._KEPT_REPLICAS", 1)
        seen = recorded("leftover")
        names = replica_names(job_of(seen["job"]))
        labels = seen["pods"][-1]["metadata"]["labels"]
        labels["training.kubeflow.org/replica-type"] = names[-1].rpartition("-")[0]
        labels["training.kubeflow.org/replica-index"] = names[-1].rpartition("-")[2]
        seen["pods"][-1]["status"]["phase"] = "Failed"
        lines = [LogLine(name, 0, STAMP, "x") for name in names]
        Records().keep(of_recorded(seen, lines), JobRef("large", "team", "12345678"))
        record = RecordBackend(Records().find("large"))
        assert list(record.logs(None, names[-1]))
        with pytest.raises(BackendError, match=f"has no output of {names[0]}"):
            list(record.logs(None, names[0]))
        assert list(last_lines(record, record.snapshot(None))) == [names[-1]]
        # Its Pod is gone, and so is what made it one of the few.
        seen["pods"].pop()
        Records().keep(of_recorded(seen, lines[:-1]), JobRef("large", "team", "12345678"))
        assert list(RecordBackend(Records().find("large")).logs(None, names[-1]))
