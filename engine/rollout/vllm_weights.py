"""What runs inside of vLLM's own worker processes: weights replaced in place, in parts.

vLLM packs weights into its kernels' form when it loads them, so `load_weights` on a running model fails. Its
layerwise reload restores each layer's loading form, takes the weights, packs them again and copies them to
where they were, which CUDA graphs need. `reload_weights` of its model runner does the same from one iterator;
that cannot cross to worker processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class WeightsExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; `LLMEngine.collective_rpc` calls these by name."""

    model_runner: Any
    model_config: Any

    def scale_logits(self, factor: float) -> None:
        """Multiply all logits, before log-probs are taken and before sampling."""
        self._model().logits_processor.scale *= factor

    def begin_weights(self) -> None:
        """Make every layer ready to take new weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self._model()
        self._lacking: set[str] | None = {name for name, _ in model.named_parameters()}
        initialize_layerwise_reload(model)

    def take_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take whole tensors by Hugging Face name; each rank keeps its part of them."""
        loaded = self._model().load_weights(iter(weights))
        if loaded is None or self._lacking is None:
            self._lacking = None  # this model does not tell what it has loaded
        else:
            self._lacking -= set(loaded)

    def end_weights(self) -> list[str]:
        """Put the new weights in force; the names of parameters that got none."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model(), self.model_config)
        return sorted(self._lacking or ())

    def _model(self) -> Any:
        return self.model_runner.get_model()
