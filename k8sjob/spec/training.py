"""The strategy, checkpoints and trackers of a training job."""

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
        refuse(f"{value!r} {GONE[value]}", "use gloo on CPUs or nccl on GPUs")
    return value


def _pattern(value: str) -> str:
    if why := pattern_error(value):
        refuse(f"{seen(value)} is not a regular expression: {why}", meant=[re.escape(value)])
    return value


Pattern = Annotated[Text, AfterValidator(_pattern)]


def _check_once(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    named = [axis for axis in axes if axis is not None]
    if len(set(named)) < len(named):
        once = [axis if axis not in axes[:at] else None for at, axis in enumerate(axes)]
        refuse(
            f"{list(axes)} names an axis twice; a tensor is divided along each once", meant=[once]
        )
    return axes


Axes = Annotated[tuple[Literal["data", "model"] | None, ...], AfterValidator(_check_once)]


def _every(value: Any) -> Any:
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "epoch" and not steps:
        message = f"{seen(value)} is neither epoch nor a number of optimizer steps"
        refuse(message, meant=[])
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
        "Number of batches whose gradients are accumulated for one optimizer step and"
        " averaged once.",
        8,
        unit="batches",
        default=1,
    )
    sync_batchnorm: Flag = doc(
        "Batch normalization over the batches of all ranks instead of each rank's own.",
        True,
        default=False,
    )
    clip_norm: Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)] | None = doc(
        "Maximum norm of the gradients of all parameters, over all ranks; larger"
        " gradients are scaled down. null: no clipping.",
        1.0,
        unit="L2 norm",
        default=None,
    )
    bf16: Flag = doc(
        "Compute in bfloat16 where it is safe (autocast); parameters and optimizer state"
        " keep their dtype.",
        True,
        default=False,
    )
    blocks: tuple[Pattern, ...] = doc(
        "Layers that fsdp gathers, checkpoint_activations recomputes and compile compiles"
        " as a unit, by name or by regular expression for the whole name; empty: the"
        " members of nn.Sequential and nn.ModuleList.",
        [r"encoder\.layers\.\d+"],
        default=(),
    )
    checkpoint_activations: Flag = doc(
        "Keep only the inputs of each block, and recompute the block in backward.",
        True,
        default=False,
    )
    compile: Flag = doc(
        "Apply torch.compile to each block; under ddp to the whole model.", True, default=False
    )
    reshard: Flag = doc(
        "fsdp: free gathered parameters between forward and backward; false: more"
        " memory, less traffic.",
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
        "mesh: the axis or null for each dimension of a parameter, or of a layer's output"
        " (LAYER.output). A key is a name, or a regular expression for the whole name; all"
        " other parameters are replicated. keras_mesh: the same with Keras's paths, such"
        " as .*/dense/kernel and .*/dense/output.",
        {"fc1.weight": ["model", None], "fc1.output": [None, "model"]},
        default=FROZEN_EMPTY,
    )
    splits: tuple[Text, ...] = doc(
        "pipeline, model_split: the layers of an nn.Sequential that begin a new stage, by"
        " name, in order. pipeline: one stage for each rank, with copies of the pipeline"
        " if there are more ranks. model_split: one stage for each GPU.",
        ["block2", "block4"],
        default=(),
    )
    schedule: Literal["1f1b", "gpipe"] = doc(
        "pipeline: 1f1b runs each backward pass as soon as possible, and keeps few"
        " micro-batches; gpipe runs all forward passes first.",
        "gpipe",
        default="1f1b",
    )
    micro_batches: Count = doc(
        "pipeline: number of parts of a batch that are in flight; a smaller batch has one"
        " for each sample.",
        8,
        unit="micro-batches",
        default=4,
    )
    servers: Count = doc(
        "parameter_server: processes of the Master that hold the tables, in addition to"
        " the coordinator; the Workers' processes train.",
        2,
        unit="processes",
        default=1,
    )
    tables: tuple[Pattern, ...] = doc(
        "parameter_server: the nn.EmbeddingBag and nn.Embedding layers on the servers, by"
        " name or by regular expression for the whole name; empty: every nn.EmbeddingBag.",
        ["users", "items"],
        default=(),
    )
    backend: Annotated[Literal["nccl", "gloo"] | None, BeforeValidator(_backend)] = doc(
        "Backend of the process group; null: nccl on GPUs, gloo on CPUs.", "gloo", default=None
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The strategy's settings that differ from its defaults, as JSON has them."""
        # Most jobs have none, and model_dump builds a serializer for this part alone.
        apart = {"kind", "backend"}
        if self.model_fields_set <= apart:
            return {}
        return self.model_dump(mode="json", exclude=apart, exclude_defaults=True)


class Checkpoint(Part):
    """Checkpoints, from which a restarted job resumes."""

    shorthand = "dir"

    dir: AbsolutePath = doc(
        "Folder in the container. To outlive the pods it must be on a volume.",
        "/checkpoints",
        default="/checkpoints",
    )
    every: Annotated[Literal["epoch"] | Count, BeforeValidator(_every)] = doc(
        "When to save: after each epoch, or a number of optimizer steps.",
        "epoch",
        500,
        unit="steps",
        default="epoch",
    )
    keep: Count = doc("How many complete checkpoints are kept.", 3, unit="checkpoints", default=3)
    format: Literal["auto", "full", "sharded"] = doc(
        "full: one file, written by rank 0. sharded: a folder to which each rank writes"
        " its shard; all replicas must mount the volume of dir. auto: sharded if the"
        " strategy shards the model and all ranks share the folder, else full.",
        "sharded",
        default="auto",
    )


# --- trackers of experiments ----------------------------------------------------------------------


def _server(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s@]+", value) and value != "databricks":
        refuse(
            f"{redacted(value)!r} is not the http(s) URL of a tracking server without credentials",
            "give those as MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN by run.env_from",
        )
    return value


class MLflow(Part):
    """An MLflow tracking server."""

    shorthand = "uri"

    uri: Annotated[Text, AfterValidator(_server)] | None = doc(
        "URL of the tracking server; null: the container's MLFLOW_TRACKING_URI.",
        "http://mlflow.team:5000",
        default=None,
    )
    experiment: Text | None = doc(
        "Name of the experiment; null: the job's name.", "digits", default=None
    )


class WandB(Part):
    """Weights & Biases. Its key is WANDB_API_KEY, from a Secret in run.env_from."""

    shorthand = "project"

    project: Text | None = doc("Name of the project; null: the job's.", "digits", default=None)
    entity: Text | None = doc("User or team; null: the key's default.", "vision", default=None)
    offline: Flag = doc(
        "Write files for `wandb sync` to WANDB_DIR instead of sending.",
        True,
        default=False,
    )


class Trackio(Part):
    """Trackio. Its token for a Space is HF_TOKEN, from a Secret in run.env_from."""

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
    """The trackers. Rank 0 sends them what the job reports; none of them can stop the training."""

    mlflow: MLflow | None = doc(
        "An MLflow server.", {"uri": "http://mlflow.team:5000"}, default=None
    )
    wandb: WandB | None = doc("Weights & Biases.", {"project": "digits"}, default=None)
    trackio: Trackio | None = doc("Trackio.", {"project": "digits"}, default=None)
    tensorboard: TensorBoard | None = doc("Files for TensorBoard.", {"dir": "/logs"}, default=None)

    @property
    def settings(self) -> dict[str, Any]:
        """Tracker -> its settings, for those that are given, as JSON has them."""
        # See Strategy.settings.
        return self.model_dump(mode="json", exclude_none=True) if self.model_fields_set else {}
