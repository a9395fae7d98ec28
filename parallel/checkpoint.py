"""A trained model's state as a sharded checkpoint: megatron-core's `dist_checkpointing`, format `torch_dist`.

Stored are fp32 weights and Adam's moments, each under its state and its Hugging Face name
("param.lm_head.weight"), cut as the distributed optimizer cuts them: every number is held, copied and written
by one rank only. The names and offsets are those of whole tensors, so any layout loads what any other has
saved.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.checkpoint_metadata import check_metadata
from rolemesh.parallel.durable_files import FileRecord, HashedFile, read_record, sync_files, sync_folder
from rolemesh.parallel.model import ParallelModel
from rolemesh.parallel.weights.boxes import boxes
from rolemesh.parallel.weights.load import planned_parameters
from rolemesh.parallel.weights.pieces import Buffer, Replicated
from rolemesh.parallel.weights.plan import export_order, hf_tensors, stage_plan

STATES = ("param", "exp_avg", "exp_avg_sq")
"""What the optimizer keeps of each number; "param" is the weight itself in fp32."""

_FORMAT, _VERSION = "torch_dist", 1
_CANCEL_S = 60.0


@dataclass(frozen=True)
class SaveProgress:
    """How far a rank has come: `error` says why it gave up; `results` and `files` are whole once `done`."""

    done: bool
    error: str | None = None
    results: tuple[WriteResult, ...] = ()
    files: Mapping[str, FileRecord] | None = None


class ShardSave:
    """One save under way on this rank: a copy of its shard in host memory, which a thread writes.

    Construction is collective and returns when the copy is made; training may go on then. The folder exists
    and is on a disk that the ranks share. Once every rank's `progress` is done, rank 0 calls `finish`.

    Raises CheckpointError for a model without an optimizer.
    """

    def __init__(self, model: ParallelModel, folder: str | Path) -> None:
        if model.optimizer is None:
            raise CheckpointError("this model has no optimizer: it is not trained, so it is not saved")
        self._folder = Path(folder)
        with model.use("states"):
            state: dict[str, Any] = dict(_sharded_state(model, saving=True))
            state["step_count"] = model.optimizer.step_count
            state["shape"] = _described(model)
            state["lora"] = asdict(model.lora) if model.lora else None
            self._writer, self._metadata, self._common = _host_copy_of(state, folder)
        self._cancelled = threading.Event()
        self._progress = SaveProgress(done=False)
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def progress(self) -> SaveProgress:
        """How far this rank has come. Safe to call from any thread."""
        return self._progress

    def finish(self, results: Sequence[Sequence[WriteResult]]) -> dict[str, FileRecord]:
        """On rank 0, with every rank's results: write what makes the files a checkpoint; those it wrote."""
        with HashedFile(self._folder / COMMON_STATE_FNAME) as common:
            torch.save(self._common, cast(IO[bytes], common))
        assert self._metadata is not None, "rank 0 has the plan of all ranks"
        self._writer.finish(self._metadata, [list(of_rank) for of_rank in results])
        save_config(CheckpointingConfig(_FORMAT, _VERSION), str(self._folder))
        names = (".metadata", CONFIG_FNAME)
        sync_files(self._folder / name for name in names)
        sync_folder(self._folder)
        written = {name: read_record(self._folder / name) for name in names}
        return {COMMON_STATE_FNAME: common.record, **written}

    def cancel(self) -> None:
        """Stop writing. Raises CheckpointError when the disk does not answer within a minute."""
        self._cancelled.set()
        self._thread.join(_CANCEL_S)
        if self._thread.is_alive():
            raise CheckpointError(f"a write into {self._folder} still hangs after {_CANCEL_S:g} s")

    def _write(self) -> None:
        try:
            files = self._writer.write(self._cancelled)
            self._progress = SaveProgress(True, None, tuple(self._writer.results), files)
        except BaseException as error:
            self._writer.copies.clear()
            self._progress = SaveProgress(False, f"{type(error).__name__}: {error}")


def load_shards(model: ParallelModel, folder: str | Path) -> None:
    """Take weights, Adam's moments and the schedule's place from a checkpoint of any layout. Collective.

    Each rank reads only its own shard. Raises CheckpointError for another model's checkpoint.
    """
    optimizer = model.optimizer
    if optimizer is None:
        raise CheckpointError("this model has no optimizer: it cannot take up a checkpoint")
    check_metadata(folder)
    saved = dist_checkpointing.load_common_state_dict(str(folder))
    if saved["shape"] != _described(model):
        raise CheckpointError(f"{folder} is of another model: {_differences(saved['shape'], model)}")
    with model.use("training"):
        state = dict(_sharded_state(model, saving=False))
        dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
        optimizer.set_step(saved["step_count"])
        optimizer.publish_weights()


def _sharded_state(model: ParallelModel, *, saving: bool) -> Iterator[tuple[str, ShardedTensor]]:
    """This rank's part of each state as boxes of Hugging Face tensors, views of the optimizer's own memory.

    When saving, what several ranks hold is left to one: the first tp rank, or the first stage of a shared
    matrix.
    """
    assert model.optimizer is not None
    shape, layout, coords = model.shape, model.layout, model.coords
    ep_rank = layout.expert_coords(layout.rank(coords)).ep
    plans = stage_plan(shape, layout, coords.pp, model.head, ep_rank=ep_rank)
    parameters = planned_parameters(dict(model.named_parameters()), plans, coords)
    adapters = model.adapter_plans(plans)
    parameters |= {name: x for name, x in model.trained_parameters() if name not in parameters}
    whole = {name: tensor.shape for name, tensor in hf_tensors(shape, model.head).items()}
    whole |= {tensor.name: tensor.shape for plan in adapters for tensor in plan.tensors}
    exported = {
        tensor.name: (stage, plan.name)
        for stage, _, plan in export_order(shape, layout, model.head)
        for tensor in plan.tensors
    }
    for plan in (*plans, *adapters):
        here = (coords.pp, plan.name)
        elsewhere = here != exported.get(plan.tensors[0].name, here)
        if saving and (elsewhere or (isinstance(plan.rule, Replicated) and coords.tp > 0)):
            continue
        if isinstance(plan.rule, Buffer):
            if not saving or (coords.dp, coords.cp) == (0, 0):
                key, data = f"param.{plan.tensors[0].name}", parameters[plan.name]
                yield key, _sharded(key, data, tuple(data.shape), (0,) * data.ndim)
            continue
        shard = model.optimizer.shard_of(parameters[plan.name])
        if shard is None:
            continue
        for box in boxes(plan.cuts[coords.tp], shard.low, shard.high):
            for name in STATES:
                key = f"{name}.{box.tensor}"
                data = _sharded(key, box.view(shard.states[name]), whole[box.tensor], box.offset)
                yield f"{key}/{plan.name}/{box.offset}", data


def _sharded(key: str, data: Tensor, whole: tuple[int, ...], offset: tuple[int, ...]) -> ShardedTensor:
    return ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=whole,
        global_offset=offset,
        axis_fragmentations=None,  # boxes are of all sizes
    )


def _described(model: ParallelModel) -> dict[str, str]:
    lora = {"lora": str(model.lora)} if model.lora else {}
    return {"head": model.head, **lora, **{name: str(value) for name, value in asdict(model.shape).items()}}


def _differences(saved: Mapping[str, str], model: ParallelModel) -> str:
    here = _described(model)
    return ", ".join(
        f"{name} {saved.get(name)} (here {here.get(name)})"
        for name in sorted(saved.keys() | here.keys())
        if saved.get(name) != here.get(name)
    )


def _host_copy_of(
    state: ShardedStateDict, folder: str | Path
) -> tuple[_HostCopyWriter, Metadata | None, Any]:
    """Plan with all ranks and copy this rank's boxes: (writer, rank 0's metadata, what is not sharded).

    These are the steps of `dist_checkpointing.save` with another writer. megatron-core's own forks writers,
    which a process with communication threads does not survive for sure, and its first rank writes a file in
    between collectives, where a full disk would leave the others waiting. Here the disk is not touched.
    """
    sharded, common = save_preprocess(state, validate_access_integrity=False)  # the planner checks the boxes
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    writer = _HostCopyWriter(folder)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planned = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(by_key, False), writer, None, 0, planner=planner
    )
    return writer, planned[0][1], common


class _HostCopyWriter(FileSystemWriter):
    """One file of this rank's boxes. `copies` shrinks as it is written."""

    can_run_decentralized_global_plan = True

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.results: list[WriteResult] = []
        self.copies = deque((item, _host_copy(planner.resolve_data(item))) for item in plan.items)

    def write(self, cancelled: threading.Event) -> dict[str, FileRecord]:
        """Write the copies; what the file holds, by name (nothing where this rank has no shard)."""
        if not self.copies:
            return {}
        name = f"__{dist.get_rank()}_0.distcp"
        with HashedFile(Path(self.path) / name) as file:
            while self.copies:
                if cancelled.is_set():
                    raise CheckpointError("given up, because the save failed on another rank")
                item, tensor = self.copies.popleft()
                form = SerializationFormat.TORCH_SAVE
                self.results.append(_write_item(self.transforms, file, tensor, item, name, form))  # type: ignore[arg-type]
        return {name: file.record}


def _host_copy(tensor: Any) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
