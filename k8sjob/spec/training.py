"""The strategy, checkpoints and trackers of a training."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from k8sjob.errors import redacted
from k8sjob.spec.base import FROZEN_EMPTY, Count, Flag, FrozenMap, Part, doc, refuse, seen
from k8sjob.spec.values import AbsolutePath, Text
from k8sjob.strategies import GONE, STRATEGIES, pattern_error


def _backend(value: Any) -> Any:
    if isinstance(value, str) and value in GONE:
        refuse(f"{value!r} {GONE[value]}; use gloo on CPUs or nccl on GPUs")
    return value


def _pattern(value: str) -> str:
    if why := pattern_error(value):
        refuse(f"{seen(value)} is not a regular expression: {why}", [re.escape(value)])
    return value


Pattern = Annotated[Text, AfterValidator(_pattern)]


def _check_once(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    named = [axis for axis in axes if axis is not None]
    if len(set(named)) < len(named):
        once = [axis if axis not in axes[:at] else None for at, axis in enumerate(axes)]
        refuse(f"{list(axes)} names an axis twice; a tensor is divided along each once", [once])
    return axes


Axes = Annotated[tuple[Literal["data", "model"] | None, ...], AfterValidator(_check_once)]


def _every(value: Any) -> Any:
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "epoch" and not steps:
        message = f"{seen(value)} is neither epoch nor a number of optimizer steps"
        refuse(message, [])
    return value


Kind = Literal[
    "ddp",
    "keras",
    "fsdp",
    "mesh",
    "keras_mesh",
    "pipeline",
    "model_split",
    "data_parallel",
    "parameter_server",
]


class Strategy(Part):
    """The strategy, its settings, and the backend of the process group."""

    shorthand = "kind"

    kind: Kind = doc(
        " ".join(f"{kind}: {row.summary}." for kind, row in STRATEGIES.items()),
        *get_args(Kind),
        default="ddp",
    )
    accumulate: Count = doc(
        "Batches whose gradients are added up before one optimizer step; they are synchronised"
        " once.",
        8,
        unit="batches",
        default=1,
    )
    sync_batchnorm: Flag = doc(
        "Batch norm over all ranks' batches instead of each rank's own.", True, default=False
    )
    clip_norm: Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)] | None = doc(
        "Largest norm of the gradients of all parameters together, over all ranks: larger ones"
        " are scaled down to it; null: as they are.",
        1.0,
        unit="L2 norm",
        default=None,
    )
    bf16: Flag = doc(
        "Compute in bfloat16 where it is safe (autocast); parameters and optimizer stay as they"
        " are.",
        True,
        default=False,
    )
    blocks: tuple[Pattern, ...] = doc(
        "Layers that fsdp gathers, checkpoint_activations recomputes and compile compiles as"
        " one, by name or regular expression of the whole name; empty: the members of"
        " nn.Sequential and nn.ModuleList.",
        [r"encoder\.layers\.\d+"],
        default=(),
    )
    checkpoint_activations: Flag = doc(
        "Keep only the inputs of each block for backward, and compute it again there.",
        True,
        default=False,
    )
    compile: Flag = doc(
        "torch.compile each block by itself; under ddp the whole model as one.", True, default=False
    )
    reshard: Flag = doc(
        "fsdp: free gathered parameters between forward and backward; false takes more"
        " memory and less traffic.",
        False,
        default=True,
    )
    data: Count | None = doc(
        "mesh, keras_mesh: ranks along data; null: world_size divided by model.",
        2,
        unit="ranks",
        default=None,
    )
    model: Count = doc("mesh, keras_mesh: ranks along model.", 4, unit="ranks", default=1)
    layout: FrozenMap[Pattern, Axes] = doc(
        "mesh: the axis or null for each dimension of a parameter, or of what a layer gives"
        " (LAYER.output, as that of fc1 here). A key is a name, or a regular expression of the"
        " whole name; the others are the same on all ranks. keras_mesh: the same with Keras's"
        " paths, as .*/dense/kernel and .*/dense/output.",
        {"fc1.weight": ["model", None], "fc1.output": [None, "model"]},
        default=FROZEN_EMPTY,
    )
    keras_backend: Literal["jax", "torch"] = doc(
        "keras_mesh: the backend of Keras, whose distribution on torch begins with Keras 3.16.",
        "torch",
        default="jax",
    )
    splits: tuple[Text, ...] = doc(
        "pipeline, model_split: the layers of an nn.Sequential that begin a new stage, by name,"
        " in its order; one stage per rank, with copies of the pipeline if there are more"
        " ranks, or one stage per GPU.",
        ["block2", "block4"],
        default=(),
    )
    schedule: Literal["1f1b", "gpipe"] = doc(
        "pipeline: 1f1b uses each gradient as soon as it is computed, and keeps few micro-batches;"
        " gpipe runs all forward passes first.",
        "gpipe",
        default="1f1b",
    )
    micro_batches: Count = doc(
        "pipeline: parts of a batch that are under way at once; a smaller batch has as many as"
        " it has samples.",
        8,
        unit="micro-batches",
        default=4,
    )
    servers: Count = doc(
        "parameter_server: processes of the Master that hold the tables, in addition to the"
        " one that coordinates; the Workers' processes train.",
        2,
        unit="processes",
        default=1,
    )
    tables: tuple[Pattern, ...] = doc(
        "parameter_server: the nn.EmbeddingBag and nn.Embedding layers that lie on the servers,"
        " by name or regular expression of the whole name; empty: every nn.EmbeddingBag.",
        ["users", "items"],
        default=(),
    )
    backend: Annotated[Literal["nccl", "gloo"] | None, BeforeValidator(_backend)] = doc(
        "Backend of the process group; null: nccl on GPUs, gloo on CPUs.", "gloo", default=None
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The strategy's settings that differ from its defaults, as JSON has them."""
        return self.model_dump(mode="json", exclude={"kind", "backend"}, exclude_defaults=True)


class Checkpoint(Part):
    """Checkpoints, from which a restarted job resumes."""

    shorthand = "dir"

    dir: AbsolutePath = doc(
        "Folder in the container; it outlives the pods only on a volume that all of them mount.",
        "/checkpoints",
        default="/checkpoints",
    )
    every: Annotated[Literal["epoch"] | Count, BeforeValidator(_every)] = doc(
        "epoch, or a number of optimizer steps.", "epoch", 500, unit="steps", default="epoch"
    )
    keep: Count = doc("Number of complete checkpoints to keep.", 3, unit="checkpoints", default=3)
    format: Literal["auto", "full", "sharded"] = doc(
        "full: one file, which rank 0 writes. sharded: a folder, where each rank writes its"
        " part; dir lies on a volume that all replicas mount. auto: sharded where strategy"
        " divides the model and all ranks see the folder, else full.",
        "sharded",
        default="auto",
    )


# --- trackers of experiments ----------------------------------------------------------------------


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
        "Write files for `wandb sync` instead of sending, to WANDB_DIR.",
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
