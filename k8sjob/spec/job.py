"""JobSpec, the whole spec of one training job, and the rules over several of its parts."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ValidationError, ValidationInfo, model_validator

from k8sjob import strategies
from k8sjob.contract import CONTAINER_NAMES, TRACKER_PACKAGES, WORKDIR, RuntimeConfig
from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.kube.objects import PRIORITY, QUEUE, RESERVED, Object, at_path
from k8sjob.spec.base import FROZEN_EMPTY, UNEXPLAINED, Flag, FrozenMap, Part, doc
from k8sjob.spec.image import AnyImage, Image
from k8sjob.spec.replicas import (
    AnyRuntime,
    Gang,
    Policy,
    Replicas,
    Resources,
    Runtime,
    Topology,
    Volume,
)
from k8sjob.spec.run import AnyPreflight, Run
from k8sjob.spec.training import Checkpoint, Strategy, Tracking
from k8sjob.spec.values import (
    MAX_NAME,
    FreeJson,
    JobName,
    LabelKey,
    LabelValue,
    NamespaceName,
    ObjectName,
    TargetName,
    Text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8sjob.findings import Finding
    from k8sjob.yamldoc import Document


# Parts by default are made by model_construct: to validate one would build its validator apart from
# that of the spec.
class JobSpec(Part):
    """A distributed training job: what runs, where, on how many replicas, with which resources."""

    name: Annotated[
        JobName,
        doc(
            "The job's name. Pods are called NAME-master-0 and NAME-worker-0, -1, ..., which must"
            " fit 63 characters.",
            "fashion-mnist",
        ),
    ]
    image: Annotated[
        AnyImage,
        doc(
            "The image of all replicas: a reference, or what to build.",
            "registry.example/team/digits:1",
            {"repository": "registry.example/team/digits", "base": "pytorch/pytorch:latest"},
        ),
    ]
    run: Annotated[Run, doc("What each replica runs.", {"script": "main.py"})]
    namespace: NamespaceName | None = doc(
        "Namespace of the job; null: that of the kubeconfig's context.", "my-team", default=None
    )
    target: TargetName = doc(
        "The kind of object that the job becomes in a cluster. pytorchjob: a PyTorchJob."
        " job: an Indexed Job with a headless Service, which needs no operator. jobset: a"
        " JobSet. trainjob: a TrainJob of Kubeflow Trainer 2; see"
        " docs/reference/targets.md.",
        "job",
        default="pytorchjob",
    )
    runtime: AnyRuntime | None = doc(
        "For target trainjob: the ClusterTrainingRuntime that the job is laid over, by its name,"
        " or a TrainingRuntime; null: a TrainingRuntime of the job's own. `k8sjob run` ignores it.",
        "torch-distributed",
        {"kind": "TrainingRuntime", "name": "team-torch"},
        default=None,
    )
    labels: FrozenMap[LabelKey, LabelValue] = doc(
        "Labels of the job and its pods.", {"team": "vision"}, default=FROZEN_EMPTY
    )
    annotations: FrozenMap[LabelKey, Text | None] = doc(
        'Annotations of the pods. sidecar.istio.io/inject is "false" by default; null removes it.',
        {"sidecar.istio.io/inject": "true"},
        default=FROZEN_EMPTY,
    )
    replicas: Replicas = doc(
        "How many replicas, and processes in each.",
        {"workers": 3},
        default=Replicas.model_construct(),
    )
    resources: Resources = doc(
        "What each replica requests from its node.",
        {"gpus": 1, "cpu": 4, "memory": "32Gi"},
        default=Resources.model_construct(),
    )
    strategy: Strategy = doc(
        "How the ranks train together.", {"kind": "ddp"}, default=Strategy.model_construct()
    )
    preflight: AnyPreflight = doc(
        "Let all nodes prove their devices and their network before the program starts, and refuse"
        " those that are broken or slow; true: with its defaults; null: no.",
        {"min_bandwidth": "10Gi"},
        default=None,
    )
    checkpoint: Checkpoint | None = doc(
        "Where and when checkpoints are written; null: none.", {"dir": "/checkpoints"}, default=None
    )
    tracking: Tracking = doc(
        "Experiment trackers that record the metrics of the run and of job.log. A resumed job"
        " continues its run.",
        {"mlflow": {"uri": "http://mlflow.team:5000"}},
        default=Tracking.model_construct(),
    )
    volumes: tuple[Volume, ...] = doc(
        "Volumes, and where they are mounted.",
        [{"name": "data", "mount": "/data", "pvc": "datasets", "local": "./data"}],
        default=(),
    )
    notify: tuple[Literal["failed", "succeeded", "stalled"], ...] | None = doc(
        "What `k8sjob collect` sends messages about; []: nothing; null: what its own"
        " options select.",
        ["failed", "succeeded"],
        default=None,
    )
    service_account: ObjectName | None = doc(
        "ServiceAccount of the pods; null: the namespace's default.", "trainer", default=None
    )
    service_account_token: Flag = doc(
        "Mount the ServiceAccount's token, for scripts that call the Kubernetes API.",
        True,
        default=False,
    )
    node_selector: FrozenMap[LabelKey, LabelValue] = doc(
        "Labels that a node must have.", {"pool": "gpu"}, default=FROZEN_EMPTY
    )
    tolerations: tuple[FreeJson, ...] = doc(
        "Tolerations of the pods, in the format of a Pod spec.",
        [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        default=(),
    )
    affinity: FreeJson | None = doc(
        "Affinity of the pods, in the format of a Pod spec.",
        {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        default=None,
    )
    topology_spread: tuple[FreeJson, ...] = doc(
        "Topology spread constraints of the pods, in the format of a Pod spec.",
        [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ],
        default=(),
    )
    runtime_class: ObjectName | None = doc(
        "RuntimeClass of the pods; null: the default.", "nvidia", default=None
    )
    host_network: Flag = doc(
        "Use the node's network, which some RDMA set-ups need.", True, default=False
    )
    priority_class: ObjectName | None = doc(
        "PriorityClass of the pods; null: the default.", "high", default=None
    )
    kueue_queue: ObjectName | None = doc(
        "Kueue's LocalQueue for the job; null: none.", "research", default=None
    )
    kueue_priority_class: ObjectName | None = doc(
        "Kueue's WorkloadPriorityClass, which decides the order in the queue and"
        " preemption; null: priority_class does.",
        "production",
        default=None,
    )
    kueue_topology: Topology | None = doc(
        "Keep all pods in one domain of Kueue's topology, such as a rack; null: anywhere.",
        {"preferred": "cloud.provider.com/topology-rack"},
        default=None,
    )
    gang: Gang | None = doc(
        "Schedule all pods at once; null: one by one.", {"scheduler": "volcano"}, default=None
    )
    security: Literal["default", "restricted", "openshift"] | None = doc(
        "restricted: containers comply with Kubernetes' Pod Security Standard of that name;"
        " openshift: and name no user or group, which the cluster chooses; null: openshift where"
        " the namespace has ids of OpenShift's when it is submitted, else default.",
        "restricted",
        default=None,
    )
    policy: Policy = doc(
        "Restarts, clean-up, deadlines.", {"max_restarts": 3}, default=Policy.model_construct()
    )
    pod_template: FreeJson = doc(
        "Other fields of the Pod template of all replicas, for every target; merged like"
        " `overlay`, and before it.",
        {"spec": {"enableServiceLinks": False}},
        default=FROZEN_EMPTY,
    )
    overlay: FreeJson = doc(
        "Other fields of the target's object; merged last, lists by `name`, null deletes.",
        {"spec": {"runPolicy": {"schedulingPolicy": {"scheduleTimeoutSeconds": 60}}}},
        default=FROZEN_EMPTY,
    )

    @classmethod
    def from_yaml(cls, text: str | bytes, source: str = "") -> JobSpec:
        """The spec in a YAML text.

        Args:
            text: one YAML document.
            source: the file's name, for messages.

        Raises:
            SpecError: with every problem and its line.
        """
        from k8sjob.spec.changes import job_document  # noqa: PLC0415 - no YAML for specs from Python

        document = job_document(text, source)
        return cls.model_validate(document.data, context=document)

    def to_yaml(self) -> str:
        """The spec as a job.yaml with what differs from the defaults; from_yaml reads it back."""
        from k8sjob.yamldoc import dump  # noqa: PLC0415 - see from_yaml

        return dump(self.model_dump(exclude_defaults=True))

    def with_(self, **changes: Any) -> JobSpec:
        """A new spec with these fields replaced, validated as a whole.

        Args:
            changes: fields by name; a mapping is laid over the field's present value, so that
                `spec.with_(replicas={"workers": 7})` keeps nproc_per_node.

        Raises:
            SpecError: the new spec is not valid.
        """
        data = self.model_dump(exclude_defaults=True)
        for name, change in changes.items():
            old = data.get(name)
            if isinstance(change, dict) and isinstance(old, dict):
                data[name] = {**old, **change}
            else:
                data[name] = change
        return type(self).model_validate(data)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(
        cls, data: Any, handler: Callable[[Any], JobSpec], info: ValidationInfo
    ) -> JobSpec:
        """All problems as one SpecError, with their lines where the data is a document."""
        if info.context is UNEXPLAINED:
            return handler(data)
        document: Document | None = info.context  # from_yaml's
        try:
            spec: JobSpec = handler(data)
        except ValidationError as error:
            from k8sjob.spec.errors import problems  # noqa: PLC0415 - only for what is wrong

            source = document.source if document else ""
            raise SpecError(problems(cls, error, document), source) from None
        return spec

    def rules(self) -> Iterator[Finding]:
        """The broken rules over several parts."""
        yield from _rules(self)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on fields that are valid but will not work as expected; most specs have none."""
        return tuple(f"{remark.field}: {remark.text}" for remark in _remarks(self))

    @property
    def nnodes(self) -> int:
        """Pods of the job; each is one node."""
        return self.replicas.nnodes

    @property
    def nproc_per_node(self) -> int:
        """Training processes in each pod: as given, or as many as the strategy takes GPUs for."""
        derived = strategies.processes_per_node(self.strategy.kind, self.resources.gpus)
        return self.replicas.nproc_per_node or derived

    @property
    def world_size(self) -> int:
        """Processes of the whole job, those of a parameter server's Master included."""
        serving = strategies.serving(self.strategy.kind, self.strategy.settings)
        training = self.nnodes - 1 if serving else self.nnodes
        return serving + training * self.nproc_per_node

    @property
    def existing_runtime(self) -> Runtime | None:
        """The runtime of Trainer's that the job is laid over; None: it has its own."""
        return Runtime(name=self.runtime) if isinstance(self.runtime, str) else self.runtime

    @property
    def without_runtime(self) -> JobSpec:
        """The job without its runtime, and without what it changes in that one's containers."""
        if self.runtime is None:
            return self
        pod = {**Object(self.pod_template).part("spec")}
        containers = pod.pop("containers", None)
        pod.pop("initContainers", None)
        names = (None, *CONTAINER_NAMES)
        if isinstance(containers, list):
            pod["containers"] = [each for each in containers if at_path(each, "name") in names]
        template = {**self.pod_template, **({"spec": pod} if pod else {})}
        return self.model_copy(update={"runtime": None, "pod_template": template})

    @property
    def image_reference(self) -> str:
        """The image, or the repository of one that is to be built and has no digest yet."""
        return self.image.repository if isinstance(self.image, Image) else self.image

    @property
    def code_folder(self) -> str:
        """The folder with the code (image.context), relative to that of the job.yaml."""
        return self.image.context if isinstance(self.image, Image) else "."

    @property
    def checkpoint_volume(self) -> Volume | None:
        """The volume that checkpoint.dir lies on, the innermost of them; None: on none."""
        if self.checkpoint is None:
            return None
        folder = PurePosixPath(self.checkpoint.dir)
        around = [volume for volume in self.volumes if folder.is_relative_to(volume.mount)]
        return max(around, key=lambda volume: len(volume.mount), default=None)

    @property
    def restricted(self) -> bool:
        """Whether its containers comply with the Pod Security Standard "restricted"."""
        return self.security in {"restricted", "openshift"}

    @property
    def builds_image(self) -> bool:
        """Whether the image is to be built."""
        return isinstance(self.image, Image) and self.image.base is not None

    @property
    def uses_agent(self) -> bool:
        """Whether k8sjob's agent starts the processes; a `run.command` is started as it is."""
        return self.run.command is None

    @property
    def restart_policy(self) -> str:
        """The replicas' restartPolicy: as given, or what ends a job of this form in good time.

        Under ExitCode a script's error fails the job at once; under OnFailure it would crash again
        and again, with the kubelet's growing delays, until the sum of all restarts is too large.
        But under ExitCode nothing counts the starts of a pod that is killed as a whole (out of
        memory, say): its peers' agents do, so there must be some, and agents.
        """
        derived = "ExitCode" if self.uses_agent and self.nnodes > 1 else "OnFailure"
        return self.policy.restart_policy or derived

    @property
    def runtime_config(self) -> RuntimeConfig:
        """The settings for the containers: the value of K8SJOB_CONFIG."""
        run = self.run
        checkpoint = {f"checkpoint_{name}": value for name, value in self.checkpoint or ()}
        return RuntimeConfig(
            job=self.name,
            strategy=self.strategy.kind,
            options=self.strategy.settings,
            backend=self.strategy.backend,
            **checkpoint,
            metrics=None if run.metrics is None else list(run.metrics),
            local_rank_arg=run.local_rank_arg,
            max_restarts=self.policy.max_restarts,
            restart_policy=self.restart_policy,
            rendezvous_timeout=float(run.rendezvous_timeout),
            collective_timeout=float(run.collective_timeout),
            hang_timeout=None if run.hang_timeout is None else float(run.hang_timeout),
            stop_grace=self.policy.termination_grace * 0.75,
            tracking=self.tracking.settings,
            preflight=self._preflight,
        )

    @property
    def _preflight(self) -> dict[str, Any]:
        if not self.preflight:
            return {}
        master = self.resources if self.replicas.elastic else self.resources.of_master
        return {**self.preflight.settings, "asks": [master.provable, self.resources.provable]}


# --- rules over several parts ---------------------------------------------------------------------


def _rules(spec: JobSpec) -> Iterator[Finding]:
    """Every rule over several parts that the spec breaks."""
    limit = longest_name(spec)
    if len(spec.name) > limit:
        yield invalid(
            ("name",),
            f"{spec.name!r} has {len(spec.name)} characters; with {_longest_suffix(spec)!r}"
            f" appended, a pod's name has more than {MAX_NAME}",
            f"shorten it to at most {limit}",
        )
    yield from _labels(spec)
    for field in ("kueue_priority_class", "kueue_topology"):
        if getattr(spec, field) is not None and spec.kueue_queue is None:
            yield invalid((field,), "only Kueue reads it", "set kueue_queue, or remove it")
    yield from _fitting(spec)
    yield from _volumes(spec)
    yield from _restricted(spec)
    script = spec.run.script or ""
    if spec.builds_image and script.startswith("/") and not script.startswith(f"{WORKDIR}/"):
        yield invalid(
            ("run", "script"),
            f"{script!r} is not in image.context, which becomes {WORKDIR} in the image",
            "write a path inside it, such as main.py, or start a program of the base with"
            " run.command",
        )
    checkpoint = spec.checkpoint
    whole = strategies.STRATEGIES[spec.strategy.kind].saved_whole
    if checkpoint and checkpoint.format == "sharded" and whole:
        yield invalid(
            ("checkpoint", "format"), whole, "set it to auto, under which rank 0 writes one file"
        )
    gang = spec.gang
    if gang and gang.min_available and gang.min_available > spec.nnodes:
        yield invalid(
            ("gang", "min_available"),
            f"{gang.min_available} is more than workers {spec.replicas.workers} + 1 ="
            f" {spec.nnodes} pods",
            f"set it to at most {spec.nnodes}",
        )
    if spec.preflight and not spec.uses_agent:
        yield invalid(
            ("preflight",),
            "k8sjob's agent runs it, which does not start a run.command",
            "use run.script or run.module, or remove it",
        )
    if spec.replicas.elastic and spec.resources.master:
        yield invalid(("resources", "master"), "an elastic job has Workers only", "remove master")


def longest_name(spec: JobSpec) -> int:
    """How many characters the name of a job with these replicas may have."""
    return MAX_NAME - len(_longest_suffix(spec))


def _longest_suffix(spec: JobSpec) -> str:
    """The end of the longest of the pods' names, behind the job's name."""
    elastic = spec.replicas.elastic
    most = elastic.max if elastic else spec.replicas.workers
    suffix = f"-worker-{most - 1}" if most else "-master-0"
    return max(suffix, "" if elastic else "-master-0", key=len)


def _labels(spec: JobSpec) -> Iterator[Finding]:
    for key in spec.labels:
        if prefix := next((reserved for reserved in RESERVED if key.startswith(reserved)), None):
            message = f"would be overridden: the cluster's controllers set labels under {prefix}"
            yield invalid(("labels", key), message, "choose another key")
        field = {QUEUE: "kueue_queue", PRIORITY: "kueue_priority_class"}.get(key, "")
        if (value := getattr(spec, field, None)) is not None:
            message = f"{field} {value!r} sets this label"
            yield invalid(("labels", key), message, "remove one of them")


def _fitting(spec: JobSpec) -> Iterator[Finding]:
    """Strategy, processes, GPUs and backend go together: see strategies.py."""
    master = spec.resources.master
    shape = strategies.Shape(
        nnodes=spec.nnodes,
        nproc_per_node=spec.nproc_per_node,
        gpus=spec.resources.gpus,
        master_gpus=master.gpus if master else None,
    )
    strategy = spec.strategy
    for conflict in strategies.conflicts(
        strategy.kind, strategy.settings, shape, backend=strategy.backend
    ):
        yield invalid(*conflict)
    resizes = strategies.STRATEGIES[strategy.kind].resizes
    if spec.replicas.elastic and spec.uses_agent and not resizes:
        able = ", ".join(name for name, row in strategies.STRATEGIES.items() if row.resizes)
        yield invalid(
            ("replicas", "elastic"),
            f"{strategy.kind} divides the model over a number of ranks that must not change",
            f"leave elastic out, or use one of {able}",
        )


def _volumes(spec: JobSpec) -> Iterator[Finding]:
    """Names and mounts are each used once, and checkpoints can be written."""
    first: dict[tuple[str, str], int] = {}
    for index, volume in enumerate(spec.volumes):
        for field in ("name", "mount"):
            value = getattr(volume, field)
            owner = first.setdefault((field, value), index)
            if owner != index:
                yield invalid(
                    ("volumes", index, field),
                    f"{value!r} is taken by volumes[{owner}]",
                    "choose another",
                )
    held = spec.checkpoint_volume
    if spec.checkpoint and held and (held.read_only or held.config_map or held.secret):
        yield invalid(
            ("checkpoint", "dir"),
            f"{spec.checkpoint.dir} is on {held.name!r}, which is read-only",
            "choose a folder on another volume",
        )


def _restricted(spec: JobSpec) -> Iterator[Finding]:
    """The fields that Kubernetes' Pod Security Standard "restricted" forbids."""
    if not spec.restricted:
        return
    forbidden = f"which security: {spec.security} forbids"
    step = "remove it, or set security: default"
    if spec.host_network:
        yield invalid(("host_network",), f"true is the node's own network, {forbidden}", step)
    for index, volume in enumerate(spec.volumes):
        if volume.host_path is not None:
            yield invalid(
                ("volumes", index, "host_path"),
                f"{volume.host_path!r} is a path of the node, {forbidden}",
                step,
            )


def _remarks(spec: JobSpec) -> Iterator[Finding]:
    """Every remark on a job: the field, and what to do about it."""
    repository = getattr(spec.image, "repository", "")
    if spec.builds_image and "/" not in repository:
        yield invalid(
            ("image", "repository"),
            f"{repository!r} has no registry, and the default one takes no push to such a name",
            f"write REGISTRY/{repository}",
        )
    if spec.replicas.elastic and spec.uses_agent and not spec.checkpoint:
        yield invalid(
            ("replicas", "elastic"),
            "without checkpoint the training starts from scratch whenever a node joins or leaves",
            "set checkpoint.dir, on a volume that all nodes share",
        )
    for name in spec.tracking.settings:
        package = TRACKER_PACKAGES.get(name)
        if package and spec.builds_image and not _installs(spec, name):
            yield invalid(
                ("tracking", name),
                f"needs the package {package} in the image",
                "add it to image.pip, or training continues without it",
            )
    if not spec.uses_agent:
        for name in ("rendezvous_timeout", "collective_timeout", "hang_timeout"):
            if name in spec.run.model_fields_set:
                yield invalid(
                    ("run", name),
                    "a command is not started by the agent, so only scripts that call session() use"
                    " it",
                    "set the timeouts of the launcher and of init_process_group instead",
                )
    if warning := strategies.STRATEGIES[spec.strategy.kind].warning:
        yield invalid(("strategy", "kind"), f"{spec.strategy.kind}: {warning}")
    checkpoint, volume = spec.checkpoint, spec.checkpoint_volume
    of_node = volume is not None and volume.host_path is not None and spec.nnodes > 1
    if checkpoint and (volume is None or volume.empty_dir is not None or of_node):
        kind = "a host_path" if of_node else "an empty_dir"
        where = "no volume" if volume is None else f"{volume.name!r}, {kind}"
        yield invalid(
            ("checkpoint", "dir"),
            f"{checkpoint.dir} is on {where}: on a cluster its checkpoints survive a restart in the"
            " pod, but are lost with the pod, or stay on its node",
            "mount a pvc there",
        )


def _installs(spec: JobSpec, package: str) -> bool:
    """Whether an image that is built may have a package, by whichever of its distributions."""
    image = spec.image
    if isinstance(image, str) or image.requirements:
        return True
    return any(requirement.startswith(package) for requirement in image.pip)
