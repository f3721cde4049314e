import json
import os
import subprocess
import sys

import pytest
import yaml

from k8sjob.rendering.dockerfile import dockerfile
from k8sjob.rendering.manifest import render
from k8sjob.spec import load

BUILT = "image: {repository: team/tiny, base: 'pytorch/pytorch:2'}"


def test_a_valid_job_says_what_it_is(k8sjob, job_file):
    file = job_file("replicas: {workers: 3}")
    done = k8sjob("validate", file)
    assert done[:2] == (0, f"{file}: valid: tiny, 4 pods, 4 processes\n")
    assert "must contain k8sjob's runtime, which starts the script" in done.err
    assert k8sjob("validate", file.parent).code == 0


def test_every_problem_of_every_file_is_reported(k8sjob, job_file, tmp_path):
    file = job_file("replicas: {worker: 3}", "nmae: x")
    missing = tmp_path / "nothing.yaml"
    done = k8sjob("validate", file, missing)
    assert done.code == 1
    assert done.out == ""
    first, second, third = done.err.splitlines()
    assert first.startswith(f"error: {file}:4:12: replicas.worker: ")
    assert second.startswith(f"error: {file}:5:1: nmae: ")
    assert third.startswith(f"error: {missing}: no such file; ")


def test_findings_as_sarif(k8sjob, tmp_path):
    script = tmp_path / "my \udcfftrain.py"
    script.write_text(
        "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    )
    (run,) = json.loads(k8sjob("lint", script, "-o", "sarif").out)["runs"]
    rules = run["tool"]["driver"]["rules"]
    (found,) = (one for one in run["results"] if one["ruleId"] == "collective-on-one-rank")
    assert rules[found["ruleIndex"]]["id"] == "collective-on-one-rank"
    assert rules[found["ruleIndex"]]["shortDescription"]["text"]
    (place,) = (one["physicalLocation"] for one in found["locations"])
    assert place["artifactLocation"]["uri"] == f"{tmp_path}/my%20%FFtrain.py"
    assert place["region"] == {"startLine": 3, "startColumn": 5}
    assert found["level"] == "error"


def test_standard_input_is_a_file(k8sjob, job_file):
    text = job_file().read_text()
    assert k8sjob("validate", "-", stdin=text).out.startswith("<stdin>: valid: tiny, 1 pod")
    assert k8sjob("validate", "-", stdin="name: [").err.startswith("error: <stdin>:")
    done = k8sjob("render", "-", stdin=text)
    assert yaml.safe_load(done.out)["metadata"]["name"] == "tiny"


def test_the_file_may_be_job_yml(k8sjob, job_file, monkeypatch):
    monkeypatch.chdir(job_file().parent)
    assert k8sjob("validate").out == "job.yaml: valid: tiny, 1 pod, 1 process\n"
    job_file().rename(job_file().with_suffix(".yml"))
    assert k8sjob("validate").out == "job.yml: valid: tiny, 1 pod, 1 process\n"
    assert k8sjob("render").code == 0


def test_what_rendering_finds_has_its_line(k8sjob, job_file):
    file = job_file("overlay:", "  metadata: {name: other}")
    for command in ("validate", "render", "run"):
        done = k8sjob(command, file)
        assert done.code == 1
        assert f"error: {file}:5:20: overlay.metadata.name: 'other' has" in done.err


def test_validate_looks_for_the_script_of_a_built_image(k8sjob, job_file):
    file = job_file()
    file.write_text("name: x\nimage: {repository: r/x, base: b}\nrun:\n  script: src/main.py\n")
    done = k8sjob("validate", file)
    assert done.code == 1
    detail = f"error: {file}:4:11: run.script: 'src/main.py' is not in the context '.'"
    assert detail in done.err
    for command in ("run", "submit"):  # one error for one mistake: not lint's as well
        assert k8sjob(command, file).err.startswith(detail)
    (file.parent / "src").mkdir()
    (file.parent / "src/main.py").touch()
    assert k8sjob("validate", file).code == 0


def test_validate_as_json(k8sjob, job_file):
    done = k8sjob("validate", job_file("replicas: {worker: 3}"), "-o", "json")
    assert (done.code, done.err) == (1, "")
    (result,) = json.loads(done.out)
    assert (result["valid"], result["job"]) == (False, None)
    (problem,) = result["problems"]
    assert (problem["field"], problem["line"]) == ("replicas.worker", 4)
    (result,) = json.loads(k8sjob("validate", job_file(), "-o", "json").out)
    assert result["job"] == {"name": "tiny", "nodes": 1, "processes": 1}


def test_warnings_go_beside_the_data(k8sjob, job_file):
    file = job_file("replicas: {workers: 1, elastic: {min: 1, max: 2}}")
    done = k8sjob("render", file)
    assert done.code == 0
    assert done.out == render(load(file))
    assert done.err.startswith("warning: replicas.elastic: without checkpoint ")
    assert "set checkpoint.dir" in done.err
    done = k8sjob("validate", file)
    assert done.code == 0
    assert done.err.startswith(f"warning: {file}: replicas.elastic: ")
    (result,) = json.loads(k8sjob("validate", file, "-o", "json").out)
    assert [result["valid"], len(result["warnings"])] == [True, 2]
    file.write_text(file.read_text().replace("script: main.py", "command: [torchrun, main.py]"))
    assert k8sjob("render", file).err == ""
    assert k8sjob("validate", file).err == ""


def test_render_prints_only_the_manifest(k8sjob, job_file):
    file = job_file()
    assert k8sjob("render", file) == (0, render(load(file)), "")
    image = "team/tiny@sha256:" + "a" * 64
    assert k8sjob("render", file, "--image", image).out == render(load(file), image)
    assert "image: 'a b' is not an image reference" in k8sjob("render", file, "--image", "a b").err
    assert k8sjob("render", file, "--image", "").code == 1
    done = k8sjob("render", file, "-n", "blue")
    assert yaml.safe_load(done.out)["metadata"]["namespace"] == "blue"


def test_render_prints_the_dockerfile_or_writes_a_folder(k8sjob, job_file, tmp_path):
    file = job_file()
    file.write_text(file.read_text().replace("image: team/tiny:1", BUILT))
    assert k8sjob("render", "--dockerfile", file).out == dockerfile(load(file))
    (tmp_path / "main.py").write_text("print()")
    (tmp_path / "ci.yml").write_text("key: AK" + "IAQ7ZP2M4T6W8Y3B5D\n")
    done = k8sjob("render", file, "-d", tmp_path / "out")
    assert done.out == ""
    *lines, warning = done.err.splitlines()
    assert warning.startswith("warning: ci.yml:1: an AWS access key: it goes into the image")
    written = {line.removeprefix("wrote ") for line in lines}
    assert written == {
        str(tmp_path / "out" / name) for name in ("pytorchjob.yaml", "Dockerfile", ".dockerignore")
    }
    assert (tmp_path / "out/main.py").exists()
    assert (tmp_path / "out/pytorchjob.yaml").read_text() == render(load(file))


@pytest.mark.parametrize(
    ("args", "code", "detail"),
    [
        (["--dockerfile", "--image", "x"], 2, "--dockerfile cannot be combined with"),
        (["--dockerfile"], 1, "is used as it is, so there is nothing to build"),
        (["-n", "Not_one"], 1, "namespace: 'Not_one' is not a DNS-1123 label"),
    ],
)
def test_render_refuses(args, code, detail, k8sjob, job_file):
    done = k8sjob("render", job_file(), *args)
    assert (done.code, done.out) == (code, "")
    assert detail in done.err


def test_a_manifest_is_utf_8_whatever_the_terminal(job_file):
    file = job_file("labels: {}", "annotations: {note: 한글 🚀}")
    out = subprocess.run(
        [sys.executable, "-m", "k8sjob", "render", file],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        check=True,
    ).stdout
    pods = yaml.safe_load(out.decode())["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    assert pods["metadata"]["annotations"]["note"] == "한글 🚀"


def test_validate_warns_of_pods_that_resolve_no_names(tmp_path, k8sjob):
    text = "name: a\nimage: registry.example/a:1\nrun: {command: [a]}\nreplicas: {workers: 1}\n"
    file = tmp_path / "job.yaml"
    file.write_text(f"{text}pod_template: {{spec: {{hostNetwork: true}}}}\n")
    done = k8sjob("validate", file)
    assert done.code == 0
    assert "dnsPolicy" in done.err
    file.write_text(f"{text}host_network: true\n")
    assert k8sjob("validate", file).err == ""


def test_the_path_of_a_script_on_this_machine_is_none_in_an_image(tmp_path, k8sjob):
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    file = tmp_path / "job.yaml"
    for name, code in ((script, 1), ("/app/train.py", 0), ("train.py", 0)):
        file.write_text(f"name: a\n{BUILT}\nrun: {{script: {name}}}\n")
        assert k8sjob("validate", file).code == code


def test_lint_of_a_script_takes_the_fields_of_its_job(tmp_path, k8sjob):
    script = tmp_path / "train.py"
    script.write_text("import torch\nloss.backward()\n")
    assert k8sjob("lint", script).out == ""
    found = k8sjob("lint", "--set", "replicas.workers=1", script)
    assert "training-not-distributed" in found.out
    assert k8sjob("lint", "--set", "replicas.worker=1", script).code == 1


@pytest.mark.parametrize(
    ("image", "warned"),
    [
        ("repository: train, base: r.example/b:1", ["image.repository: 'train' has no registry"]),
        ("repository: me/train, base: r.example/b:1", []),
        ("repository: r.example/t, base: 'pytorch/pytorch:2.5.1-cuda'", ["and k8sjob's runtime"]),
        ("repository: r.example/t, base: 'pytorch/pytorch:2.7.0'", ["and this machine has 2.8.0"]),
        ("repository: r.example/t, base: 'pytorch/pytorch:2.8.1'", []),
    ],
)
def test_what_is_known_of_an_image_is_said_before_the_work(
    k8sjob, tmp_path, monkeypatch, image, warned
):
    monkeypatch.setattr("k8sjob.checks.distributions.installed_version", lambda _: "2.8.0+cpu")
    (tmp_path / "a.py").touch()
    text = f"name: tiny\nimage: {{{image}}}\nrun: {{script: a.py}}\n"
    (file := tmp_path / "job.yaml").write_text(text)
    for command in (["validate"], ["push", "--plain-http", "none.invalid"], ["submit"]):
        warnings = [
            one
            for one in k8sjob(*command, file).err.splitlines()
            if "image." in one or "runtime needs" in one
        ]
        assert len(warnings) == len(warned), command
        assert all(part in line for part, line in zip(warned, warnings, strict=True))
