"""What an error says to write is accepted when it is put in place, and is what was meant."""

import copy
import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import HOSTILE, examples

from k8sjob.errors import SpecError
from k8sjob.spec import JobSpec
from k8sjob.spec.base import part_types
from k8sjob.yamldoc import parse

BASE = {"name": "x", "image": "r/x:1", "run": {"script": "main.py"}, "replicas": {"workers": 3}}
BUILT = {"image": {"repository": "r/x", "base": "python:3.12"}}
CONTEXTS = [
    (r"image\.", BUILT),
    (r"runtime\.kind", {"runtime": {"name": "torch-distributed"}, "target": "trainjob"}),
    (r"run\.(command|module)", {"run": {}}),
    (r"run\.env_from\.config_map", {"run": {"script": "main.py", "env_from": [{}]}}),
    (r"kueue_", {"kueue_queue": "q"}),
    (r"replicas\.elastic\.", {"replicas": {"workers": 3, "elastic": {"min": 1, "max": 9999}}}),
    (r"resources\.(gpu_type|gpu_resource)", {"resources": {"gpus": 1}}),
    (r"resources\.master\.gpus", {"resources": {"gpus": 1}}),
    (r"strategy\.reshard", {"strategy": {"kind": "fsdp"}}),
    (
        r"strategy\.(data|model|layout)",
        {"strategy": {"kind": "mesh", "model": 2, "layout": {"a": ["model"]}}},
    ),
    (
        r"strategy\.(splits|schedule|micro_batches)",
        {"strategy": {"kind": "pipeline", "splits": ["a", "b"]}, "replicas": {"workers": 2}},
    ),
    (r"strategy\.(servers|tables)", {"strategy": {"kind": "parameter_server"}}),
    (r"volumes\.(?!pvc)\w+$", {"volumes": [{"name": "a", "mount": "/a", "pvc": "b"}]}),
    (r"volumes\.pvc", {"volumes": [{"name": "a", "mount": "/a"}]}),
    (
        r"volumes\.(host_path|config_map|secret|empty_dir)$",
        {"volumes": [{"name": "a", "mount": "/a"}]},
    ),
    (r"volumes\.empty_dir\.", {"volumes": [{"name": "a", "mount": "/a", "empty_dir": {}}]}),
]

OVER_FIELDS = re.compile(
    "do not divide|mesh data|no layer is sharded|no such setting|nodes are not between|is taken by"
    "|is more than max|is more than workers"
)
"""What rules over several fields say of a value that is right by itself."""


def paths(part=JobSpec, base=()):
    for name, info in part.model_fields.items():
        yield (*base, name)
        is_list = str(info.annotation).startswith("tuple")
        for nested in part_types(info.annotation):
            yield from paths(nested, (*base, name, *([0] if is_list else [])))


def document(path):
    made = copy.deepcopy(BASE)
    named = ".".join(str(step) for step in path if step != 0)
    for pattern, context in CONTEXTS:
        if re.match(pattern, named):
            made |= copy.deepcopy(context)
    return made


def put(data, path, value):
    holder = data
    for step, after in itertools.pairwise(path):
        if isinstance(step, int):
            holder.extend([] if len(holder) > step else [{}])
            holder = holder[step]
        else:
            if not isinstance(holder.get(step), dict | list):
                holder[step] = [] if isinstance(after, int) else {}
            holder = holder[step]
    if isinstance(path[-1], int):
        holder[path[-1] : path[-1] + 1] = [value]
    else:
        holder[path[-1]] = value


def problems(data):
    try:
        JobSpec(**data)
    except SpecError as error:
        return error.findings
    return []


def shown(problem):
    """The value that a message says to write; `...` for a message without one."""
    step = problem.next_step
    writes = r"(?:^|; )(?:remove the key, or )?write(?: it as|, for example,) (.*)$"
    if found := re.search(writes, step):
        last = problem.path[-1]
        text = found[1]
        return parse(text.removeprefix(f"{last}: ")).data
    if found := re.search(r"(?:did you mean |for example )'(\S+)'\??$", step):
        return found[1]
    return ...


WORDS = [
    "--lr 0.1", "python main.py", "main.py --lr 1", "fsdp", "32GB", "4 cores", "10 minutes", "yes",
    "3", "3.0", "1e3", "/data", "data", "a, b", "A=1", "a=b,c=d", "numpy>=1,<2", "it's", "Always",
    "always", "None", "-1", "-5s", "1.5h", "8 GiB", "torchrun main.py", "python -m pkg.train -v",
]  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-5, max_value=2**70)
    | st.floats()
    | st.sampled_from([*WORDS, *HOSTILE])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "value", "a", "kind", "$x y"]), inner, max_size=3
        )
    ),
    max_leaves=4,
)


@given(path=st.sampled_from(list(paths())), value=VALUES)
@examples(300)
@example(path=("run", "env"), value=[{"name": "A", "value": 1}])
@example(path=("run", "rendezvous_timeout"), value=[0])
@example(path=("image", "repository"), value="localhost:5000/a@sha256:" + "0" * 64)
def test_what_an_error_says_to_write_is_accepted(path, value):
    data = document(path)
    put(data, path, value)
    before = problems(data)
    for problem in before:
        meant = shown(problem)
        if meant is ... or (problem.message.startswith("no such field")):
            continue
        mended = copy.deepcopy(data)
        put(mended, problem.path, meant)
        left = [
            found
            for found in problems(mended)
            if found.field.startswith(problem.field) and not OVER_FIELDS.search(found.text)
        ]
        assert problem not in left
        assert not set(left) - set(before), f"{problem.field}: {problem.text}"


@pytest.mark.parametrize("path", list(paths()), ids=lambda path: ".".join(map(str, path)))
def test_the_example_of_a_field_is_accepted(path):
    """It is what an error shows where nothing better can be told."""
    data = document(path)
    put(data, path, object())
    shows = [problem for problem in problems(data) if shown(problem) is not ...]
    for problem in shows:
        mended = copy.deepcopy(data)
        put(mended, problem.path, shown(problem))
        assert not problems(mended)


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [
        ("run.args", "--name 'two words'", ["--name", "two words"]),
        ("run.args", 5, [5]),
        ("run.command", "python main.py", ["python", "main.py"]),
        ("run", "main.py", {"script": "main.py"}),
        ("run", "python3 -m pkg.train", {"module": "pkg.train"}),
        ("run", "torchrun main.py", {"command": ["torchrun", "main.py"]}),
        ("run.env", ["A=1", "B=x=y"], {"A": "1", "B": "x=y"}),
        ("run.env", [{"name": "A", "value": 1}], {"A": 1}),
        ("run.env_from", {"secret": "a"}, [{"secret": "a"}]),
        ("strategy", "FSDP", {"kind": "fsdp"}),
        ("strategy.clip_norm", "0.5", 0.5),
        ("strategy.splits", "a", ["a"]),
        ("strategy.layout.a", "model", ["model"]),
        ("checkpoint", "/ckpt", {"dir": "/ckpt"}),
        ("checkpoint.every", "500", 500),
        ("volumes", {"name": "a", "mount": "/a", "pvc": "b"}, [
            {"name": "a", "mount": "/a", "pvc": "b"}
        ]),
        ("replicas.workers", 3.0, 3),
        ("image.pip", "numpy>=1", ["numpy>=1"]),
        ("image.apt", "git curl", ["git", "libgl1"]),
        ("image.repository", "localhost:5000/a@sha256:" + "0" * 64, "localhost:5000/a"),
        ("host_network", "yes", True),
        ("host_network", "False", False),
        ("labels", "team=vision", {"team": "vision"}),
    ],
)  # fmt: skip
def test_what_an_error_says_to_write_is_what_was_meant(path, value, meant):
    path = tuple(path.split("."))
    data = document(path)
    put(data, path, value)
    (problem,) = [found for found in problems(data) if found.field == ".".join(path)]
    assert shown(problem) == meant, problem.text
