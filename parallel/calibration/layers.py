"""What a decoder layer costs when there is next to nothing to compute: the host's part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from rolemesh.parallel.calibration.points import Point, seconds_of
from rolemesh.parallel.config import transformer_config
from rolemesh.parallel.context import Packed
from rolemesh.parallel.groups import make_groups
from rolemesh.parallel.process_state import prepare_process
from rolemesh.parallel.stage import build_stage
from rolemesh.placement.layout import Layout
from rolemesh.placement.model import ModelShape

LAYERS = (1, 5)
TOKENS = 8
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def measure(device: torch.device, budget_s: float) -> Iterator[Point]:
    """Forward (`layers_infer`), and forward and backward (`layers_train`), of models of one and more layers.

    Every rank of the default group must call: each has a replica.
    """
    layout = Layout(dp=dist.get_world_size())
    prepare_process(device, 0)
    groups = make_groups(layout)
    tokens = torch.arange(TOKENS, device=device).reshape(1, TOKENS)
    packed = Packed.of((0, TOKENS), 1, 0, device)
    for n_layers in LAYERS:
        shape = ModelShape.from_config({**_CONFIG, "num_hidden_layers": n_layers})
        config = transformer_config(shape, layout, 0, dtype=torch.float32)
        module = build_stage(shape, config, groups, layout=layout, head="lm", device=device)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

        def train(module: torch.nn.Module = module) -> None:
            module(tokens, None, None, packed_seq_params=packed).float().sum().backward()

        def infer(module: torch.nn.Module = module) -> None:
            with torch.no_grad():
                module(tokens, None, None, packed_seq_params=packed)

        yield Point("layers_infer", "float32", (n_layers,), seconds_of(infer, device, budget_s))
        yield Point("layers_train", "float32", (n_layers,), seconds_of(train, device, budget_s))
