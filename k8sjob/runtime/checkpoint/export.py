"""One file of weights from a checkpoint, on any machine with torch: no group, no model's code.

A program: `python -m k8sjob.runtime.checkpoint.export '{"source": ...}'` prints one JSON object,
the result or the error. `k8sjob export` calls it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves

from k8sjob.runtime.base.env import dist_env
from k8sjob.runtime.checkpoint.format import gathered
from k8sjob.runtime.checkpoint.integrity import load, newest_whole, verify
from k8sjob.runtime.checkpoint.store import DIGESTS, Checkpoints, write
from k8sjob.runtime.comm.process_group import Group
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable

_SAFETENSORS: Final = ".safetensors"


def export(
    source: Path, target: Path, *, everything: bool, force: bool, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Write the weights of a checkpoint's model as one state_dict.

    Args:
        source: a checkpoint, file or folder; or a folder of them, of which the newest whole one
            counts.
        target: the file; its suffix says the form, .safetensors or torch.save's .pt or .pth.
        everything: the optimizer, the position in the data and the rest, too.
        force: whether the file may be there already.
        warn: called with each checkpoint that is skipped, and why.

    Returns:
        What was done: path, source, step, tensors, bytes.

    Raises:
        ValueError: the checkpoint is torn or holds no weights, or the file cannot be of that form.
        OSError: something cannot be read or written; the file is as it was.
    """
    # Everything that can be refused by the names alone comes first: to read a checkpoint may take
    # minutes.
    if target.suffix.lower() not in {_SAFETENSORS, ".pt", ".pth"}:
        raise ValueError(
            f"{target}: its suffix decides the format; end it with .pt or {_SAFETENSORS}"
        )
    if target.exists() and not force:
        raise ValueError(
            f"{target} exists; specify another file with -o, or replace it with --force"
        )
    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}; create it first")
    as_safetensors = target.suffix.lower() == _SAFETENSORS
    if as_safetensors and everything:
        raise ValueError(
            f"{target}: safetensors holds tensors by name and nothing else; write a .pt, or omit "
            "--all"
        )
    # Here the checkpoint is whole; its tensors are still in their files, until gathered() reads
    # them.
    path, state = _checkpoint(source, warn)
    chosen = gathered(state if everything else _weights(state, path))
    draft = Path(target.name)
    try:
        # The draft is beside the target, since a rename does not cross file systems.
        # temporary_folder also removes what a killed export has left there.
        with temporary_folder("export", str(target.parent)) as folder:
            draft = folder / target.name
            (_write_safetensors if as_safetensors else write)(draft, chosen)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(target)
    except OSError as error:
        # The writers name the draft in their errors, and the user knows only the target.
        reason = (error.strerror or str(error)).removeprefix(f"{draft}: ")
        raise OSError(f"{target} cannot be written: {reason}") from error
    return {
        "path": str(target),
        "source": str(path),
        "step": state.get("step"),
        "tensors": sum(isinstance(value, torch.Tensor) for value in tree_leaves(chosen)),
        "bytes": target.stat().st_size,
    }


def _checkpoint(source: Path, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that is meant, which is whole, and what it holds."""
    if not source.exists():
        raise ValueError(
            f"{source} does not exist; specify a checkpoint (step-00000120.pt, or a folder "
            "step-00000120), or the folder of checkpoints"
        )
    source = source.resolve()  # the user may name a link; one that lies in a folder is not followed
    # By its name a folder without digests is a checkpoint that is damaged, not a folder without
    # any.
    if source.is_file() or (source / DIGESTS).exists() or source.name.startswith("step-"):
        try:
            verify(source)
        except ValueError as error:
            raise ValueError(f"{source}: {error}; use another checkpoint") from error
        return source, load(source)
    # No variables mean a world of one process, in which newest_whole() runs no collective.
    alone = Group(dist_env({}), "gloo", torch.device("cpu"))
    newest = newest_whole(Checkpoints(source), alone, shared=True, warn=warn, beat=lambda: None)
    if newest is None:
        raise ValueError(
            f"{source} has no complete checkpoint; specify the folder of the step-... files or"
            " folders"
        )
    return newest


def _weights(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """The model's part of a state; of a state given to Job.save(), its `model`."""
    weights = state.get("model", (state.get("state") or {}).get("model"))
    if not isinstance(weights, dict) or not weights:
        raise ValueError(
            f"{path} holds {', '.join(sorted(map(str, state)))} and no model's weights by name; "
            "export everything with --all"
        )
    return weights


def _write_safetensors(path: Path, weights: dict[str, Any]) -> None:
    try:
        # An extra of the package, which no training needs.
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError(
            "safetensors is not installed; pip install safetensors, or write a .pt"
        ) from None
    odd = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ValueError(
            f"{odd[0]} is not a tensor, and safetensors holds nothing else; write a .pt"
        )
    # Tensors that share memory, as tied weights do, become tensors of their own: the format has no
    # other way to keep all names.
    try:
        save_file({name: value.contiguous().clone() for name, value in weights.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def main(argument: str) -> int:
    """The program; 1 after an error."""
    # Standard output carries one JSON object and nothing else: the client reads it, and never
    # imports torch.
    asked, warnings = json.loads(argument), list[str]()
    try:
        result = export(
            Path(asked["source"]),
            Path(asked["target"]),
            everything=asked["everything"],
            force=asked["force"],
            warn=warnings.append,
        )
    except ValueError as error:
        result = {"error": str(error)}
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        result = {"error": f"{place}{error.strerror or error}"}
    sys.stdout.write(json.dumps({**result, "warnings": warnings}) + "\n")
    return int("error" in result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
