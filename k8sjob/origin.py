"""What a job's image was made of: told by what puts the code on its base, carried by the job.

So `status` can say it without asking a registry, long after the image was made.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["Origin", "Part"]

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A layer that was put on the base.

    Attributes:
        kind: "dependencies" or "code"; a newer k8sjob may know more.
        digest: of the layer as the registry has it, "sha256:...".
        size: its bytes there.
    """

    kind: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Origin:
    """What an image was made of.

    Attributes:
        image: the image itself, by its digest.
        base: the image at the bottom, by its digest; empty where it is not known.
        onto: the image that the code was put on, by its digest: the base, or one with what the code
            needs.
        platform: os/architecture.
        layers: those on the base as far as they are known, the lowest first; the last is the code.
        installed: what was installed beside the code, in words; may be empty.
        files: number of files of the user's in the code layer.
    """

    image: str
    base: str
    onto: str
    platform: str
    layers: tuple[Part, ...]
    installed: str = ""
    files: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON; docs/reference/json.md says what each field means."""
        return {**asdict(self), "layers": [asdict(layer) for layer in self.layers]}

    def encode(self) -> str:
        """Compact JSON for an annotation; equal origins give equal text."""
        body = {"version": _VERSION, **self.as_dict()}
        return json.dumps(body, separators=(",", ":"), sort_keys=True)

    @classmethod
    def decode(cls, text: str | None) -> Origin | None:
        """The origin in an annotation, or None where there is none that can be read."""
        try:
            body = json.loads(text or "")
            return cls(
                image=str(body["image"]),
                base=str(body["base"]),
                onto=str(body["onto"]),
                platform=str(body["platform"]),
                layers=tuple(
                    Part(str(one["kind"]), str(one["digest"]), int(one["size"]))
                    for one in body["layers"]
                ),
                installed=str(body.get("installed", "")),
                files=int(body.get("files", 0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return None
