"""The rendered Dockerfile builds for real, and the training runs in the image as its user."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from k8sjob.contract import AGENT, CHECKPOINT_DIR_ENV, TERMINATION_LOG_ENV, Event
from k8sjob.rendering.dockerfile import write_context
from k8sjob.rendering.manifest import container_env, replica_env
from k8sjob.spec import load

pytestmark = pytest.mark.system
EXAMPLES = Path(__file__).resolve().parents[2] / "manifests"


def on(spec, **changes):
    """The spec, with another image part."""
    return spec.model_copy(update={"image": spec.image.model_copy(update=changes)})


@pytest.fixture(scope="module")
def digits(buildah, base_image, tmp_path_factory):
    """The image of the main example, for fewer epochs: its spec and its tag."""
    folder, context = (tmp_path_factory.mktemp("digits") / name for name in ("code", "context"))
    shutil.copytree(EXAMPLES / "digits-ddp", folder)
    script = (folder / "main.py").read_text()
    assert "EPOCHS = 20" in script
    (folder / "main.py").write_text(script.replace("EPOCHS = 20", "EPOCHS = 4"))
    spec = on(load(folder / "job.yaml"), base=base_image)
    write_context(spec, folder, context)
    return spec, buildah.build(context, "localhost/k8sjob-test-digits")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(buildah, spec, containers, command, **env):
    """All replicas at once on loopback; each one's output, after all have ended with code 0."""
    local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    local |= {f"PET_{key}": value for key, value in local.items()}
    # Debian's torch is built without libuv, which the store would use by default.
    local |= {"USE_LIBUV": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    roles = [("Master", 0), *(("Worker", i) for i in range(spec.replicas.workers))]
    started = []
    for (role, index), name in zip(roles, containers, strict=True):
        variables = container_env(spec) | replica_env(spec, role, index) | local
        flags = [f"--env={key}={value}" for key, value in variables.items()]
        argv = buildah.argv("run", "--isolation", "chroot", *flags, name, "--", *command)
        started.append(
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    assert codes == [0] * len(codes), "\n".join(outputs)[-6000:]
    return outputs


def test_what_the_image_says(buildah, digits):
    spec, image = digits
    config = buildah.config(image)
    assert config["User"] == "1000:1000"
    assert config["WorkingDir"] == "/app"
    assert config["Cmd"] == [*AGENT, spec.run.script, *spec.run.args]
    env = dict(item.split("=", 1) for item in config["Env"])
    assert env["PYTHONPATH"] == "/opt/k8sjob:/app"
    assert not {"PIP_CERT", "PIP_CONFIG_FILE"} & set(env)


def test_the_main_example_trains_in_its_image(buildah, digits, container):
    spec, image = digits
    spec = spec.model_copy(
        update={"replicas": spec.replicas.model_copy(update={"workers": 1, "elastic": None})}
    )
    containers = [container(image) for _ in range(2)]
    command = buildah.config(image)["Cmd"]
    where = {CHECKPOINT_DIR_ENV: "/app/checkpoints", TERMINATION_LOG_ENV: "/app/termination"}
    master, _ = run(buildah, spec, containers, command, **where)
    events = [event for line in master.splitlines() if (event := Event.decode(line))]
    started = next(event for event in events if event.kind == "started")
    assert started.data["world_size"] == 2
    accuracy = [e.data["test_accuracy"] for e in events if "test_accuracy" in e.data]
    assert accuracy[-1] > max(0.5, accuracy[0])
    if spec.checkpoint is not None:
        root = Path(buildah("mount", containers[0]))
        assert list((root / "app/checkpoints").iterdir())


WRITES = """
import getpass, json, os, pathlib
here = pathlib.Path(__file__).parent
(here / "data").mkdir()
(here / "data/model").write_text("x")
home = os.access(os.environ["HOME"], os.W_OK)
print(json.dumps({"uid": os.getuid(), "name": getpass.getuser(), "home": home,
                  "base": os.access("/opt/k8sjob", os.W_OK)}))
"""


def test_a_script_writes_beside_itself_as_another_user_than_root(
    buildah, digits, container, tmp_path
):
    spec, below = digits
    spec = on(spec, base=below, requirements=None)
    spec = spec.model_copy(update={"replicas": spec.replicas.model_copy(update={"workers": 0})})
    (tmp_path / "code").mkdir()
    (tmp_path / "code/main.py").write_text(WRITES)
    write_context(spec, tmp_path / "code", tmp_path / "context")
    image = buildah.build(tmp_path / "context", "localhost/k8sjob-test-writes")
    name = container(image)
    (who,) = run(buildah, spec, [name], ["python", "main.py"])
    assert json.loads(who) == {"uid": 1000, "name": "k8sjob", "home": True, "base": False}
    assert (Path(buildah("mount", name)) / "app/data/model").stat().st_uid == 1000


def test_certificates_and_caches_are_not_in_the_image(buildah, digits, container):
    _, image = digits
    root = Path(buildah("mount", container(image)))
    left = [path for path in (root / "run/k8sjob").glob("*") if path.stat().st_size]
    assert left == []
    assert not (root / "root/.cache/pip").exists()
    assert not list((root / "app").glob("**/__pycache__"))
    assert {path.name for path in (root / "app").iterdir()} >= {"main.py", "job.yaml"}
    assert not (root / "app/Dockerfile").exists()


def test_packages_have_bytecode_whatever_the_times_of_files(buildah, digits, container):
    _, image = digits
    root = Path(buildah("mount", container(image)))
    (compiled,) = root.glob("usr/**/sklearn/__pycache__/base.*.pyc")
    hashed = 1  # PEP 552: the second word of a .pyc says how it is checked
    assert int.from_bytes(compiled.read_bytes()[4:8], "little") & hashed
