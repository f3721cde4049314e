"""A token server as registries have it, whose tokens docker-registry really checks."""

import base64
import json
import subprocess
import time
from urllib.parse import parse_qs, urlsplit

from serving import Server

LEEWAY = 60
"""Seconds for which docker-registry takes a token after its end."""


def b64(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class TokenServer:
    """Gives tokens to users for repositories.

    Attributes:
        users: password by name.
        refresh: user by refresh token.
        rights: actions by (user, repository); the user "" is anybody.
        lasts: seconds that a token is good for.
        whole: refuse a request of which one part is not allowed.
        asked: the scopes of each request.
    """

    def __init__(self, certificate):
        self.certificate, self.key = certificate
        self.users, self.refresh, self.rights = {}, {}, {}
        self.lasts, self.whole, self.asked = 300, False, []
        self._server = Server(self._answer)
        self.realm = f"{self._server.url}/token?kind=test"
        self.stop = self._server.stop

    @property
    def config(self):
        """What the registry is told of it."""
        token = {"realm": self.realm, "service": "test", "issuer": "tests"}
        return {"token": {**token, "rootcertbundle": str(self.certificate)}}

    def granted(self, user, scopes):
        """The access of a token, or None where it is refused."""
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            allowed = self.rights.get((user, name), "") or self.rights.get(("", name), "")
            given = [action for action in actions.split(",") if action in allowed.split(",")]
            if self.whole and len(given) < len(actions.split(",")):
                return None
            access.append({"type": kind, "name": name, "actions": given})
        return access

    def token(self, user, access):
        der = base64.b64encode(pem_body(self.certificate)).decode()
        now = time.time()
        claims = {
            "iss": "tests",
            "sub": user,
            "aud": "test",
            "jti": str(now),
            "access": access,
            "iat": int(now) - 120,
            "nbf": int(now) - 120,
            "exp": int(now - LEEWAY + self.lasts) + 1,
        }
        header = {"typ": "JWT", "alg": "RS256", "x5c": [der]}
        signed = ".".join(b64(json.dumps(part).encode()) for part in (header, claims))
        argv = ["openssl", "dgst", "-sha256", "-sign", str(self.key)]
        done = subprocess.run(argv, input=signed.encode(), capture_output=True, check=True)
        return f"{signed}.{b64(done.stdout)}"

    def _answer(self, request):
        if request.method == "POST":
            form = parse_qs(request.body.decode())
            assert form["grant_type"] == ["refresh_token"]
            user = self.refresh.get(form["refresh_token"][0])
            if user is None:
                return 401, {"details": "unknown refresh token"}
            return self._given(user, form["scope"][0].split(), "access_token")
        query = parse_qs(urlsplit(request.target).query)
        assert query["kind"] == ["test"]
        scheme, _, encoded = request.headers.get("Authorization", "").partition(" ")
        user = ""
        if scheme == "Basic":
            user, _, password = base64.b64decode(encoded).decode().partition(":")
            if self.users.get(user) != password:
                return 401, {"details": "wrong password"}
        return self._given(user, query.get("scope", []), "token")

    def _given(self, user, scopes, name):
        self.asked.append(sorted(scopes))
        access = self.granted(user, scopes)
        if access is None:
            return 403, {"details": "no"}
        return 200, {name: self.token(user, access), "expires_in": 60}


def pem_body(path):
    lines = path.read_text().split("-----")[2]
    return base64.b64decode("".join(lines.split()))
