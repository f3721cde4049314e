"""References to images in registries: [registry/]path[:tag][@sha256:digest]."""

from __future__ import annotations

import re
from typing import Final

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*(?::[0-9]+)?"
_PATH = rf"(?:{_DOMAIN}/)?{_COMPONENT}(?:/{_COMPONENT})*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
REFERENCE: Final = re.compile(rf"({_PATH})(?::{_TAG})?(?:@sha256:[0-9a-f]{{64}})?")


def is_image_reference(text: str) -> bool:
    """Whether the text names an image as registries do."""
    match = REFERENCE.fullmatch(text)
    return match is not None and len(match[1]) <= 255


def is_repository(reference: str) -> bool:
    """Whether an image reference has neither a tag nor a digest."""
    return bool(re.fullmatch(_PATH, reference))
