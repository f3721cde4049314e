"""The ids of users and groups that a namespace of OpenShift allows to its Pods.

OpenShift's admission looks for a SecurityContextConstraint that the Pod's service account may use
and that allows the Pod; most may use restricted-v2 alone, which takes the ids from annotations of
the namespace. A Pod that names no ids gets the first ones, with group 0.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.kube.objects import Object, containers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.kube.objects import Json

_USER_IDS: Final = "openshift.io/sa.scc.uid-range"
_GROUP_IDS: Final = "openshift.io/sa.scc.supplemental-groups"
_ID_BLOCK: Final = re.compile(r"(\d{1,10})([/-])(\d{1,10})(?:,|$)", re.ASCII)


class AllowedIds(NamedTuple):
    """The ids that OpenShift's constraint restricted-v2 allows to the Pods of a namespace."""

    users: range
    fs_group: int

    @classmethod
    def of(cls, namespace: Json) -> AllowedIds | None:
        """Those in the annotations of a namespace; None: it has none, so the cluster allows any."""
        annotations = Object(namespace).annotations
        users = _first_block(annotations.get(_USER_IDS, ""))
        groups = _first_block(annotations.get(_GROUP_IDS, "")) or users
        # Of the groups' first block the constraint allows the first one alone.
        return cls(users, groups.start) if users and groups else None

    def __str__(self) -> str:
        return f"users {self.users.start} to {self.users.stop - 1} and fsGroup {self.fs_group}"

    def refused(self, pod: Json) -> Iterator[str]:
        """The ids of a Pod's spec that are not among them, each with its field: "fsGroup 1000"."""
        contexts = [Object(holder).part("securityContext") for holder in (pod, *containers(pod))]
        group = range(self.fs_group, self.fs_group + 1)
        named = [("fsGroup", contexts[0].get("fsGroup"), group)]
        named += [("runAsUser", context.get("runAsUser"), self.users) for context in contexts]
        for field, number, ids in named:
            # A range looks for anything but an integer number by number, over billions of ids.
            if number is not None and not (isinstance(number, int) and number in ids):
                yield f"{field} {number}"


def _first_block(text: str) -> range | None:
    """The first of some blocks of ids: "1000750000/10000" or "1000750000-1000759999"."""
    if not (block := _ID_BLOCK.match(text)):
        return None
    start, last = int(block[1]), int(block[3])
    return range(start, start + last if block[2] == "/" else last + 1) or None
