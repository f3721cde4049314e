"""What a field of the spec becomes in the PyTorchJob."""

import json

import pytest
import yaml

from k8sjob.adopt import adopt
from k8sjob.contract import RuntimeConfig
from k8sjob.kube.objects import IMAGE_ORIGIN, MANIFEST_DIGEST, NOTIFY
from k8sjob.provenance import Provenance
from k8sjob.rendering import container_argv, container_env, manifest, render
from k8sjob.rendering.manifest import literal
from k8sjob.targets.pytorchjob.target import backoff_limit


def replica(rendered, role="Master"):
    return rendered["spec"]["pytorchReplicaSpecs"][role]


def pod(rendered, role="Master"):
    return replica(rendered, role)["template"]["spec"]


def container(rendered, role="Master"):
    (only,) = pod(rendered, role)["containers"]
    return only


def test_a_small_job(job, crd_problems):
    rendered = manifest(job(namespace="team", replicas={"workers": 3}))
    assert (rendered["apiVersion"], rendered["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert (rendered["metadata"]["name"], rendered["metadata"]["namespace"]) == ("digits", "team")
    assert rendered["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "k8sjob"}
    assert {r: replica(rendered, r)["replicas"] for r in ("Master", "Worker")} == {
        "Master": 1,
        "Worker": 3,
    }
    assert rendered["spec"]["nprocPerNode"] == "1"
    assert rendered["spec"]["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 13,
        "suspend": False,
    }
    for role in ("Master", "Worker"):
        annotations = replica(rendered, role)["template"]["metadata"]["annotations"]
        assert annotations == {"sidecar.istio.io/inject": "false"}
        assert replica(rendered, role)["restartPolicy"] == "ExitCode"
        assert container(rendered, role)["name"] == "pytorch"
        assert container(rendered, role)["command"] == ["python", "-P", "-m", "k8sjob.runtime"]
        assert container(rendered, role)["args"] == ["main.py"]
        assert pod(rendered, role)["automountServiceAccountToken"] is False
        assert pod(rendered, role)["terminationGracePeriodSeconds"] == 60
    assert crd_problems(rendered) == []


def test_absent_fields_stay_absent(job):
    rendered = manifest(job(resources={"shm": 0}))
    assert "namespace" not in rendered["metadata"]
    assert list(rendered["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    fields = "automountServiceAccountToken containers terminationGracePeriodSeconds"
    assert set(pod(rendered)) == set(fields.split())
    fields = "args command env image name ports terminationMessagePolicy"
    assert set(container(rendered)) == set(fields.split())


def test_equal_specs_are_equal_text_and_the_hash_tells_others(job):
    one, two = (render(job(run={"script": "main.py", "env": {"A": v}})) for v in "12")
    assert one == render(job(run={"script": "main.py", "env": {"A": "1"}}))
    hashes = [yaml.safe_load(t)["metadata"]["annotations"][MANIFEST_DIGEST] for t in (one, two)]
    assert hashes[0] != hashes[1]
    assert all(len(text) == 64 and int(text, 16) for text in hashes)


def test_what_the_image_was_made_of_is_carried_and_makes_no_other_job(job):
    origin = Provenance("i@sha256:1", "b@sha256:2", "b@sha256:2", "linux/amd64", ())
    with_it, without = (
        yaml.safe_load(render(job(), provenance=one))["metadata"]["annotations"]
        for one in (origin, None)
    )
    assert Provenance.decode(with_it.pop(IMAGE_ORIGIN)) == origin
    assert with_it == without


def test_the_image_of_a_build(built):
    digest = "registry.example/team/digits@sha256:" + "0" * 64
    assert container(manifest(built(), digest))["image"] == digest
    assert container(manifest(built()))["image"] == "registry.example/team/digits"


def test_image_settings(built, crd_problems):
    image = {"pull_secrets": ["a", "b", "a"], "pull_policy": "Always", "platform": "linux/arm64"}
    rendered = manifest(built(image=image))
    assert container(rendered)["imagePullPolicy"] == "Always"
    assert pod(rendered)["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert pod(rendered)["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert crd_problems(rendered) == []


def test_limits_and_requests_are_equal(job):
    rendered = manifest(
        job(
            replicas={"workers": 1},
            resources={"gpus": 1, "cpu": 4, "memory": "32Gi", "extended": {"rdma/hca": 1}},
        )
    )
    expected = {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": 1, "rdma/hca": "1"}
    for role in ("Master", "Worker"):
        assert container(rendered, role)["resources"] == {"limits": expected, "requests": expected}


def test_requests_may_be_less_and_the_master_different(job):
    rendered = manifest(
        job(
            replicas={"workers": 1},
            resources={
                "cpu": 4,
                "memory": "8Gi",
                "requests": {"cpu": "500m"},
                "master": {"memory": "16Gi", "shm": "1Gi"},
            },
        )
    )
    assert container(rendered, "Worker")["resources"] == {
        "limits": {"cpu": "4", "memory": "8Gi"},
        "requests": {"cpu": "500m", "memory": "8Gi"},
    }
    assert container(rendered)["resources"]["limits"] == {"cpu": "4", "memory": "16Gi"}
    assert pod(rendered)["volumes"] == [
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    ]
    assert pod(rendered, "Worker")["volumes"] == [
        {"name": "dshm", "emptyDir": {"medium": "Memory"}}
    ]


def test_requests_without_limits(job):
    rendered = manifest(job(resources={"requests": {"cpu": 2}}))
    assert container(rendered)["resources"] == {"requests": {"cpu": "2"}}


@pytest.mark.parametrize(("shm", "size"), [(None, {}), ("8Gi", {"sizeLimit": "8Gi"})])
def test_shared_memory(job, shm, size):
    rendered = manifest(job(resources={"shm": shm}))
    volume = {"name": "dshm", "emptyDir": {"medium": "Memory", **size}}
    assert pod(rendered)["volumes"] == [volume]
    assert container(rendered)["volumeMounts"] == [{"name": "dshm", "mountPath": "/dev/shm"}]


def test_gpu_type_selects_nodes_beside_the_users_labels(job):
    rendered = manifest(
        job(resources={"gpus": 2, "gpu_type": "NVIDIA-A100"}, node_selector={"pool": "gpu"})
    )
    assert pod(rendered)["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-A100",
        "pool": "gpu",
    }
    assert rendered["spec"]["nprocPerNode"] == "2"


def test_volumes(job, crd_problems):
    rendered = manifest(
        job(
            resources={"shm": 0},
            volumes=[
                {"name": "claim", "mount": "/claim", "pvc": "datasets", "sub_path": "mnist"},
                {"name": "node", "mount": "/node", "host_path": "/mnt/x", "read_only": True},
                {"name": "settings", "mount": "/settings", "config_map": "settings"},
                {"name": "token", "mount": "/token", "secret": "token"},
                {"name": "scratch", "mount": "/scratch", "empty_dir": {}},
                {
                    "name": "fast",
                    "mount": "/fast",
                    "empty_dir": {"medium": "Memory", "size_limit": "1Gi"},
                },
            ],
        )
    )
    assert pod(rendered)["volumes"] == [
        {"name": "claim", "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "node", "hostPath": {"path": "/mnt/x"}},
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "token", "secret": {"secretName": "token"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "fast", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    mounts = container(rendered)["volumeMounts"]
    assert mounts[0] == {"name": "claim", "mountPath": "/claim", "subPath": "mnist"}
    assert mounts[1] == {"name": "node", "mountPath": "/node", "readOnly": True}
    assert len(mounts) == 6
    assert crd_problems(rendered) == []


def test_secrets_by_reference(job):
    sources = [{"secret": "wandb"}, {"config_map": "settings"}]
    rendered = manifest(job(run={"script": "main.py", "env_from": sources}))
    assert container(rendered)["envFrom"] == [
        {"secretRef": {"name": "wandb"}},
        {"configMapRef": {"name": "settings"}},
    ]


def test_the_runtime_reads_its_settings_from_one_variable(job):
    spec = job(run={"script": "main.py", "env": {"A": "x"}}, checkpoint={"dir": "/ckpt"})
    env = {item["name"]: item["value"] for item in container(manifest(spec))["env"]}
    assert env == container_env(spec) == {"A": "x", "K8SJOB_CONFIG": spec.runtime_config.encode()}
    settings = json.loads(env["K8SJOB_CONFIG"])
    assert settings.pop("version") == 1
    assert RuntimeConfig(**settings) == spec.runtime_config


@pytest.mark.parametrize(
    ("run", "command", "args"),
    [
        (
            {"script": "a b.py", "args": ["-x"]},
            ["python", "-P", "-m", "k8sjob.runtime"],
            ["a b.py", "-x"],
        ),
        ({"module": "pkg.train"}, ["python", "-P", "-m", "k8sjob.runtime"], ["-m", "pkg.train"]),
        ({"command": ["torchrun", "x.py"], "args": ["1"]}, ["torchrun", "x.py"], ["1"]),
        ({"command": ["sh", "-c", "echo $(date)"]}, ["sh", "-c", "echo $(date)"], []),
    ],
)
def test_what_is_started(job, run, command, args):
    assert container_argv(job(run=run)) == (command, args)
    rendered = container(manifest(job(run=run)))
    assert [expanded(word) for word in rendered["command"]] == command
    assert [expanded(word) for word in rendered.get("args", [])] == args


def expanded(text):
    """What the process sees: Kubernetes' expand.go, byte by byte, where every variable is 'VALUE'.

    A `$` that starts nothing is written together with the next *byte* as a code point of its own,
    so that in front of anything but ASCII the text is damaged.
    """
    made, data, at = bytearray(), text.encode(), 0
    while at < len(data):
        following = data[at + 1 : at + 2]
        if data[at : at + 1] != b"$" or not following:
            made, at = made + data[at : at + 1], at + 1
        elif following == b"$":
            made, at = made + b"$", at + 2
        elif following == b"(" and (end := data.find(b")", at)) > 0:
            made, at = made + b"VALUE", end + 1
        else:
            made, at = made + b"$" + chr(following[0]).encode(), at + 2
    return made.decode(errors="replace")


HOSTILE = ["$(X)", "$$(X)", "$$", "$", "a$", "$HOME", "$(", "$()", "$$$(A)$$", "$é", "$$é", "${X}"]


@pytest.mark.parametrize("text", HOSTILE)
def test_dollars_reach_the_process_as_they_are(job, text):
    assert expanded(literal(text)) == text
    spec = job(run={"script": "main.py", "args": [text], "env": {"A": text}})
    rendered = container(manifest(spec))
    assert expanded(rendered["args"][1]) == text
    assert expanded(rendered["env"][0]["value"]) == text


def test_the_expansion_of_this_test_is_that_of_kubernetes():
    assert expanded("$(X) $$(X) $x $ $( $$") == "VALUE $(X) $x $ $( $"
    assert expanded("$é") == "$Ã\ufffd"


def test_the_istio_annotation_can_be_changed_and_left_out(job):
    def annotations(**given):
        metadata = replica(manifest(job(annotations=given)))["template"]["metadata"]
        return metadata.get("annotations", {})

    key = "sidecar.istio.io/inject"
    assert annotations(**{key: "true"}) == {key: "true"}
    assert annotations(**{key: None}) == {}
    assert annotations(team="a") == {key: "false", "team": "a"}


def test_labels_are_on_the_job_and_its_pods(job):
    rendered = manifest(job(labels={"team": "vision"}))
    expected = {"team": "vision", "app.kubernetes.io/managed-by": "k8sjob"}
    assert rendered["metadata"]["labels"] == expected
    assert replica(rendered)["template"]["metadata"]["labels"] == expected


@pytest.mark.parametrize("workers", [0, 1, 3, 64])
@pytest.mark.parametrize("restarts", [1, 3])
def test_peers_restarts_never_fail_a_job(job, workers, restarts):
    spec = job(replicas={"workers": workers}, policy={"max_restarts": restarts})
    limit = manifest(spec)["spec"]["runPolicy"]["backoffLimit"]
    nodes = workers + 1
    # The operator's rule: the job fails once the sum of the restarts of all pods is >= the limit.
    assert restarts * nodes < limit <= restarts * nodes + 1


def test_backoff_limit_at_its_ends(job):
    assert backoff_limit(job(policy={"max_restarts": 0})) == 0
    elastic = {"workers": 1, "elastic": {"min": 1, "max": 8}}
    assert backoff_limit(job(replicas=elastic, policy={"max_restarts": 2})) == 17
    most = {"replicas": {"workers": 9999}, "policy": {"max_restarts": 1000}, "name": "j"}
    assert backoff_limit(job(**most)) < 2**31


def test_run_policy(job, crd_problems):
    given = {"clean_pod_policy": "None", "restart_policy": "ExitCode", "suspend": True}
    times = {"ttl_after_finished": "1d", "active_deadline": "2h", "termination_grace": "90s"}
    rendered = manifest(job(policy=given | times))
    assert rendered["spec"]["runPolicy"] == {
        "cleanPodPolicy": "None",
        "backoffLimit": 4,
        "suspend": True,
        "ttlSecondsAfterFinished": 86400,
        "activeDeadlineSeconds": 7200,
    }
    assert replica(rendered)["restartPolicy"] == "ExitCode"
    assert pod(rendered)["terminationGracePeriodSeconds"] == 90
    assert crd_problems(rendered) == []


def test_elastic(job, crd_problems):
    rendered = manifest(job(replicas={"workers": 2, "elastic": {"min": 2, "max": 4}}))
    assert list(rendered["spec"]["pytorchReplicaSpecs"]) == ["Worker"]
    assert replica(rendered, "Worker")["replicas"] == 3
    assert rendered["spec"]["elasticPolicy"] == {
        "rdzvBackend": "c10d",
        "minReplicas": 2,
        "maxReplicas": 4,
        "maxRestarts": 3,
    }
    assert crd_problems(rendered) == []


def test_scheduling(job, crd_problems):
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
    rendered = manifest(
        job(
            replicas={"workers": 3},
            gang={"scheduler": "volcano", "queue": "research"},
            kueue_queue="research",
            kueue_priority_class="production",
            kueue_topology={"preferred": "rack"},
            priority_class="high",
            runtime_class="nvidia",
            host_network=True,
            service_account="trainer",
            service_account_token=True,
            tolerations=[{"key": "gpu", "operator": "Exists"}],
            topology_spread=[spread],
            affinity=affinity,
        )
    )
    assert rendered["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert rendered["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "production"
    assert rendered["spec"]["runPolicy"]["suspend"] is True
    assert rendered["spec"]["runPolicy"]["schedulingPolicy"] == {
        "minAvailable": 4,
        "queue": "research",
        "priorityClass": "high",
    }
    for role in ("Master", "Worker"):
        expected = {
            "schedulerName": "volcano",
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "serviceAccountName": "trainer",
            "automountServiceAccountToken": True,
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "topologySpreadConstraints": [spread],
            "affinity": affinity,
        }
        assert expected.items() <= pod(rendered, role).items()
        template = rendered["spec"]["pytorchReplicaSpecs"][role]["template"]
        assert template["metadata"]["annotations"] == {
            "sidecar.istio.io/inject": "false",
            "kueue.x-k8s.io/podset-preferred-topology": "rack",
            "kueue.x-k8s.io/podset-group-name": rendered["metadata"]["name"],
        }
    assert crd_problems(rendered) == []


@pytest.mark.parametrize("target", ["pytorchjob", "job", "jobset", "trainjob"])
def test_messages_that_a_job_chooses(job, target):
    """They are the job's own annotation, part of what is compared, and come back by adopt."""
    chosen = {notify: job(target=target, notify=notify) for notify in (None, (), ("failed",))}
    made = {notify: manifest(spec)["metadata"]["annotations"] for notify, spec in chosen.items()}
    assert [one.get(NOTIFY) for one in made.values()] == [None, "", "failed"]
    assert len({one[MANIFEST_DIGEST] for one in made.values()}) == 3
    for notify, spec in chosen.items():
        again = adopt(render(spec)).spec
        assert (again.notify, dict(again.overlay)) == (notify, {})


def test_a_group_of_pods_has_two_parts(job):
    made = manifest(job(kueue_queue="q", kueue_topology={"required": "rack"}))
    annotations = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["metadata"]
    assert "kueue.x-k8s.io/podset-group-name" not in annotations["annotations"]


def test_gang_of_some(job):
    rendered = manifest(job(replicas={"workers": 3}, gang={"min_available": 2}))
    assert rendered["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": 2}
    assert "schedulerName" not in pod(rendered)


def test_restricted_of_a_built_image_is_for_the_whole_pod(built, crd_problems):
    rendered = manifest(built(security="restricted", replicas={"workers": 1}))
    for role in ("Master", "Worker"):
        assert pod(rendered, role)["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
        assert container(rendered, role)["securityContext"] == {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    assert crd_problems(rendered) == []


def test_restricted_of_another_image_leaves_the_init_container_its_user(job):
    """The operator adds an init container of root's to Workers, which nothing may forbid."""
    rendered = manifest(job(security="restricted", replicas={"workers": 1}))
    context = pod(rendered, "Worker")["securityContext"]
    assert not {"runAsNonRoot", "runAsUser"} & set(context)
    assert container(rendered, "Worker")["securityContext"]["runAsNonRoot"] is True


def test_a_built_image_may_write_to_its_claims(built, job):
    expected = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    assert pod(manifest(built()))["securityContext"] == expected
    assert "securityContext" not in pod(manifest(job()))


@pytest.mark.parametrize(
    ("claim", "mounted"),
    [
        ({}, {"checkpoints": "/checkpoints"}),
        ({"name": "data", "mount": "/checkpoints"}, {"data": "/checkpoints"}),
        (
            {"name": "checkpoints", "mount": "/elsewhere"},
            {"checkpoints": "/elsewhere", "checkpoints-0": "/checkpoints"},
        ),
    ],
)
def test_checkpoints_on_no_volume_get_a_folder_of_the_pod(job, claim, mounted):
    volumes = [{**claim, "pvc": "claim"}] if claim else []
    made = manifest(job(checkpoint={"dir": "/checkpoints"}, volumes=volumes))
    mounts = {one["name"]: one["mountPath"] for one in container(made)["volumeMounts"]}
    assert mounts == {"dshm": "/dev/shm", **mounted}
    folders = {one["name"] for one in pod(made)["volumes"] if one.get("emptyDir") == {}}
    assert folders == mounted.keys() - {claim.get("name")}
