"""Code that was put on its base in the registry, in the containers of a real cluster."""

import json

import pytest

IDS = ("uid-range", "supplemental-groups")
MAIN = """
import getpass, json, os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
count = torch.ones(1)
dist.all_reduce(count)
pathlib.Path("beside.txt").write_text("written")
said = {"ranks": int(count), "uid": os.getuid(), "user": getpass.getuser()}
said |= {"home": os.access(os.environ["HOME"], os.W_OK), "cwd": os.getcwd()}
said |= {"files": sorted(os.listdir("."))}
print(json.dumps(said))
dist.destroy_process_group()
"""


def test_code_runs_in_its_folder_as_another_user_than_root(desk):
    job = desk.code(MAIN)
    reference, _ = desk.call("push", job)
    desk.call("submit", job, "--image", reference.strip(), "--watch")
    assert detail(desk) == {
        "ranks": 2,
        "uid": 1000,
        "user": "k8sjob",
        "home": True,
        "cwd": "/app",
        "files": ["beside.txt", "main.py", "tiny.yaml"],
    }
    pods = desk.objects("pods").values()
    statuses = [status for pod in pods for status in pod["status"]["containerStatuses"]]
    assert {status["imageID"] for status in statuses} == {reference.strip()}


def detail(desk):
    """What rank 0 has printed."""
    out, _ = desk.call("logs", "tiny", "-n", desk.namespace, "-r", "master-0")
    return next(json.loads(line) for line in out.splitlines() if line.startswith('{"ranks"'))


CACHING = """
import pathlib
cache = pathlib.Path.home() / ".cache/huggingface/hub"
cache.mkdir(parents=True)
pathlib.Path("data/beside.txt").write_text("written")
"""
UID = 1000750000
PROFILE = {"type": "RuntimeDefault"}


@pytest.mark.parametrize("builds", [True, False], ids=["built", "finished"])
def test_code_runs_as_the_user_that_a_namespace_of_openshift_chooses(desk, cluster, builds):
    ranges = [f"openshift.io/sa.scc.{name}={UID}/10000" for name in IDS]
    cluster.kubectl("annotate", "namespace", desk.namespace, *ranges)
    (desk.folder / "data").mkdir()
    (desk.folder / "data/digits.csv").write_text("1,2\n")
    # OpenShift's admission adds these to a Pod that names none, and this cluster has it not.
    ids = {"spec": {"securityContext": {"fsGroup": UID, "runAsUser": UID}}}
    job = desk.code(CACHING + MAIN, pod_template=ids)
    reference, _ = desk.call("push", job)
    if not builds:
        job = desk.code(CACHING + MAIN, image=reference.strip(), pod_template=ids)
    desk.call("submit", job, *(("--image", reference.strip()) if builds else ()), "--watch")
    shown = detail(desk)
    assert shown | {"files": []} == {
        "ranks": 2, "uid": UID, "user": "k8sjob", "home": True, "cwd": "/app", "files": []
    }  # fmt: skip
    for pod in desk.objects("pods").values():
        context = pod["spec"]["securityContext"]
        assert context == {"fsGroup": UID, "runAsUser": UID, "seccompProfile": PROFILE}
