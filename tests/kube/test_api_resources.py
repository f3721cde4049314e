import pytest

from k8sjob.errors import BackendError
from k8sjob.kube.api_resources import ResourcePath, path


@pytest.mark.parametrize(("namespace", "name"), [("..", ""), (".", "x"), ("a", ".."), ("a", ".")])
def test_no_name_leads_out_of_its_place(namespace, name):
    """A client that resolves dots would ask for all namespaces, or for a whole collection."""
    with pytest.raises(BackendError, match="is not the name of a namespace or of an object"):
        path("pods", namespace, name)


def test_a_name_stays_one_part_of_the_path():
    assert path("pods", "a/../b", "c?d") == ("/api/v1/namespaces/a%2F..%2Fb/pods/c%3Fd")


@pytest.mark.parametrize(
    ("made", "target"),
    [
        (("pods", "ns", "a-0", "log"), ResourcePath("", "v1", "pods", "ns", "a-0", "log")),
        (("workloads", "ns"), ResourcePath("kueue.x-k8s.io", "v1beta2", "workloads", "ns")),
        (("nodes",), ResourcePath("", "v1", "nodes")),
        (("namespaces", "", "ns"), ResourcePath("", "v1", "namespaces", name="ns")),
        (("deployments", "", ""), ResourcePath("apps", "v1", "deployments")),
        (("secrets", "a b", "c/d"), ResourcePath("", "v1", "secrets", "a b", "c/d")),
    ],
)
def test_a_path_is_read_as_it_was_made(made, target):
    assert ResourcePath.of(path(*made)) == target
