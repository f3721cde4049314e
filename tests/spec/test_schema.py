import copy
import json
import re

import jsonschema
import pytest

from k8sjob.errors import SpecError
from k8sjob.spec import JobSpec, schema

MINIMAL = {"name": "x", "image": "r/x:1", "run": {"script": "main.py"}}


def properties():
    """Every property at every depth, by the part it belongs to."""
    whole = schema()
    return [
        (part, name, field)
        for part, described in [("JobSpec", whole), *whole["$defs"].items()]
        for name, field in described["properties"].items()
    ]


def validator():
    return jsonschema.Draft202012Validator(schema())


@pytest.mark.parametrize(("part", "name", "field"), properties())
def test_every_field_has_a_description_and_an_example(part, name, field):
    assert len(field["description"]) > 4
    assert field["description"].endswith(".")
    assert field["examples"]
    for example in field["examples"]:
        jsonschema.validate(example, {**field, "$defs": schema()["$defs"]})
    kinds = [option.get("type") for option in (field, *field.get("anyOf", ()))]
    if "integer" in kinds or "number" in kinds:
        assert field["unit"]


def test_the_schema_is_one_and_names_no_host_but_its_dialect():
    whole = schema()
    jsonschema.Draft202012Validator.check_schema(whole)
    assert whole.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert "$id" not in whole
    parts = [whole, *whole["$defs"].values()]
    assert all(part["additionalProperties"] is False for part in parts)
    text = re.sub(
        r"https://packages\.internal/simple|http://mlflow\.team:5000", "", json.dumps(whole)
    )
    assert "://" not in text


def test_defaults_are_written_as_in_a_job_yaml():
    whole = schema()
    assert whole["$defs"]["Policy"]["properties"]["termination_grace"]["default"] == "1m"
    assert whole["properties"]["policy"]["default"]["termination_grace"] == "1m"
    assert list(whole["properties"])[:3] == ["name", "image", "run"]


EVERYTHING = {
    "name": "x", "namespace": "n", "service_account": "s", "kueue_queue": "q",
    "kueue_priority_class": "p", "kueue_topology": {"required": "a/rack"},
    "image": {"repository": "r/x", "base": "b", "pip": ["a"], "pull_policy": "Never"},
    "run": {"script": "m.py", "args": ["a"], "env": {"A": "b"}, "env_from": [{"secret": "s"}]},
    "labels": {"a": "b"}, "annotations": {"a": "b"}, "node_selector": {"a": "b"},
    "replicas": {"workers": 3, "nproc_per_node": 2},
    "resources": {"cpu": 1, "memory": "4Gi", "shm": "1Gi", "extended": {"a/b": 1},
                  "requests": {"cpu": 1}, "master": {"memory": "4Gi"}},
    "strategy": {"kind": "fsdp", "accumulate": 2, "sync_batchnorm": True, "clip_norm": 1.0,
                 "blocks": ["a"], "backend": "gloo"},
    "checkpoint": {"dir": "/c", "every": 5, "keep": 2},
    "volumes": [{"name": "v", "mount": "/v", "sub_path": "a", "local": "x", "read_only": True,
                 "empty_dir": {"size_limit": "2Gi"}}],
    "policy": {"ttl_after_finished": "1d", "active_deadline": 5, "suspend": True},
    "gang": {"scheduler": "v", "min_available": 2}, "tolerations": [{"key": "x"}],
    "affinity": {"a": 1}, "overlay": {"spec": {"x": 1}}, "pod_template": {"x": 1},
    "security": "restricted",
}  # fmt: skip
VALUES = ["", "x", "90", "1h", "1e3", "+4Gi", ".5", "/x/", "None", 0, 1, 1.5, True, None, [], {}]


def places(data, path=()):
    if path:
        yield path
    for key, value in data.items() if isinstance(data, dict) else ():
        yield from places(value, (*path, key))
    for index, value in enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*path, index))


def test_an_editor_marks_nothing_that_k8sjob_takes():
    check, taken = validator(), 0
    for *path, last in places(EVERYTHING):
        for value in VALUES:
            data = inner = copy.deepcopy(EVERYTHING)
            for key in path:
                inner = inner[key]
            inner[last] = value
            try:
                JobSpec.model_validate(data)
            except SpecError:
                continue
            taken += 1
            assert not [error.message for error in check.iter_errors(data)], (*path, last, value)
    assert taken > 200


@pytest.mark.parametrize(
    "change",
    [
        {"replica": {}}, {"name": 1}, {"replicas": {"workers": "3"}}, {"replicas": {"workers": -1}},
        {"security": "strict"}, {"run": {"args": "x"}}, {"run": {"env": {"A": True}}},
        {"image": 3}, {"volumes": [{"mount": "/x"}]}, {"policy": {"active_deadline": "soon"}},
        {"name": "My_Job"}, {"namespace": "a.b"}, {"image": "Team/x"}, {"service_account": "/"},
        {"checkpoint": {"dir": "ckpt"}}, {"checkpoint": {"every": 0}},
        {"resources": {"cpu": "4cores"}}, {"resources": {"memory": "-1Gi"}},
    ],
    ids=str,
)  # fmt: skip
def test_an_editor_sees_what_k8sjob_refuses(change):
    data = {**MINIMAL, **change}
    with pytest.raises(SpecError):
        JobSpec(**data)
    assert list(validator().iter_errors(data))
