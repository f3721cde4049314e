"""TrainJobs over a runtime of the platform, by a user with no more rights than Kubeflow gives."""

import json
import re
import shutil

import pytest
import yaml

from k8sjob.spec import load

from .bed.components import cluster_role
from .desk import shortened
from .test_rbac import RBAC, ROOT, User

STOCK = ROOT / "tests/targets/stock_runtimes.yaml"
SMALL = {"cpu": 1, "memory": "2Gi", "requests": {"cpu": "50m", "memory": "200Mi"}}
JOB = """\
name: digits
target: trainjob
image: {image}
run: {{command: [sh, -c, "echo I am $RANK of $WORLD_SIZE in $HERE; sleep {seconds}"]}}
replicas: {{workers: 1}}
resources: {{cpu: 50m, memory: 32Mi}}
volumes: [{{name: data, mount: /data, empty_dir: {{}}}}]
pod_template: {{spec: {{containers: [{{name: node, env: [{{name: HERE, value: there}}]}}]}}}}
policy: {{termination_grace: 2s, active_deadline: 1h}}
"""


@pytest.fixture
def runtime(cluster, trainer, namespace):
    """Trainer's torch-distributed under a name of the test's own, which all who log in may read."""
    name = f"torch-{namespace}"
    rule = {"apiGroups": ["trainer.kubeflow.org"], "resources": ["clustertrainingruntimes"]}
    rule["verbs"] = ["get", "list", "watch"]
    stock = next(yaml.safe_load_all(STOCK.read_text())) | {"metadata": {"name": name}}
    objects = [stock, *cluster_role(name, "system:authenticated", rule, kind="Group")]
    for item in objects:
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(item))
    yield name
    for item in objects:
        cluster.kubectl("delete", item["kind"], name)


@pytest.fixture
def eve(cluster, namespace, kubeconfig_of):
    """A user with Kubeflow's role."""
    cluster.kubectl("apply", "-n", namespace, "-f", str(RBAC / "kubeflow-user.yaml"))
    cluster.kubectl("create", "serviceaccount", "eve", "-n", namespace)
    to = ("--role=k8sjob-kubeflow-user", f"--serviceaccount={namespace}:eve")
    cluster.kubectl("create", "rolebinding", "eve", "-n", namespace, *to)
    return User(cluster, *kubeconfig_of("eve"), namespace)


def test_a_user_of_kubeflow_can_do_everything(eve, runtime, tmp_path, eventually):
    job = f"{eve.namespace}/digits"
    cluster, file = eve.cluster, tmp_path / "job.yaml"
    file.write_text(JOB.format(image=cluster.base_image, seconds=600))
    for ask in (("submit",), ("submit", "--target", "auto"), ("diff",)):
        answer = eve.k8sjob(*ask, file, code=2 if ask == ("diff",) else 1)
        assert "cannot create trainingruntimes" in answer
        assert f"`runtime: {runtime}`" in answer
    assert "clustertrainingruntimes/none does not exist" in eve.k8sjob(
        "submit", file, "--runtime", "none", code=1
    )
    over = (file, "--runtime", runtime)
    assert "jobs can be submitted" in eve.k8sjob("doctor", *over)
    assert "created (server dry run)" in eve.k8sjob("submit", *over, "--dry-run=server")
    assert "target trainjob: not pytorchjob" in eve.k8sjob("submit", *over, "--target=auto")
    assert "as the same job" in eve.k8sjob("submit", *over)
    eve.k8sjob("diff", *over)
    eventually(lambda: "I am 1 of 2 in there" in eve.k8sjob("logs", job), "the output")
    eventually(lambda: "Running" in eve.k8sjob("status", job), "the job to run")
    assert "digits" in eve.k8sjob("list")
    assert "nothing wrong was found" in eve.k8sjob("why", job)
    assert "container started" in eve.k8sjob("why", job, "--timing")
    eve.k8sjob("suspend", job)
    eventually(lambda: "Suspended" in eve.k8sjob("status", job), "the suspension")
    eve.k8sjob("resume", job)
    eventually(lambda: "Running" in eve.k8sjob("status", job), "the job to run again")
    file.write_text(JOB.format(image=cluster.base_image, seconds=1))
    assert "a different job" in eve.k8sjob("submit", *over, code=1)
    eve.k8sjob("submit", "--replace", *over)
    assert "Succeeded" in eve.k8sjob("watch", job)
    assert "digits succeeded" in eve.k8sjob("why", job)
    assert cluster.read("trainingruntimes", namespace=eve.namespace) == []
    eve.k8sjob("delete", job)
    assert "no job 'none'" in eve.k8sjob("status", f"{eve.namespace}/none", code=102)
    assert "digits" not in eve.k8sjob("list")


def test_its_deadline_is_the_cause(eve, runtime, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(image=eve.cluster.base_image, seconds=600))
    short = ("--runtime", runtime, "--set", "policy.active_deadline=8s")
    assert "Failed" in eve.k8sjob("submit", file, *short, "--watch", code=100)
    why = eve.k8sjob("why", f"{eve.namespace}/digits")
    assert "deadline" in why
    assert "trainingruntimes" not in why


def test_it_trains_over_the_stock_runtime(eve, runtime, image_of, tmp_path, eventually):
    """The same job.yaml as everywhere: digits by DDP, on two nodes of two processes."""
    shutil.copytree(ROOT / "manifests/digits-ddp", tmp_path, dirs_exist_ok=True)
    script = tmp_path / "main.py"
    script.write_text(shortened(script.read_text()))
    document = yaml.safe_load((tmp_path / "job.yaml").read_text())
    document |= {"target": "trainjob", "runtime": runtime, "resources": SMALL, "volumes": []}
    document |= {"replicas": {"workers": 1, "nproc_per_node": 2}, "checkpoint": None}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    image = image_of(load(tmp_path / "job.yaml"), tmp_path)
    job = f"{eve.namespace}/digits-ddp"
    eve.k8sjob("submit", tmp_path / "job.yaml", "--image", image)
    eventually(lambda: "Succeeded" in eve.k8sjob("status", job), "the training", deadline=600)
    shown = eve.k8sjob("watch", job)
    assert "4 processes joined: ddp over gloo" in shown
    assert float(re.findall(r"test_accuracy +([\d.]+)", shown)[-1]) > 0.5
