"""What brings k8sjob elsewhere: the GitHub Action, the krew plugin, the container image."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from baseimage import Buildah, missing_tools

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "manifests/digits-ddp/job.yaml"


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def action(tmp_path):
    """Runs the last step of action.yml as a runner would, with these inputs."""
    script = f'#!/bin/sh\nexec "{sys.executable}" -m k8sjob "$@"\n'
    executable(tmp_path / "k8sjob/bin/k8sjob", script)
    action = yaml.safe_load((ROOT / "action.yml").read_text())

    def run(**given):
        inputs = {name: spec["default"] for name, spec in action["inputs"].items()} | given
        step = action["runs"]["steps"][-1]
        values = {
            name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")]
            for name, value in step["env"].items()
        }
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env={**os.environ, **values, "RUNNER_TEMP": str(tmp_path), "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )

    return run


def test_the_action_writes_sarif(action, tmp_path):
    done = action(files=str(EXAMPLE))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "k8sjob.sarif").read_text())["version"] == "2.1.0"


def test_the_action_fails_for_an_error_and_shows_it(action, tmp_path):
    (tmp_path / "bad.yaml").write_text("name: x\nimage: a/b:1\nrun: {script: x.py}\nreplicas: 3\n")
    done = action(files=f"{EXAMPLE} bad.yaml", sarif="found.json")
    assert done.returncode == 1
    assert "replicas" in done.stdout
    (run,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert "invalid-document" in {result["ruleId"] for result in run["results"]}


@pytest.fixture
def plugin(tmp_path):
    """The krew plugin's manifest, and its unpacked files."""
    url = "https://forge.example/team/k8sjob"
    packed = tmp_path / "krew"
    program = ROOT / "packaging/krew.py"
    subprocess.run([sys.executable, program, packed, url], check=True)
    (tmp_path / "plugin").mkdir()
    archive = str(packed / "kubectl-k8sjob.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", str(tmp_path / "plugin")], check=True)
    return packed, tmp_path / "plugin/kubectl-k8sjob"


def test_the_krew_manifest_names_its_archive(plugin):
    packed, script = plugin
    manifest = yaml.safe_load((packed / "k8sjob.yaml").read_text())
    (platform,) = manifest["spec"]["platforms"]
    digest = hashlib.sha256((packed / "kubectl-k8sjob.tar.gz").read_bytes()).hexdigest()
    assert platform["sha256"] == digest
    assert platform["selector"]["matchExpressions"][0]["values"] == ["linux"]
    release = "https://forge.example/team/k8sjob/releases/download/v0.1.0"
    assert platform["uri"] == f"{release}/kubectl-k8sjob.tar.gz"
    assert {file["from"] for file in platform["files"]} == {"kubectl-k8sjob", "LICENSE"}
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    ("there", "called"),
    [
        ("k8sjob", ["list"]),
        ("uvx", ["-q", "--from", "k8sjob==0.1.0", "k8sjob", "list"]),
        ("pipx", ["run", "-q", "--spec", "k8sjob==0.1.0", "k8sjob", "list"]),
    ],
)
def test_the_krew_plugin_runs_what_is_there(plugin, there, called, tmp_path):
    executable(tmp_path / "bin" / there, '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    env = {"PATH": str(tmp_path / "bin")}
    argv = ["/bin/sh", str(plugin[1]), "list"]
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == called


def test_the_krew_plugin_with_nothing_there(plugin, tmp_path):
    argv, env = ["/bin/sh", str(plugin[1])], {"PATH": str(tmp_path)}
    done = subprocess.run(argv, env=env, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pipx install 'k8sjob==0.1.0'" in done.stderr


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Publishes a checkout beside programs that only write down how they were called."""
    checkout, git = tmp_path / "checkout", ["git", "-C", tmp_path / "checkout"]
    for file in ("packaging/publish.py", "pyproject.toml"):
        executable(checkout / file, (ROOT / file).read_text())
    (checkout / "CHANGELOG.md").write_text("## [0.1.0] - 2026-12-01\n")
    (checkout / ".gitignore").write_text("dist\n")
    executable(checkout / "dist/k8sjob-0.1.0.tar.gz", "")
    for name in ("make", "docker", "uv"):
        executable(tmp_path / "bin" / name, f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("K8SJOB_REPOSITORY", "https://forge.example/team/k8sjob")
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "origin"], check=True)
    for line in (
        "init -q", "remote add origin ../origin", "config user.name x", "config user.email x",
        "add .", "commit -qm x",
    ):  # fmt: skip
        subprocess.run([*git, *line.split()], check=True)
    command = [sys.executable, checkout / "packaging/publish.py"]
    options = {"capture_output": True, "text": True}
    return lambda *argv: subprocess.run([*command, *argv], check=False, **options)


def test_one_command_publishes_a_version_and_goes_on_after_a_failure(
    publish, tmp_path, monkeypatch
):
    monkeypatch.setenv("K8SJOB_IMAGE", "forge.example/k8sjob")
    calls, tag = tmp_path / "calls", tmp_path / "origin/refs/tags/v0.1.0"
    image = "forge.example/k8sjob:0.1.0"
    built = ["make release", f"docker build -f packaging/Dockerfile -t {image} ."]
    assert "not run: uv publish" in publish("--dry-run").stdout
    assert calls.read_text().splitlines() == built
    assert not tag.exists()
    uv = (tmp_path / "bin/uv").read_text()
    executable(tmp_path / "bin/uv", "#!/bin/sh\nexit 3\n")
    assert "exit code 3; run the same command again" in publish().stderr
    executable(tmp_path / "bin/uv", uv)
    calls.unlink()
    assert publish().returncode == 0
    published = [f"docker push {image}", "uv publish dist/k8sjob-0.1.0.tar.gz"]
    assert calls.read_text().splitlines() == [*built, *published]
    assert tag.exists()


def test_a_version_that_cannot_be_published_is_refused_with_all_reasons(publish, tmp_path):
    (tmp_path / "checkout/CHANGELOG.md").write_text("## [Unreleased]\n")
    done = publish()
    assert done.returncode == 1
    for reason in ("K8SJOB_IMAGE is not set", "rename [Unreleased]", "commit them"):
        assert reason in done.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.system
@pytest.mark.timeout(1800)  # it installs everything in a container
@pytest.mark.skipif(bool(missing_tools()), reason=str(missing_tools()))
def test_the_image_runs_as_another_user_than_root():
    buildah = Buildah()
    tag = buildah.client_image()
    assert buildah.config(tag)["User"] == "1000:1000"
    container = buildah("from", "--pull-never", tag)
    try:
        run = ["run", "--isolation", "chroot", container, "--"]
        assert "k8sjob 0.1.0" in buildah(*run, "k8sjob", "version")
        buildah(*run, "k8sjob", "init", "mine")
        assert ": valid: " in buildah(*run, "k8sjob", "validate", "mine/job.yaml")
    finally:
        buildah("rm", container)
