"""submit and diff, with a cluster in memory behind HTTP."""

import json

import pytest
import yaml
from clusters import status

from k8sjob.rendering.manifest import manifest
from k8sjob.spec import load

DIGEST = "team/tiny@sha256:" + "a" * 64


@pytest.fixture
def file(job_file):
    """A job.yaml without anything to remark on."""
    path = job_file()
    path.write_text(path.read_text().replace("team/tiny:1", DIGEST))
    return path


def other(file):
    file.write_text(file.read_text().replace("main.py", "other.py"))
    return file


def test_a_job_is_made_and_the_same_again_is_attached_to(k8sjob, api, file):
    done = k8sjob("submit", file)
    assert done == (0, "blue/tiny created\n", "follow it: k8sjob watch blue/tiny\n")
    assert list(api.jobs) == [("blue", "tiny")]
    assert [path for _, path, *_ in api.asked].count("/api/v1/namespaces/blue") == 1
    again = k8sjob("submit", file)
    unchanged = "blue/tiny already exists as the same job and has not ended: nothing was changed\n"
    assert again[:2] == (0, unchanged)
    made = json.loads(k8sjob("submit", file, "-o", "json").out)
    assert made["metadata"]["uid"] == api.jobs["blue", "tiny"]["metadata"]["uid"]


def test_another_job_of_the_name_is_shown_and_not_touched(k8sjob, api, file):
    k8sjob("submit", file)
    done = k8sjob("submit", other(file))
    assert (done.code, done.out) == (1, "")
    *lines, note = done.err.splitlines()
    assert "-                - main.py" in lines
    assert "+                - other.py" in lines
    assert note.startswith("error: blue/tiny already exists: a different job, Created")
    assert note.endswith("replace it, or submit under a generated name: --replace, --generate-name")
    assert "main.py" in json.dumps(api.jobs["blue", "tiny"])
    done = k8sjob("submit", file, "--replace")
    assert (done.code, done.out) == (0, "blue/tiny replaced\n")
    assert done.err.startswith("waiting until blue/tiny and its pods are gone, at most 120 s\n")
    assert "other.py" in json.dumps(api.jobs["blue", "tiny"])


def test_what_a_job_names_and_the_cluster_lacks_is_reported_at_once(k8sjob, api, file):
    claim = "volumes: [{name: d, mount: /d, pvc: data}]\nservice_account: trainer\n"
    file.write_text(file.read_text() + claim)
    api.refusals = {"persistentvolumeclaims/data": 404, "serviceaccounts/trainer": 403}
    done = k8sjob("submit", file)
    assert (done.code, done.out) == (0, "blue/tiny created\n")
    (note,) = [line for line in done.err.splitlines() if "there is no" in line]
    assert "there is no claim data in blue; write a PersistentVolumeClaim of that name" in note
    assert "trainer" not in done.err  # who may not look is not warned
    done = k8sjob("submit", file, "--generate-name", "--dry-run=server")
    assert "there is no claim data in blue" in done.err


def test_a_generated_name(k8sjob, api, file):
    for _ in range(2):
        done = k8sjob("submit", file, "--generate-name", "-o", "name")
        assert done.code == 0
        namespace, name = done.out.strip().split("/")
        assert (namespace, name) in api.jobs
        assert k8sjob("status", done.out.strip()).code == 0
    assert len(api.jobs) == 2


def test_a_dry_run_of_the_client_asks_no_cluster(k8sjob, file):
    done = k8sjob("submit", file, "--dry-run=client", "-o", "yaml")
    assert yaml.safe_load(done.out) == manifest(load(file)).document
    done = k8sjob("submit", file, "--dry-run=client", "-n", "red", "-o", "json")
    shown = json.loads(done.out)
    assert list(shown["metadata"])[:2] == ["name", "namespace"]
    assert shown["metadata"].pop("namespace") == "red"
    assert shown == manifest(load(file)).document
    assert k8sjob("submit", file, "--dry-run=client").out == "tiny created (dry run)\n"
    assert k8sjob("submit", file, "--dry-run=client", "-n", "red", "-o", "name").out == "red/tiny\n"


def test_errors_of_lint_are_shown_and_the_job_is_made(k8sjob, api, file):
    script = "from k8sjob import runtime\nwith runtime.session() as job:\n    if job.is_main:\n"
    (file.parent / "main.py").write_text(script + "        job.barrier()\n")
    file.write_text(file.read_text() + "replicas: {workers: 1}\n")
    done = k8sjob("submit", file)
    assert (done.code, done.out) == (0, "blue/tiny created\n")
    assert f"warning: lint: {file.parent}/main.py:4:9: error[collective-on-one-rank]: " in done.err
    (file.parent / "main.py").write_text("import torch.distributed as d\nd.init_process_group()\n")
    assert "lint:" not in k8sjob("submit", file, "--replace").err
    (file.parent / "main.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    assert k8sjob("submit", file, "--replace").code == 0


@pytest.mark.parametrize("option", [["-n", "red"], []])
def test_the_namespace_is_the_options_or_the_specs_or_the_contexts(option, k8sjob, api, file):
    if not option:
        file.write_text(file.read_text() + "namespace: red\n")
    assert k8sjob("submit", file, *option).out == "red/tiny created\n"
    done = k8sjob("diff", other(file), *option)
    assert done.code == 1
    assert f"k8sjob submit {file}{' -n red' * bool(option)} --replace" in done.err


def test_the_difference_has_the_exit_codes_of_kubectl(k8sjob, api, file):
    done = k8sjob("diff", file)
    assert done.code == 1
    assert done.out.startswith("--- /dev/null\n+++ blue/tiny as it would be\n")
    assert done.err == f"\nthe job does not exist; create it: k8sjob submit {file}\n"
    k8sjob("submit", file)
    assert k8sjob("diff", file) == (0, "", "")
    api.jobs["blue", "tiny"]["spec"]["runPolicy"]["suspend"] = True
    done = k8sjob("diff", file)
    assert done.code == 1
    assert done.err == (
        "\nread again while the job runs; kubectl edit pytorchjob tiny -n blue changes it, submit"
        " does not:\n  spec.runPolicy.suspend\n"
    )
    done = k8sjob("diff", file, "--image", DIGEST.replace("aaaa", "bbbb"))
    assert done.code == 1
    assert "takes effect only in a new job" in done.err
    assert "spec.pytorchReplicaSpecs.Master.template.spec.containers[0].image" in done.err
    assert k8sjob("diff", file, "--context", "nowhere").code == 2
    assert k8sjob("diff", file.parent / "missing.yaml").code == 2
    assert len(api.jobs) == 1


APPLIED = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: tiny, namespace: blue}
spec:
  pytorchReplicaSpecs:
    Master: &replica
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
          - name: pytorch
            image: team/digits:1
            imagePullPolicy: IfNotPresent
            command: [python, main.py, --lr, "0.1"]
            resources: {limits: {cpu: 4, memory: 16Gi, nvidia.com/gpu: 1}}
            env: [{name: B, value: "1"}, {name: A, value: "2"}]
            volumeMounts: [{name: dshm, mountPath: /dev/shm}]
          volumes: [{name: dshm, emptyDir: {medium: Memory}}]
    Worker: *replica
"""


def test_a_job_that_was_adopted_does_not_differ(k8sjob, api, tmp_path):
    """kubectl apply stores a manifest without the defaults of pods, and quantities as written."""
    manifest, job = tmp_path / "applied.yaml", tmp_path / "job.yaml"
    manifest.write_text(APPLIED)
    job.write_text(k8sjob("adopt", manifest).out)
    api.jobs["blue", "tiny"] = stored = yaml.safe_load(APPLIED)
    stored["metadata"] |= {"uid": "uid-1", "resourceVersion": "1"}
    assert k8sjob("diff", job) == (0, "", "")
    api.annotations = {"openshift.io/sa.scc.uid-range": "1000750000/10000"}
    assert k8sjob("diff", job) == (0, "", "")
    job.write_text(job.read_text().replace('cpu: "4"', 'cpu: "5"'))
    done = k8sjob("diff", job)
    changed = {line[1:].strip() for line in done.out.splitlines() if line[:1] in "+-"}
    assert {line for line in changed if ":" in line} == {'cpu: "4"', 'cpu: "5"'}
    assert done.code == 1


def test_text_of_a_cluster_is_harmless(k8sjob, api, file):
    k8sjob("submit", file)
    api.jobs["blue", "tiny"]["metadata"]["labels"]["x"] = "\x1b]0;title\x07\u202eevil"
    api.jobs["blue", "tiny"]["metadata"]["annotations"] = {}
    for command in ("diff", "submit"):
        done = k8sjob(command, file)
        assert done.code == 1
        assert "evil" in done.out + done.err
        assert not {"\x1b", "\x07", "\u202e"} & set(done.out + done.err)


def test_a_difference_has_colors_on_a_terminal_only(api, file, on_a_terminal, k8sjob):
    k8sjob("submit", file)
    assert "\x1b" not in k8sjob("diff", other(file)).out
    code, seen = on_a_terminal("diff", file)
    assert code == 1
    assert "\x1b[31m-                - main.py\x1b[0m" in seen
    assert "\x1b[32m+                - other.py\x1b[0m" in seen


def test_a_refusal_is_a_line_with_the_next_step(k8sjob, api, file):
    api.before = lambda _word: status(404, "NotFound", 'namespaces "blue" not found')
    done = k8sjob("submit", file)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: there is no namespace 'blue' (context fake); create it with")
    assert k8sjob("diff", file).code == 2


def test_without_a_cluster_it_says_what_to_set(k8sjob, file):
    done = k8sjob("submit", file)
    assert done.code == 1
    assert "set KUBECONFIG, or specify a file with --kubeconfig" in done.err


def test_the_context_goes_along_into_what_is_suggested(k8sjob, api, file, tmp_path):
    config = tmp_path / "fake.kubeconfig"
    done = k8sjob("submit", file, "--kubeconfig", config, "--context", "fake")
    assert done.err == (f"follow it: k8sjob watch blue/tiny --context fake --kubeconfig {config}\n")
