"""What runs inside of vLLM's own worker processes: weights replaced in place.

vLLM packs weights into its kernels' form when it loads them, so `load_weights` on a running model fails. Its
layerwise reload restores each layer's loading form, takes the weights, packs them again and copies them to
where they were, which CUDA graphs need. Its model runner's `reload_weights` does so too, but does not tell
which parameters got nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rolemesh.engine.rollout.kept_weights import KeptWeights


class WeightsExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; `LLMEngine.collective_rpc` calls these by name."""

    model_runner: Any
    model_config: Any
    device: torch.device
    rank: int

    def scale_logits(self, factor: float) -> None:
        """Multiply all logits, before log-probs are taken and before sampling."""
        self._model().logits_processor.scale *= factor

    def load_kept(self, of_ranks: Sequence[KeptWeights]) -> list[str]:
        """Replace all weights by those that are kept for this rank; the names of parameters that got none."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self._model()
        held = {name for name, _ in model.named_parameters()}
        if self.device.type == "cpu":
            _forget_expert_kernels(model)
        initialize_layerwise_reload(model)
        held &= {name for name, _ in model.named_parameters()}  # without what vLLM derives from others
        loaded = model.load_weights(of_ranks[self.rank].read())
        finalize_layerwise_reload(model, self.model_config)
        if self.device.type == "cpu":
            _pack_heads(model)
        return [] if loaded is None else sorted(held - set(loaded))  # None: a model that does not tell

    def _model(self) -> Any:
        return self.model_runner.get_model()


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Have a reload pad and pack experts again.

    On a CPU vLLM 0.32 does that only with a kernel's first weights; on a GPU, whose graphs keep the kernel,
    it converts them each time.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _pack_heads(model: torch.nn.Module) -> None:
    """Pack the matrix that makes logits again: a reload leaves it out where it is the embedding's."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
