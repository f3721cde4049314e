"""What Python itself says of a spec: signatures, docstrings, completion, errors of assignments."""

import inspect
import pydoc
import re

import pytest

import k8sjob
from k8sjob.spec import Checkpoint, JobSpec
from k8sjob.spec.json_schema import schema

SPEC = JobSpec(name="x", image="r/x:1", run={"script": "main.py"})


def test_a_signature_has_the_fields_as_one_writes_them():
    shown = str(inspect.signature(JobSpec))
    assert shown.startswith("(*, name: str, image: str | Image, run: Run, namespace: str | None =")
    assert "policy: Policy = Policy()" in shown
    assert "hang_timeout: int" in str(inspect.signature(k8sjob.spec.Run))
    assert str(inspect.signature(Checkpoint)) == (
        "(*, dir: str = '/checkpoints', every: Literal['epoch'] | int = 'epoch', keep: int = 3,"
        " format: Literal['auto', 'full', 'sharded'] = 'auto')"
    )


def test_the_help_has_all_fields_and_nothing_of_pydantic():
    text = pydoc.render_doc(JobSpec, renderer=pydoc.plaintext)
    assert "replicas (Replicas, default Replicas()): How many replicas" in text
    assert "to_yaml(self)" in text
    assert "workers (int, pods, default 0): Workers in" in inspect.getdoc(k8sjob.spec.Replicas)
    assert not re.search(r"\bmodel_|Annotated|validator", text)
    assert "Args:" not in str(schema()), "the schema has the fields themselves"


def test_completion_offers_fields_and_methods():
    offered = {name for name in dir(SPEC) if not name.startswith("_")}
    assert {"name", "policy", "replicas", "nnodes", "from_yaml", "with_"} <= offered
    assert not [name for name in offered if name.startswith(("model_", "parse_", "json"))]


@pytest.mark.parametrize("name", [n for n in k8sjob.__all__ if not n.startswith("_")])
def test_what_is_public_has_a_docstring_and_a_readable_signature(name):
    thing = getattr(k8sjob, name)
    assert inspect.getdoc(thing)
    if isinstance(thing, type) and issubclass(thing, Exception):
        return
    assert "Annotated" not in str(inspect.signature(thing))
    assert "data: 'Any'" not in str(inspect.signature(thing))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("workers", "Replicas.workers cannot be set: a spec is frozen; make another one: spec.wi"),
        ("wrokers", "did you mean 'workers'?"),
        ("zzz", "valid fields: workers, "),
    ],
)
def test_setting_a_field_shows_the_way_to_another_spec(name, error):
    with pytest.raises(AttributeError, match=re.escape(error)):
        setattr(SPEC.replicas, name, 3)
