"""An image registry in this process: OCI's distribution API over a dictionary.

It has the face of tests/registries.py's Registry, and keeps to what docker-registry does: what a
token must allow, which blobs a manifest must find. A blob is taken in one request.
"""

import base64
import hashlib
import json
import threading
import time
import uuid
from pathlib import Path

from serving import Server

LEEWAY = 60  # seconds for which a token is taken after its end


class Store:
    """The contents of a registry, which outlive a restart.

    Attributes:
        blobs: content by (repository, digest).
        manifests: (media type, content) by (repository, digest).
        tags: digest by (repository, tag).
        uploads: ids of those that were begun.
    """

    def __init__(self):
        self.blobs, self.manifests, self.tags, self.uploads = {}, {}, {}, set()
        self.lock = threading.RLock()


class InProcessRegistry:
    """Takes the same configuration as docker-registry, as far as tests use it."""

    def __init__(self, *, port=0, auth=None, http=None, storage=None, password=None):
        tls = (http or {}).get("tls")
        self.store = Store()
        self.scheme = "https" if tls else "http"
        self.tls = [tls["certificate"], tls["key"]] if tls else ()
        self.readonly = "maintenance" in (storage or {})
        self.token = (auth or {}).get("token")
        self.users, self.proxy_logins = {}, set()
        if "htpasswd" in (auth or {}):
            user = Path(auth["htpasswd"]["path"]).read_text().partition(":")[0]
            self.users = {user: password}
        self.port = port
        self.start()

    @property
    def host(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        self._server = Server(self._answer, port=self.port, tls=self.tls)
        self.port, self.stop = self._server.server_port, self._server.stop

    def _answer(self, request):
        if login := request.headers.get("Proxy-Authorization"):
            self.proxy_logins.add(login)
        request.body  # noqa: B018 - read before the store is locked
        with self.store.lock:
            return _Exchange(self, request).answer()


class _Exchange:
    """One request to the registry."""

    def __init__(self, registry, request):
        self.registry, self.request, self.store = registry, request, registry.store
        self.query, self.body = request.query, request.body

    def answer(self):
        parts = self.request.path.removeprefix("/").split("/")
        if parts in (["v2"], ["v2", ""]):
            return self.refusal([]) or (200,)
        for kind in ("blobs", "manifests", "tags"):
            if kind in parts[2:]:
                at = len(parts) - 1 - parts[::-1].index(kind)
                return self.dispatch(kind, "/".join(parts[1:at]), parts[at + 1 :])
        return error(404, "NAME_UNKNOWN")

    def dispatch(self, kind, name, rest):
        writes = self.request.method not in {"GET", "HEAD"}
        scopes = [(name, "pull,push" if writes else "pull")]
        if kind == "blobs" and rest[0] == "uploads":
            scopes = [(name, "pull,push")]
        if "from" in self.query:
            scopes.append((self.query["from"], "pull"))
        if refused := self.refusal(scopes):
            return refused
        if writes and self.registry.readonly:
            return (405,)
        if kind == "tags":
            return self.list_tags(name)
        if kind == "manifests":
            act = self.put_manifest if writes else self.manifest
            return act(name, rest[0])
        if rest[0] == "uploads":
            return self.upload(name, rest[1]) if rest[1:] != [""] else self.begin_upload(name)
        return self.blob(name, rest[0])

    # --- authorization ----------------------------------------------------------------------

    def refusal(self, scopes):
        """The answer to a request that may not be made."""
        scheme, _, value = self.request.headers.get("Authorization", "").partition(" ")
        if self.registry.users:
            login = base64.b64decode(value if scheme == "Basic" else "").decode()
            user, _, password = login.partition(":")
            if self.registry.users.get(user) == password:
                return None
            return unauthorized('Basic realm="test"')
        if self.registry.token is None:
            return None
        granted = self.granted(value) if scheme == "Bearer" else None
        if granted is not None and all(
            set(actions.split(",")) <= granted.get(name, set()) for name, actions in scopes
        ):
            return None
        scope = " ".join(f"repository:{name}:{actions}" for name, actions in scopes)
        realm, service = self.registry.token["realm"], self.registry.token["service"]
        return unauthorized(f'Bearer realm="{realm}",service="{service}",scope="{scope}"')

    def granted(self, token):
        """Actions by repository; None where the token is none, or has expired."""
        part = token.split(".")[1] if token.count(".") == 2 else ""
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) or "{}")
        if claims.get("exp", 0) + LEEWAY < time.time():
            return None
        return {one["name"]: set(one["actions"]) for one in claims["access"]}

    # --- what it has ------------------------------------------------------------------------

    def list_tags(self, name):
        tags = sorted(tag for repository, tag in self.store.tags if repository == name)
        return 200, {"name": name, "tags": tags}

    def manifest(self, name, version):
        store = self.store
        digest = version if ":" in version else store.tags.get((name, version))
        found = store.manifests.get((name, digest))
        if found is None:
            return error(404, "MANIFEST_UNKNOWN", "manifest unknown")
        media_type, content = found
        headers = {"Content-Type": media_type, "Docker-Content-Digest": digest}
        return 200, content, headers

    def put_manifest(self, name, version):
        store, content = self.store, json.loads(self.body)
        blobs = [content[key] for key in ("config",) if key in content] + content.get("layers", [])
        known = [(name, blob["digest"]) in store.blobs for blob in blobs if not blob.get("urls")]
        known += [
            (name, each["digest"]) in store.manifests for each in content.get("manifests", [])
        ]
        if not all(known):
            return error(400, "MANIFEST_BLOB_UNKNOWN", "blob unknown to registry")
        digest = f"sha256:{hashlib.sha256(self.body).hexdigest()}"
        store.manifests[name, digest] = (self.request.headers["Content-Type"], self.body)
        if ":" not in version:
            store.tags[name, version] = digest
        place = self.place(f"/v2/{name}/manifests/{digest}")
        return 201, b"", {"Location": place, "Docker-Content-Digest": digest}

    def blob(self, name, digest):
        content = self.store.blobs.get((name, digest))
        if content is None:
            return error(404, "BLOB_UNKNOWN", "blob unknown to registry")
        start = int((self.request.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        headers = {"Content-Type": "application/octet-stream", "Docker-Content-Digest": digest}
        return 206 if start else 200, content[start:], headers

    def upload(self, name, number):
        store = self.store
        if number not in store.uploads:
            return error(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        if len(self.body) < self.request.length:  # the client went away
            return error(400, "SIZE_INVALID")
        store.uploads.remove(number)
        digest = f"sha256:{hashlib.sha256(self.body).hexdigest()}"
        if digest != self.query["digest"]:
            return error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        store.blobs[name, digest] = self.body
        return self.created(name, digest)

    def begin_upload(self, name):
        store, query = self.store, self.query
        mounted = store.blobs.get((query.get("from"), query.get("mount")))
        if mounted is not None:
            store.blobs[name, query["mount"]] = mounted
            return self.created(name, query["mount"])
        number = str(uuid.uuid4())
        store.uploads.add(number)
        place = self.place(f"/v2/{name}/blobs/uploads/{number}?_state=x")
        return 202, b"", {"Location": place, "Range": "0-0"}

    def created(self, name, digest):
        place = self.place(f"/v2/{name}/blobs/{digest}")
        return 201, b"", {"Location": place, "Docker-Content-Digest": digest}

    def place(self, path):
        return f"{self.registry.scheme}://{self.request.headers['Host']}{path}"


def unauthorized(challenge):
    headers = {"WWW-Authenticate": challenge}
    return error(401, "UNAUTHORIZED", "authentication required", headers)


def error(status, code, message="", headers=None):
    return status, {"errors": [{"code": code, "message": message}]}, headers
