"""Code that was put on its base in the registry, in the containers of a real cluster."""

import json

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
    registry = desk.cluster.registry
    (desk.folder / "main.py").write_text(MAIN)
    job = desk.file(
        image={"repository": f"{registry}/pushed/code", "base": desk.cluster.base_image},
        run={"script": "main.py"},
        resources={"cpu": "100m", "memory": "300Mi"},
    )
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
