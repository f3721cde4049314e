"""What a run on this machine needs, found or refused before anything starts."""

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.backends.local import prepare as module
from k8sjob.backends.local.machine import check_packages, visible_gpus
from k8sjob.backends.local.prepare import Places, copy_context, mapped, prepare
from k8sjob.backends.local.state_folder import Store
from k8sjob.contract import CHECKPOINT_DIR_ENV, CONFIG_ENV
from k8sjob.errors import BackendError, ImageError
from k8sjob.forking.forks import Forks
from k8sjob.jobs.plan import plan_job
from k8sjob.spec import JobSpec


def spec(**fields):
    fields.setdefault("image", "example/image:1")
    fields.setdefault("run", {"command": ["python", "main.py"]})
    return JobSpec(name="job", **fields)


@pytest.fixture
def prepared(tmp_path):
    """Prepare a spec; the launches, and what was said."""

    def go(made):
        folder = tmp_path / "context"
        folder.mkdir(exist_ok=True)
        store = Store(tmp_path / "state")
        with store.draft() as draft:
            home = store.folder("job", "00000000")
            places = Places(plan_job(made, folder), home.path, tmp_path / "kept", store)
            result = prepare(places, draft.path)
        return result.launches, dict(result.notices)

    return go


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,2", ("0", "2")),
        ("-1", ()),
        ("0,1,none,2", ("0", "1")),
        ("1,1", ()),
        (" GPU-a , GPU-b", ("GPU-a", "GPU-b")),
    ],
)
def test_visible_devices_are_respected(value, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == expected


def test_nvidia_smi_is_called_if_it_exists(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == ()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0\necho 1\necho ''\n")
    program.chmod(0o755)
    assert visible_gpus() == ("0", "1")


def test_each_replica_gets_its_part_of_the_gpus(prepared, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    launches, detail = prepared(spec(replicas={"workers": 1}, resources={"gpus": 2}))
    seen = {name: launch.env["CUDA_VISIBLE_DEVICES"] for name, launch in launches.items()}
    assert seen == {"master-0": "4,5", "worker-0": "6,7"}
    assert "TooFewGPUs" not in detail


def test_too_few_gpus_mean_cpus_with_a_message(prepared, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    made = spec(
        replicas={"workers": 1}, resources={"gpus": 1}, strategy={"kind": "ddp", "backend": "nccl"}
    )
    launches, detail = prepared(made)
    assert {launch.env["CUDA_VISIBLE_DEVICES"] for launch in launches.values()} == {""}
    assert "requests 2 GPUs and this machine has 1" in detail["TooFewGPUs"]
    assert json.loads(launches["master-0"].env[CONFIG_ENV])["backend"] == "gloo"
    assert "gloo is used" in detail["NoNccl"]


def test_a_job_without_gpus_sees_none(prepared, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    launches, detail = prepared(spec())
    assert launches["master-0"].env["CUDA_VISIBLE_DEVICES"] == ""
    assert detail == {}


# --- the command and the environment --------------------------------------------------------------


def test_the_agent_is_started_by_this_python(prepared):
    launches, _ = prepared(spec(run={"script": "main.py", "args": ["--x", "$(HOME) $$"]}))
    agent = [sys.executable, "-P", "-m", "k8sjob.runtime"]
    assert launches["master-0"].argv == [*agent, "main.py", "--x", "$(HOME) $$"]
    assert launches["master-0"].has_agent
    launches, _ = prepared(spec(run={"command": ["torchrun", "main.py"]}))
    assert launches["master-0"].argv == [*agent, "--exec", "torchrun", "main.py"]
    assert not launches["master-0"].has_agent


@pytest.mark.parametrize("env", [{}, {"PYTHONPATH": "/opt/k8sjob:/app/src"}])
def test_a_file_of_the_runtimes_name_does_not_hide_it(prepared, env):
    launches, _ = prepared(spec(run={"script": "main.py", "env": env}))
    launch = launches["master-0"]
    runtime, code = launch.env["PYTHONPATH"].split(":")[:2]
    assert runtime == json.loads(launch.env["K8SJOB_PATHS"])["/opt/k8sjob"]
    assert code.startswith(launch.cwd)


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
def test_arguments_and_variables_are_literal_as_on_a_cluster(text):
    from k8sjob.backends.local.prepare import _expand
    from k8sjob.rendering.manifest import literal

    assert _expand(literal(text), {"HOME": "expanded", "": "expanded"}) == text


def test_variables_refer_to_earlier_ones_as_in_kubernetes(prepared):
    env = [
        {"name": "A", "value": "one"},
        {"name": "B", "value": "$(A)-$(LATER)-$$(A)"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    container = {"name": "pytorch", "env": env}
    master = {"template": {"spec": {"containers": [container]}}}
    launches, _ = prepared(spec(overlay={"spec": {"pytorchReplicaSpecs": {"Master": master}}}))
    env = launches["master-0"].env
    assert (env["B"], env["POD"]) == ("one-$(LATER)-$(A)", "job-master-0")


def test_a_field_that_means_nothing_here_is_refused(prepared):
    field = {"fieldRef": {"fieldPath": "spec.serviceAccountName"}}
    container = {"name": "pytorch", "env": [{"name": "X", "valueFrom": field}]}
    master = {"template": {"spec": {"containers": [container]}}}
    with pytest.raises(BackendError, match=r"spec\.serviceAccountName"):
        prepared(spec(overlay={"spec": {"pytorchReplicaSpecs": {"Master": master}}}))


def test_threads_are_divided_unless_somebody_has_chosen(prepared, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launches, _ = prepared(spec(replicas={"workers": 3}))
    assert launches["worker-2"].env["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 4))
    chosen = {"command": ["python"], "env": {"OMP_NUM_THREADS": 5}}
    launches, _ = prepared(spec(replicas={"workers": 3}, run=chosen))
    assert launches["worker-2"].env["OMP_NUM_THREADS"] == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in prepared(spec())[0]["master-0"].env


def test_sidecars_are_left_out_and_env_from_is_explained(prepared):
    master = {"template": {"spec": {"containers": [{"name": "proxy", "image": "p:1"}]}}}
    overlay = {"spec": {"pytorchReplicaSpecs": {"Master": master}}}
    run = {"command": ["python"], "env_from": [{"secret": "wandb"}]}
    _, detail = prepared(spec(overlay=overlay, run=run))
    assert "containers proxy" in detail["ContainersLeftOut"]
    assert "secret 'wandb' exists only in the cluster" in detail["EnvFrom"]


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data", "/here"),
        ("/data/a b", "/here/a b"),
        ("--in=/data/x=y", None),
        ("--in=/data/x", "--in=/here/x"),
        ("/database", None),
        ("x/data", None),
        ("/data/deep/x", "/deeper/x"),
    ],
)
def test_mapped(text, expected):
    assert mapped(text, {"/data/deep": "/deeper", "/data": "/here"}) == expected


def test_checkpoints_on_a_claim_are_this_runs_own(prepared, tmp_path):
    volume = {"name": "claim", "mount": "/checkpoints", "pvc": "claim"}
    launches, _ = prepared(spec(checkpoint={"dir": "/checkpoints"}, volumes=[volume]))
    assert launches["master-0"].env[CHECKPOINT_DIR_ENV] == str(tmp_path / "kept")


def test_a_config_map_needs_a_folder_of_this_machine(prepared):
    volume = {"name": "settings", "mount": "/etc/settings", "config_map": "settings"}
    with pytest.raises(BackendError, match=r"volumes\[0\]: the config_map .* add `local: PATH`"):
        prepared(spec(volumes=[volume]))


# --- packages -------------------------------------------------------------------------------------


def image(**fields):
    return {"repository": "example/image", "base": "python:3.12", **fields}


def test_missing_packages_are_one_error_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text(
        "# comment\n-r other.txt\npytest>=1\nno-such-package==1 # why\n\n"
        "other ; python_version < '3'\npkg @ https://example.org/x\n"
    )
    made = spec(image=image(requirements="requirements.txt", pip=["neither-this[x]>=2", "click"]))
    with pytest.raises(BackendError) as error:
        check_packages(made, tmp_path)
    message = str(error.value)
    assert "image's requirements: no-such-package, neither-this; " in message
    file = tmp_path / "requirements.txt"
    assert f"-m pip install -r {file} 'neither-this[x]>=2'" in message
    monkeypatch.setitem(sys.modules, "pip", None)  # as in an environment of uv
    with pytest.raises(BackendError, match=f"uv pip install --python {sys.executable} -r"):
        check_packages(made, tmp_path)


def test_no_process_is_started_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match="torch is not installed for"), Forks("no-such-file"):
        pytest.fail("a process was started")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_files_and_encodings_of_requirements(encoding, tmp_path):
    text = "vendor/no-such.whl\r\nno-such-1.0-py3-none-any.whl\r\nno-such-package\r\n"
    bom = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "requirements.txt").write_bytes(f"{bom}{text}".encode(encoding))
    with pytest.raises(BackendError, match=r"image's requirements: no-such-package; "):
        check_packages(spec(image=image(requirements="requirements.txt")), tmp_path)


def test_a_missing_requirements_file_is_named(tmp_path):
    with pytest.raises(ImageError, match=r"image\.requirements: .*nothing\.txt cannot be read"):
        check_packages(spec(image=image(requirements="nothing.txt")), tmp_path)


def test_relative_paths_lead_to_the_mounts(tmp_path):
    for name in ("data", "context/inner", "around/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "here").write_text(name)
    volumes = [
        {"name": "data", "mount": "/data", "pvc": "claim", "local": str(tmp_path / "data")},
        {"name": "inner", "mount": "/app/inner", "pvc": "claim", "local": str(tmp_path / "data")},
        {"name": "deep", "mount": "/mnt/a/b", "pvc": "claim", "local": str(tmp_path / "data")},
        {"name": "below", "mount": "/data/sub", "pvc": "other"},
    ]
    plan = plan_job(spec(volumes=volumes, replicas={"workers": 1}), tmp_path / "context")
    store = Store(tmp_path / "state")
    with store.draft() as draft:
        prepare(Places(plan, tmp_path / "job", tmp_path / "kept", store), draft.path)
        works = [draft.path / "replicas" / name / "work" for name in ("master-0", "worker-0")]
        found = [work / path for work in works for path in ("../data", "inner", "../mnt/a/b")]
        assert [(path / "here").read_text() for path in found] == ["data"] * 6
    assert (tmp_path / "context/inner/here").read_text() == "context/inner"
    # A container runtime, too, makes the point of a mount that is inside of another volume.
    assert {file.name for file in (tmp_path / "data").iterdir()} <= {"here", "sub"}


@pytest.mark.parametrize(
    ("code", "run", "named"),
    [
        ("torch.load('/keep/last.pt')", {}, True),
        ('folder = "/keep"', {}, True),
        ("open('/keeper/x'); open('../keep/last.pt')", {}, False),
        ("parser.add_argument('--keep', default='/keep')", {"args": ["--keep=/keep"]}, False),
        ("os.environ.get('KEEP', '/keep')", {"env": {"KEEP": "/keep"}}, False),
        ("", {"command": ["bash", "-c", f"echo {'long ' * 60} && python main.py"]}, False),
    ],
)
def test_a_path_of_the_cluster_in_the_script_is_named(prepared, tmp_path, code, run, named):
    (tmp_path / "context").mkdir()
    (tmp_path / "context/main.py").write_text(code)
    volumes = [{"name": "keep", "mount": "/keep", "pvc": "claim"}]
    _, notices = prepared(spec(volumes=volumes, run={"command": ["python", "main.py"], **run}))
    assert ("PathNotMapped" in notices) == named
    assert not named or "write ../keep," in notices["PathNotMapped"]


# --- the context ----------------------------------------------------------------------------------


def test_the_context_is_copied_for_each_replica_without_what_is_ignored(tmp_path):
    source = tmp_path / "source"
    names = ["main.py", "pkg/a.py", "data/big.bin", ".git/config", "pkg/__pycache__/a.pyc"]
    names += [".venv/bin/python", "state/jobs/x", ".dockerignore"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / ".dockerignore").write_text("data\n")
    (source / "link").symlink_to("main.py")
    targets = [tmp_path / "one", tmp_path / "two"]
    assert copy_context(source, targets, beside=source / "state") == ""
    for target in targets:
        seen = {str(p.relative_to(target)) for p in target.rglob("*") if not p.is_dir()}
        assert seen == {"main.py", "pkg/a.py", ".dockerignore", "link"}
        assert (target / "link").is_symlink()
    assert (source / "data/big.bin").exists()


def test_a_large_context_is_reported_with_its_largest_parts(tmp_path):
    source, state = tmp_path / "source", tmp_path / "state"
    state.mkdir()
    (source / "big").mkdir(parents=True)
    with (source / "big" / "sparse").open("wb") as file:
        file.truncate(300 << 20)
    (source / "main.py").touch()
    advice = copy_context(source, [], beside=state)
    assert "has 2 files of 300 MiB (big 300 MiB" in advice
    with (source / "big" / "sparse").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(BackendError, match=r"\.dockerignore.* are free"):
        copy_context(source, [tmp_path / "one"], beside=state)


def test_a_context_of_many_files_is_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MANY", 2)
    monkeypatch.setattr(module, "_TOO_MANY", 3)
    source, state = tmp_path / "source", tmp_path / "state"
    state.mkdir()
    (source / "big").mkdir(parents=True)
    for name in ("big/1", "big/2", "main.py"):
        (source / name).touch()
    assert "has 3 files of 0 MiB" in copy_context(source, [tmp_path / "one"], beside=state)
    (source / "big" / "3").touch()
    with pytest.raises(BackendError, match=r"more than 3 files \(of the first, big 3, main.py 1\)"):
        copy_context(source, [tmp_path / "two"], beside=state)
    assert not (tmp_path / "two").exists()


def test_a_context_that_is_not_there(tmp_path):
    with pytest.raises(BackendError, match="is not a folder"):
        copy_context(tmp_path / "nothing", [], beside=tmp_path)
