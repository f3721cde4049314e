import pytest

from k8sjob.contract import RuntimeConfig
from k8sjob.errors import SpecError
from k8sjob.spec import JobSpec, Replicas, Resources, Run
from k8sjob.yamldoc import parse


def job(**changes):
    return JobSpec(**{"name": "x", "image": "r/x:1", "run": {"script": "main.py"}, **changes})


def test_a_minimal_job():
    spec = job()
    assert (spec.nnodes, spec.nproc_per_node, spec.world_size) == (1, 1, 1)
    assert spec.image_reference == "r/x:1"
    assert not spec.builds_image
    built = job(image={"repository": "r/x", "base": "python:3.12"})
    assert (built.builds_image, built.image_reference) == (True, "r/x")
    assert job(run=Run(script="main.py"), replicas=Replicas()) == spec
    assert spec.uses_agent
    assert spec.runtime_config == RuntimeConfig(job="x")
    assert spec.to_yaml() == 'name: x\nimage: "r/x:1"\nrun:\n  script: main.py\n'


@pytest.mark.parametrize(
    ("gpus", "given", "expected"), [(0, None, 1), (4, None, 4), (0, 3, 3), (2, 2, 2)]
)
def test_processes_follow_the_gpus(gpus, given, expected):
    spec = job(resources={"gpus": gpus}, replicas={"workers": 2, "nproc_per_node": given})
    assert spec.nproc_per_node == expected
    assert spec.world_size == 3 * expected


def test_a_parameter_server_s_processes_are_counted():
    strategy = {"kind": "parameter_server", "servers": 2}
    spec = job(replicas={"workers": 3, "nproc_per_node": 2}, strategy=strategy)
    assert spec.world_size == 3 + 3 * 2


@pytest.mark.parametrize(
    ("replicas", "limit"),
    [
        ({"workers": 0}, 63 - len("-master-0")),
        ({"workers": 3}, 63 - len("-worker-2")),
        ({"workers": 11}, 63 - len("-worker-10")),
        ({"workers": 1000}, 63 - len("-worker-999")),
        ({"workers": 1, "elastic": {"min": 1, "max": 12}}, 63 - len("-worker-11")),
    ],
)
def test_the_longest_name_of_a_pod_fits_63_characters(replicas, limit):
    assert job(name="a" * limit, replicas=replicas)
    with pytest.raises(SpecError, match=f"shorten it to at most {limit}"):
        job(name="a" * (limit + 1), replicas=replicas)


def test_the_master_may_differ():
    resources = Resources(
        cpu=4.0, memory="8192Mi", master={"memory": "16Gi", "extended": {"a/b": 1}}
    )
    assert resources.of_master.memory == "16Gi"
    assert resources.of_master.cpu == "4"
    assert resources.of_master.extended == {"a/b": "1"}
    assert resources.of_master.master is None
    assert Resources(cpu=4).of_master == Resources(cpu=4)
    with pytest.raises(SpecError, match=r"resources\.master\.shm: 9Gi is more than memory 8Gi"):
        job(resources={"memory": "8Gi", "shm": "1Gi", "master": {"shm": "9Gi"}})


def test_a_spec_is_frozen_to_the_bottom():
    spec = job(run={"script": "main.py", "env": {"A": "1"}})
    with pytest.raises(AttributeError, match=r"make another one: spec\.with_"):
        spec.name = "y"
    with pytest.raises(AttributeError, match="with_"):
        del spec.run
    with pytest.raises(TypeError, match="with_"):
        spec.run.env["A"] = "2"
    with pytest.raises(TypeError, match="with_"):
        spec.run.env |= {"B": "2"}
    with pytest.raises(TypeError):
        spec.labels.update(a="b")
    assert spec.run.env == {"A": "1"}


def test_with_makes_a_new_valid_spec():
    spec = job(replicas={"workers": 1, "nproc_per_node": 2})
    more = spec.with_(replicas={"workers": 7}, namespace="team")
    assert (more.world_size, more.namespace, spec.world_size) == (16, "team", 4)
    assert spec.with_(namespace=None) == spec
    with pytest.raises(SpecError, match=r"replicas\.workers: -1"):
        spec.with_(replicas={"workers": -1})


def test_the_short_repr_shows_what_was_set():
    assert repr(job(replicas={"workers": 3})) == (
        "JobSpec(name='x', image='r/x:1', run=Run(script='main.py'), replicas=Replicas(workers=3))"
    )
    assert str(Replicas()) == "Replicas()"


def test_the_runtimes_settings():
    spec = job(
        strategy={"accumulate": 4, "backend": "gloo"},
        checkpoint={"dir": "/c", "every": 100, "keep": 1},
        run={"script": "m.py", "local_rank_arg": "--local_rank", "hang_timeout": 0},
        policy={"max_restarts": 1, "termination_grace": "100s"},
    )
    assert spec.runtime_config == RuntimeConfig(
        job="x",
        options={"accumulate": 4},
        backend="gloo",
        checkpoint_dir="/c",
        checkpoint_every=100,
        checkpoint_keep=1,
        local_rank_arg="--local_rank",
        max_restarts=1,
        hang_timeout=0.0,
        stop_grace=75.0,
    )


def test_numbers_in_the_environment_are_kept_as_they_are_written():
    text = "name: x\nimage: x\nrun:\n  script: a.py\n  env: {V: 1.10, N: 010, S: 1e-3, T: 12:30}\n"
    env = JobSpec.from_yaml(text).run.env
    assert env == {"V": "1.10", "N": "010", "S": "1e-3", "T": "12:30"}
    assert JobSpec.from_yaml(JobSpec.from_yaml(text).to_yaml()).run.env == env


def test_free_json_is_a_copy():
    inner = {"y": ["on", 1.5]}
    spec = job(overlay={"x": inner}, tolerations=[{"key": "a"}])
    assert parse(spec.to_yaml()).data["overlay"] == {"x": {"y": ["on", 1.5]}}
    inner["y"].append("more")
    assert spec.overlay == {"x": {"y": ["on", 1.5]}}
    with pytest.raises(SpecError, match=r"^overlay"):
        job(overlay={"x": ["\ud800"]})


def test_pythonpath_may_add_to_the_runtimes_folder():
    env = {"PYTHONPATH": "/opt/k8sjob:/app/src"}
    assert job(run={"script": "main.py", "env": env}).run.env == env
    assert job(run={"command": ["python"], "env": {"PYTHONPATH": "/x"}})


def test_checkpoints_lie_on_the_innermost_volume():
    volumes = [
        {"name": "all", "mount": "/data", "pvc": "all"},
        {"name": "fast", "mount": "/data/ckpt", "empty_dir": {}},
        {"name": "other", "mount": "/data/ck", "pvc": "other"},
    ]
    base = {"name": "x", "image": "r/x", "run": {"script": "main.py"}, "volumes": volumes}

    def volume(folder):
        spec = JobSpec(**base, checkpoint={"dir": folder})
        return spec.checkpoint_volume.name if spec.checkpoint_volume else None

    assert volume("/data/ckpt/run") == "fast"
    assert volume("/data/ckpts") == "all"
    assert volume("/elsewhere") is None
    assert JobSpec(**base).checkpoint_volume is None
    assert JobSpec(**base, checkpoint={"dir": "/data"}).remarks == ()
