import copy
import pickle

from hypothesis import given
from strategies import examples, job_specs

from k8sjob.spec import JobSpec


@given(job_specs())
@examples(60)
def test_a_spec_survives_yaml_exactly(spec):
    text = spec.to_yaml()
    assert JobSpec.from_yaml(text) == spec
    assert JobSpec.from_yaml(text).to_yaml() == text


@given(job_specs())
@examples(20)
def test_a_spec_survives_json_copies_and_pickles(spec):
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert copy.deepcopy(spec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@given(job_specs())
@examples(20)
def test_ranks_and_names_of_any_spec(spec):
    assert spec.world_size == spec.nnodes * spec.nproc_per_node >= 1
    last = spec.replicas.elastic.max - 1 if spec.replicas.elastic else spec.replicas.workers
    assert len(f"{spec.name}-worker-{last}") <= 63
    if spec.resources.gpus:
        assert spec.nproc_per_node == spec.resources.gpus
