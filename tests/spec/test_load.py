import io
import sys

import pytest

from k8sjob.checks.lint import lint
from k8sjob.errors import SpecError
from k8sjob.findings import MAX_FINDINGS, invalid
from k8sjob.spec import JobSpec, load
from k8sjob.spec.changes import Change
from k8sjob.spec.load import folder_of, located

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
    assert [(p.line, p.column, p.field) for p in error.findings] == [
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
    assert [(p.line, p.field) for p in error.findings] == [(2, "image"), (5, "volumes[0].mount")]


def test_values_seen_are_cut_and_printable():
    error = problems(f'name: x\nimage: x\nrun: {{script: x}}\nreplicas: "\\e[31m{"x" * 500}"\n')
    assert len(str(error)) < 250
    assert "\x1b" not in str(error)


def test_of_very_many_problems_the_first_are_reported():
    many = "".join(f"k{i}: {i}\n" for i in range(5000))
    error = problems(TEXT + many)
    assert len(error.findings) == MAX_FINDINGS + 1
    assert error.findings[0].field == "k0"
    assert error.findings[-1].text == f"{5000 - MAX_FINDINGS} more problems; correct these first"


@pytest.mark.parametrize("count", ["--5", "9" * 5000, "\u00b2"])
def test_text_that_only_looks_like_a_number_is_refused_in_one_line(count):
    (problem,) = problems(f"{TEXT}replicas: {{workers: {count!r}}}\n").findings
    assert problem.field == "replicas.workers"
    assert "is not a whole number" in problem.message


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(?a)(?u)x", "(" * 900, "x" * 1001])
@pytest.mark.parametrize("setting", ["blocks: [{}]", "layout: {{{}: [model]}}", "tables: [{}]"])
def test_a_pattern_that_cannot_be_matched_is_refused(pattern, setting):
    strategy = setting.format(f"'{pattern}'")
    found = problems(f"{TEXT}strategy: {{kind: mesh, {strategy}}}\n").findings
    assert "is not a regular expression" in found[0].message
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
    (problem,) = problems(text).findings
    assert (problem.field, problem.line) == ("kind", line)
    assert step in problem.text


@pytest.mark.parametrize("name", ["train.ipynb", "train.sh"])
def test_a_script_is_distinguished_from_a_job_yaml(name, tmp_path):
    (tmp_path / name).write_text("import torch\nx = {'a': 1}\n")
    with pytest.raises(SpecError, match=rf"{name}: not a job\.yaml; "):
        load(tmp_path / name)


def test_an_error_after_loading_gets_its_line(tmp_path):
    file = tmp_path / "job.yml"
    file.write_text(TEXT + "volumes:\n- {name: a, mount: /a, pvc: b}\n")
    with pytest.raises(SpecError) as caught, located(tmp_path):
        raise SpecError([invalid(("volumes", 0, "mount"), "no"), invalid(("run", "env"), "no")])
    assert str(caught.value) == f"{file}:5:20: volumes[0].mount: no\n{file}:3:1: run.env: no"
    with pytest.raises(SpecError, match=r"^other.yaml:7:7: name: no$"), located(tmp_path):
        raise SpecError([invalid(("name",), "no", line=7, column=7)], "other.yaml")


# --- changes of single fields, and scripts in place of a job.yaml --------------------------------

JOB = """\
name: x
image: r/x:1
run: {script: main.py, args: [--epochs, 5]}
labels: {a.io/team: vision}
volumes:
  - {name: data, mount: /data, pvc: datasets}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


@pytest.mark.parametrize(
    ("text", "seen", "value"),
    [
        ("replicas.workers=3", lambda spec: spec.replicas.workers, 3),
        ("run.env.VERSION=1.10", lambda spec: spec.run.env["VERSION"], "1.10"),
        ('labels["a.io/team"]=speech', lambda spec: spec.labels["a.io/team"], "speech"),
        ("volumes[0].mount=/more", lambda spec: spec.volumes[0].mount, "/more"),
        ("volumes[1]={name: b, mount: /b, pvc: c}", lambda spec: spec.volumes[1].name, "b"),
        ("run.args=[--lr, 0.1]", lambda spec: spec.run.args, ("--lr", "0.1")),
        ("labels=", lambda spec: dict(spec.labels), {}),
        ("run.args[0]=", lambda spec: spec.run.args, ("5",)),
        ("volumes[0]=", lambda spec: spec.volumes, ()),
        ("run.env.A=b=c", lambda spec: spec.run.env["A"], "b=c"),
    ],
)
def test_a_field_is_changed(text, seen, value, file):
    assert seen(load(file, [Change.parse(text)])) == value


def test_the_last_change_counts_and_arguments_are_added(file):
    changes = [Change.parse("name=a"), Change.parse("name=b")]
    changes.append(Change(("run", "args"), ["--lr", "0.1"], adds=True))
    spec = load(file, changes)
    assert (spec.name, spec.run.args) == ("b", ("--epochs", "5", "--lr", "0.1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "replicas.workers",
            "--set: 'replicas.workers' does not change a field; write",
        ),
        ("=3", "--set: '=3' does not change a field"),
        *((f"{field}=x", f"--set: '{field}=x' does not") for field in (".name", "name.", "name[]")),
        *(
            (f"{field}=x", f"--set: '{field}=x' does not")
            for field in ("overlay" + ".a" * 20_000, "a" + "[0]" * 20_000, f"a[{'9' * 5000}]")
        ),
        (
            "labels[a.io/b]=c",
            """--set: 'labels[a.io/b]=c' does not change a field; write FIELD=VALUE, such as \
replicas.workers=3 or 'labels["example.com/team"]=vision'""",
        ),
        (
            "run.args[-1]=x",
            """--set: 'run.args[-1]=x' does not change a field; write FIELD=VALUE, such as \
replicas.workers=3; the items of a list count from 0, as in run.args[0]""",
        ),
        ("run.env.A.B=x", "job.yaml: --set run.env.A: {'B': 'x'} is not text"),
        ("labels.1=a b", "job.yaml: --set labels.1: 'a b' is not a label value"),
        ("replicas.workers=a", "job.yaml: --set replicas.workers: 'a' is not a whole number"),
        (
            "replicas.wokers=3",
            "job.yaml: --set replicas.wokers: no such field; did you mean",
        ),
        (
            "image.base=b",
            "--set image.base: image is 'r/x:1' there and has no such part",
        ),
        ("volumes[7].mount=/b", "--set volumes[7].mount: volumes is a list of 1 there"),
        ("run.args=[", "--set run.args:1:2: a bracket is never closed"),
        ("name=", "job.yaml: --set name: missing; write, for example"),
    ],
)
def test_a_change_that_cannot_be_made(text, message, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    with pytest.raises(SpecError) as caught:
        load("job.yaml", [Change.parse(text)])
    assert str(caught.value).startswith(message)


def test_an_option_of_a_field_is_named_in_its_error(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    change = Change(("replicas", "workers"), -1, option="--workers")
    with pytest.raises(SpecError, match=r"^job\.yaml: --workers: -1 is too small"):
        load("job.yaml", [change])


def test_a_later_error_about_a_changed_field_has_no_line(file):
    changes = [Change.parse("overlay={a: 1}")]
    with pytest.raises(SpecError, match=r"--set overlay\.a: wrong$"), located(file, changes):
        raise SpecError([invalid(("overlay", "a"), "wrong")])


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("My_Model v2.py", "my-model-v2"), ("2024.py", "job-2024")],
)
def test_a_script_is_a_job_of_its_name(script, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / script).write_text("")
    spec = load(f"src/{script}", local=True)
    assert (spec.name, spec.run.script) == (name, f"src/{script}")
    assert folder_of(f"src/{script}").resolve() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))  # all of it would be copied for each replica
    assert folder_of(f"src/{script}").resolve() == tmp_path / "src"
    monkeypatch.chdir("/")
    assert load(tmp_path / "src" / script, local=True).run.script == script


def test_in_a_cluster_a_script_needs_an_image(tmp_path):
    script = tmp_path / "train.py"
    with pytest.raises(SpecError, match=r"train\.py: no such file; name a script"):
        load(script)
    script.write_text("")
    with pytest.raises(SpecError, match=r"image: missing: .*--set image\.repository="):
        load(script)
    assert load(script, [Change.parse("image=r/x:1")]).image == "r/x:1"
    with pytest.raises(SpecError, match=r"(?s)image: missing.*--set nme: no such field"):
        load(script, [Change.parse("nme=x")])


def test_a_script_may_be_a_link_to_another_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "here" / "link.py").symlink_to("../train.py")
    monkeypatch.chdir(tmp_path / "here")
    assert load("link.py", local=True).run.script == "link.py"


@pytest.mark.parametrize(
    ("image", "field"),
    [
        ("context: ..", "image.context"),
        ("context: /", "image.context"),
        ("context: src/link", "image.context"),
        ("context: src, requirements: keys.txt", "image.requirements"),
        ("context: src, requirements: link/keys.txt", "image.requirements"),
    ],
)
def test_files_of_this_machine_go_into_an_image_only_from_the_folder_of_the_job(
    tmp_path, image, field
):
    (source := tmp_path / "repo/src").mkdir(parents=True)
    (tmp_path / "keys.txt").write_text("torch\n")
    (source / "keys.txt").symlink_to(tmp_path / "keys.txt")
    (source / "link").symlink_to(tmp_path)
    (job := tmp_path / "repo/job.yaml").write_text(
        "name: x\nimage:\n  {repository: r.example/x, base: b:1, "
        + image
        + "}\nrun: {script: a.py}\n"
    )
    with pytest.raises(SpecError) as caught:
        load(job)
    (problem,) = caught.value.findings
    assert (problem.field, problem.line) == (field, 3)
    assert str(tmp_path.resolve()) in problem.message or "leads to /," in problem.message
    assert [one.id for one in lint(job)] == ["invalid-document"]
    confirmed = problem.next_step.rpartition("--set ")[2]
    changes = [Change.parse(confirmed)]
    assert getattr(load(job, changes).image, field[6:]) == confirmed.partition("=")[2]
    assert not [one for one in lint(job, changes) if one.id == "invalid-document"]
    unrelated = [Change.parse("image.repository=r.example/y")]
    with pytest.raises(SpecError, match=field):
        load(job, unrelated)


def test_links_inside_of_the_folder_are_followed(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "src").symlink_to("code")
    (tmp_path / "r.txt").symlink_to("code/../requirements.txt")
    text = TEXT.replace("r/x:1", "{repository: r/x, base: b:1, context: CONTEXT}")
    for context in ("src", "., requirements: r.txt", "code/.."):
        (tmp_path / "job.yaml").write_text(text.replace("CONTEXT", context))
        load(tmp_path)
