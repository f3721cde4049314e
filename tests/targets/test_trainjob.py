"""A TrainJob and its TrainingRuntime: what each has, and how a job of other tools is read."""

import pytest
import yaml

from k8sjob.backends.api import Snapshot
from k8sjob.errors import SpecError
from k8sjob.findings import field_path
from k8sjob.kube.objects import at_path
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.rendering.diff import difference
from k8sjob.rendering.manifest import manifest, render
from k8sjob.spec import JobSpec
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import (
    by_name,
    job_of,
    references,
    replica_names,
    seconds_to_end,
    with_child,
)

TARGET = by_name("trainjob")
JOB = ("runtime", "spec", "template", "spec", "replicatedJobs", 0, "template", "spec")


def spec(**fields):
    document = {"name": "tiny", "image": "example/image:1", "run": {"script": "main.py"}}
    document |= {"target": "trainjob", "replicas": {"workers": 1, "nproc_per_node": 2}}
    return JobSpec.model_validate({**document, **fields})


def stored(**more):
    """The job as an apiserver has it."""
    meta = {"uid": "1", "namespace": "team", "creationTimestamp": "2026-01-01T00:00:00Z"}
    job = manifest(spec(policy={"active_deadline": 60}))
    return job_of({**job.document, "metadata": {**job.metadata, **meta}, **more})


def not_created(message):
    """Trainer's Event about a job of which it could make nothing."""
    return {
        "reason": "TrainJobResourcesCreationFailed",
        "message": f"TrainJob resources reconciliation failed: {message}",
        "involvedObject": {"kind": "TrainJob", "name": "tiny", "uid": "1"},
        "lastTimestamp": "2026-01-01T00:00:01Z",
    }


def test_the_job_has_the_process_and_its_runtime_the_rest():
    volumes = [{"name": "data", "mount": "/data", "pvc": "data"}]
    runtime, job = yaml.safe_load_all(render(spec(volumes=volumes, resources={"cpu": 2})))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "tiny"
    trainer = job["spec"]["trainer"]
    assert trainer["image"] == "example/image:1"
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "2"}
    assert trainer["args"] == ["main.py"]
    # The webhook refuses those names (validator.trainjob.trainer.kubeflow.org).
    assert not [v["name"] for v in trainer["env"] if v["name"].startswith("PET_")]
    (container,) = at_path({"runtime": runtime}, *JOB, "template", "spec")["containers"]
    assert container["name"] == "node"
    assert not container.keys() & {"image", "command", "args", "env", "resources"}
    mounting = manifest(spec(volumes=volumes))
    assert [reference.name for reference in references(mounting)] == ["data"]
    assert mounting.raw.keys() == {"apiVersion", "kind", "metadata", "spec"}


UNNAMED = {"network": {"enableDNSHostnames": False}}
TWICE = {"replicatedJobs": [{"name": "node", "replicas": 2}]}
LOADER = {"replicatedJobs": [{"name": "loader", "template": {"spec": {}}}]}
OTHER_A = {"name": "node", "env": [{"name": "A", "value": "2"}]}
OTHER_PODS = {"template": {"spec": {"containers": [OTHER_A]}}}
OTHER_ENV = {"replicatedJobs": [{"name": "node", "template": {"spec": OTHER_PODS}}]}


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"policy": {"ttl_after_finished": 60}}, "policy.ttl_after_finished", "would run again"),
        ({"gang": {"scheduler": "volcano"}}, "gang", "overlay.runtime"),
        ({"name": "a" * 49}, "name", "use at most 48"),
        (
            {
                "run": {"script": "main.py", "env": {"A": "1"}},
                "overlay": {"runtime": {"spec": {"template": {"spec": OTHER_ENV}}}},
            },
            f"overlay.{field_path((*JOB, 'template', 'spec', 'containers', 0, 'env', 0))}",
            "spec.trainer has another value, which takes precedence",
        ),
        (
            {
                "image": {"repository": "example/image", "base": "python:3.12"},
                "overlay": {"spec": {"trainer": {"image": "other"}}},
            },
            "overlay.spec.trainer.image",
            "would replace the image that is built",
        ),
        (
            {"overlay": {"runtime": {"metadata": {"name": "other"}}}},
            "overlay.runtime.metadata.name",
            "set `name` in the job spec",
        ),
        (
            {"overlay": {"spec": {"runtimeRef": {"name": "torch-distributed"}}}},
            "overlay.spec.runtimeRef",
            "set `runtime` in the job spec",
        ),
        (
            {"overlay": {"spec": {"trainer": {"numNodes": 5}}}},
            "overlay.spec.trainer",
            "5 Pods with 2 ranks each, but WORLD_SIZE is 4",
        ),
        (
            {"target": "jobset", "overlay": {"spec": {"network": {"subdomain": "other"}}}},
            "overlay.spec.network",
            "no Pod has the name .*, which is MASTER_ADDR",
        ),
        (
            {"overlay": {"runtime": {"spec": {"template": {"spec": UNNAMED}}}}},
            "overlay.runtime.spec.template.spec.network",
            "no Pod has the name .*, which is MASTER_ADDR",
        ),
        ({"overlay": {"runtime": None}}, "overlay.runtime", "completion index; use Indexed"),
        (
            {"overlay": {"runtime": {"spec": {"template": {"spec": LOADER}}}}},
            "overlay.runtime.spec.template.spec.replicatedJobs[0]",
            "'loader' is another replicated Job",
        ),
        ({"run": {"command": ["tune", "run"]}}, "run.command", "Trainer rewrites `tune run`"),
        ({"target": "jobset", "overlay": {"runtime": {}}}, "overlay.runtime", "a TrainJob's"),
        (
            {"target": "job", "overlay": {"spec": {"completions": 3}}},
            "overlay.spec.completions",
            "3 Pods with 2 ranks each, but WORLD_SIZE is 4",
        ),
        (
            {"target": "job", "overlay": {"spec": {"parallelism": 1}}},
            "overlay.spec.parallelism",
            "1 of 2 Pods at a time",
        ),
        (
            {"overlay": {"runtime": {"spec": {"template": {"spec": TWICE}}}}},
            "overlay.runtime.spec.template.spec.replicatedJobs[0].replicas",
            "2 Jobs of 2 Pods",
        ),
    ],
)
def test_what_it_cannot_have_is_refused(fields, field, text):
    with pytest.raises(SpecError, match=text) as caught:
        manifest(spec(**fields))
    assert caught.value.findings[0].field == field


def test_fields_of_pods_and_of_the_runtime_are_merged_into_it():
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    container = {"name": "pytorch", "env": env, "tty": True}
    job = manifest(
        spec(
            run={"script": "main.py", "env": {"B": "1"}},
            pod_template={"spec": {"containers": [container]}},
            overlay={"runtime": {"spec": {"podGroupPolicy": {"coscheduling": {}}}}},
        )
    )
    (merged,) = job.at(*JOB, "template", "spec")["containers"]
    assert (merged["name"], merged["tty"]) == ("node", True)
    env = {v["name"]: v for v in job.replicas[0].pod["containers"][0]["env"]}
    assert "RANK" in env
    assert (env["A"]["value"], env["B"]["value"]) == ("1", "2")
    assert job.companion["spec"]["podGroupPolicy"] == {"coscheduling": {}}


def test_a_changed_runtime_is_a_difference_and_what_kueue_adds_is_none():
    before, after = manifest(spec()), manifest(spec(policy={"termination_grace": "9s"}))
    pod = "runtime.spec.template.spec.replicatedJobs[0].template.spec.template.spec"
    assert difference(before, after).recreated == (
        f"{pod}.terminationGracePeriodSeconds",
        "spec.trainer.env[0].value.stop_grace",
    )
    patch = {"manager": "kueue.x-k8s.io/manager", "trainingRuntimeSpec": {}}
    queued = {**before.document, "spec": {**before.spec, "runtimePatches": [patch]}}
    assert not difference(job_of(queued), before)


def test_that_trainer_cannot_create_the_jobset_is_reported():
    detail = "exceeded quota: none, requested: count/jobsets=1, used: count/jobsets=0, limited: 0"
    event = not_created(f"jobsets is forbidden: {detail}")
    findings = diagnose(Snapshot(stored(), (), (event,)), {})
    assert Cause.QUOTA in {finding.id for finding in findings}


def test_a_job_of_another_tool_is_read_by_the_job_that_trainer_made():
    job = {
        "kind": "TrainJob",
        "metadata": {"name": "theirs", "uid": "1"},
        "spec": {"runtimeRef": {"name": "torch-distributed"}},
    }
    assert tuple(replica_names(job_of(job))) == ("master-0",)
    begun, before = "2026-01-01T00:00:09Z", "2026-01-01T00:00:00Z"
    job["metadata"]["creationTimestamp"] = begun
    for created, taken in ((begun, True), (before, False)):  # of an earlier job of the name
        child = {"metadata": {"name": "theirs-node-0", "uid": "j", "creationTimestamp": created}}
        assert (with_child(job_of(job), [child]).child is child) is taken
    pod = {"terminationGracePeriodSeconds": 5, "containers": [{"name": "node"}]}
    job_spec = {"completions": 3, "template": {"spec": pod}}
    job = job_of({**job, "child": {"spec": job_spec, "status": {"active": 3, "ready": 3}}})
    assert tuple(replica_names(job)) == ("master-0", "worker-0", "worker-1")
    assert job.state()[0] is JobState.RUNNING
    assert seconds_to_end(job) == 65


def test_the_shorter_deadline_counts():
    job = stored()
    assert job.spec["activeDeadlineSeconds"] == job.active_deadline == 60
    for seconds, least in ((30, 30), (90, 60)):
        job.at(*JOB)["activeDeadlineSeconds"] = seconds  # of a TrainingRuntime of others
        assert job.active_deadline == least
    message = "TrainJob exceeded its active deadline"
    at_end = {"type": "Failed", "status": "True", "message": message}
    findings = diagnose(Snapshot(stored(status={"conditions": [at_end]})), {})
    assert Cause.DEADLINE in {finding.id for finding in findings}


@pytest.mark.parametrize("looked_up", [True, False])  # or Trainer's controller says it
def test_that_somebody_deleted_its_runtime_is_the_cause(looked_up):
    event = not_created("TrainingRuntime specified in TrainJob is not found")
    gone = {"kind": "Status", "details": {"kind": "trainingruntimes", "name": "tiny"}}
    events = () if looked_up else (event,)
    findings = diagnose(Snapshot(stored(), (), events), {}, [gone] * looked_up)
    assert (findings[0].id, "does not exist" in findings[0].message) == (Cause.COMPANION, True)
    assert Cause.REFUSED not in {finding.id for finding in findings}
    assert "submit --replace" in findings[0].next_step
