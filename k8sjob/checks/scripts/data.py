"""Checks of a script's data, saved files and metrics, mainly for silent errors."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from k8sjob.checks.finding import pattern, table
from k8sjob.checks.scripts.code import constant, followed, keyword
from k8sjob.checks.scripts.facts import MANAGED, Script
from k8sjob.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding

RULES: Final = Rules["Script"]("script")

_EVALUATION: Final = pattern("evaluation")
_OPTIMIZER: Final = pattern("optimizer")
_STREAM: Final = pattern("stream")


def _samplers(script: Script) -> Iterator[tuple[ast.Call, bool]]:
    """Every DistributedSampler with whether it is one for evaluation."""
    for call in script.torch_calls("DistributedSampler"):
        stmt = next(parent for _, parent in script.ancestors(call) if isinstance(parent, ast.stmt))
        named = [keyword(call, "dataset", 0), *getattr(stmt, "targets", ())]
        text = " ".join(script.unparsed(part).lower() for part in named if part)
        yield call, any(map(_EVALUATION.search, re.split(r"[^a-z0-9_]+", text)))


@RULES.warning
def _sampler_without_set_epoch(script: Script) -> Iterator[Finding]:
    """DistributedSampler shuffles by its seed and its epoch; one that is never set stays 0."""
    if _sets_epoch(script) or not _has_epochs(script):
        return
    reason = "set_epoch is never called"
    if calls := script.method_calls("set_epoch"):
        reason = f"`{script.shown(calls[0])}` is the same epoch every time"
    for call, evaluates in _samplers(script):
        if evaluates or constant(keyword(call, "shuffle", 3)) is False:
            continue
        seed = keyword(call, "seed", 4)
        if seed and constant(seed) is None and script.all_loops(call):
            continue  # one for each epoch, of a seed of its own
        yield script.at(call, "sampler-without-set-epoch", reason=reason)


def _sets_epoch(script: Script) -> bool:
    """Whether a sampler may get its epoch, by whatever means."""
    samplers = set(script.torch_calls("DistributedSampler"))
    for node in script.nodes:
        match node:
            case ast.Attribute(value=owner, attr="epoch", ctx=ast.Store()):
                if samplers & set(script.origins(owner)) or "sampler" in ast.unparse(owner).lower():
                    return True
            case _:
                pass
    numbers = {constant(keyword(call, "epoch", 0)) for call in script.method_calls("set_epoch")}
    by_name = any(constant(node) == "set_epoch" for node in script.nodes)  # for getattr
    return by_name or None in numbers or len(numbers) > 1


def _has_epochs(script: Script) -> bool:
    """Whether the file trains in a loop over epochs: it passes over a loader several times."""
    for node in script.nodes:
        if isinstance(node, ast.For) and "epoch" in ast.unparse(node.target).lower():
            return script.trains
    loops = (script.loops(call)[:-1] for call in script.method_calls("backward"))
    inner = (loop.iter for several in loops for loop in several if isinstance(loop, ast.For))
    return any(_is_loader(script, part) for source in inner for part in ast.walk(source))


def _is_loader(script: Script, node: ast.AST) -> bool:
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call):
        return False
    made_by = script.makers(node)
    return any("load" in name.lower() for name in (script.last_name(node), *made_by))


@RULES.warning
def _sampler_in_evaluation(script: Script) -> Iterator[Finding]:
    """DistributedSampler repeats samples (or drops some) until every rank has equally many."""
    for call, evaluates in _samplers(script):
        if evaluates and constant(keyword(call, "drop_last", 5)) is not True:
            yield script.at(call, "sampler-in-evaluation")


_DIVIDERS: Final = re.compile(r"(?!Batch)\w*Sampler|split_dataset_by_node|shard")
_SHARE: Final = frozenset({"num_replicas", "rank", "world_size", "num_shards", "index"})
"""The arguments of what divides data that say how many shares there are, and which."""


@RULES.warning
def _sampler_by_local_rank(script: Script) -> Iterator[Finding]:
    """LOCAL_RANK counts the processes of one pod; the data is divided between those of all."""
    if script.setting.nodes == 1 or script.setting.processes == 1:
        return
    for name, call in script.calls:
        if not _DIVIDERS.fullmatch(name.rpartition(".")[2]):
            continue
        named = [option.value for option in call.keywords if option.arg in _SHARE]
        for value in (*call.args, *named):
            if _is_local(script, value):
                yield script.at(value, "sampler-by-local-rank", value=script.shown(value))


def _is_local(script: Script, value: ast.expr) -> bool:
    """Whether a value certainly is a rank, or a number of processes, of one pod."""
    if script.environment(value) in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        return True
    names = {script.last_name(origin) for origin in script.origins(value)}
    counts = {"device_count"} if not script.spawns else set()  # where it is the whole world
    return bool(names) and names <= {"local_rank", "local_process_index", *counts}


@RULES.warning
def _data_not_sharded(script: Script) -> Iterator[Finding]:
    """DistributedDataParallel averages gradients; dividing the data is the sampler's business."""
    dividers = table("libraries")["divides"].split()
    divides = any(map(script.uses, dividers)) or _passes_sampler(script)
    divides |= script.has_runtime or bool(script.modules & MANAGED) or not script.self_contained
    if divides or not script.torch_calls("DistributedDataParallel"):
        return
    # Shares made by hand: data[rank::world], or range(rank, len(data), world).
    slices = (node for node in script.nodes if isinstance(node, ast.Slice))
    ranges = (call for name, call in script.calls if name in ("range", "torch.arange"))
    if any(map(script.ranks.mentioned_in, (*slices, *ranges))):
        return
    for call in script.torch_calls("DataLoader"):
        samplers = (keyword(call, name) for name in ("sampler", "batch_sampler"))
        if constant(keyword(call, "shuffle", 2)) is True and not any(samplers):
            yield script.at(call, "data-not-sharded")


def _passes_sampler(script: Script) -> bool:
    """Whether a DistributedSampler may be given to a loader: it does more than get its epoch."""
    names = set[str]()
    for sampler in script.uses("DistributedSampler"):
        around = [parent for _, parent in script.ancestors(sampler)][:2]
        match around:
            case [ast.Call(), ast.Assign(targets=[ast.Name(id=name)])]:
                names.add(name)
            case _:
                return True
    owners = (script.parent(use) for name in names for use in script.uses(name))
    return any(getattr(owner, "attr", "") not in ("set_epoch", "epoch") for owner in owners)


@RULES.error
def _shuffle_with_sampler(script: Script) -> Iterator[Finding]:
    """A DataLoader takes its order from the sampler or shuffles by itself, not both."""
    for call in script.torch_calls("DataLoader"):
        sampler = keyword(call, "sampler", 3)
        # Where there may be no sampler, shuffle=True may be right.
        may_be_none = sampler is None or isinstance(sampler, ast.Constant | ast.IfExp)
        may_be_none |= isinstance(sampler, ast.Name) and script.conditional(call)
        if not may_be_none and constant(keyword(call, "shuffle", 2)) is True:
            yield script.at(call, "shuffle-with-sampler")


@RULES.warning
def _save_on_every_rank(script: Script) -> Iterator[Finding]:
    """All ranks that write one file at once can leave a corrupt checkpoint on a shared volume."""
    if not script.torch_calls("init_process_group") and not script.has_runtime:
        return
    for name, call in script.calls:
        if name != "torch.save" or script.ranks.only_some_reach(call):
            continue
        target = keyword(call, "f", 1)
        # With the rank in its name each rank has a file of its own.
        if target is None or script.ranks.mentioned_in(target):
            continue
        # What is written to memory, or sent to somebody, is no file.
        maker = script.name(target.func) if isinstance(target, ast.Call) else ""
        if maker.endswith("BytesIO") or _STREAM.search(script.unparsed(target).lower()):
            continue
        yield script.at(call, "save-on-every-rank", target=script.shown(target))


@RULES.warning
def _download_on_every_rank(script: Script) -> Iterator[Finding]:
    """Downloads of several processes into one folder overwrite each other."""
    if not script.torch_calls("init_process_group") or script.setting.processes == 1:
        return
    # The usual order: the others wait at a barrier, and rank 0 comes to it after its download.
    if any(
        script.ranks.only_some_reach(call)
        for call in script.torch_calls("barrier", "monitored_barrier")
    ):
        return

    def locked(place: ast.AST) -> bool:
        return any("lock" in script.unparsed(held).lower() for held in script.contexts(place))

    for name, call in script.calls:
        library = name.startswith(("torchvision.", "torchaudio.", "torchtext."))
        if not library or constant(keyword(call, "download")) is not True:
            continue
        arguments = (*call.args, *(option.value for option in call.keywords))
        if any(map(script.ranks.mentioned_in, arguments)) or script.always(call, locked):
            continue
        if not script.ranks.only_some_reach(call):
            yield script.at(call, "download-on-every-rank")


@RULES.warning
def _keras_fit_diverges(script: Script) -> Iterator[Finding]:
    """Keras on torch does not know the process group: fit never averages gradients or weights."""
    grouped = script.torch_calls("init_process_group") or script.has_runtime
    reduced = script.torch_calls("all_reduce", "all_reduce_coalesced", "broadcast")
    around = (parent for call in reduced for _, parent in script.ancestors(call))
    if not grouped or any(isinstance(parent, ast.ClassDef) for parent in around):
        return  # a class of its own, an optimizer or a callback, averages
    for call in script.keras_fits:
        yield script.at(call, "keras-fit-diverges")


_MODES: Final = frozenset(table("libraries")["keras-modes"].split())
"""Layers of Keras that do something else while the model is trained."""


@RULES.warning
def _keras_not_training(script: Script) -> Iterator[Finding]:
    """Outside of fit, Keras calls a model for inference unless training=True is passed."""
    if script.has_runtime or "keras" not in script.modules:
        return
    weights = [
        node.value
        for node in script.nodes
        if isinstance(node, ast.Attribute) and _is_optimized(script, node)
    ]
    trained = {script.last_name(owner) for owner in weights} - {""}
    models = {model for owner in weights for model in script.unwrapped(owner)}
    steps = {loop for call in script.method_calls("backward") for loop in script.loops(call)}
    for _, call in script.calls:
        if script.last_name(call.func) not in trained and not models.intersection(
            script.unwrapped(call.func)
        ):
            continue
        sets_mode = any(option.arg in (None, "training") for option in call.keywords)
        if sets_mode or not steps.intersection(script.loops(call)[:1]):
            continue
        contexts = [script.unparsed(context) for context in script.contexts(call)]
        if any("no_grad" in text or "inference_mode" in text for text in contexts):
            continue
        if layers := script.is_keras_model(call.func) and _modes(script, call.func):
            yield script.at(
                call, "keras-not-training", model=script.shown(call.func), layer=min(layers)
            )


def _is_optimized(script: Script, weights: ast.Attribute) -> bool:
    """Whether these are the weights of a model that learns, and not of a teacher or an average."""
    calls = (node.func for _, node in script.ancestors(weights) if isinstance(node, ast.Call))
    return weights.attr in ("trainable_weights", "trainable_variables") or (
        weights.attr == "parameters" and any("optim" in script.name(func).lower() for func in calls)
    )


def _modes(script: Script, model: ast.expr) -> set[str]:
    """The layers of _MODES that a model seems to have, unless it sets their mode by itself."""
    layers: set[str] = set()
    for value in script.unwrapped(model):
        listed = isinstance(value, ast.Call) and value.args and isinstance(value.args[0], ast.List)
        whole = value if listed else script.function(value) or script.module(value).tree
        layers |= _modes_in(script, script.instance(value) or whole)
    return layers


@followed(frozenset[str]())
def _modes_in(script: Script, node: ast.AST) -> frozenset[str]:
    text = script.unparsed(node)
    is_set = re.search(r"training(: bool)? ?= ?True", text)
    return frozenset() if is_set else _MODES.intersection(re.findall(r"\w+", text))


_CLEARS: Final = frozenset({"zero_grad", "zero_", "_foreach_zero_", "grad"})
"""Names that may clear gradients: as an attribute, or as text for getattr and setattr."""


@RULES.warning
def _gradients_not_cleared(script: Script) -> Iterator[Finding]:
    """backward() adds to the existing gradients; only zero_grad() clears them."""
    words = (getattr(node, "attr", constant(node)) for node in script.nodes)
    clears = any(word in _CLEARS for word in words if isinstance(word, str))
    if clears or script.modules & MANAGED or not script.self_contained or script.has_runtime:
        return

    for call in script.method_calls("step") if script.trains else ():
        # The optimizer, or a GradScaler with the optimizer.
        candidates = [getattr(call.func, "value", None), *call.args[:1]]
        for optimizer in filter(None, candidates):
            made_by = script.makers(optimizer)
            if not made_by or not all(map(_OPTIMIZER.fullmatch, made_by)):
                continue
            # One that is created for each step finds no older gradients in the model made with it.
            maker_loops = map(script.all_loops, script.origins(optimizer))
            if script.all_loops(call).difference(*maker_loops):
                yield script.at(call, "gradients-not-cleared")
