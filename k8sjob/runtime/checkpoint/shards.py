"""A checkpoint that all ranks write together, each the part that it has.

torch.distributed.checkpoint plans who writes what, on the main thread, where the ranks may
communicate; the plan holds until the state has other tensors. What a rank writes is copied
to host memory at once, so that training continues while it is written, without any collective: the
ranks tell rank 0 through the store what they have written, and rank 0 makes it a checkpoint.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from k8sjob.runtime.checkpoint.format import METADATA, OTHERS, mark
from k8sjob.runtime.checkpoint.store import Digest, as_oserror, lasting, measure, write_digests

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.planner import WriteItem

    from k8sjob.runtime.comm.process_group import Group


class Plans:
    """The plans of what each rank writes, for the saves of one run."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._local: SavePlan | None = None
        self._mine = SavePlan([])
        self._metadata: Metadata | None = None

    def stage(self, parts: dict[str, Any], *, describes: bool) -> RankPart:
        """Copy to host memory what this rank is to write; all ranks call it.

        Args:
            parts: this rank's part of the state: dicts, lists and tuples with tensors, which may be
                distributed. Equal names are parts of one tensor, or the same tensor.
            describes: whether its values that are no tensors count too; they do on the ranks of one
                copy of the model.

        Raises:
            ValueError: the ranks' parts do not make up whole tensors.
        """
        marked, tensors = mark(parts)
        # Rank 0's copy counts of what all ranks have: their buffers may differ.
        planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        planner.set_up_planner(tensors, is_coordinator=self._group.rank == 0)
        local = planner.create_local_plan()
        # torch compares the plans by name, type and shape of each tensor. A plan is made by
        # collectives of objects, so it is kept; the ranks must agree on that, as all of them take
        # part.
        changed = torch.tensor(int(local != self._local))
        changed_anywhere = bool(self._group.all_reduce(changed, "max"))
        # Values that are no tensors, as a learning rate, may differ at each save, so they are sent
        # each time.
        mine = (marked if describes else None, local if changed_anywhere else None)
        everyone = self._gather(mine)
        if changed_anywhere:
            self._mine = self._divide(planner, [plan for _, plan in everyone])
            self._local = local
        whole: dict[str, Any] = {}
        for values, _ in everyone:
            _merge(whole, values or {})
        # From here on the training may change its tensors: these are copies in host memory.
        staged = {
            item.index: _on_host(cast("Tensor", planner.resolve_data(item)))
            for item in self._mine.items
        }
        if any(tensor.is_pinned() for tensor in staged.values()):
            torch.cuda.current_stream().synchronize()
        return RankPart(whole, self._mine, staged, self._metadata)

    def _divide(self, planner: DefaultSavePlanner, plans: list[SavePlan]) -> SavePlan:
        """This rank's part of the plan that rank 0 makes of all."""
        answers: list[Any] = [None] * self._group.world_size
        if self._group.rank == 0:
            try:
                whole, self._metadata = planner.create_global_plan(plans)
                answers = FileSystemWriter("").prepare_global_plan(whole)
            except (ValueError, AssertionError) as error:  # torch takes the plans' form for granted
                answers = [str(error)] * self._group.world_size
        mine = answers[:1]
        if self._group.world_size > 1:
            with self._group.waiting():
                dist.scatter_object_list(mine, answers if self._group.rank == 0 else None, src=0)
        # Rank 0 sends its error in place of the plans, so that no rank waits for one.
        if isinstance(mine[0], str):
            raise ValueError(f"the ranks' states do not form a whole one: {mine[0]}")  # noqa: TRY004 - of their content
        plan: SavePlan = planner.finish_plan(mine[0])
        return plan

    def _gather(self, mine: Any) -> list[Any]:
        """The ranks' objects, on rank 0."""
        if self._group.world_size == 1:
            return [mine]
        first = self._group.rank == 0
        objects: list[Any] = [None] * self._group.world_size
        with self._group.waiting():
            dist.gather_object(mine, objects if first else None, dst=0)
        return objects if first else []


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part that one rank writes, in host memory."""

    marked: dict[str, Any]  # on rank 0: the whole nest, with marks in the places of tensors
    _plan: SavePlan
    _staged: dict[MetadataIndex, Tensor]
    _metadata: Any  # torch's Metadata of all tensors, on rank 0

    def write(self, draft: Path) -> str:
        """Write this rank's files to the disk; returns what rank 0 must know, as JSON."""
        if not self._plan.items:
            return json.dumps({"files": {}, "places": []})
        with as_oserror(draft):
            # This runs in the thread of Background. torch's writer syncs its files by default.
            results = FileSystemWriter(draft).write_data(self._plan, _Staged(self._staged)).wait()
        places = [
            [
                result.index.fqn,
                list(result.index.offset or ()),
                result.storage_data.relative_path,
                result.storage_data.offset,
                result.storage_data.length,
            ]
            for result in results
        ]
        names = {place[2] for place in places}
        files = {name: measure(draft / name) for name in names}
        return json.dumps({"files": files, "places": places})

    def finish(self, draft: Path, common: dict[str, Any], written: list[str]) -> None:
        """On rank 0: describe what all ranks wrote, by write()'s results."""
        results = [json.loads(text) for text in written]
        places = {
            MetadataIndex(name, torch.Size(offset)): _StorageInfo(file, start, length)
            for result in results
            for name, offset, file, start, length in result["places"]
        }
        # planner_data, None here, would say how to nest the tensors again: OTHERS says it.
        about = Metadata(self._metadata.state_dict_metadata, None, places, StorageMeta())
        digests = (pair for result in results for pair in result["files"].items())
        files = {name: Digest(*digest) for name, digest in digests}
        with lasting(draft / METADATA) as stream:
            pickle.dump(about, stream)
        with lasting(draft / OTHERS) as stream:
            torch.save({**common, "marked": self.marked}, stream)
        files |= {name: measure(draft / name) for name in (METADATA, OTHERS)}
        # The last file: one without digests is not whole.
        write_digests(draft, files)


class _Staged(DefaultSavePlanner):
    """Gives torch's writer the copies; the plan is made."""

    def __init__(self, staged: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The copy that belongs to an item of the plan."""
        return self._staged[write_item.index]


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add what is not there yet; the first of two values counts."""
    for key, value in part.items():
        # Lower ranks come first, so rank 0's value of a key counts.
        present = whole.setdefault(key, value)
        if isinstance(present, dict) and isinstance(value, dict) and present is not value:
            _merge(present, value)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; a copy from a GPU may still be running."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True)
    # Pinned, so that the copies follow each other without the host; torch keeps such memory.
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)
