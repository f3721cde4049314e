import pytest

from k8sjob.errors import BackendError
from k8sjob.kube.resources import JOBS, Target, path


@pytest.mark.parametrize(("namespace", "name"), [("..", ""), (".", "x"), ("a", ".."), ("a", ".")])
def test_no_name_leads_out_of_its_place(namespace, name):
    """A client that resolves dots would ask for all namespaces, or for a whole collection."""
    with pytest.raises(BackendError, match="is not the name of a namespace or of an object"):
        path(JOBS, namespace, name)


def test_a_name_stays_one_part_of_the_path():
    assert path(JOBS, "a/../b", "c?d") == (
        "/apis/kubeflow.org/v1/namespaces/a%2F..%2Fb/pytorchjobs/c%3Fd"
    )


@pytest.mark.parametrize(
    ("made", "target"),
    [
        (("pods", "ns", "a-0", "log"), Target("", "v1", "pods", "ns", "a-0", "log")),
        (("pytorchjobs", "ns"), Target("kubeflow.org", "v1", "pytorchjobs", "ns")),
        (("nodes",), Target("", "v1", "nodes")),
        (("namespaces", "", "ns"), Target("", "v1", "namespaces", name="ns")),
        (("deployments", "", ""), Target("apps", "v1", "deployments")),
        (("secrets", "a b", "c/d"), Target("", "v1", "secrets", "a b", "c/d")),
    ],
)
def test_a_path_is_read_as_it_was_made(made, target):
    assert Target.of(path(*made)) == target
