"""Adopt of kinds but PyTorchJobs: what their authors write themselves, and what becomes of it."""

import copy

import pytest
import yaml
from pytorchjobs import pytorchjob

from k8sjob.adopt import adopt
from k8sjob.errors import SpecError
from k8sjob.rendering.manifest import manifest, render
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import by_name
from k8sjob.yamldoc import dump

OF_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "headless"},
    "spec": {"clusterIP": "None", "selector": {"job-name": "train"}, "ports": [{"port": 29500}]},
}
RANKS = [
    {"name": "MASTER_ADDR", "value": "train-0.headless"},
    {"name": "MASTER_PORT", "value": "29500"},
    {"name": "WORLD_SIZE", "value": "8"},
    {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": OF_INDEX}}},
]


def job(container=None, pod=None, **spec):
    main = {"name": "main", "image": "registry/train:1", "command": ["python", "main.py"]}
    given = {"restartPolicy": "Never", "subdomain": "headless", **(pod or {})}
    template = {"spec": {**given, "containers": [{**main, **(container or {})}]}}
    counts = {"completions": 4, "parallelism": 4, "completionMode": "Indexed", "backoffLimit": 0}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {**counts, "template": template, **spec},
    }


def ignoring(container):
    codes = {"containerName": container, "operator": "In", "values": [1]}
    rules = [{"action": "Ignore", "onExitCodes": codes}]
    return {"backoffLimit": 1, "podFailurePolicy": {"rules": rules}}


def adopted(*objects):
    return adopt("---\n".join(map(dump, objects)))


def trainer(spec, target):
    """The container that a spec renders for a target."""
    (only,) = manifest(spec.with_(target=target)).replicas[0].pod["containers"]
    return only


def test_a_job_with_its_service():
    torchrun = ["torchrun", "--nproc_per_node=2", "--node-rank=$(JOB_COMPLETION_INDEX)"]
    torchrun += ["--rdzv-endpoint=train-0.headless:29500", "main.py"]
    made = adopted(
        SERVICE, job({"command": torchrun, "env": [*RANKS, {"name": "A", "value": "1"}]})
    )
    spec = made.spec
    assert (spec.target, spec.replicas.workers, spec.nproc_per_node) == ("job", 3, 2)
    assert (spec.policy.restart_policy, spec.run.env, spec.overlay) == ("Never", {"A": "1"}, {})
    words = ["--node-rank=$(PET_NODE_RANK)", "--rdzv-endpoint=$(MASTER_ADDR):29500"]
    for target in ("job", "pytorchjob"):  # the same words, and in both the kinds replace them
        assert trainer(spec, target)["command"][2:4] == words
    notes = "\n".join(made.notes)
    for part in (
        "the Service headless is left out",
        "the container main is called pytorch",
        "the address train-0.headless became $(MASTER_ADDR)",
        "sets them in every replica: MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK",
        "MASTER_PORT is 23456 in the rendered manifest, not 29500",
    ):
        assert part in notes
    assert "WORLD_SIZE is" not in notes
    assert "not part of the job" not in notes
    assert adopt(render(spec)).spec == spec


def test_what_the_apiserver_wrote_is_left_out():
    live = job(selector={"matchLabels": {"controller-uid": "1"}}, manualSelector=False)
    live["spec"]["template"]["metadata"] = {"labels": {"job-name": "train", "team": "v"}}
    labels = {"batch.kubernetes.io/controller-uid": "1", "team": "v"}  # the template's, by default
    meta = {"name": "train", "uid": "1", "labels": labels}
    live |= {"status": {"active": 4}, "metadata": meta}
    made = adopted(live)
    assert (made.spec.labels, made.spec.overlay) == ({"team": "v"}, {})
    assert made.notes[0].endswith("metadata.uid, status")


@pytest.mark.parametrize(
    ("given", "policy", "restarts", "overlay"),
    [
        ({"backoffLimit": 0}, "Never", 3, {}),
        ({}, "Never", 3, {"backoffLimit": 6}),
        ({"backoffLimit": 9, "pod": "OnFailure"}, "OnFailure", 2, {}),
        ({"backoffLimit": 0, "pod": "OnFailure"}, "OnFailure", 0, {}),
        ({"backoffLimit": 0, "podReplacementPolicy": "TerminatingOrFailed"}, "Never", 3, {}),
        ({"backoffLimit": 0, "maxFailedIndexes": 1}, "Never", 3, {"maxFailedIndexes": 1}),
        (ignoring("main"), "Never", 3, ignoring("pytorch")),
    ],
)
def test_restarts(given, policy, restarts, overlay):
    given = dict(given)
    one = job(pod={"restartPolicy": given.pop("pod", "Never")})
    del one["spec"]["backoffLimit"]
    one["spec"] |= given
    spec = adopted(one).spec
    assert (spec.policy.restart_policy, spec.policy.max_restarts) == (policy, restarts)
    assert spec.overlay == ({"spec": overlay} if overlay else {})


def test_one_pod_needs_no_index():
    one = job(completions=1, parallelism=1)
    del one["spec"]["completionMode"]
    assert adopted(one).spec.replicas.workers == 0


def test_a_queue_means_suspended():
    one = job()
    one["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    made = adopted(one)
    assert (made.spec.kueue_queue, made.spec.overlay) == ("research", {})
    assert "the job starts suspended" in "\n".join(made.notes)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"completionMode": "NonIndexed"}, "spec.completionMode", "use Indexed"),
        ({"completions": "4"}, "spec.completions", "is not a whole number"),
        ({"parallelism": 2}, "spec.parallelism", "2 of 4 Pods at a time"),
        (
            {"template": {}},
            "spec.template.spec.containers",
            "give that name to the one that trains",
        ),
        ({"completions": 0}, "spec.completions", "0 Pods cannot train; use 1 or more"),
        ({"completions": -1}, "spec.completions", "-1 Pods cannot train; use 1 or more"),
        ({"backoffLimit": 2**31}, "spec.backoffLimit", "2147483648 is not a number of 32 bits"),
    ],
)
def test_what_is_refused(change, field, text):
    with pytest.raises(SpecError) as caught:
        adopted({**copy.deepcopy(job()), "spec": {**job()["spec"], **change}})
    (problem,) = caught.value.findings
    assert problem.field == field
    assert text in problem.text


def test_a_restart_policy_that_no_job_has():
    with pytest.raises(SpecError, match=r"spec\.restartPolicy: 'Always' is not for the Pods"):
        adopted(job(pod={"restartPolicy": "Always"}))


def test_an_amount_that_is_no_quantity():
    asked = {"limits": {"cpu": "500m", "memory": "lots", "nvidia.com/gpu": 1}}
    one = pytorchjob({"resources": asked}, workers=0)
    for refused in (one, job({"resources": asked})):
        with pytest.raises(SpecError, match=r"file:\d+:\d+: .*memory: 'lots' is not a q") as caught:
            adopt(dump(refused), "file")
        assert len(caught.value.findings) == 1


def test_a_name_that_no_job_has_is_the_only_error():
    rendered = render(JobSpec(name="tiny", image="i", run={"command": ["true"]}, target="job"))
    with pytest.raises(SpecError, match="file: name: 'Tiny_1'") as caught:
        adopt(rendered.replace("name: tiny\n", "name: Tiny_1\n"), "file")
    assert len(caught.value.findings) == 1


def test_a_selector_of_ones_own_is_kept():
    one = job(manualSelector=True, selector={"matchLabels": {"app": "x"}})
    kept = {"manualSelector": True, "selector": {"matchLabels": {"app": "x"}}}
    assert adopted(one).spec.overlay["spec"].items() >= kept.items()
    assert "selector" not in adopted(job(selector={"matchLabels": {"uid": "1"}})).spec.overlay


@pytest.mark.parametrize("target", ["job", "jobset", "trainjob"])
def test_defaults_that_a_cluster_fills_in_are_left_out(target):
    spec = JobSpec(name="tiny", image="i", run={"command": ["true"]}, target=target)
    documents = list(yaml.safe_load_all(render(spec)))
    (job,) = (one for one in documents if one["kind"] == by_name(target).kind)
    job["spec"]["managedBy"] = by_name(target).manager
    for one in documents:
        parts = one["spec"].get("template", {}).get("spec", one["spec"]).get("replicatedJobs", ())
        for part in parts:
            part["groupName"] = "default"
            part["template"].setdefault("metadata", {})
    assert adopted(*documents).spec == spec.with_(security="default")


def test_which_of_two_containers_trains():
    side = {"name": "side", "image": "registry/side:1"}
    two = job()
    two["spec"]["template"]["spec"]["containers"].append(side)
    with pytest.raises(SpecError, match="give that name to the one that trains"):
        adopted(two)
    two["spec"]["template"]["spec"]["containers"][0]["name"] = "pytorch"
    assert adopted(two).spec.pod_template["spec"]["containers"][0]["name"] == "side"


def replicated(name, count, **more):
    template = {"spec": {**job(**more)["spec"], "completions": count, "parallelism": count}}
    del template["spec"]["template"]["spec"]["subdomain"]
    return {"name": name, "template": template}


def jobset(*parts, **spec):
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "train"},
        "spec": {**spec, "replicatedJobs": list(parts)},
    }


def runtime(kind="ClusterTrainingRuntime", **spec):
    pod = {"containers": [{"name": "node", "image": "i"}]}
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    template = {"spec": jobset(node)["spec"]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": kind,
        "metadata": {"name": "torch", "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": template, **spec},
    }


ZERO = {"name": "RANK", "value": "0"}
OF_WORKERS, OF_MASTER = ({"args": [f"train-{one}-0-0.train"]} for one in ("workers", "master"))
TRAINER = {
    "numNodes": 3,
    "image": "registry/train:1",
    "command": ["torchrun", "main.py"],
    "env": [{"name": "A", "value": "1"}],
    "resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}},
}


def trainjob(**spec):
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "train"},
        "spec": {"runtimeRef": {"name": "torch"}, "trainer": TRAINER, **spec},
    }


@pytest.mark.parametrize(
    "parts",
    [
        [replicated("workers", 4, container=OF_WORKERS)],
        [{**replicated("workers", 1, container=OF_WORKERS), "replicas": 4}],
        [
            replicated("worker", 3, container={**OF_MASTER, "env": RANKS[-1:]}),
            replicated("master", 1, container={**OF_MASTER, "env": [ZERO]}),
        ],
    ],
    ids=["one", "a job for each pod", "master and worker"],
)
def test_a_jobset_is_one_replicated_job(parts):
    made = adopted(jobset(*parts, network={"enableDNSHostnames": True}))
    spec = made.spec
    assert (spec.target, spec.replicas.workers, spec.overlay) == ("jobset", 3, {})
    assert spec.policy.restart_policy == "Never"
    for target in ("jobset", "trainjob", "job", "pytorchjob"):
        assert trainer(spec, target)["args"] == ["$(MASTER_ADDR)"]
    assert "are one, node, of 4 Pods" in "\n".join(made.notes)
    assert adopt(render(spec)).spec == spec


def test_two_jobs_in_one_domain_of_kueue_are_one_job_in_it():
    parts = [replicated("master", 1), replicated("worker", 3)]
    keys = {"required-topology": "rack", "group-name": "near"}
    for part in parts:
        template = part["template"]["spec"]["template"]
        annotations = {f"kueue.x-k8s.io/podset-{key}": value for key, value in keys.items()}
        template["metadata"] = {"annotations": annotations}
    one = jobset(*parts)
    one["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    made = adopted(one)
    assert made.spec.kueue_topology.required == "rack"
    assert "left out: kueue.x-k8s.io/podset-group-name" in "\n".join(made.notes)
    assert "podset-group-name" not in render(made.spec)


def test_what_a_jobset_has_for_its_parts_is_reported():
    parts = [replicated("master", 1), replicated("worker", 3)]
    policy = {"operator": "All", "targetReplicatedJobs": ["master"]}
    made = adopted(jobset(*parts, successPolicy=policy, failurePolicy={"maxRestarts": 2}))
    assert "successPolicy is All of master; in the rendered manifest" in "\n".join(made.notes)
    assert made.spec.overlay == {"spec": {"failurePolicy": {"maxRestarts": 2}}}
    with pytest.raises(SpecError, match=r"overlay.spec.failurePolicy: a Job has no"):
        render(made.spec.with_(target="job"))
    parts[1] = replicated("worker", 3, container={"args": ["worker"]})
    with pytest.raises(
        SpecError, match=r"worker.*containers\[0\].args: the replicated Jobs differ"
    ):
        adopted(jobset(*parts))


@pytest.mark.parametrize("kind", ["ClusterTrainingRuntime", "TrainingRuntime"])
def test_a_trainjob_with_its_runtime(kind):
    reference = {"name": "torch", "kind": kind}
    made = adopted(runtime(kind), trainjob(runtimeRef=reference))
    spec = made.spec
    assert (spec.target, spec.replicas.workers, spec.nproc_per_node) == ("trainjob", 2, 4)
    assert (spec.image, spec.run.env) == ("registry/train:1", {"A": "1"})
    assert spec.run.command == ("torchrun", "main.py")
    assert (spec.resources.gpus, spec.overlay, spec.pod_template) == (4, {}, {})
    notes = "\n".join(made.notes)
    assert f"the {kind} torch is kept" in notes
    assert "numProcPerNode is auto; in the rendered manifest 4" in notes
    assert [document["kind"] for document in yaml.safe_load_all(render(spec))] == ["TrainJob"]
    assert adopt(render(spec)).spec == spec
    assert adopted(trainjob(runtimeRef=reference)).spec == spec
    with pytest.raises(SpecError, match=f"kubectl get {kind.lower()} torch -o yaml"):
        adopted(trainjob(runtimeRef=reference, trainer={"numNodes": 3}))


def test_what_trainer_has_no_longer():
    overrides = [{"targetJobs": [{"name": "node"}], "spec": {"serviceAccountName": "train"}}]
    old = trainjob(podTemplateOverrides=overrides)
    with pytest.raises(SpecError, match=r"file:\d+:\d+: spec.podTemplateOverrides: .* move its"):
        adopt("---\n".join(map(dump, (runtime(), old))), "file")


def test_what_only_a_runtime_has_is_kept_for_trainjobs_only():
    own = runtime("TrainingRuntime", podGroupPolicy={"coscheduling": {}})
    own["metadata"]["name"] = "train"
    made = adopted(own, trainjob(runtimeRef={"kind": "TrainingRuntime", "name": "train"})).spec
    assert made.overlay == {"runtime": {"spec": {"podGroupPolicy": {"coscheduling": {}}}}}
    with pytest.raises(SpecError, match=r"overlay.runtime: a Job has no"):
        render(made.with_(target="job"))


# --- what generators write: the Kubeflow SDK (TrainerClient), the training SDK, torchx

FUNCTION = 'if ! [ -x "$(command -v pip)" ]; then\n  python -m ensurepip\nfi\ntorchrun "$path/s.py"'


@pytest.mark.parametrize(
    ("resources", "processes"),
    [
        ({"cpu": 4.0, "nvidia.com/gpu": 2.0}, "2, one per GPU"),
        ({"cpu": "3500m"}, "4, one per CPU"),
        ({}, "1, one per CPU"),
    ],
)
def test_a_function_of_the_kubeflow_sdk(resources, processes):
    """Trainer starts as many processes as there are GPUs, else CPUs (torch.go, EnforceMLPolicy)."""
    trainer = {
        "image": "registry/train:1",
        "command": ["bash", "-c", FUNCTION],
        "numNodes": 3,
        "resourcesPerNode": {"limits": resources, "requests": resources},
    }
    made = adopted(runtime(), trainjob(activeDeadlineSeconds=600, trainer=trainer))
    assert f"numProcPerNode is auto; in the rendered manifest {processes}" in "\n".join(made.notes)
    assert made.spec.nproc_per_node == int(processes[0])
    assert made.spec.resources.gpus == resources.get("nvidia.com/gpu", 0)
    assert made.spec.run.command == ("bash", "-c", FUNCTION)
    assert made.spec.policy.active_deadline == 600
    assert (made.spec.pod_template, made.spec.overlay) == ({}, {})


def test_a_function_of_the_training_sdk():
    def given(argument):
        return pytorchjob({"command": ["bash", "-c"], "args": [argument]}, workers=0)

    spec = adopted(given(FUNCTION)).spec
    assert (spec.run.args, spec.pod_template) == ((FUNCTION,), {})
    assert trainer(spec, "pytorchjob")["args"] == [FUNCTION.replace("$(", "$$(")]
    assert adopted(given("$(MASTER_ADDR)")).spec.pod_template  # which Kubernetes replaces


@pytest.mark.parametrize("metadata", [None, {}, {"generateName": "train-"}])
def test_a_job_without_a_name_is_refused(metadata):
    with pytest.raises(SpecError, match=r"metadata.name: the job has no name"):
        adopted({**job(), "metadata": metadata})


def test_a_job_of_torchx_is_volcanos():
    with pytest.raises(SpecError, match=r"found Job train of batch.volcano.sh/v1alpha1; its pods"):
        adopted({**job(), "apiVersion": "batch.volcano.sh/v1alpha1"})


NAMED_TORCH = {"metadata": {"name": "torch"}}


@pytest.mark.parametrize(
    ("job", "field"),
    [
        ({"kind": "JobSet", "metadata": {"name": "a"}}, "spec.replicatedJobs"),
        (
            trainjob(runtimeRef={"kind": "TrainingRuntime", "name": "torch"}) | NAMED_TORCH,
            "runtime.spec.template.spec.replicatedJobs",
        ),
    ],
)
def test_a_job_without_its_parts_is_refused(job, field):
    version = {"apiVersion": "jobset.x-k8s.io/v1alpha2", **job}
    with pytest.raises(SpecError) as caught:
        adopted(runtime("TrainingRuntime", template=None), version)
    assert [problem.field for problem in caught.value.findings] == [field]


@pytest.mark.parametrize(
    ("objects", "version"),
    [
        ((job(),), "batch/v1beta1"),
        ((runtime(), trainjob()), "trainer.kubeflow.org/v2alpha1"),
        ((trainjob(), runtime()), "trainer.kubeflow.org/v2alpha1"),
    ],
    ids=["job", "trainjob", "runtime"],
)
def test_another_version_is_an_error_at_its_line(objects, version):
    text = yaml.safe_dump_all([*objects[:-1], {**objects[-1], "apiVersion": version}])
    line = text[: text.index(version)].count("\n") + 1
    with pytest.raises(SpecError, match=rf"'{version}' is not '.*', the only version") as caught:
        adopt(text, "file")
    assert caught.value.findings[0].line == line


@pytest.mark.parametrize(
    "other", [{"dependsOn": [{"name": "leader", "status": "Ready"}]}, {"groupName": "g"}]
)
def test_fields_of_only_one_replicated_job_are_not_dropped(other):
    parts = replicated("leader", 1), {**replicated("workers", 3), **other}
    with pytest.raises(
        SpecError, match=rf"workers\.{next(iter(other))}: the replicated Jobs differ"
    ):
        adopted(jobset(*parts))


@pytest.mark.parametrize(
    ("reference", "more", "field", "message"),
    [
        ({}, (), "spec.runtimeRef.name", "no runtime is named"),
        ({"name": "torch", "kind": "Foo"}, (), "spec.runtimeRef.kind", "'Foo' is not a runtime"),
        ({"name": "torch"}, (runtime(),), "spec.runtimeRef", "the file has 2 ClusterTraining"),
    ],
)
def test_a_runtime_that_nobody_can_know(reference, more, field, message):
    with pytest.raises(SpecError, match=message) as caught:
        adopted(runtime(), *more, trainjob(runtimeRef=reference))
    assert [problem.field for problem in caught.value.findings] == [field]
