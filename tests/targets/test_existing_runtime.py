"""TrainJobs over a runtime that exists: what they say of it, what they cannot, and what fits."""

from collections import Counter
from pathlib import Path

import pytest
import yaml
from clusters import Cluster, status

from k8sjob.backends.api import Snapshot
from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.checks.lint import lint
from k8sjob.errors import BackendError, SpecError
from k8sjob.jobs.plan import plan_run, plan_submission
from k8sjob.jobs.submit import compare, for_namespace, submit_plan
from k8sjob.kube.objects import at_path
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.rendering.diff import difference
from k8sjob.rendering.manifest import manifest, render
from k8sjob.spec import JobSpec
from k8sjob.spec.base import part_types
from k8sjob.targets.jobs import job_of, references

STOCK = list(yaml.safe_load_all((Path(__file__).parent / "stock_runtimes.yaml").read_text()))
RUNTIMES = {runtime["metadata"]["name"]: runtime for runtime in STOCK}
RUNTIME = RUNTIMES["torch-distributed"]
PODS = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs", 0, "template", "spec")
PODS = (*PODS, "template")
CASE = """\
name: digits
namespace: team
target: trainjob
image: registry.example/team/digits:1
replicas: {workers: 1}
run: {command: [python, main.py]}
"""


def spec(**fields):
    return JobSpec.from_yaml(CASE).with_(**{"runtime": "torch-distributed", **fields})


def test_the_job_says_all_that_a_trainjob_can():
    volumes = [{"name": "data", "mount": "/data", "pvc": "data"}]
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists"}
    context = {"runAsNonRoot": True, "allowPrivilegeEscalation": False}
    context["capabilities"] = {"drop": ["ALL"]}
    side = {"name": "side", "env": [{"name": "B", "value": "2"}], "securityContext": context}
    pytorch = {"name": "pytorch", "args": ["a.py"], "env": [{"name": "A", "value": "1"}]}
    pod = {"containers": [pytorch, side], "schedulingGates": [{"name": "team/gate"}]}
    job = manifest(
        spec(
            image={"repository": "registry.example/team/digits:1", "pull_secrets": ["login"]},
            labels={"team": "vision"},
            volumes=volumes,
            service_account="trainer",
            node_selector={"pool": "gpu"},
            tolerations=[toleration],
            affinity={"podAffinity": {}},
            security="restricted",
            policy={"active_deadline": 60, "termination_grace": 9},
            pod_template={"spec": pod},
            overlay={"spec": {"runtimePatches": [{"manager": "team.example/own"}]}},
        )
    )
    assert job.objects == [job.raw]
    assert {"data", "login", "trainer"} <= {reference.name for reference in references(job)}
    assert manifest(spec()).spec["trainer"]["args"] == []  # else those of the runtime stay
    of_runtime = {"spec": {"containers": [{"name": "node", "command": None}]}}
    assert "args" not in manifest(spec(pod_template=of_runtime)).spec["trainer"]
    assert job.spec["runtimeRef"]["kind"] == "ClusterTrainingRuntime"
    assert job.spec["activeDeadlineSeconds"] == 60
    trainer = job.spec["trainer"]
    assert (trainer["args"], trainer["env"][-1]["name"]) == (["a.py"], "A")
    patch, other = job.spec["runtimePatches"]
    assert [entry["manager"] for entry in (patch, other)] == ["k8sjob.dev/job", "team.example/own"]
    template = at_path(patch, *PODS)
    assert template["metadata"]["labels"]["team"] == "vision"
    node, sidecar = template["spec"].pop("containers")
    assert node.keys() == {"name", "securityContext", "volumeMounts"}
    assert sidecar == side
    assert [volume["name"] for volume in template["spec"].pop("volumes")] == ["dshm", "data"]
    assert template["spec"].pop("securityContext")["fsGroup"] == 1000
    assert template["spec"] == {
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "login"}],
        "nodeSelector": {"pool": "gpu"},
        "affinity": {"podAffinity": {}},
        "tolerations": [toleration],
        "schedulingGates": [{"name": "team/gate"}],
        "terminationGracePeriodSeconds": 9,
    }


def test_one_error_has_all_that_it_cannot_say():
    beyond = {
        "host_network": True,
        "pod_template": {
            "metadata": {"finalizers": ["a/b"]},
            "spec": {"hostAliases": [], "containers": [{"name": "side", "image": "i"}]},
        },
        "overlay": {"runtime": {"spec": {}}, "spec": {"runtimeRef": {"name": "other"}}},
    }
    with pytest.raises(SpecError, match=r"the ClusterTrainingRuntime torch-d.* decides") as caught:
        manifest(spec(**beyond))
    assert {finding.field for finding in caught.value.findings} == {
        *("host_network", "pod_template.metadata.finalizers", "pod_template.spec.hostAliases"),
        *("pod_template.spec.containers[0].image", "overlay.runtime", "overlay.spec.runtimeRef"),
    }
    namesake = {"kind": "TrainingRuntime", "name": "digits"}
    with pytest.raises(SpecError, match=r"runtime: the TrainingRuntime of the job's name is the"):
        render(spec(runtime=namesake))
    with pytest.raises(SpecError, match=r"runtime: a JobSet has none; use target trainjob, or"):
        render(spec(target="jobset"))


def leaves(value, key=""):
    """All scalars in a value, each with its key."""
    if isinstance(value, str) and value.startswith('{"backend"'):  # the settings of the agent
        value = {**yaml.safe_load(value), "restart_policy": ""}
    if not (isinstance(value, dict | list) and value):
        return Counter([(key, str(value))])
    pairs = value.items() if isinstance(value, dict) else ((key, entry) for entry in value)
    return sum((leaves(below, name) for name, below in pairs), Counter())


def said(job_spec):
    """What a job and the template of its Pods say."""
    job = manifest(job_spec)
    written = {k: v for k, v in job.spec.items() if k not in {"runtimeRef", "runtimePatches"}}
    return leaves([job.job_spec["template"], job.labels, written])


def examples(part=JobSpec):
    """The paths of all fields of a spec, each with an example."""
    for name, field in part.model_fields.items():
        yield from (((name,), example) for example in field.examples)
        for below in part_types(field.annotation):
            yield from (((name, *path), example) for path, example in examples(below))


def test_each_field_is_said_or_refused():
    volume = {"name": "data", "mount": "/data", "pvc": "data"}
    image = {"repository": "registry.example/team/digits", "base": "python:3"}
    run = {"command": None, "script": "main.py"}
    over = spec(image=image, kueue_queue="research", run=run, volumes=[volume])
    plain = over.with_(runtime=None)
    before, before_over, refused, changing = said(plain), said(over), set(), set()
    for (field, *path), value in examples():
        for key in reversed(path):
            value = {key: value}  # noqa: PLW2901 - an example as job.yaml has it
        change = {field: [{**volume, **value}] if field == "volumes" and path else value}
        try:
            added = said(plain.with_(**change)) - before
        except SpecError:  # no TrainJob has it, or not without another field
            continue
        if field not in {"name", "target", "runtime"}:
            try:
                assert not added - (said(over.with_(**change)) - before_over), (field, path)
            except SpecError as error:
                refused |= {finding.field for finding in error.findings}
            else:
                changing |= {".".join((field, *path))} if added else set()
    assert len(changing) > 60
    assert refused == {
        *("host_network", "priority_class", "runtime_class", "service_account_token"),
        *("topology_spread", "run.env_from", "policy.restart_policy", "image.pull_policy"),
        "pod_template.spec.enableServiceLinks",
    }


def test_a_run_on_this_machine_ignores_it(tmp_path):
    containers = [{"name": "pytorch", "tty": True}, {"name": "side", "env": []}]
    pod = {"containers": containers, "initContainers": [{"name": "prepare", "env": []}]}
    job = spec(run={"command": ["true"]}, pod_template={"spec": pod})
    plan = plan_run(job, tmp_path)
    assert [c["name"] for c in plan.job.replicas[0].pod["containers"]] == ["pytorch"]
    (tmp_path / "job.yaml").write_text(
        job.with_(pod_template={"spec": {**pod, "containers": containers[1:]}}).to_yaml()
    )
    assert not [finding for finding in lint(tmp_path) if "image" in finding.message]
    assert (plan.job.target.name, plan.spec.runtime) == ("pytorchjob", None)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("torch-distributed", {}, ""),
        ("jax-distributed", {}, "has no mlPolicy for torch .it has jax"),
        ("deepspeed-distributed", {}, "has no replicated Job `node` with the label trainer.k"),
        ("torchtune-llama3.2-1b", {}, "asks for nvidia.com/gpu, and the job does not; set resou"),
        ("torchtune-llama3.2-1b", {"resources": {"gpus": 1}}, ""),
        (
            "torch-distributed",
            {"pod_template": {"spec": {"containers": [{"name": "side", "env": []}]}}},
            "has no container 'side'; change one of node",
        ),
        ("slow", {"policy": {"active_deadline": 60}}, "ends a job after 30 s; set policy.active_d"),
        (
            "slow",
            {"volumes": [{"name": "data", "mount": "/data", "pvc": "data"}]},
            "has another volume 'data'; give that of the job another name",
        ),
        (
            "slow",
            {"volumes": [{"name": "own", "mount": "/data", "pvc": "data"}]},
            "mounts a volume at /data, and its subPath would stay; mount that of the job at",
        ),
        ("slow", {}, "has a network in which no Pod has the name that is MASTER_ADDR"),
        ("gone", {}, "clustertrainingruntimes/gone does not exist; namespace blue may use `runt"),
    ],
)
def test_the_runtime_is_looked_at_before_a_submission(name, fields, message):
    plan = plan_submission(spec(namespace=None, runtime=name, **fields))
    backend = ClusterBackend(Stock())
    if not message:
        assert for_namespace(plan, backend) == plan
        return
    with pytest.raises(SpecError, match=message) as caught:
        for_namespace(plan, backend)
    assert {finding.field for finding in caught.value.findings} == {"runtime"}


class Stock(Cluster):
    """A cluster with the stock runtimes, whose user may not create others."""

    def answer(self, method, path, _query, body):
        *_, resource, name = path.split("/")
        if method == "POST" and name == "trainjobs":
            patches = [
                {**patch, "time": "2026"} for patch in body["spec"].get("runtimePatches", ())
            ]
            return {**body, "spec": {**body["spec"], "runtimePatches": patches}}
        if method == "POST":
            return status(403, "Forbidden", f'cannot create resource "{name}" in API group "x"')
        if name == "clustertrainingruntimes":
            return {"items": STOCK}
        if resource == "clustertrainingruntimes":
            return slow() if name == "slow" else RUNTIMES.get(name)
        return None


def slow():
    """A runtime that says what a job says, too."""
    runtime = yaml.safe_load(yaml.safe_dump(RUNTIME))
    runtime["metadata"]["name"] = "slow"
    jobset = runtime["spec"]["template"]["spec"]
    jobset["network"] = {"subdomain": "train"}
    (node,) = jobset["replicatedJobs"]
    node["template"]["spec"]["activeDeadlineSeconds"] = 30
    pod = node["template"]["spec"]["template"]["spec"]
    pod["volumes"] = [{"name": "data", "emptyDir": {}}]
    mount = {"name": "work", "mountPath": "/data", "subPath": "team"}
    pod["containers"][0]["volumeMounts"] = [mount]
    return runtime


@pytest.mark.parametrize(
    "field",
    [
        "spec.runtimePatches",
        f"spec.runtimePatches[0].{'.'.join(map(str, PODS))}.spec.terminationGracePeriodSeconds",
    ],
)
def test_trainer_before_2_3_is_said_to_be_too_old(field):
    def answer(method, *_):
        unknown = f'strict decoding error: unknown field "{field}"'
        return status(400, "BadRequest", unknown) if method == "POST" else None

    with pytest.raises(BackendError, match=r"Kubeflow Trainer is too old; ask for it .2\.3"):
        submit_plan(plan_submission(spec(namespace=None)), ClusterBackend(Cluster(answer)))


def test_without_the_right_to_create_one_those_that_fit_are_offered():
    plan = plan_submission(spec(namespace=None, runtime=None))
    offer = r"cannot create trainingruntimes in namespace blue.*may use `runtime: torch-distri"
    for ask in (submit_plan, compare):
        with pytest.raises(BackendError, match=offer):
            ask(plan, ClusterBackend(Stock()))
    over = plan_submission(spec(namespace=None))
    assert compare(over, ClusterBackend(Stock())).is_new


def test_a_job_shares_its_runtime():
    job = manifest(spec())
    stored = job_of({**job.document, "runtime": RUNTIME})
    assert stored.objects == [job.raw]
    assert not difference(stored, job)
    details = {"kind": "clustertrainingruntimes", "name": "torch-distributed"}
    meta = {**job.metadata, "uid": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    snapshot = Snapshot(job_of({**job.document, "metadata": meta}))
    findings = diagnose(snapshot, {}, [{"kind": "Status", "details": details}])
    assert findings[0].id is Cause.COMPANION
    assert "clustertrainingruntimes/torch-distributed does not exist" in findings[0].message
    own = {"kind": "Status", "details": {"kind": "trainingruntimes", "name": "digits"}}
    assert Cause.COMPANION not in {finding.id for finding in diagnose(snapshot, {}, [own])}
