"""An image registry in this process: OCI's distribution API over a dictionary.

It has the face of tests/registries.py's Registry, and keeps to what docker-registry does: what a
token must allow, which blobs a manifest must find. A blob is taken in one request.
"""

import base64
import contextlib
import hashlib
import json
import socket
import ssl
import threading
import time
import urllib.parse
import uuid
from pathlib import Path

from serving import Handler, Server

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
        self.context = None
        if tls:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(tls["certificate"], tls["key"])
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
        self._server = _Server(_Handler, port=self.port, registry=self)
        self.port = self._server.server_port

    def stop(self):
        """As if it were killed: connections break."""
        self._server.stop()
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Server(Server):
    def __init__(self, *args, **options):
        self.connections = set()
        super().__init__(*args, **options)

    def process_request(self, request, client_address):
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.connections.discard(request)
        super().shutdown_request(request)


class _Handler(Handler):
    disable_nagle_algorithm = True
    registry = None

    def setup(self):
        self.speaks_plain = True
        context = self.registry.context
        if context and self.request.recv(1, socket.MSG_PEEK) == b"\x16":
            self.request = context.wrap_socket(self.request, server_side=True)
            self.speaks_plain = False
        super().setup()

    def handle_any(self):
        if login := self.headers.get("Proxy-Authorization"):
            self.registry.proxy_logins.add(login)
        self.length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(self.length)
        if self.registry.context and self.speaks_plain:
            return self.reply(400, b"Client sent an HTTP request to an HTTPS server.\n")
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        parts = url.path.removeprefix("/").split("/")
        with self.registry.store.lock:
            if parts in (["v2"], ["v2", ""]):
                return self.allowed([]) and self.reply(200)
            for kind in ("blobs", "manifests", "tags"):
                if kind in parts[2:]:
                    at = len(parts) - 1 - parts[::-1].index(kind)
                    name, rest = "/".join(parts[1:at]), parts[at + 1 :]
                    return self.dispatch(kind, name, rest)
        return self.error(404, "NAME_UNKNOWN")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815 - http.server's names

    def dispatch(self, kind, name, rest):
        writes = self.command not in {"GET", "HEAD"}
        scopes = [(name, "pull,push" if writes else "pull")]
        if kind == "blobs" and rest[0] == "uploads":
            scopes = [(name, "pull,push")]
        if "from" in self.query:
            scopes.append((self.query["from"], "pull"))
        if not self.allowed(scopes):
            return None
        if writes and self.registry.readonly:
            return self.reply(405)
        if kind == "tags":
            return self.list_tags(name)
        if kind == "manifests":
            act = self.put_manifest if writes else self.manifest
            return act(name, rest[0])
        if rest[0] == "uploads":
            return self.upload(name, rest[1]) if rest[1:] != [""] else self.begin_upload(name)
        return self.blob(name, rest[0])

    # --- authorization ----------------------------------------------------------------------

    def allowed(self, scopes):
        """Whether the request may be made; the refusal is sent where it may not."""
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        if self.registry.users:
            user, _, password = (
                base64.b64decode(value if scheme == "Basic" else "").decode().partition(":")
            )
            if self.registry.users.get(user) == password:
                return True
            return self.unauthorized('Basic realm="test"')
        if self.registry.token is None:
            return True
        granted = self.granted(value) if scheme == "Bearer" else None
        missing = [
            (name, actions)
            for name, actions in scopes
            if granted is None or not set(actions.split(",")) <= granted.get(name, set())
        ]
        if granted is not None and not missing:
            return True
        scope = " ".join(f"repository:{name}:{actions}" for name, actions in scopes)
        realm, service = self.registry.token["realm"], self.registry.token["service"]
        return self.unauthorized(f'Bearer realm="{realm}",service="{service}",scope="{scope}"')

    def granted(self, token):
        """Actions by repository; None where the token is none, or has expired."""
        part = token.split(".")[1] if token.count(".") == 2 else ""
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) or "{}")
        if claims.get("exp", 0) + LEEWAY < time.time():
            return None
        return {one["name"]: set(one["actions"]) for one in claims["access"]}

    def unauthorized(self, challenge):
        self.error(
            401, "UNAUTHORIZED", "authentication required", **{"WWW-Authenticate": challenge}
        )
        return False

    # --- what it has ------------------------------------------------------------------------

    def list_tags(self, name):
        tags = sorted(tag for repository, tag in self.registry.store.tags if repository == name)
        return self.reply(200, json.dumps({"name": name, "tags": tags}).encode())

    def manifest(self, name, version):
        store = self.registry.store
        digest = version if ":" in version else store.tags.get((name, version))
        found = store.manifests.get((name, digest))
        if found is None:
            return self.error(404, "MANIFEST_UNKNOWN", "manifest unknown")
        media_type, content = found
        headers = {"Content-Type": media_type, "Docker-Content-Digest": digest}
        return self.reply(200, content, headers)

    def put_manifest(self, name, version):
        store, content = self.registry.store, json.loads(self.body)
        blobs = [content[key] for key in ("config",) if key in content] + content.get("layers", [])
        known = [(name, blob["digest"]) in store.blobs for blob in blobs if not blob.get("urls")]
        known += [
            (name, each["digest"]) in store.manifests for each in content.get("manifests", [])
        ]
        if not all(known):
            return self.error(400, "MANIFEST_BLOB_UNKNOWN", "blob unknown to registry")
        digest = f"sha256:{hashlib.sha256(self.body).hexdigest()}"
        store.manifests[name, digest] = (self.headers["Content-Type"], self.body)
        if ":" not in version:
            store.tags[name, version] = digest
        place = self.place(f"/v2/{name}/manifests/{digest}")
        return self.reply(201, headers={"Location": place, "Docker-Content-Digest": digest})

    def blob(self, name, digest):
        content = self.registry.store.blobs.get((name, digest))
        if content is None:
            return self.error(404, "BLOB_UNKNOWN", "blob unknown to registry")
        start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        headers = {"Content-Type": "application/octet-stream", "Docker-Content-Digest": digest}
        return self.reply(206 if start else 200, content[start:], headers)

    def upload(self, name, number):
        store = self.registry.store
        if number not in store.uploads:
            return self.error(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        if len(self.body) < self.length:  # the client went away
            self.close_connection = True
            return self.error(400, "SIZE_INVALID")
        store.uploads.remove(number)
        digest = f"sha256:{hashlib.sha256(self.body).hexdigest()}"
        if digest != self.query["digest"]:
            return self.error(
                400, "DIGEST_INVALID", "provided digest did not match uploaded content"
            )
        store.blobs[name, digest] = self.body
        return self.created(name, digest)

    def begin_upload(self, name):
        store, query = self.registry.store, self.query
        mounted = store.blobs.get((query.get("from"), query.get("mount")))
        if mounted is not None:
            store.blobs[name, query["mount"]] = mounted
            return self.created(name, query["mount"])
        number = str(uuid.uuid4())
        store.uploads.add(number)
        place = self.place(f"/v2/{name}/blobs/uploads/{number}?_state=x")
        return self.reply(202, headers={"Location": place, "Range": "0-0"})

    def created(self, name, digest):
        place = self.place(f"/v2/{name}/blobs/{digest}")
        return self.reply(201, headers={"Location": place, "Docker-Content-Digest": digest})

    def place(self, path):
        return f"{self.registry.scheme}://{self.headers['Host']}{path}"

    def error(self, status, code, message="", **headers):
        body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
        return self.reply(status, body, headers)
