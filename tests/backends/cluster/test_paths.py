import pytest

from k8sjob.backends.cluster.paths import JOBS, path
from k8sjob.errors import BackendError


@pytest.mark.parametrize(("namespace", "name"), [("..", ""), (".", "x"), ("a", ".."), ("a", ".")])
def test_no_name_leads_out_of_its_place(namespace, name):
    """A client that resolves dots would ask for all namespaces, or for a whole collection."""
    with pytest.raises(BackendError, match="is no name of a namespace or of an object"):
        path(JOBS, namespace, name)


def test_a_name_stays_one_part_of_the_path():
    assert path(JOBS, "a/../b", "c?d") == (
        "/apis/kubeflow.org/v1/namespaces/a%2F..%2Fb/pytorchjobs/c%3Fd"
    )
