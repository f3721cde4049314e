"""Trackers of experiments that a job sends its numbers to."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator

from k8sjob.errors import redacted
from k8sjob.spec.base import Flag, Part, doc, refuse
from k8sjob.spec.names import AbsolutePath, Text


def _server(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s@]+", value) and value != "databricks":
        refuse(
            f"{redacted(value)!r} is not the http(s) URL of a tracking server without credentials;"
            " give those as MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN by run.env_from"
        )
    return value


class MLflow(Part):
    """An MLflow tracking server."""

    shorthand = "uri"

    uri: Annotated[Text, AfterValidator(_server)] | None = doc(
        "URL of the tracking server; null: MLFLOW_TRACKING_URI of the container.",
        "http://mlflow.team:5000",
        default=None,
    )
    experiment: Text | None = doc(
        "Name of the experiment; null: the job's name.", "digits", default=None
    )


class WandB(Part):
    """Weights & Biases. Its key comes as WANDB_API_KEY from a Secret in run.env_from."""

    shorthand = "project"

    project: Text | None = doc("Name of the project; null: the job's.", "digits", default=None)
    entity: Text | None = doc("User or team; null: the key's default.", "vision", default=None)
    offline: Flag = doc(
        "Write files for `wandb sync` instead of sending; WANDB_DIR says where.",
        True,
        default=False,
    )


class Trackio(Part):
    """Trackio. Its token for a Space comes as HF_TOKEN from a Secret in run.env_from."""

    shorthand = "project"

    project: Text | None = doc("Name of the project; null: the job's.", "digits", default=None)
    space: Text | None = doc(
        "The Space of the Hugging Face Hub; null: files in TRACKIO_DIR.", "team/runs", default=None
    )


class TensorBoard(Part):
    """Event files for TensorBoard."""

    shorthand = "dir"

    dir: Annotated[
        AbsolutePath, doc("Folder in the container, on a volume that outlives the pods.", "/logs")
    ]


class Tracking(Part):
    """The trackers; rank 0 sends to each what the job reports, none can stop the training."""

    mlflow: MLflow | None = doc(
        "An MLflow server.", {"uri": "http://mlflow.team:5000"}, default=None
    )
    wandb: WandB | None = doc("Weights & Biases.", {"project": "digits"}, default=None)
    trackio: Trackio | None = doc("Trackio.", {"project": "digits"}, default=None)
    tensorboard: TensorBoard | None = doc("Files for TensorBoard.", {"dir": "/logs"}, default=None)

    @property
    def settings(self) -> dict[str, Any]:
        """Tracker -> its settings, for those that are given, as JSON has them."""
        return self.model_dump(mode="json", exclude_none=True)
