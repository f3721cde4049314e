"""Changes of single fields, and scripts in place of a job.yaml."""

import pytest

from k8sjob.errors import Problem, SpecError
from k8sjob.spec import load
from k8sjob.spec.load import Change, folder_of, located

TEXT = """\
name: x
image: r/x:1
run: {script: main.py, args: [--epochs, 5]}
labels: {a.io/team: vision}
volumes:
  - {name: data, mount: /data, pvc: datasets}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "job.yaml").write_text(TEXT)
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
            """--set: 'labels[a.io/b]=c' does not change a field; write FIELD=VALUE, as \
replicas.workers=3 or 'labels["example.com/team"]=vision'""",
        ),
        (
            "run.args[-1]=x",
            """--set: 'run.args[-1]=x' does not change a field; write FIELD=VALUE, as \
replicas.workers=3; the items of a list count from 0, as in run.args[0]""",
        ),
        ("run.env.A.B=x", "job.yaml: --set run.env.A: {'B': 'x'} is not text"),
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
        ("name=", "job.yaml: --set name: missing; write it"),
    ],
)
def test_a_change_that_cannot_be_made(text, message, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    with pytest.raises(SpecError) as caught:
        load("job.yaml", [Change.parse(text)])
    assert str(caught.value).startswith(message)


def test_a_later_error_about_a_changed_field_has_no_line(file):
    changes = [Change.parse("overlay={a: 1}")]
    with pytest.raises(SpecError, match=r"--set overlay\.a: wrong$"), located(file, changes):
        raise SpecError([Problem("overlay.a", "wrong")])


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("My_Model v2.py", "my-model-v2"), ("2024.py", "job-2024")],
)
def test_a_script_is_a_job_of_its_name(script, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / script).write_text("")
    spec = load(f"src/{script}", here=True)
    assert (spec.name, spec.run.script) == (name, f"src/{script}")
    assert folder_of(f"src/{script}").resolve() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))  # all of it would be copied for each replica
    assert folder_of(f"src/{script}").resolve() == tmp_path / "src"
    monkeypatch.chdir("/")
    assert load(tmp_path / "src" / script, here=True).run.script == script


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
    assert load("link.py", here=True).run.script == "link.py"
