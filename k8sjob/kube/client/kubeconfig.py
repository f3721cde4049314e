"""Kubeconfig files: which cluster, as which user, and what can be wrong with them.

kubectl, and the Python client for an auth-provider, read the files themselves. Where KUBECONFIG is
a list the first value counts, as with kubectl (the Python client takes the last current-context),
so the context is always passed on by its name.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from k8sjob import environment
from k8sjob.contract import did_you_mean
from k8sjob.errors import BackendError, redacted
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import is_name

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_CLUSTER: Final = "in-cluster"
"""The name of the context of a pod's own service account."""
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts a pod's token, CA and namespace."""
_TEXTS: Final = (
    "server proxy-url tls-server-name certificate-authority certificate-authority-data token"
    " tokenFile client-certificate client-certificate-data client-key client-key-data as as-uid"
    " username password cluster user namespace"
)
_TYPES: Final = (
    (_TEXTS, str, "is not text; put it in quotes"),
    ("as-groups extensions", list, "is not a list"),
    ("exec auth-provider as-user-extra", dict, "is not a mapping"),
    # In Python, "false" in quotes would count as true.
    ("insecure-skip-tls-verify", bool, "is neither true nor false; remove the quotes"),
)
"""Fields of clusters, users and contexts with their types; kubectl refuses others, too."""
_PATHS: Final = frozenset(
    {"certificate-authority", "client-certificate", "client-key", "tokenFile"}
)
_ENTRIES: Final = (("clusters", "cluster"), ("users", "user"), ("contexts", "context"))

_Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Access:
    """A cluster and the user's access to it.

    Attributes:
        context: the kubeconfig's context, or IN_CLUSTER.
        server: the apiserver's URL.
        namespace: the context's, "default" where it names none.
        files: the kubeconfig files that exist, in their order; none inside a pod.
        plugin: the program that gets the user's credentials; empty if none is needed.
        hint: how to install it, from the kubeconfig.
        headers: those of impersonation.
        cluster: the cluster's fields as in a kubeconfig, paths absolute.
        user: the user's, in the same way.
    """

    context: str
    server: str
    namespace: str = "default"
    files: tuple[Path, ...] = ()
    plugin: str = ""
    hint: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    cluster: _Config = field(default_factory=dict, repr=False)
    user: _Config = field(default_factory=dict, repr=False)

    @property
    def kubeconfig(self) -> str:
        """The files as one value of KUBECONFIG."""
        return os.pathsep.join(map(str, self.files))

    @property
    def where(self) -> str:
        """The path of its settings."""
        return self.kubeconfig or "the pod's service account"

    def unreachable(self, why: str) -> ApiError:
        """There was no answer, or the connection broke."""
        step = "check that the cluster and the network are up, or specify another with --context"
        return _error(f"{self.server} (context {self.context}) cannot be reached", why, step)

    def untrusted(self, why: str) -> ApiError:
        """The server's certificate is not one that the kubeconfig trusts."""
        about = f"{self.server} (context {self.context}) has a certificate that is not trusted"
        step = f"correct certificate-authority of this cluster in {self.where}"
        return _error(about, why, step, reason="Untrusted")

    def unusable(self, why: str) -> ApiError:
        """The client cannot use what is in the kubeconfig."""
        about = f"{self.where}: context {self.context} cannot be used"
        return _error(about, why, "correct it", reason="Unusable")

    def without_credentials(self, why: str) -> ApiError:
        """The program that gets the credentials returns none."""
        hint = f" ({' '.join(self.hint.split())})" if self.hint else ""
        about = f"the credentials of context {self.context} come from {self.plugin!r}, which gives"
        step = f"install it{hint}, or log in again"
        return _error(f"{about} none", why, step, code=401, reason="Unauthorized")

    def rejected(self) -> ApiError:
        """The server refuses the credentials."""
        by = f" with {self.plugin!r}" if self.plugin else ""
        return ApiError(
            f"{self.server} does not accept the credentials of context {self.context}: they have"
            " expired or were revoked",
            f"log in again{by}, or renew them in {self.where}",
            code=401,
            reason="Unauthorized",
            detail="Unauthorized",
        )


def _error(about: str, why: str, next_step: str, **details: Any) -> ApiError:
    """An error with its reason, which programs and servers may give with credentials in it."""
    why = redacted(why)
    return ApiError(f"{about}: {why}", next_step, detail=why, **details)


def configured() -> bool:
    """Whether there is a kubeconfig or a service account; reads no kubeconfig."""
    return any(path.is_file() for path in _paths(None)) or bool(_of_pod())


def contexts(kubeconfig: str | Path | None = None) -> list[str]:
    """The names of all contexts, for completion; none where no file can be read. See `access`."""
    try:
        return sorted(_named(_read(kubeconfig)[1], "contexts"))
    except BackendError:
        return []


def namespaces(kubeconfig: str | Path | None = None) -> set[str]:
    """The namespaces that contexts have, for completion; none where no file can be read."""
    with suppress(BackendError):
        config = _read(kubeconfig)[1]
        parts = [_part(config, "contexts", name, "context") for name in _named(config, "contexts")]
        return {str(part["namespace"]) for part in parts if part.get("namespace")}
    return set()


def access(
    context: str | None = None,
    kubeconfig: str | Path | None = None,
    namespace: str | None = None,
    *,
    plugins: bool = True,
) -> Access:
    """The access to the cluster that is meant.

    Args:
        context: None: the current context; in a pod without a kubeconfig its service account.
        kubeconfig: a file, or a list of them as in $KUBECONFIG; None: $KUBECONFIG, or the user's.
        namespace: None: that of the context.
        plugins: False: refuse a context whose credentials come from a program.

    Raises:
        BackendError: no cluster is configured, there is no such context, or a file is invalid.
    """
    files, config = _read(kubeconfig)
    # As with kubectl, a kubeconfig goes before the account of the Pod.
    pod_access = None if files or context or kubeconfig else _of_pod(namespace)
    if pod_access is not None:
        return pod_access
    if not files:
        looked = _paths(kubeconfig)
        # A redirection whose command has failed leaves an empty file, for which "there is no
        # kubeconfig" would be puzzling.
        empty = [path for path in looked if path.exists()]
        absence = "there is nothing in" if empty else "there is no kubeconfig at"
        raise BackendError(
            f"no cluster is configured: {absence} {', '.join(map(str, empty or looked))}",
            "set KUBECONFIG, or specify a file with --kubeconfig",
        )
    contexts = sorted(_named(config, "contexts"))
    # Errors of a merged kubeconfig name all of its files: the entry may be missing from any of
    # them.
    where, available = os.pathsep.join(map(str, files)), ", ".join(contexts) or "none"
    name = context or str(config.get("current-context") or "")
    if not name:
        raise BackendError(
            f"{where}: no current-context", f"specify one with --context (available: {available})"
        )
    if name not in contexts:
        hint = did_you_mean(name, contexts, f"available: {available}")
        raise BackendError(f"{where}: no context {name!r}", hint)
    user = _part(config, "contexts", name, "context").get("user", "")
    fields = _part(config, "users", user, "user")
    # The words after a Tab must not run a program of whatever kubeconfig is typed or set.
    if not plugins and (fields.get("exec") or fields.get("auth-provider")):
        raise BackendError(f"{where}: the credentials of context {name!r} come from a program")
    return _of_context(name, config, files, namespace)


def _of_context(
    name: str, config: _Config, files: tuple[Path, ...], namespace: str | None
) -> Access:
    meant = _part(config, "contexts", name, "context")
    where = os.pathsep.join(map(str, files))
    for part, names in (("cluster", "clusters"), ("user", "users")):
        if meant.get(part) and meant[part] not in _named(config, names):
            raise BackendError(
                f"{where}: context {name!r} names the {part} {meant[part]!r}, which is not"
                f" under {names}",
                "add it, or correct the context",
            )
    cluster = _part(config, "clusters", meant.get("cluster", ""), "cluster")
    user = _part(config, "users", meant.get("user", ""), "user")
    server = cluster.get("server")
    if not server:
        raise BackendError(f"{where}: context {name!r} has no cluster with a server", "add it")
    scheme, separator, address = str(server).rstrip("/").rpartition("://")
    space, plugin = namespace or str(meant.get("namespace") or "default"), user.get("exec") or {}
    # The namespace becomes a part of paths and of commands to paste.
    if not is_name(space):
        raise BackendError(
            f"{where}: the context's namespace {space!r} is not a valid namespace",
            "correct the kubeconfig, or specify one with -n",
        )
    return Access(
        context=name,
        server=scheme.lower() + separator + address,
        namespace=space,
        files=files,
        plugin=str(plugin.get("command", "")),
        hint=str(plugin.get("installHint") or ""),
        headers=_impersonation(user),
        cluster=cluster,
        user=user,
    )


def _impersonation(user: _Config) -> tuple[tuple[str, str], ...]:
    """The headers of the user's `as`."""
    headers = [("Impersonate-User", user.get("as")), ("Impersonate-Uid", user.get("as-uid"))]
    headers += [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    for key, values in (user.get("as-user-extra") or {}).items():
        # A header's name holds fewer characters than a key; client-go escapes the same ones.
        name = "Impersonate-Extra-" + quote(key, safe="!#$&'*+^`|")
        headers += [(name, value) for value in (values if isinstance(values, list) else [values])]
    return tuple((name, str(value)) for name, value in headers if value)


def _of_pod(namespace: str | None = None) -> Access | None:
    """The account of the pod that this runs in; None outside one."""
    if (address := environment.api_server()) is None or not (SERVICE_ACCOUNT / "token").is_file():
        return None
    host, port = address
    file = SERVICE_ACCOUNT / "namespace"
    return Access(
        context=IN_CLUSTER,
        # In a cluster with IPv6 the host is an address with colons, which a URL has in brackets.
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=namespace or (file.read_text().strip() if file.is_file() else "default"),
        cluster={"certificate-authority": str(SERVICE_ACCOUNT / "ca.crt")},
        user={"tokenFile": str(SERVICE_ACCOUNT / "token")},
    )


def _paths(kubeconfig: str | Path | None) -> list[Path]:
    listed = str(kubeconfig or environment.kubeconfig())
    return [Path(part).expanduser() for part in listed.split(os.pathsep) if part]


def _read(kubeconfig: str | Path | None) -> tuple[tuple[Path, ...], _Config]:
    """The files that are not empty, and their merged content; the first value counts."""
    files, merged = [], dict[str, Any]()
    for path in _paths(kubeconfig):
        content = _file(path)
        if not content:
            continue
        files.append(path)
        for key, value in content.items():
            # clusters, users and contexts are joined. Of two entries with the same name, and of
            # other keys, the first counts.
            if isinstance(value, list):
                merged.setdefault(key, []).extend(value)
            elif value:
                merged.setdefault(key, value)
    return tuple(files), merged


def _file(path: Path) -> _Config:
    import yaml  # noqa: PLC0415 - `configured` alone reads nothing

    try:
        # The parser in C is about ten times as fast; a PyYAML that was built without libyaml lacks
        # it.
        content = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BackendError(f"kubeconfig {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        at = f", line {place.line + 1}" if place else ""
        why = getattr(error, "problem", None) or "not a YAML document"
        raise BackendError(f"kubeconfig {path}{at}: {why}", "correct the file") from None
    if content is not None and not isinstance(content, dict):
        raise BackendError(f"kubeconfig {path}: a mapping is expected", "correct the file")
    config: _Config = content or {}
    if wrong := next(_mistakes(config), ""):
        raise BackendError(f"kubeconfig {path}: {wrong}", "correct the file")
    for key, inner in _ENTRIES:
        for part in (entry.get(inner) or {} for entry in config.get(key) or ()):
            # A relative path starts from the folder of its own file.
            part |= {
                name: str(path.absolute().parent / part[name])
                for name in _PATHS & part.keys()
                if part[name]
            }
            plugin = part.get("exec") or {}
            if "/" in str(plugin.get("command")):  # others are looked up in PATH
                plugin["command"] = str(path.absolute().parent / plugin["command"])
    return config


def _mistakes(config: _Config) -> Iterator[str]:
    """What kubectl refuses to read, in any entry of a file, used or not."""
    for key, inner in _ENTRIES:
        entries = config.get(key) or []
        if not isinstance(entries, list):
            yield f"{key} is not a list"
            continue
        for number, entry in enumerate(entries):
            if not isinstance(entry, dict) or not isinstance(entry.get(inner) or {}, dict):
                yield f"{key}[{number}] is not a mapping with name and {inner}"
            elif not isinstance(entry.get("name"), str | None):
                yield f"{key}[{number}]: the name is not text; put it in quotes"
            else:
                where = f"of the {inner} {entry.get('name')!r}"
                fields = (entry.get(inner) or {}).items()
                for name, value in fields:
                    if mistake := _mistake(name, value):
                        yield f"{name} {where} {mistake}"


def _mistake(name: str, value: object) -> str:
    """What is wrong with the type of a field; empty: nothing."""
    for names, kind, mistake in _TYPES:
        if name in names.split() and not isinstance(value, kind | None):
            return mistake
    return ""


def _named(config: _Config, key: str) -> list[str]:
    return [entry["name"] for entry in config.get(key) or [] if entry.get("name")]


def _part(config: _Config, key: str, name: str, inner: str) -> _Config:
    entries = config.get(key) or []
    return next((entry.get(inner) or {} for entry in entries if entry.get("name") == name), {})
