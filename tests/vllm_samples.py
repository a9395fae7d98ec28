"""What a real vLLM engine writes, and what transformers would: `from vllm_samples import ...`.

vLLM makes one engine at a time in a process, so tests that need several have `Writer`, a process of its own.
"""

import gc
import multiprocessing
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import PreTrainedModel

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.kept_weights import KeptWeights
from rolemesh.engine.rollout.requests import Rows
from rolemesh.engine.rollout.vllm import EngineSpec, VLLMEngine


def prompts(lengths: Sequence[int], width: int) -> DataProto:
    """Left-padded prompts of random tokens, of these lengths."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.randint(20, 100, mask.shape, generator=generator) * mask
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "row_ids": torch.arange(len(lengths))}
    )


def write(engine: VLLMEngine, data: DataProto, options: SamplingOptions) -> DataProto:
    """The columns of all rows."""
    rows = Rows(data, options)
    for samples in engine.generate(rows.requests()):
        for sample in samples:
            rows.add(sample)
    return rows.columns(range(len(data)), partial=True)


def greedy(model: PreTrainedModel, data: DataProto, options: SamplingOptions) -> torch.Tensor:
    """transformers' greedy responses [b, R], padded."""
    width, most = data.batch["input_ids"].shape[1], options.max_response_tokens
    ids = model.generate(
        data.batch["input_ids"],
        attention_mask=data.batch["attention_mask"],
        do_sample=False,
        max_new_tokens=most,
        eos_token_id=list(options.eos_ids),
        pad_token_id=0,
    )
    return torch.nn.functional.pad(ids[:, width:], (0, most + width - ids.shape[1]))


class Writer:
    """vLLM in a process of its own, one engine after another; forked ranks may use `asking` too."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.asking, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end,), daemon=True)
        self._process.start()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.join()

    def start(self, spec: EngineSpec) -> None:
        """Have an engine without weights in the place of the last one."""
        ask(self.asking, spec)


def ask(asking: Connection, question: Any, limit_s: float = 120) -> Any:
    """The answer to an EngineSpec (None), or to (kept weights, prompts): what is sampled, and greedy."""
    asking.send(question)
    assert asking.poll(limit_s), f"no answer from vLLM within {limit_s} s"
    answer = asking.recv()
    assert not isinstance(answer, str), answer
    return answer


def _serve(end: Connection) -> None:
    engine: VLLMEngine | None = None
    while True:
        asked = end.recv()
        try:
            if isinstance(asked, EngineSpec):
                engine = None
                _forget()
                engine, answer = VLLMEngine(asked), None
            else:
                assert engine is not None
                answer = _written(engine, *asked)
        except BaseException:
            answer = traceback.format_exc()
        end.send(answer)


def _written(engine: VLLMEngine, kept: KeptWeights, data: DataProto) -> tuple[DataProto, DataProto]:
    engine.load_weights([kept], engine.version + 1)
    sampling = engine.spec.sampling
    sampled, likeliest = (write(engine, data, replace(sampling, do_sample=how)) for how in (True, False))
    return sampled, likeliest


def _forget() -> None:
    """What the last engine left in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
