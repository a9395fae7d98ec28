"""Checkpoints as verl's trainers lay them out, saved by real ranks: `from verl_folders import ...`."""

import json
import shutil
from pathlib import Path

import torch
from gloo import run_ranks
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rolemesh.parallel.config import transformer_config
from rolemesh.parallel.groups import make_groups
from rolemesh.parallel.process_state import prepare_process
from rolemesh.parallel.spec import block_spec
from rolemesh.parallel.weights import load_hf
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape, padded_vocab

SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def fsdp_folder(folder: Path, model: Path, mesh: tuple[int, ...], head: str = "lm", change=None) -> Path:
    """What FSDP ranks in a mesh (fsdp,) or (ddp, fsdp) save of `model`; `change` is made to it first."""
    folder.mkdir(parents=True)
    _settings(folder, model)
    names = ("ddp", "fsdp")[-len(mesh) :]
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification

    def on_rank(rank: int, world: int) -> None:
        module = auto.from_pretrained(model)
        if change is not None:
            module = change(module)
        on = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        for layer in [x for x in module.modules() if type(x).__name__.endswith("DecoderLayer")]:
            fully_shard(layer, mesh=on)
        fully_shard(module, mesh=on)
        torch.save(module.state_dict(), folder / f"model_world_size_{world}_rank_{rank}.pt")

    world = torch.Size(mesh).numel()
    run_ranks(on_rank, world)
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    return folder


def megatron_folder(folder: Path, model: Path, layout: Layout, head: str = "lm") -> Path:
    """What megatron-core's ranks save of `model`."""
    (folder / "dist_ckpt").mkdir(parents=True)
    _settings(folder, model)
    config = json.loads((model / "config.json").read_text())
    shape, dtype = ModelShape.from_config(config), getattr(torch, config["dtype"])

    def on_rank(rank: int, world: int) -> None:
        # megatron-core asks its global state who saves a matrix that two stages share.
        parallel_state.initialize_model_parallel(layout.tp, layout.pp)
        groups, coords = make_groups(layout), layout.coords(rank)
        prepare_process(torch.device("cpu"), coords.tp)
        module = GPTModel(
            transformer_config(shape, layout, coords.pp, dtype=dtype),
            block_spec(shape, layout.stages(shape.n_layers)[coords.pp][0], torch.device("cpu")),
            vocab_size=padded_vocab(shape.vocab, layout.tp),
            max_sequence_length=64,
            pre_process=coords.pp == 0,
            post_process=coords.pp == layout.pp - 1,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=shape.tied and head == "lm",
            pg_collection=groups,
        )
        if head == "value" and module.post_process:
            module.output_layer = torch.nn.Linear(shape.hidden, 1, bias=False, dtype=dtype)
        load_hf(module, shape, layout, coords, model, head=head)
        mixed = 0 < len(shape.moe_layers) < shape.n_layers  # each layer is then saved by itself
        how = {"dp_cp_group": groups.dp_cp, "non_homogeneous_layers": mixed}
        state = {"model": module.sharded_state_dict(metadata=how)}
        dist_checkpointing.save(state, str(folder / "dist_ckpt"))

    run_ranks(on_rank, layout.world)
    return folder


def _settings(folder: Path, model: Path) -> None:
    (folder / "huggingface").mkdir()
    for name in SETTINGS:
        if (model / name).is_file():
            shutil.copy(model / name, folder / "huggingface")
