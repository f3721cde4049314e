"""Which cluster is meant: contexts, lists of files, pods; and what can be wrong with the files."""

import json
import re
from pathlib import Path

import pytest
import yaml

from k8sjob.errors import BackendError
from k8sjob.kube.client.kubeconfig import access, configured, contexts

_, *CASES = yaml.safe_load_all((Path(__file__).parent / "kubeconfigs.yaml").read_text())


def config(name="one", *, current=True, user=None, **context):
    written = {
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}:6443/"}}],
        "users": [{"name": f"{name}-user", "user": user or {}}],
        "contexts": [
            {"name": name, "context": {"cluster": name, "user": f"{name}-user", **context}}
        ],
    }
    return {**written, "current-context": name} if current else written


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes kubeconfig files and makes them $KUBECONFIG."""

    def write(*configs):
        files = []
        for number, content in enumerate(configs):
            files.append(tmp_path / f"config-{number}")
            files[-1].write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        monkeypatch.setenv("KUBECONFIG", ":".join(map(str, files)))
        return files

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return write


def test_the_current_context(write):
    files = write(config("one", namespace="team"))
    way = access()
    assert (way.context, way.server, way.namespace) == ("one", "https://one:6443", "team")
    assert way.files == tuple(files)
    assert access(namespace="other").namespace == "other"
    write(config())
    assert access().namespace == "default"


def test_in_a_list_of_files_the_first_word_counts(write, tmp_path):
    write(config("one"), "", config("two"), config("three", current=False))
    assert access().context == "one"
    assert access("three").server == "https://three:6443"
    assert contexts() == ["one", "three", "two"]
    assert tmp_path / "config-1" not in access().files, "an empty file says nothing"


def test_a_file_of_a_list_may_be_missing(write, tmp_path):
    (there,) = write(config())
    assert access(kubeconfig=f"{tmp_path / 'nowhere'}:{there}").context == "one"


def test_only_the_file_that_is_named_counts(write, tmp_path):
    write(config("one"))
    other = tmp_path / "other"
    other.write_text(json.dumps(config("two")))
    assert access(kubeconfig=other).context == "two"


@pytest.mark.parametrize(
    ("content", "asked", "words"),
    [
        (config("prod"), "prd", "no context 'prd'; did you mean 'prod'?"),
        (config("prod"), "xyz", "no context 'xyz'; available: prod"),
        (
            config(current=False),
            None,
            "no current-context; specify one with --context (available: o",
        ),
        ("a: [", None, "line 2: "),
        ("- a", None, "a mapping is expected"),
        (config(user="x") | {"users": []}, None, "the user 'one-user', which is not under users"),
        (config() | {"clusters": []}, None, "the cluster 'one', which is not under clusters"),
        (config() | {"clusters": [{"name": "one"}]}, None, "no cluster with a server"),
    ],
)
def test_what_is_wrong_with_a_file_is_reported_with_its_name(write, content, asked, words):
    (path,) = write(content)
    with pytest.raises(BackendError) as told:
        access(asked)
    assert words in str(told.value)
    assert str(path) in str(told.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["of"])
def test_real_shapes(write, case):
    write(case["config"])
    if "wrong" in case:
        with pytest.raises(BackendError, match=re.escape(case["wrong"])):
            access()
        assert contexts() == []
        return
    way = access()
    assert [way.server, way.namespace, way.plugin, [*map(list, way.headers)]] == case["read"]


def test_no_cluster_at_all(write, tmp_path):
    assert not configured()
    assert contexts() == []
    with pytest.raises(BackendError, match="no cluster is configured"):
        access()
    with pytest.raises(BackendError, match="nowhere"):
        access(kubeconfig=tmp_path / "nowhere")
    (path,) = write("")
    with pytest.raises(BackendError, match=f"there is nothing in {path}; set KUBECONFIG"):
        access()
    write("a: [")
    assert configured(), "a file that is wrong is to be told, not passed over"
    assert contexts() == []


def test_the_users_own_file(write, tmp_path):
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").write_text(yaml.safe_dump(config("home")))
    assert configured()
    assert access().context == "home"


@pytest.fixture
def pod(write, tmp_path, monkeypatch):
    """A pod's service account."""
    account = tmp_path / "serviceaccount"
    account.mkdir()
    for name, content in {"token": "t", "namespace": "mine\n", "ca.crt": "c"}.items():
        (account / name).write_text(content)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr("k8sjob.kube.client.kubeconfig.SERVICE_ACCOUNT", account)


@pytest.mark.usefixtures("pod")
def test_in_a_pod_its_own_cluster_is_meant():
    way = access()
    assert (way.context, way.server) == ("in-cluster", "https://10.96.0.1:443")
    assert way.namespace == "mine"
    assert access(namespace="other").namespace == "other"
    assert configured()


@pytest.mark.usefixtures("pod")
def test_in_a_pod_a_kubeconfig_comes_first(write):
    write(config())
    assert access().context == "one"


@pytest.mark.usefixtures("pod")
def test_in_a_pod_what_is_requested_must_be_there(tmp_path):
    with pytest.raises(BackendError, match="nowhere"):
        access(kubeconfig=tmp_path / "nowhere")
    with pytest.raises(BackendError, match="no cluster is configured"):
        access("prod")
