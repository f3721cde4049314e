"""When something happened, by the timestamps of an apiserver. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from k8sjob.backends.api import Json

__all__ = ["event_time", "moment"]

_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)


def event_time(event: Json) -> datetime:
    """When an Event happened last; long ago where it does not say so.

    Which of its times is kept up to date depends on the API through which it was told, and the
    scheduler's have an eventTime alone.
    """
    series = event.get("series") or {}
    last = filter(None, map(moment, (series.get("lastObservedTime"), event.get("lastTimestamp"))))
    stamp = (
        event.get("eventTime")
        or event.get("firstTimestamp")
        or (event.get("metadata") or {}).get("creationTimestamp")
    )
    return max(last, default=None) or moment(stamp) or _LONG_AGO


def moment(stamp: str | None) -> datetime | None:
    """A timestamp of the apiserver; None for none."""
    return datetime.fromisoformat(stamp) if stamp else None
