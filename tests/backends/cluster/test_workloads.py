"""Whatever runs Pods, by its kind and name: found by discovery, its Pods by who owns them."""

import click
import pytest
from clusters import Cluster, kubeconfig, status

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.cli.find_job import Place, find
from k8sjob.errors import BackendError, K8sJobError
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import select
from k8sjob.observe.status import job_status
from k8sjob.targets.api import JobState

GROUPS = {
    "ray.io/v1": {"rayjobs": ("RayJob", "rayjob"), "rayclusters": ("RayCluster", "raycluster")},
    "kubeflow.org/v1": {"pytorchjobs": ("PyTorchJob", "pytorchjob")},
    "apps.kruise.io/v1": {"rayjobs": ("RayJob", "rayjob", "krj")},
    "workload.codeflare.dev/v1beta2": {"appwrappers": ("AppWrapper", "appwrapper", "aw")},
}
PLURALS = {
    **{kind: plural for kinds in GROUPS.values() for plural, (kind, *_) in kinds.items()},
    **{kind: f"{kind.lower()}s" for kind in ("Pod", "Job", "CronJob", "Deployment", "ReplicaSet")},
    **{kind: f"{kind.lower()}s" for kind in ("StatefulSet", "PyTorchJob", "Event")},
}
AW = "appwrappers.workload.codeflare.dev/aw"
IMAGE = "registry.example/work:1"


def obj(version, kind, name, owner=None, *, minute=0, **fields):
    """An object of team blue, controlled by another."""
    meta = {"name": name, "namespace": "blue", "uid": f"{kind}-{name}"}
    meta["creationTimestamp"] = f"2026-11-01T00:{minute:02}:00Z"
    if owner:
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        uid = owner["metadata"]["uid"]
        reference |= {"name": owner["metadata"]["name"], "uid": uid, "controller": True}
        meta["ownerReferences"] = [reference]
    meta |= fields.pop("metadata", {})
    return {"apiVersion": version, "kind": kind, "metadata": meta, **fields}


def pod(name, owner=None, *, phase="Running", minute=0, containers=("main",), **fields):
    state = {"terminated": {"exitCode": 1, "reason": "Error"}} if phase == "Failed" else {}
    state = state or ({"running": {}} if phase == "Running" else {"terminated": {"exitCode": 0}})
    statuses = [{"name": c, "restartCount": 0, "state": state} for c in sorted(containers)]
    spec = {"nodeName": "n", "containers": [{"name": c, "image": IMAGE} for c in containers]}
    spec["containers"][0] |= fields.pop("container", {})
    now = {"phase": phase, "containerStatuses": statuses}
    return obj("v1", "Pod", name, owner, minute=minute, spec=spec, status=now, **fields)


def template(**fields):
    return {"template": {"spec": {"containers": [{"name": "main", "image": IMAGE}]}}, **fields}


class World(Cluster):
    """A cluster with these objects; of `hidden` resources nothing may be read."""

    def __init__(self, *objects, hidden=()):
        super().__init__()
        self.objects, self.hidden = objects, hidden

    def answer(self, _method, path, query, _body):
        steps = path.strip("/").split("/")
        if len(steps) == 2 and (found := [v for v in GROUPS if v.startswith(f"{steps[1]}/")]):
            return self.group(found[0])
        if (kinds := GROUPS.get("/".join(steps[1:]))) is not None:
            names = ("kind", "singularName")
            return {
                "resources": [
                    {"name": plural, "namespaced": True, **dict(zip(names, kind, strict=False))}
                    | {"shortNames": list(kind[2:])}
                    for plural, kind in kinds.items()
                ]
            }
        place = steps.index("namespaces") + 2 if "namespaces" in steps else len(steps)
        plural, *name = steps[place:] or [""]
        if plural in self.hidden:
            return status(403, "Forbidden", f'User "eve" cannot get resource "{plural}"')
        of_kind = [o for o in self.objects if PLURALS[o["kind"]] == plural]
        of_kind = [o for o in of_kind if not name or o["metadata"]["name"] == name[0]]
        if name:
            return of_kind[0] if of_kind else None
        selector = query.get("labelSelector", "")
        wanted = dict(term.split("=") for term in selector.split(",") if "=" in term)
        if (field := query.get("fieldSelector", "")).startswith("metadata.name="):
            of_kind = [o for o in of_kind if o["metadata"]["name"] == field.partition("=")[2]]
        labels = [(o, o["metadata"].get("labels", {})) for o in of_kind]
        return {"kind": "List", "items": [o for o, has in labels if wanted.items() <= has.items()]}

    @staticmethod
    def group(version):
        name = version.partition("/")[0]
        return {"name": name, "versions": [{"groupVersion": version}]}


def look(name, *objects, **options):
    """The snapshot of what a command line calls so."""
    backend = ClusterBackend(World(*objects, **options))
    return backend.snapshot(backend.find(name))


RAY = obj("ray.io/v1", "RayJob", "tune", spec={"rayClusterSpec": {"headGroupSpec": template()}})
RAY_CLUSTER = obj("ray.io/v1", "RayCluster", "tune-raycluster-k4x", RAY)
DEPLOY = obj(
    "apps/v1", "Deployment", "web", spec={"selector": {"matchLabels": {"app": "web"}}, **template()}
)
DEPLOY["spec"]["replicas"] = 2
REPLICA_SET = obj("apps/v1", "ReplicaSet", "web-6d4b", DEPLOY)
WEB = {"metadata": {"labels": {"app": "web"}}}


@pytest.mark.parametrize("name", ["rayjobs.ray.io/tune", "RayJob.ray.io/tune"])
def test_the_pods_are_those_that_ownerreferences_lead_from(name):
    others = [obj("batch/v1", "Job", f"other-{number}") for number in range(20)]
    pods = [pod(f"{job['metadata']['name']}-x", job) for job in others]
    mine = [pod("tune-raycluster-k4x-head-a", RAY_CLUSTER), pod("tune-submit-b", RAY)]
    shown = look(name, RAY, RAY_CLUSTER, *others, *pods, *mine, pod("tune-alone"))
    assert {p["metadata"]["name"] for p in shown.pods} == {o["metadata"]["name"] for o in mine}
    assert str(JobRef.of(shown.job)) == "blue/rayjobs.ray.io/tune"
    (role,) = shown.job.replicas
    assert role.path == ("spec", "rayClusterSpec", "headGroupSpec", "template")


def test_many_owners_cost_few_requests():
    jobs = [obj("batch/v1", "Job", f"other-{number}") for number in range(300)]
    world = World(RAY, *jobs, *(pod(f"p-{number}", job) for number, job in enumerate(jobs)))
    backend = ClusterBackend(world)
    backend.snapshot(backend.find("rayjobs.ray.io/tune"))
    assert len(world.asked) < 20


def test_a_selector_alone_makes_no_pod_its_own():
    own, orphan = pod("web-6d4b-a", REPLICA_SET, **WEB), pod("web-debug", **WEB)
    shown = look("deploy/web", DEPLOY, REPLICA_SET, own, orphan)
    assert [p["metadata"]["name"] for p in shown.pods] == ["web-6d4b-a"]
    assert shown.job.replica_named("web-6d4b-gone")
    assert not shown.job.replica_named("web-api-0")
    both = look("pods/app=web", DEPLOY, REPLICA_SET, own, orphan)
    assert (len(both.pods), diagnose(both, {})) == (2, [])


def test_labels_alone_tell_where_an_owner_may_not_be_read(caplog):
    own = pod("web-6d4b-a", REPLICA_SET, **WEB)
    shown = look("deploy/web", DEPLOY, REPLICA_SET, own, hidden=("replicasets", "events"))
    assert len(shown.pods) == 1
    warnings = [record.getMessage() for record in caplog.records]
    assert ["cannot be read" in warning for warning in warnings] == [True, True]


def test_an_object_whose_pods_are_all_refused_has_the_events_of_what_is_between():
    about = {**{k: REPLICA_SET[k] for k in ("kind", "apiVersion")}, **REPLICA_SET["metadata"]}
    event = obj("v1", "Event", "e", minute=1, involvedObject=about, type="Warning")
    text = 'pods "web-6d4b-x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1'
    event |= {"reason": "FailedCreate", "message": f"Error creating: {text}, limited: pods=1"}
    event["lastTimestamp"] = "2026-11-01T00:01:00Z"
    shown = look("deploy/web", DEPLOY, REPLICA_SET, event)
    (finding,) = diagnose(shown, {})
    assert (finding.id, finding.message[:5]) == ("quota", "web: ")


def test_of_a_cronjob_the_newest_run_is_shown_and_what_still_runs_of_others():
    cron = obj("batch/v1", "CronJob", "nightly")
    runs = [obj("batch/v1", "Job", f"nightly-{n}", cron, minute=10 * n) for n in range(3)]
    pods = [
        pod("nightly-0-a", runs[0], phase="Failed"),
        pod("nightly-1-b", runs[1]),
        pod("nightly-2-c", runs[2], phase="Succeeded"),
    ]
    shown = look("cj/nightly", cron, *runs, *pods)
    assert [p["metadata"]["name"] for p in shown.pods] == ["nightly-1-b", "nightly-2-c"]


def test_what_is_part_of_a_job_or_wraps_one_leads_to_it():
    wrapper = obj("workload.codeflare.dev/v1beta2", "AppWrapper", "aw")
    job = obj("kubeflow.org/v1", "PyTorchJob", "train", wrapper, spec={})
    worker = pod("train-worker-0", job)
    backend = ClusterBackend(World(wrapper, job, worker))
    for name in ("pod/train-worker-0", AW, "pytorchjob/train"):
        found = backend.find(name)
        assert (found.name, found.kind) == ("train", "PyTorchJob"), name
    # One that Kueue holds back has no Pods that lead to it.
    assert ClusterBackend(World(wrapper, job)).find(AW).name == "train"


def torchrun(number, **container):
    labels = {"apps.kubernetes.io/pod-index": str(number)}
    owner = obj("apps/v1", "StatefulSet", "train")
    return pod(f"train-{number}", owner, metadata={"labels": labels}, container=container)


@pytest.mark.parametrize(
    ("container", "rank", "replica"),
    [
        ({"command": ["torchrun", "--nproc-per-node=2", "train.py"]}, 3, "train-1"),
        ({"env": [{"name": "MASTER_ADDR", "value": "train-0"}]}, 1, "train-1"),
        ({"command": ["postgres"]}, None, None),
    ],
)
def test_ranks_are_those_that_pods_of_torch_have(container, rank, replica):
    owner = obj("apps/v1", "StatefulSet", "train")
    job = look("sts/train", owner, torchrun(1, **container), torchrun(0, **container)).job
    assert job.is_elastic is (rank is None)
    if rank is not None:
        assert select(job, ranks=[rank]) == (replica,)
    else:
        with pytest.raises(BackendError, match="have no ranks"):
            select(job, ranks=[0])


@pytest.mark.parametrize(
    ("status", "phase", "state"),
    [
        ({"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"}, "Succeeded", "Succeeded"),
        ({"state": {"phase": "Aborted"}}, "Succeeded", "Stopped"),  # Volcano
        ({"phase": "Error", "message": "child failed"}, "Failed", "Failed"),  # Argo
        # Argo Rollouts call a rollout Completed whose Pods serve.
        ({"conditions": [{"type": "Completed", "status": "True"}]}, "Running", "Running"),
        ({"conditions": [{"type": "Completed", "status": "True"}]}, "Succeeded", "Succeeded"),
        ({"state": "ready"}, "Failed", "Failed"),
    ],
)
def test_the_state_is_by_common_words_else_by_the_pods(status, phase, state):
    owner = {**RAY, "status": status}
    shown = job_status(look("rayjobs.ray.io/tune", owner, pod("tune-a", owner, phase=phase)))
    assert shown.state is JobState(state)


def test_of_several_containers_the_one_that_kubectl_chooses_trains():
    annotations = {"kubectl.kubernetes.io/default-container": "train"}
    alone = pod("p", phase="Failed", containers=("sidecar", "train"))
    assert job_status(look("pod/p", alone)).replicas[0].exit_code == 1
    alone["metadata"]["annotations"] = annotations
    assert look("pod/p", alone).job.replicas[0].main["name"] == "train"


def test_how_a_command_line_names_them(tmp_path):
    """Only what is certain is no namespace; a command that changes something takes none."""
    own = pod("web-6d4b-a", REPLICA_SET, **WEB)
    wrapper = obj("workload.codeflare.dev/v1beta2", "AppWrapper", "aw")
    with World(DEPLOY, REPLICA_SET, own, wrapper).served() as server:
        place = Place(kubeconfig=str(kubeconfig(tmp_path, server.url)))
        blue = Place(kubeconfig=place.kubeconfig, namespace="blue")
        named = ("deploy/web", "blue/Deployments/web", "deployments.apps/web", AW)
        refs = [str(find(name, at, any_kind=True)[1]) for name in named for at in (place, blue)]
        assert dict.fromkeys(refs).keys() == {"blue/deployment/web", "blue/" + AW}
        # The Pod may be part of a job, which `delete` would take for the one that is meant.
        for name in ("deploy/web", "pod/train-worker-0", AW, "pytorchjob/train"):
            with pytest.raises(K8sJobError, match="names an object by its kind"):
                find(name, place)
        with pytest.raises(BackendError, match="no kind 'rayjob' of objects"):
            find("blue/rayjob/tune", place, any_kind=True)
        for name in ("red/deploy/web", "local/deploy/web", "rayjob/x"):
            with pytest.raises(click.UsageError, match="conflicts with the options"):
                find(name, blue, any_kind=True)
