"""What a record keeps of the time when more could be seen."""

import pytest
from observed import NOW, RECORDED, at, ended, make_jobset, make_pod, of_recorded, snapshot

from k8sjob.backends.api import JobRef
from k8sjob.backends.record import Records
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.findings import findings, findings_to_keep
from k8sjob.targets.jobs import job_of

LIMIT = {"type": "Failed", "status": "True", "reason": "PyTorchJobFailed"}
LIMIT |= {"message": "Job has failed because it has reached the specified backoff limit"}


@pytest.mark.parametrize(
    ("name", "cause"),
    [("crash", "crash"), ("gone-command", "start"), ("image-missing", "image-missing")],
)
@pytest.mark.parametrize("end", [{}, {"deletionTimestamp": "2027-01-01T00:00:00Z"}])
def test_a_record_keeps_the_cause_when_pods_and_events_are_gone(
    name, cause, end, tmp_path, monkeypatch
):
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path))
    cluster, records = of_recorded({**RECORDED[name], "related": []}), Records()
    (before,) = cluster.snapshots
    ref = JobRef.of(before.job)
    records.keep(cluster, ref, before, findings_to_keep)
    metadata = {**before.job.raw["metadata"], **end}
    status = {"conditions": [] if end else [LIMIT]}
    job = job_of({**before.job.raw, "metadata": metadata, "status": status})
    cluster.lines = []
    for _ in range(2):  # it stays, once
        gone = before._replace(job=job, pods=(), events=())
        records.keep(cluster, ref, gone, findings_to_keep)
        for backend in (records.open(ref), cluster):
            first, *others = findings(backend, gone)
            assert (first.id, first.message.count("(seen at 2026-")) == (cause, 1)
            assert first.next_step.startswith("its record says: ")
            assert [one.id for one in others] == ["deleting" if end else "restart-limit"]


def test_a_job_that_is_deleted_says_what_had_failed():
    failed = make_pod("worker-0", terminated=ended(1, "ValueError: no"), dying=True)
    killed = make_pod("master-0", terminated=ended(143, time="09:20"), dying=True)
    running = snapshot("Running", pods=[killed, failed])
    running.job.raw["metadata"]["deletionTimestamp"] = at("09:14")
    causes = [(one.id, one.replica) for one in diagnose(running, {}, now=NOW)]
    assert causes[:2] == [("deleting", ""), ("crash", "worker-0")]
    assert ("crash", "master-0") not in causes


def test_a_jobs_condition_has_the_exit_code_of_a_pod_that_is_gone():
    """The Job controller's words; the JobSet itself only names the Job."""
    said = "Container node for pod ns/job-node-0-1-x7k2p failed with exit code 137 matching FailJob"
    policy = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}
    policy |= {"message": f"{said} rule at index 0", "lastTransitionTime": at("09:00")}
    failed = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "first: job"}
    node = {"name": "node", "template": {"spec": {"completions": 2, "parallelism": 2}}}
    job = make_jobset(node, condition=failed)
    job["child"] = {"kind": "Job", "status": {"conditions": [policy]}}
    finding, *_ = diagnose(snapshot()._replace(job=job_of(job)), {}, now=NOW)
    assert (finding.id, finding.replica) == ("killed", "worker-0")
