"""Other hosts that a registry leads to: which are asked for what, and which never."""

import contextlib

import pytest
from serving import Server

from k8sjob.errors import ImageError
from k8sjob.image.registry.blob_content import in_memory
from k8sjob.image.registry.client import Authorizer, RegistryClient
from k8sjob.image.registry.credentials import Login
from k8sjob.image.registry.http_client import HttpClient, Response, RetryPolicy, Zone
from k8sjob.image.registry.manifest import ImageReference
from k8sjob.image.registry.repository import Repository

ADDRESSES = {
    "127.0.0.2": Zone.PUBLIC,
    "127.0.0.3": Zone.PUBLIC,
    "127.0.0.4": Zone.PRIVATE,
    "127.0.0.5": Zone.PRIVATE,
    "127.0.0.6": Zone.LINK_LOCAL,
    "127.0.0.7": Zone.LOOPBACK,
}
ALLOWED = [("2", "3"), ("2", "2"), ("4", "5"), ("4", "3"), ("7", "4"), ("7", "3"), ("7", "7")]
REFUSED = [("2", "4"), ("2", "6"), ("2", "7"), ("4", "6"), ("4", "7"), ("7", "6")]


@pytest.fixture(autouse=True)
def zones(monkeypatch):
    """Addresses of this machine that count as others."""
    monkeypatch.setattr(Zone, "of", staticmethod(ADDRESSES.__getitem__))


class _Host(Server):
    def __init__(self, last):
        self.asked, self.answers = [], {}
        super().__init__(self._next, address=f"127.0.0.{last}")

    def _next(self, request):
        if request.body:
            self.asked.append("a body")
        login = request.headers.get("Authorization")
        self.asked.append((request.path, login))
        status, headers = self.answers.get(request.path, (200, {}))
        if request.path == "/private" and not login:
            status, headers = 401, self.answers["challenge"]
        return status, b'{"token": "T"}', headers


@pytest.fixture
def host():
    """host(last) is a server at 127.0.0.LAST, with what it was asked and what it answers."""
    with contextlib.ExitStack() as started:
        yield lambda last: started.enter_context(_Host(last))


@pytest.fixture
def client_of():
    """client_of(server): a client with a login there."""
    clients = []

    def make(server, **options):
        clients.append(HttpClient(retry=RetryPolicy(tries=1), **options))
        login = Login("me", "secret")
        return RegistryClient(clients[-1], server.host, server.host, lambda: login)

    yield make
    for client in clients:
        client.close()


def redirect(registry, target, client):
    registry.answers["/blob"] = (307, {"Location": f"http://{target.host}/content"})
    return client.request("GET", "/blob", ok={200}, doing="reading it")


def login(registry, target, client):
    realm = f'Bearer realm="http://{target.host}/content",service="s"'
    registry.answers["challenge"] = {"WWW-Authenticate": realm}
    return client.request("GET", "/private", ok={200}, doing="reading it")


@pytest.mark.parametrize(("from_", "to"), ALLOWED)
def test_where_a_registry_may_lead(host, client_of, from_, to):
    registry, target = host(from_), host(to)
    client = client_of(registry)
    login(registry, target, client)
    (asked,) = target.asked
    assert asked[0] == "/content"
    assert asked[1].startswith("Basic ")
    target.asked.clear()
    redirect(registry, target, client)
    assert target.asked == [("/content", None)]  # no login


@pytest.mark.parametrize("lead", [redirect, login])
@pytest.mark.parametrize(("from_", "to"), REFUSED)
def test_where_no_registry_may_lead(host, client_of, from_, to, lead):
    registry, target = host(from_), host(to)
    with pytest.raises(ImageError, match=rf"the registry leads to {target.host}, a .* mkdir -p"):
        lead(registry, target, client_of(registry))
    assert target.asked == []


@pytest.mark.parametrize("lead", [redirect, login])
def test_a_connection_that_is_open_for_the_user_is_not_the_registrys(host, client_of, lead):
    registry, target = host("2"), host("7")
    client = client_of(registry)
    client._http.request("GET", f"http://{target.host}/")
    with pytest.raises(ImageError, match="the registry leads to"):
        lead(registry, target, client)
    assert target.asked == [("/", None)]


@pytest.mark.parametrize("lead", [redirect, login])
def test_a_host_that_the_user_names_is_trusted(host, client_of, lead, home):
    registry, target, other = host("2"), host("7"), host("6")
    assert lead(registry, target, client_of(registry, plain_http=[target.host]))
    (home / ".docker/certs.d" / other.host).mkdir(parents=True)
    assert lead(registry, other, client_of(registry))


def test_behind_a_proxy_addresses_are_refused_by_their_form(host, client_of, monkeypatch):
    proxy = host("3")
    monkeypatch.setenv("https_proxy", f"http://{proxy.host}")
    monkeypatch.setattr(Zone, "of", staticmethod(lambda _: Zone.PRIVATE))
    with pytest.raises(ImageError, match=r"leads to 10\.0\.0\.1, a private address"):
        HttpClient().send("GET", "https://10.0.0.1/", limit=Zone.PUBLIC)
    assert proxy.asked == []


@pytest.mark.parametrize("to", ["2", "3", "7"])
def test_a_blob_is_sent_to_the_registry_alone(host, client_of, to):
    registry, target = host("2"), host(to)
    registry.answers["/v2/a/blobs/uploads/"] = (202, {"Location": f"http://{target.host}/up"})
    repository = Repository(client_of(registry), ImageReference.parse(f"{registry.host}/a:1"))
    with pytest.raises(ImageError, match=f"wants it to be sent to another host, {target.host}"):
        repository.add_blob(in_memory(b"code"), lambda _: None)
    assert target.asked == []
    assert "a body" not in registry.asked


@pytest.mark.parametrize(
    "realm", ["http://auth.example/", "http://127.0.0.1/", "HTTP://reg.example/"]
)
def test_a_login_is_never_sent_with_less_protection_than_the_registry_has(realm):
    asked = Response(
        "https://reg.example/v2/", 401, {"WWW-Authenticate": f'Bearer realm="{realm}"'}
    )
    keys = Authorizer(HttpClient(), "reg.example", lambda: Login("me", "secret"))
    with pytest.raises(ImageError, match="without TLS, which the registry itself has"):
        keys.renew(asked, None)


def test_the_port_of_a_scheme_may_be_left_out():
    client = RegistryClient(HttpClient(), "reg.example", "reg.example", lambda: None)
    client.url("")
    assert client.owns("https://reg.example:443/x")
    assert not client.owns("https://reg.example:80/x")
    assert not client.owns("https://reg.example:8443/x")
