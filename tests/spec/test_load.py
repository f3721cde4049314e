import io
import sys

import pytest

from k8sjob.errors import MAX_PROBLEMS, Problem, SpecError
from k8sjob.spec import JobSpec, load
from k8sjob.spec.load import located

TEXT = "name: x\nimage: r/x:1\nrun: {script: main.py}\n"
BAD = """\
name: Bad
run:
  script: main.py
  env:
    RANK: 1
    OK: fine
image: x
replica: {workers: 2}
resources:
  cpu: lots
volumes:
  - {name: a, mount: a, pvc: b}
"""


def problems(text):
    with pytest.raises(SpecError) as caught:
        JobSpec.from_yaml(text, source="job.yaml")
    return caught.value


def test_a_file_a_folder_and_standard_input(tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(TEXT)
    spec = JobSpec.from_yaml(TEXT)
    assert load(tmp_path / "job.yaml") == load(str(tmp_path)) == spec
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert load("-") == spec


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"none\.yaml: no such file; .*k8sjob init"):
        load(tmp_path / "none.yaml")
    (tmp_path / "x" / "job.yaml").mkdir(parents=True)
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        load(tmp_path / "x")


def test_all_problems_come_at_once_in_the_order_of_the_file():
    error = problems(BAD)
    assert [(p.line, p.column, p.field) for p in error.problems] == [
        (1, 7, "name"),
        (5, 11, "run.env.RANK"),
        (8, 1, "replica"),
        (10, 8, "resources.cpu"),
        (12, 22, "volumes[0].mount"),
    ]
    assert str(error).splitlines()[2] == (
        "job.yaml:8:1: replica: no such field; did you mean 'replicas'?"
    )


def test_what_is_missing_is_named_where_it_should_stand():
    error = problems("# comment\nname: x\nrun: {script: a.py}\nvolumes:\n- name: a\n  pvc: b\n")
    assert [(p.line, p.field) for p in error.problems] == [(2, "image"), (5, "volumes[0].mount")]


def test_values_seen_are_cut_and_printable():
    error = problems(f'name: x\nimage: x\nrun: {{script: x}}\nreplicas: "\\e[31m{"x" * 500}"\n')
    assert len(str(error)) < 250
    assert "\x1b" not in str(error)


def test_of_very_many_problems_the_first_are_told():
    many = "".join(f"k{i}: {i}\n" for i in range(5000))
    error = problems(TEXT + many)
    assert len(error.problems) == MAX_PROBLEMS + 1
    assert error.problems[0].field == "k0"
    assert error.problems[-1].message == f"{5000 - MAX_PROBLEMS} more problems; correct these first"


@pytest.mark.parametrize("count", ["--5", "9" * 5000, "\u00b2"])
def test_text_that_only_looks_like_a_number_is_refused_in_one_line(count):
    (problem,) = problems(f"{TEXT}replicas: {{workers: {count!r}}}\n").problems
    assert problem.field == "replicas.workers"
    assert "is not a whole number" in problem.message


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(?a)(?u)x", "(" * 900, "x" * 1001])
@pytest.mark.parametrize("setting", ["blocks: [{}]", "layout: {{{}: [model]}}", "tables: [{}]"])
def test_a_pattern_that_cannot_be_matched_is_refused(pattern, setting):
    strategy = setting.format(f"'{pattern}'")
    found = problems(f"{TEXT}strategy: {{kind: mesh, {strategy}}}\n").problems
    assert "is no regular expression" in found[0].message
    assert all(len(problem.message) < 300 for problem in found)


def test_a_folder_may_have_a_job_yml(tmp_path):
    (tmp_path / "job.yml").write_text(TEXT)
    assert load(tmp_path) == load(tmp_path / "job.yaml") == JobSpec.from_yaml(TEXT)
    (tmp_path / "job.yaml").write_text(TEXT.replace("name: x", "name: y"))
    assert load(tmp_path).name == "y"


PYTORCHJOB = "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\n"


@pytest.mark.parametrize(
    ("text", "line", "step"),
    [
        (PYTORCHJOB, 2, "`k8sjob adopt job.yaml` prints the job.yaml of the training job in it"),
        (f"kind: Service\n---\n{PYTORCHJOB}", 1, "`k8sjob adopt job.yaml` prints the job.yaml"),
        ("kind: List\nitems:\n- kind: PyTorchJob\n", 1, "`k8sjob adopt job.yaml` prints"),
        ("kind: JobSet\nspec: {}\n", 1, "kind JobSet, not a job.yaml; `k8sjob adopt job.yaml`"),
        ("kind: PodList\nitems: [{metadata: {name: a}}]\n", 1, "kind PodList, not a job.yaml"),
    ],
)
def test_a_manifest_is_sent_to_adopt(text, line, step):
    (problem,) = problems(text).problems
    assert (problem.field, problem.line) == ("kind", line)
    assert step in problem.message


@pytest.mark.parametrize("name", ["train.ipynb", "train.sh"])
def test_a_script_is_told_from_a_job_yaml(name, tmp_path):
    (tmp_path / name).write_text("import torch\nx = {'a': 1}\n")
    with pytest.raises(
        SpecError, match=rf"{name}: a script, not a job\.yaml, whose `run` names it"
    ):
        load(tmp_path / name)


def test_an_error_after_loading_gets_its_line(tmp_path):
    file = tmp_path / "job.yml"
    file.write_text(TEXT + "volumes:\n- {name: a, mount: /a, pvc: b}\n")
    with pytest.raises(SpecError) as caught, located(tmp_path):
        raise SpecError([Problem("volumes[0].mount", "no"), Problem("run.env", "no")])
    assert str(caught.value) == f"{file}:5:20: volumes[0].mount: no\n{file}:3:1: run.env: no"
    with pytest.raises(SpecError, match=r"^other.yaml:7:7: name: no$"), located(tmp_path):
        raise SpecError([Problem("name", "no", 7, 7)], "other.yaml")
