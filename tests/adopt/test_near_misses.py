"""Files that are nearly a manifest of one job: what they are, and the next command."""

from pathlib import Path

import pytest

from k8sjob.adopt import adopt
from k8sjob.checks.lint import lint, lint_manifest
from k8sjob.errors import SpecError
from k8sjob.rendering.manifest import render
from k8sjob.spec import JobSpec

NEAR = Path(__file__).parent / "near_misses"
JOB = """\
apiVersion: batch/v1
kind: Job
metadata: {name: NAME}
spec:
  completionMode: Indexed
  template:
    spec:
      restartPolicy: Never
      containers: [{name: pytorch, image: "r.example/a:1", command: [sh, -c, "echo ${HOME}"]}]
"""
UNFILLED = [
    JOB.replace("NAME", "{{ .Values.name }}"),
    JOB.replace("NAME", "'${NAME}-train'"),
    JOB.replace("NAME", "<YOUR_NAME>"),
    JOB.replace("r.example/a:1", "${REGISTRY}/a:{{ tag }}"),
    JOB.replace("spec:\n", "spec:\n  replicas: ${N}\n", 1),
    f"{{{{- if .Values.on }}}}\n{JOB.replace('NAME', '{{ .Release.Name }}')}{{{{- end }}}}\n",
]


SIBLINGS = {
    "kubeflow.org/v1/MPIJob kubeflow.org/v2beta1/MPIJob ray.io/v1/RayJob v1/Pod "
    "batch.volcano.sh/v1alpha1/Job sagemaker.amazonaws.com/v1/HyperPodPyTorchJob "
    "apps/v1/Deployment apps/v1/StatefulSet": "k8sjob init --from SCRIPT",
    "kubeflow.org/v1/TFJob kubeflow.org/v1/XGBoostJob kubeflow.org/v1/PaddleJob "
    "kubeflow.org/v1/JAXJob": "kubectl apply -f FILE",
    "batch/v1/CronJob": "k8sjob adopt",
}


def refused(text, source="old.yaml", name=None):
    with pytest.raises(SpecError) as caught:
        adopt(text, source, name)
    return caught.value.findings


@pytest.mark.parametrize(
    "text", [*UNFILLED, *((NEAR / n).read_text() for n in ("helm.yaml", "template.yaml"))]
)
def test_an_unfilled_template_is_one_error(text):
    (problem,) = refused(text)
    assert "template that is not filled in" in problem.message
    (finding,) = lint_manifest(text, "old.yaml")
    assert (finding.id, finding.line) == ("invalid-document", problem.line)


SETTINGS = """\
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data:
  hydra.yaml: |
    model:

      name: ${model}
    {{- if this }} is text, too
"""


@pytest.mark.parametrize("beside", ["", SETTINGS, "\n" * 200_000])
def test_a_variable_of_a_shell_or_in_a_text_is_no_template(beside):
    assert adopt(JOB.replace("NAME", "digits") + beside).spec.name == "digits"


def test_a_job_inside_of_another_object_is_named_with_its_place(tmp_path):
    file = NEAR / "appwrapper.yaml"
    (problem,) = refused(file.read_text())
    (finding,) = lint(file)
    for message in (problem.text, finding.text):
        assert "PyTorchJob digits at spec.components[0].template" in message


@pytest.mark.parametrize("text", ["\n---\n".join(JOB.replace("NAME", name) for name in "ab")])
def test_one_job_of_several_is_chosen_by_its_name(text):
    assert "--name" in refused(text)[0].next_step
    adopted = adopt(text, name="b")
    assert adopted.spec.name == "b"
    assert any("Job a" in note for note in adopted.notes)
    assert "'c'" in refused(text, name="c")[0].message
    assert "--name" not in refused(f"{text}\n---\n{text}", name="b")[0].next_step


def test_a_misplaced_field_is_not_called_the_overlays():
    problems = refused((NEAR / "deadline.yaml").read_text())
    assert [one.field for one in problems] == ["spec.activeDeadlineSeconds", "spec.suspend"]
    assert not any("pod_template" in one.text for one in problems)


def test_volcanos_scheduling_is_a_gang():
    spec = adopt((NEAR / "volcano-gang.yaml").read_text()).spec
    assert (spec.gang.scheduler, spec.gang.min_available, spec.gang.queue) == (
        "volcano",
        3,
        "research",
    )
    assert "schedulerName" not in str(spec.pod_template)


def test_what_kueue_patches_is_left_out_with_a_note(tmp_path):
    adopted = adopt((NEAR / "trainjob-kueue-patch.yaml").read_text())
    assert any("kueue.x-k8s.io/manager" in note for note in adopted.notes)
    spec = adopted.spec
    assert (spec.runtime, spec.service_account) == ("torch-distributed", "training-sa")
    assert (spec.nnodes, spec.nproc_per_node, spec.resources.shm) == (2, 8, None)
    assert spec.node_selector == {}
    (left_over,) = spec.overlay["spec"]["runtimePatches"]
    template = left_over["trainingRuntimeSpec"]["template"]
    assert template["metadata"]["labels"] == {"team": "nlp", "cost-center": "research"}
    assert "nccl-check" not in render(spec)
    (tmp_path / "job.yaml").write_text(adopted.spec.to_yaml())
    assert lint(tmp_path) == []  # the patch of others mounts /dev/shm
    changed = spec.with_(resources={"shm": "0"})
    (tmp_path / "job.yaml").write_text(changed.to_yaml())
    assert {finding.id for finding in lint(tmp_path)} == {"no-shared-memory"}


@pytest.mark.parametrize(
    ("name", "step"), [(name, step) for names, step in SIBLINGS.items() for name in names.split()]
)
def test_another_kind_of_job_is_named_with_the_next_command(name, step, tmp_path):
    api, _, kind = name.rpartition("/")
    file = tmp_path / "other.yaml"
    file.write_text(f"apiVersion: {api}\nkind: {kind}\nmetadata: {{name: other}}\nspec: {{}}\n")
    with pytest.raises(SpecError) as caught:
        JobSpec.from_yaml(file.read_text(), str(file))
    (finding,) = lint(file)
    for message in (refused(file.read_text())[0].text, finding.text, str(caught.value)):
        assert kind in message
        assert step in message
        assert message.count("k8sjob adopt") == (kind == "CronJob")
