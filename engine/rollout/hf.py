"""The built-in rollout engine: transformers' `generate` on a full copy of the model in one process."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from rolemesh.engine.parts import Part
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout.requests import Request, Sample
from rolemesh.engine.rollout.row_sampler import RowSampler
from rolemesh.engine.rollout.sampling import RolloutError, SamplingOptions, row_uniforms, seeded_uniforms
from rolemesh.engine.rollout.stored_names import stored_views
from rolemesh.placement.model import ModelShape


class HFRollout:
    """Generates on one device with weights given by `load_weights`; it reads no weights from disk.

    Args:
        path: Hugging Face folder; only its config.json is read.
        device, dtype: where the copy lives, and its type by torch's name ("float32", "bfloat16").
        max_params: the largest model to hold a full copy of.

    Raises:
        RolloutError: the model has more than `max_params` parameters (found before memory is taken).
    """

    def __init__(self, path: str | Path, device: torch.device | str, dtype: str, max_params: int) -> None:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            self.n_params: int = AutoModelForCausalLM.from_config(config).num_parameters()
        if self.n_params > max_params:
            raise RolloutError(
                f"the hf engine holds a full copy of the model in each process; {path} has {self.n_params:,} "
                f"parameters, rollout.max_params is {max_params:,}. Use a vLLM engine, or raise max_params"
            )
        with torch.device(device), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.tie_weights()  # left out with the initialisation
        self.shape = ModelShape.from_config(json.loads((Path(path) / "config.json").read_text()))
        self.dtype: torch.dtype = getattr(torch, dtype)
        # Penalties and limits of the checkpoint's own generation settings would bend the policy unseen.
        model.generation_config = GenerationConfig()
        self.model: PreTrainedModel = model.requires_grad_(False).eval()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = buffer.data.float()  # as from_pretrained keeps it: it chooses experts
        self._stored = stored_views(model.state_dict(), self.shape.family)
        self.has_weights = False

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where the model has the tensor of that Hugging Face name, to be written in place.

        Raises RolloutError: the model has none.
        """
        if (place := self._targets().get(name)) is None:
            raise RolloutError(f"the rollout model has no parameter {name!r}")
        return place

    def _targets(self) -> dict[str, Tensor]:
        """By the names in checkpoints; both names of a tied matrix are there, over the same memory."""
        return self._stored

    def _persistent_buffers(self) -> dict[str, Tensor]:
        """Routers' correction biases: what a state dict has besides parameters."""
        stored = self.model.state_dict()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in stored}

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy `(Hugging Face name, tensor)` pairs into the model in place, cast to its type; what lies there
        already, at `place`, is only noted. While they come, and after a failure, the model has no weights.

        Raises:
            RolloutError: a name or shape the model does not have, or parameters that no pair covered.
        """
        targets, self.has_weights = self._targets(), False
        held = {**dict(self.model.named_parameters()), **self._persistent_buffers()}
        missing = set(stored_views(held, self.shape.family))
        for name, tensor in weights:
            if name not in targets:
                raise RolloutError(f"the rollout model has no parameter {name!r}")
            if tensor.shape != targets[name].shape:
                raise RolloutError(
                    f"{name}: got {list(tensor.shape)}, the model has {list(targets[name].shape)}"
                )
            if tensor.data_ptr() != targets[name].data_ptr():
                targets[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise RolloutError(f"{len(missing)} parameters got no weights: {', '.join(sorted(missing)[:5])}")
        self.has_weights = True

    @torch.no_grad()
    def generate(self, prompts: DataProto, options: SamplingOptions) -> DataProto:
        """One response per prompt row.

        Args:
            prompts: `input_ids`, `attention_mask` [b, P] left-padded; b may be 0. When sampling also
                `row_ids` [b] int64: with `options.seed` they alone decide a row's random numbers, so its
                response is the same in any batch and on any rank. Samples of one prompt need different ids.

        Returns:
            `prompts` [b, P]; `responses` [b, R] as sampled (no end is forced), padded on the right to
            `max_response_tokens`; `response_mask` [b, R] 1 up to the first end token and on it; `input_ids`,
            `attention_mask`, `position_ids` [b, P + R]; `rollout_log_probs` [b, R] fp32 under the policy at
            `temperature`, 0 outside the mask. All on the prompts' device.
        """
        return DataProto.concat([part.data for part in self.generate_parts(prompts, options)])

    def generate_parts(self, prompts: DataProto, options: SamplingOptions) -> Iterator[Part]:
        """`generate`, as many rows at a time as `options.max_batch_tokens` allows, in order; one part of no
        rows where there are none.
        """
        if not self.has_weights:
            raise RolloutError("generate was called before load_weights: the model has no weights yet")
        width = prompts.batch["input_ids"].shape[1] + options.max_response_tokens
        n_rows = max(1, options.max_batch_tokens // width)
        for start in range(0, max(1, len(prompts)), n_rows):
            rows = range(start, min(start + n_rows, len(prompts)))
            yield Part(rows, self._generate(prompts.slice(rows.start, rows.stop), options))

    @torch.no_grad()
    def _generate(self, prompts: DataProto, options: SamplingOptions) -> DataProto:
        """`generate` on rows that fit at a time."""
        prompt_ids, prompt_mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        uniforms = None
        if options.do_sample:
            uniforms = row_uniforms(options.seed, prompts.batch["row_ids"], options.max_response_tokens)
        # [b, n <= R], the longest response's length
        tokens, token_log_probs = self._decode(prompt_ids, prompt_mask, uniforms, options)
        room = (0, options.max_response_tokens - tokens.shape[1])
        is_eos = torch.isin(tokens, tokens.new_tensor(options.eos_ids)).to(prompt_mask.dtype)
        response_mask = pad(is_eos.cumsum(-1) - is_eos == 0, room).to(prompt_mask.dtype)
        responses = pad(tokens, room).masked_fill(response_mask == 0, options.pad_id)
        attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
        return DataProto.from_dict(
            tensors={
                "prompts": prompt_ids,
                "responses": responses,
                "response_mask": response_mask,
                "input_ids": torch.cat([prompt_ids, responses], dim=1),
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
                "rollout_log_probs": pad(token_log_probs, room).masked_fill(response_mask == 0, 0.0),
            }
        )

    def write(self, requests: Sequence[Request], options: SamplingOptions, version: int) -> list[Sample]:
        """A sample for each request, as many at a time as `options.max_batch_tokens` allows, under the
        weights of `version`. Each draws from its own seed; their limits are their own, too.
        """
        if not self.has_weights:
            raise RolloutError("write was called before load_weights: the model has no weights yet")
        samples: list[Sample] = []
        left = list(requests)
        while left:
            width = max(len(request.token_ids) for request in left) + max(r.max_tokens for r in left)
            n_rows = max(1, options.max_batch_tokens // width)
            samples += self._write(left[:n_rows], options, version)
            left = left[n_rows:]
        return samples

    @torch.no_grad()
    def _write(self, requests: list[Request], options: SamplingOptions, version: int) -> list[Sample]:
        """`write` of requests that fit at a time."""
        width, longest = (
            max(sizes) for sizes in zip(*((len(r.token_ids), r.max_tokens) for r in requests), strict=True)
        )
        ids = torch.full((len(requests), width), options.pad_id)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.token_ids) :] = torch.from_numpy(request.token_ids)
            mask[row, width - len(request.token_ids) :] = 1
        seeds = [request.seed for request in requests if request.seed is not None]
        uniforms = seeded_uniforms(seeds, longest) if seeds else None
        options = replace(options, max_response_tokens=longest)
        tokens, log_probs = self._decode(ids, mask, uniforms, options)
        ends = torch.isin(tokens, tokens.new_tensor(options.eos_ids))
        samples = []
        for row, request in enumerate(requests):
            first_end = torch.nonzero(ends[row]).flatten()[:1].tolist()
            n = min([*(at + 1 for at in first_end), request.max_tokens])
            own = (tokens[row, :n].numpy(), log_probs[row, :n].float().numpy())
            samples.append(Sample(request.row, *own, version, finished=True))
        return samples

    def _decode(
        self, ids: Tensor, mask: Tensor, uniforms: Tensor | None, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """New tokens [b, n] and their log-probabilities [b, n] fp32; past a row's end both mean nothing.

        `ids` and `mask` [b, P] are left-padded, `uniforms` [b, R] what is drawn with; None: greedy.
        """
        if len(ids) == 0:
            return ids.new_empty(0, 0), torch.empty(0, 0, device=ids.device)
        device = self.model.device
        sampler = RowSampler(options, None if uniforms is None else uniforms.to(device))
        output = self.model.generate(  # type: ignore[operator]  # a mixin's method, read as a tensor
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            logits_processor=LogitsProcessorList([sampler]),
            generation_config=GenerationConfig(
                max_new_tokens=options.max_response_tokens,
                do_sample=False,  # the sampler has chosen
                eos_token_id=list(options.eos_ids) or None,
                pad_token_id=options.pad_id,
            ),
        )
        return output[:, ids.shape[1] :].to(ids.device), torch.stack(sampler.log_probs, dim=1).to(ids.device)
