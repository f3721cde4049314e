"""The provenance of a job's image: what it was made of, stored in an annotation of the job.

So `status` shows it without asking a registry, long after the image was made.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

_VERSION: Final = 1


class ImageLayer(NamedTuple):
    """A layer that was added to the base.

    Attributes:
        kind: "dependencies" or "code"; a newer k8sjob may know more.
        digest: of the layer as the registry has it, "sha256:...".
        size: its bytes there.
    """

    kind: str
    digest: str
    size: int


class Provenance(NamedTuple):
    """The sources of an image.

    Attributes:
        image: the image itself, by its digest.
        base: the image at the bottom, by its digest; empty if it is not known.
        onto: the image that the code was added to, by its digest: the base, or one with the job's
            dependencies.
        platform: os/architecture.
        layers: the known ones above the base, the lowest first; the last is the code.
        installed: what was installed beside the code, as text; may be empty.
        files: number of the user's files in the code layer.
        commit: of the code, see checkout.commit_of().
    """

    image: str
    base: str
    onto: str
    platform: str
    layers: tuple[ImageLayer, ...]
    installed: str = ""
    files: int = 0
    commit: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON; docs/reference/json.md describes each field."""
        return {**self._asdict(), "layers": [layer._asdict() for layer in self.layers]}

    def encode(self) -> str:
        """Compact JSON for an annotation; equal values give equal text."""
        body = {"version": _VERSION, **self.as_dict()}
        return json.dumps(body, separators=(",", ":"), sort_keys=True)

    @classmethod
    def decode(cls, text: str | None) -> Provenance | None:
        """The value of an annotation; None if it is missing or cannot be read."""
        try:
            body = json.loads(text or "")
            return cls(
                image=str(body["image"]),
                base=str(body["base"]),
                onto=str(body["onto"]),
                platform=str(body["platform"]),
                layers=tuple(
                    ImageLayer(str(layer["kind"]), str(layer["digest"]), int(layer["size"]))
                    for layer in body["layers"]
                ),
                installed=str(body.get("installed", "")),
                files=int(body.get("files", 0)),
                commit=str(body.get("commit", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return None
