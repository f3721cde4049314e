"""The Pod Security Standard "restricted", with the baseline, as one table.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8sjob.findings import FieldPath

_GROUPS: Final = ("initContainers", "containers", "ephemeralContainers")


class _Control(NamedTuple):
    """One field that the standard limits."""

    path: tuple[str, ...]  # "*" is each item of a list
    allows: Callable[[Any], bool]
    requirement: str  # in words


def _one_of(path: str, *values: Any, requirement: str) -> _Control:
    return _Control(tuple(path.split(".")), lambda value: value in values, requirement)


_OFF: Final = (None, False)
_ON: Final = (None, True)
_PROFILES: Final = (None, "RuntimeDefault", "Localhost")
_SYSCTLS: Final = (
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_syncookies",
    *(f"net.ipv4.tcp_keepalive_{part}" for part in ("time", "intvl", "probes")),
    *(f"net.ipv4.tcp_{part}" for part in ("fin_timeout", "rmem", "wmem")),
)
_SELINUX_TYPES: Final = (
    *(None, ""),
    *(f"container_{kind}t" for kind in ("", "init_", "kvm_", "engine_")),
)
_VOLUMES: Final = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "projected", "secret"}
    | {"persistentVolumeClaim"}
)
_HOOKS: Final = (
    *(f"{probe}.{kind}" for probe in ("livenessProbe", "readinessProbe", "startupProbe")
      for kind in ("httpGet", "tcpSocket")),
    *(f"lifecycle.{hook}.{kind}" for hook in ("postStart", "preStop")
      for kind in ("httpGet", "tcpSocket")),
)  # fmt: skip
_CONTEXT: Final = (
    _one_of("securityContext.windowsOptions.hostProcess", *_OFF, requirement="false"),
    _one_of("securityContext.runAsNonRoot", *_ON, requirement="true"),
    _Control(("securityContext", "runAsUser"), lambda value: value != 0, "any user but 0"),
    _one_of("securityContext.seccompProfile.type", *_PROFILES, requirement="RuntimeDefault"),
    _one_of("securityContext.appArmorProfile.type", *_PROFILES, requirement="RuntimeDefault"),
    _one_of("securityContext.seLinuxOptions.type", *_SELINUX_TYPES, requirement="container_t"),
    _one_of("securityContext.seLinuxOptions.user", None, "", requirement="left out"),
    _one_of("securityContext.seLinuxOptions.role", None, "", requirement="left out"),
)
"""The fields that Pods and containers have in common."""
_POD: Final = (
    *(
        _one_of(field, *_OFF, requirement="false")
        for field in ("hostNetwork", "hostPID", "hostIPC")
    ),
    *_CONTEXT,
    _one_of("securityContext.sysctls.*.name", None, *_SYSCTLS, requirement="a safe sysctl"),
    _Control(
        ("volumes", "*"),
        lambda value: not isinstance(value, dict) or not value.keys() - {"name"} - _VOLUMES,
        f"of {', '.join(sorted(_VOLUMES))}",
    ),
)
_CONTAINER: Final = (
    *_CONTEXT,
    _one_of("securityContext.privileged", *_OFF, requirement="false"),
    _one_of("securityContext.allowPrivilegeEscalation", *_OFF[1:], requirement="false"),
    _Control(
        ("securityContext", "capabilities", "drop"),
        lambda value: isinstance(value, list) and "ALL" in value,
        "[ALL]",
    ),
    _one_of("securityContext.capabilities.add.*", None, "NET_BIND_SERVICE", requirement="left out"),
    _one_of("securityContext.procMount", None, "Default", requirement="Default"),
    _one_of("ports.*.hostPort", None, 0, requirement="left out"),
    *(_one_of(f"{hook}.host", None, "", requirement="left out") for hook in _HOOKS),
)
_INHERITED: Final = {
    ("securityContext", "runAsNonRoot"): "true",
    ("securityContext", "seccompProfile", "type"): "RuntimeDefault",
}
"""The fields that each container must set unless the Pod does, and their values."""


def restricted_violations(pod: dict[str, Any]) -> Iterator[tuple[FieldPath, Any, str]]:
    """The paths at which a Pod's spec, of any shape, breaks the standard.

    Yields:
        The path of a field, its value, and what the standard wants there.
    """
    for control in _POD:
        yield from _broken(pod, control, ())
    for group in _GROUPS:
        containers = pod.get(group)
        for index, container in enumerate(containers if isinstance(containers, list) else ()):
            for control in _CONTAINER:
                yield from _broken(container, control, (group, index))
            for path, requirement in _INHERITED.items():
                # A container inherits these from the Pod, and each may set them itself.
                if all(value is None for _, value in (*_at(container, path), *_at(pod, path))):
                    yield (group, index, *path), None, requirement


def _broken(
    holder: Any, control: _Control, base: FieldPath
) -> Iterator[tuple[FieldPath, Any, str]]:
    for path, value in _at(holder, control.path):
        if not control.allows(value):
            yield (*base, *path), value, control.requirement


def _at(value: Any, path: tuple[str, ...]) -> Iterator[tuple[FieldPath, Any]]:
    """The fields that a path stands for, with their values; None for one that is left out."""
    if not path:
        yield (), value
    elif path[0] == "*":
        for index, item in enumerate(value if isinstance(value, list) else ()):
            for below, field_value in _at(item, path[1:]):
                yield (index, *below), field_value
    else:
        inner = value.get(path[0]) if isinstance(value, dict) else None
        for below, field_value in _at(inner, path[1:]):
            yield (path[0], *below), field_value
