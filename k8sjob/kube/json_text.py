"""JSON from others, parsed only if it is neither deep nor far larger in memory than as text."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

from k8sjob.contract import is_shallow

MAX_DEPTH: Final = 100
"""Mappings and lists inside of each other; the deepest real ones are schemas, of about 40."""
MAX_MEMORY: Final = 1 << 30
"""Bytes that the values may take; of 30,000 Pods they do."""
_SIZES: Final = {b",": 60, b"[": 80, b"{": 240}
"""What a value, a list and a mapping take at most, by the character that each of them needs."""


class OversizeError(ValueError):
    """JSON whose value is deeper or larger than is read."""


def check_size(text: bytes) -> None:
    """Refuse JSON whose values would take more than MAX_MEMORY.

    Raises:
        OversizeError: with the estimate.
    """
    # Counted in the text, before anything is parsed. Marks within strings count as well, so the
    # estimate is rather too large.
    size = len(text) + sum(text.count(mark) * size for mark, size in _SIZES.items())
    if size > MAX_MEMORY:
        raise OversizeError(f"its values would take {size >> 20} MiB, more than {MAX_MEMORY >> 20}")


def parsed(text: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        OversizeError: it has too many values, or is nested deeper than MAX_DEPTH.
        ValueError: it is no JSON.
    """
    check_size(text)
    # json's own limit depends on the depth of the stack at this moment.
    with suppress(RecursionError):
        document = json.loads(text)
        if is_shallow(document, MAX_DEPTH):
            return document
    raise OversizeError(f"it is nested deeper than {MAX_DEPTH} levels")
