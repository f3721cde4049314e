"""`lint(path)`: any file, and a job.yaml with all that belongs to it."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

from k8sjob.checks.lint import lint
from k8sjob.errors import SpecError

JOB = "name: digits\nimage: {repository: r/x, base: 'python:3.12'}\nrun: {script: main.py}\n"


def ids(path):
    return [finding.id for finding in lint(path)]


@pytest.fixture
def job(tmp_path):
    """A job.yaml with a good script beside it."""
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "main.py").write_text("print('hello')\n")
    return tmp_path / "job.yaml"


def test_a_job_is_checked_with_its_script(job):
    assert ids(job) == []
    assert ids(job.parent) == []
    (job.parent / "main.py").write_text(
        "import torch\ntorch.distributed.init_process_group('mpi')\n"
    )
    found = lint(job)
    assert {f.source for f in found} == {str(job.parent / "main.py")}
    # the agent destroys the group of a script that does not
    assert [f.id for f in found] == ["backend-not-built-in"]


def test_the_script_is_looked_for_where_the_image_has_it(job):
    (job.parent / "main.py").unlink()
    assert ids(job) == ["script-missing"]
    job.write_text(JOB.replace("script: main.py", "module: pkg.train"))
    assert ids(job) == []  # it may be installed in the image
    (job.parent / "pkg").mkdir()
    assert ids(job) == ["script-missing"]
    (job.parent / "pkg/train").mkdir()
    (job.parent / "pkg/train/__main__.py").write_text("def f(:\n")
    assert ids(job) == ["script-syntax"]
    job.write_text(JOB.replace("base: 'python:3.12'", "pull_secrets: [a]"))
    assert ids(job) == []


def test_a_command_is_followed_to_its_script(job):
    script = "import os\nprint(os.environ['LOCAL_RANK'])\n"
    (job.parent / "main.py").write_text(script)
    for command, expected in (
        ("[python, /app/main.py]", ["local-rank-without-launcher"]),
        ("[torchrun, main.py]", []),
        ("[./start.sh, main.py]", []),
        ("[python, elsewhere.py]", []),
    ):
        job.write_text(JOB.replace("script: main.py", f"command: {command}"))
        assert ids(job) == expected, command


def test_a_job_that_is_not_valid(job):
    job.write_text(JOB + "replica: {workers: 2}\n")
    (finding,) = lint(job)
    assert (finding.id, finding.line) == ("invalid-document", 4)
    assert finding.next_step == "did you mean 'replicas'?"


def test_findings_in_the_manifest_are_reported_at_the_field_of_the_job(job):
    job.write_text(
        JOB
        + "replicas: {workers: 1}\nresources:\n  gpus: 1\n  shm: 0\n"
        + "policy:\n  clean_pod_policy: None\n"
    )
    found = {finding.id: finding.line for finding in lint(job)}
    assert found == {"no-shared-memory": 7, "gpus-kept-after-success": 9}
    job.write_text(job.read_text().replace("shm: 0", "shm: 0  # k8sjob: ignore[no-shared-memory]"))
    assert ids(job) == ["gpus-kept-after-success"]


def test_findings_that_come_from_the_overlay_are_reported_there(job):
    overlay = "overlay:\n  spec:\n    runPolicy:\n      backoffLimit: 1\n"
    counted = "replicas: {workers: 3}\npolicy: {restart_policy: OnFailure}\n"
    job.write_text(JOB + counted + overlay)
    (finding,) = lint(job)
    assert (finding.id, finding.line) == ("backoff-limit-too-small", 9)


@pytest.mark.parametrize("target", ["job", "jobset"])
def test_a_job_of_another_target_is_checked_too(job, target):
    more = (
        "replicas: {workers: 1}\nresources: {gpus: 1, shm: 0}\noverlay: {spec: {suspend: true}}\n"
    )
    job.write_text(f"{JOB}{more}target: {target}\n")
    assert set(ids(job)) == {"no-shared-memory"}
    job.write_text(f"{JOB}{more}target: {target}\ngang: {{scheduler: volcano}}\n")
    assert ids(job) == ["invalid-document"]


def test_what_a_file_is_shows_in_its_name_or_its_text(tmp_path, monkeypatch, pytorchjob):
    from k8sjob.yamldoc import dump

    bad = pytorchjob(nprocPerNode="two")
    for name, text, expected in (
        ("a.yaml", dump(bad), ["nproc-value"]),
        ("a.json", dump(bad), ["nproc-value"]),
        ("a.py", "def f(:\n", ["script-syntax"]),
        (
            "train",
            "import torch\ntorch.distributed.new_group(backend='mpi')\n",
            ["backend-not-built-in"],
        ),
        ("b.yaml", "[]\n", ["invalid-document"]),
        ("c.yaml", "", ["invalid-document"]),
    ):
        (tmp_path / name).write_text(text)
        assert ids(tmp_path / name) == expected, name
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        if "." not in name or name == "a.yaml":
            assert ids("-") == expected


def test_what_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(SpecError, match=r"none\.yaml: cannot be read: No such file"):
        lint(tmp_path / "none.yaml")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    with pytest.raises(SpecError, match="encoding declaration; save the file as UTF-8"):
        lint(tmp_path / "latin.py")


def test_a_script_in_another_encoding(job):
    (job.parent / "main.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\nimport other\n")
    (job.parent / "other.py").write_bytes(b"# coding: no-such\nname = '\xe9'\n")
    assert ids(job) == ids(job.parent / "main.py") == []
    (job.parent / "main.py").write_bytes(b"name = '\xe9'\n")
    with pytest.raises(SpecError, match=r"main\.py: .*; save the file as UTF-8"):
        lint(job)
    (job.parent / "main.py").write_bytes(b"import other\n")
    for name in (b"rot13", b"undefined"):  # codecs that are not for texts
        (job.parent / "other.py").write_bytes(b"# coding: %s\n" % name)
        assert ids(job) == []
        with pytest.raises(SpecError, match=r"other\.py: .*; save the file as UTF-8"):
            lint(job.parent / "other.py")


@pytest.mark.parametrize("text", ["FROM python:3.12\nCOPY . /app\n", "all:\n\tdo this: [\n"])
def test_what_is_neither_yaml_nor_python_is_refused(tmp_path, text):
    (tmp_path / "Dockerfile").write_text(text)
    seen = "is neither YAML nor Python, .*specify a job's manifest"
    with pytest.raises(SpecError, match=f"Dockerfile: {seen}"):
        lint(tmp_path / "Dockerfile")
    (tmp_path / "Dockerfile").write_text("#!/usr/bin/env python3\ndef f(:\n")
    assert ids(tmp_path / "Dockerfile") == ["script-syntax"]


def test_the_packages_of_a_module_are_read_from_the_context(job):
    job.write_text(JOB.replace("script: main.py", "module: pkg.train") + "replicas: {workers: 1}\n")
    (job.parent / "pkg").mkdir()
    (job.parent / "pkg/__init__.py").touch()
    (job.parent / "pkg/train.py").write_text(
        "from .setup import start\nfrom pkg import loop\nstart()\nloop.train(model)\n"
    )
    loop = "def train(model):\n    loss(model).backward()\n"
    (job.parent / "pkg/loop.py").write_text(loop)
    (job.parent / "pkg/setup.py").write_text("def start():\n    pass\n")
    (finding,) = lint(job)
    assert (finding.id, finding.source) == (
        "training-not-distributed",
        str(job.parent / "pkg/loop.py"),
    )
    (job.parent / "pkg/setup.py").write_text(
        "import torch.distributed as dist\n\ndef start():\n    dist.init_process_group()\n"
    )
    assert ids(job) == []


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("docker.oi/a/b:1", ["image-host"]),
        ("ghcr.oi/a/b:1", ["image-host"]),
        ("gchr.io/a/b:1", ["image-host"]),
        ("dockr.io/a/b:1", ["image-host"]),
        ("quay.ioo/a/b:1", ["image-host"]),
        ("registry/team/train:1", ["image-host"]),
        ("{repository: r/x, base: 'docker.oi/library/python:3.12'}", ["image-host"]),
        ("icr.io/a/b:1", []),
        ("scr.io/a/b:1", []),
        ("eu.gcr.io/a/b:1", []),
        ("registry:5000/team/train:1", []),
        ("localhost/a/b/c:1", []),
        ("user/train:1", []),
        ("python:3.10-slim", ["image-too-old"]),
        ("pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime", ["image-too-old"]),
        ("nvcr.io/nvidia/pytorch:24.12-py3", ["image-too-old"]),
        ("{repository: r/x, base: 'docker.io/library/python:3.9'}", ["image-too-old"]),
        ("python:3.11", []),
        ("python:3", []),
        ("pytorch/pytorch:latest", []),
        ("pytorch/pytorch:2.10.0", []),
        ("nvcr.io/nvidia/pytorch:25.01-py3", []),
        ("team/python:3.8", []),
        ("registry.example/python:3.8", []),
        ("registry.example:5000/pytorch/pytorch:2.4", ["image-too-old"]),
    ],
)
def test_images(job, image, expected):
    job.write_text(f"name: digits\nimage: {image}\nrun: {{script: main.py}}\n")
    assert ids(job) == expected
    if expected == ["image-too-old"]:  # which a job without k8sjob's agent may use
        job.write_text(job.read_text().replace("script: main.py", "command: [python, main.py]"))
        assert ids(job) == []


@pytest.mark.parametrize(
    ("script", "found"),
    [("mian.py", True), ("main.py", False), ("/opt/mian.py", False), ("evaluate_all.py", False)],
)
def test_a_script_that_an_image_used_as_it_is_may_have(job, script, found):
    job.write_text(f"name: digits\nimage: r/x:1\nrun: {{script: {script}}}\n")
    assert ids(job) == (["script-not-here"] if found else [])


PAIR = "replicas: {workers: 1}\n"
KEPT = "pod_template: {spec: {containers: [{name: pytorch, imagePullPolicy: IfNotPresent}]}}"
ADVICE = {
    "resources.shm": ("resources: {gpus: 1, shm: 0}", "resources: {gpus: 1, shm: 8Gi}"),
    "policy.clean_pod_policy: Running": (
        "replicas: {workers: 1}\nresources: {gpus: 1}\npolicy: {clean_pod_policy: None}",
        "replicas: {workers: 1}\nresources: {gpus: 1}\npolicy: {clean_pod_policy: Running}",
    ),
    "policy.max_restarts": (
        "policy: {restart_policy: OnFailure}\noverlay: {spec: {runPolicy: {backoffLimit: null}}}",
        "policy: {restart_policy: OnFailure, max_restarts: 3}",
    ),
    "replicas.nproc_per_node": (
        "run: {command: [python, main.py]}\nreplicas: {workers: 1, nproc_per_node: 2}",
        "run: {command: [python, main.py]}\nreplicas: {workers: 1}",
    ),
    "write $(HOME)": (
        "run: {command: [python, main.py, $HOME]}",
        "run: {command: [python, main.py, $(HOME)]}",
    ),
    "use a newer image": ("image: 'python:3.9'", "image: 'python:3.12'"),
    "did you mean 'docker.io'": ("image: docker.oi/a/b:1", "image: docker.io/a/b:1"),
    "remove it, and set policy.restart_policy": (
        "pod_template: {spec: {restartPolicy: Always}}",
        "policy: {restart_policy: Always}",
    ),
    "a native sidecar": (
        "pod_template: {spec: {containers: [{name: pytorch}, {name: nginx, image: nginx:1}]}}",
        "pod_template: {spec: {initContainers: [{name: a, image: nginx, restartPolicy: Always}]}}",
    ),
    "or use another name": (
        "pod_template: {spec: {containers: [{name: pytorch, env: [{name: RANK, value: '3'}]}]}}",
        "pod_template: {spec: {containers: [{name: pytorch, env: [{name: R, value: '3'}]}]}}",
    ),
    "or a digest": (f"image: x:latest\n{KEPT}", f"image: x@sha256:{'0' * 64}\n{KEPT}"),
    "remove it, the operator": (
        "run: {command: [torchrun, --standalone, main.py]}\nreplicas: {workers: 1}",
        "run: {command: [torchrun, main.py]}\nreplicas: {workers: 1}",
    ),
    "swap them": (
        f"{PAIR}overlay: {{spec: {{elasticPolicy: {{minReplicas: 2, maxReplicas: 1}}}}}}",
        f"{PAIR}overlay: {{spec: {{elasticPolicy: {{minReplicas: 1, maxReplicas: 2}}}}}}",
    ),
    "did you mean 'Running'": (
        "overlay: {spec: {runPolicy: {cleanPodPolicy: Runing}}}",
        "overlay: {spec: {runPolicy: {cleanPodPolicy: Running}}}",
    ),
    'write "2"': ("overlay: {spec: {nprocPerNode: 2}}", "overlay: {spec: {nprocPerNode: '2'}}"),
    "did you mean run.script: main.py": ("run: {script: mian.py}", "run: {script: main.py}"),
}


@pytest.mark.parametrize("advice", ADVICE)
def test_the_advice_for_a_job_is_a_valid_job(job, advice):
    def write(lines):
        text = {"name": "name: x", "image": "image: r/x:1", "run": "run: {script: main.py}"}
        text |= {line.partition(":")[0]: line for line in lines.splitlines()}
        job.write_text("\n".join(text.values()) + "\n")

    before, after = ADVICE[advice]
    write(before)
    found = lint(job)
    assert found
    for finding in found:
        assert advice in finding.message
        assert not re.search(r"emptyDir|spec\.runPolicy|template\.", finding.message)
    write(after)
    assert lint(job) == []


def test_a_file_without_an_end_is_refused():
    with pytest.raises(SpecError, match="longer than 1048576 bytes"):
        lint("/dev/zero")
