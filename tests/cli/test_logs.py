"""`logs`: what --save leaves in files, and what replicas without output wait for."""

import pytest
import trainings

from k8sjob.backends.api import LogLine, Snapshot
from k8sjob.cli.logs import Saver, _event_text, _waiting
from k8sjob.contract import Event
from k8sjob.errors import K8sJobError
from k8sjob.observe.status import job_status
from k8sjob.targets.jobs import job_of

AT = "2026-01-01T00:00:00.000000000Z"


def line(text, attempt=0, replica="master-0", **more):
    return LogLine(replica, attempt, AT, text, **more)


def save(folder, *lines):
    with Saver(folder, "job") as saver:
        saver.show([line(*one) if isinstance(one, tuple) else line(one) for one in lines])
    return [path.name for path in saver.saved]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_file_a_replica_and_attempt_as_it_was_written(tmp_path):
    folder = tmp_path / "new" / "logs"
    with Saver(folder, "job") as saver:
        saver.show([line("a\r\x1b[31mred"), line("w", 3, "worker-1"), line("b")])
        saver.show([line("again", 1), line("ü", 1)])
    assert files(folder) == {
        "job-master-0.0.log": b"a\r\x1b[31mred\nb\n",
        "job-master-0.1.log": "again\nü\n".encode(),
        "job-worker-1.3.log": b"w\n",
    }
    assert sorted(saver.saved) == sorted(folder.iterdir())


def test_on_a_full_disk_no_file_looks_complete(tmp_path, full_disk):
    with (
        full_disk(1000),
        pytest.raises(K8sJobError, match=r"File too large; what was saved is in its \*.part files"),
    ):
        save(tmp_path, "short", ("x" * 2000, 0, "worker-0"))
    assert sorted(files(tmp_path)) == ["job-master-0.0.log.part", "job-worker-0.0.log.part"]


def test_every_byte_is_kept(tmp_path):
    written = [b"\xff\xfe\n", b"\r\n", "ü\u2028\n".encode(), b"\xed\xb3\xbf no newline"]
    lines = [LogLine.of("master-0", 0, AT, one) for one in written]
    assert lines[0].text == "\ufffd\ufffd"
    assert [one.written for one in lines] == written
    with Saver(tmp_path, "job") as saver:
        saver.show(lines)
    assert saver.saved[0].read_bytes() == b"".join(written)


def test_what_was_taken_is_kept_however_the_reading_ends(tmp_path):
    def break_off():
        with Saver(tmp_path, "job") as saver:
            saver.show([line("whole"), line("so far", 1)])
            assert files(tmp_path) == {
                "job-master-0.0.log": b"whole\n",
                "job-master-0.1.log.part": b"so far\n",
            }
            raise KeyError("the connection")

    with pytest.raises(KeyError):
        break_off()
    kept = {"job-master-0.0.log": b"whole\n", "job-master-0.1.log": b"so far\n"}
    assert files(tmp_path) == kept
    assert save(tmp_path, "whole", ("so far", 1), ("more", 1)) == list(kept)
    assert files(tmp_path) == kept | {"job-master-0.1.log": b"so far\nmore\n"}


def test_a_link_that_somebody_puts_in_place_of_a_file_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with Saver(tmp_path, "job") as saver:
        saver.show([line("a")])
        (part,) = tmp_path.glob("*.part")
        part.unlink()
        part.symlink_to(tmp_path / "precious")
        with pytest.raises(K8sJobError, match="cannot be written: Too many levels of symbolic"):
            saver.show([line("b")])
    assert (tmp_path / "precious").read_text() == "mine"


def test_two_at_once_and_one_that_was_killed_leave_each_other_alone(tmp_path):
    killed = Saver(tmp_path, "job")
    killed.__enter__()
    killed.show([line("mine")])
    with Saver(tmp_path, "job") as other:
        other.show([line("yours")])
        assert save(tmp_path, "theirs") == ["job-master-0.0.log"]
    assert files(tmp_path) == {
        "job-master-0.0.log.part": b"mine\n",
        "job-master-0.0.log": b"theirs\n",
        "job-master-0.0-2.log": b"yours\n",
    }


def test_what_is_missing_is_shown_in_its_place(tmp_path, capsys):
    gap, gone = line("missing", 1, gap=True), line("gone", 0, "worker-0", gap=True)
    with Saver(tmp_path, "job") as saver:
        saver.show([gap, line("a", 1), gap])
        saver.show([gap, gone])
    assert files(tmp_path) == {"job-master-0.1.log": b"a\nmissing\nmissing\n"}
    assert capsys.readouterr().err == "missing\ngone\n"


def test_names_lead_nowhere_else(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (folder / "___x-worker-0.0.log").symlink_to(outside)
    (folder / "___x-worker-0.0-2.log").symlink_to(tmp_path / "nowhere")
    (folder / "___x-worker-0.0-3.log").mkdir()
    with Saver(folder, "../x") as saver:
        saver.show([line("text", 0, "worker-0"), line("text", 0, "../../etc/passwd")])
    assert {path.parent for path in saver.saved} == {folder}
    assert (folder / "___x-worker-0.0-4.log").read_text() == "text\n"
    assert outside.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_what_is_there_grows_by_what_was_written_since(tmp_path):
    assert save(tmp_path, "a") == ["job-master-0.0.log"]
    assert save(tmp_path, "a", "b") == ["job-master-0.0.log"]
    assert files(tmp_path) == {"job-master-0.0.log": b"a\nb\n"}
    assert save(tmp_path, "a") == ["job-master-0.0.log"]  # less than is there: nothing is new
    assert files(tmp_path) == {"job-master-0.0.log": b"a\nb\n"}


def test_other_lines_stay_beside_what_is_there(tmp_path):
    save(tmp_path, "first pod")
    assert save(tmp_path, "second pod") == ["job-master-0.0-2.log"]
    assert save(tmp_path, "second pod", "goes on") == ["job-master-0.0-2.log"]
    assert save(tmp_path, "first") == ["job-master-0.0-3.log"]  # a line is no part of another
    assert save(tmp_path, "goes on", ("again", 1)) == ["job-master-0.0-4.log", "job-master-0.1.log"]
    assert files(tmp_path) == {
        "job-master-0.0.log": b"first pod\n",
        "job-master-0.0-2.log": b"second pod\ngoes on\n",
        "job-master-0.0-3.log": b"first\n",
        "job-master-0.0-4.log": b"goes on\n",
        "job-master-0.1.log": b"again\n",
    }


def test_long_files_are_compared_to_their_end(tmp_path):
    many = ["x" * 1000] * 3000
    save(tmp_path, *many, "one end")
    assert save(tmp_path, *many, "another") == ["job-master-0.0-2.log"]
    assert save(tmp_path, *many, "one end", "more") == ["job-master-0.0.log"]


def test_times_in_front_of_the_lines(tmp_path):
    with Saver(tmp_path, "job", times=True) as saver:
        saver.show([line("text")])
    assert saver.saved[0].read_text() == f"{AT} text\n"


def test_thousands_of_files_need_no_thousands_of_handles(tmp_path):
    with Saver(tmp_path, "job") as saver:
        for number in range(2000):
            saver.show([line("text", 0, f"worker-{number}")])
    assert len(files(tmp_path)) == 2000


# --- replicas without output ----------------------------------------------------------------------


def test_replicas_that_wait_for_the_same_are_named_together():
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pending = {"status": {"phase": "Pending", "conditions": [unschedulable]}}
    pods = [trainings.pod(name, 0) | pending for name in ("master-0", "worker-0")]
    job = trainings.job(end=1, state="Created", workers=2)
    status = job_status(Snapshot(job_of(job), pods))
    assert list(_waiting(status, ("master-0", "worker-0", "worker-1"))) == [
        "master-0 and 1 more: there is no output (Unschedulable); -f waits for it",
        "worker-1: there is no output (it has no pod, the job is Created); -f waits for it",
    ]


def test_a_restart_in_place_is_a_line():
    event = Event("restarting", {"restart": 2, "reason": {}})
    assert _event_text(event) == [("restart 2", "yellow")]
