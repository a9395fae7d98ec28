"""The rollout role with the built-in engine: each rank generates its share on a full copy of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.parts import Part
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rollout import SamplingOptions
from rolemesh.engine.rollout.agent import AgentSpec, Conversations, Tokenizers, fields_of, in_turns
from rolemesh.engine.rollout.hf import HFRollout
from rolemesh.engine.rollout.requests import Rows
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.baseline import as_baseline, as_prompts, prompts_once
from rolemesh.engine.workers.weights import take, takes_weights
from rolemesh.parallel.weights.transfer_link import Meeting
from rolemesh.parallel.weights.transfer_sides import EngineSide
from rolemesh.placement.steps.operations import SEQUENCES


@dataclass(frozen=True)
class RolloutSpec:
    """Where the model's shape comes from, its type, how to sample, and who answers, if anyone does."""

    path: str
    dtype: str
    max_params: int
    sampling: SamplingOptions
    agent: AgentSpec | None = None


class RolloutWorker(Worker):
    """Generation on one rank; its weights come from the actor, by `load_weights`, before the first use."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> int:
        """Build the engine, without weights. Returns its number of parameters."""
        spec = self.spec
        if spec.agent is not None:
            spec.agent.load()
            self.tokenizers = Tokenizers.load(spec.agent.tokenizer)
        self.engine = HFRollout(spec.path, self.device, spec.dtype, spec.max_params)
        return self.engine.n_params

    @takes_weights
    def load_weights(self, meeting: Meeting, version: int = 0) -> None:
        """Take the actor's weights, all of them, each to where it is used; `version` says after how many
        updates they are.
        """
        engine = self.engine
        side = EngineSide(engine.shape, engine.dtype, replicas=self.world_size)
        engine.load_weights(take(self, meeting, side, engine.place))
        self.version = version

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, parts=True)
    def generate_sequences(self, prompts: DataProto, greedy: bool = False) -> Iterator[Part]:
        """One response per row: the columns that `HFRollout.generate` lists, and `weight_versions` int64
        [b, R], of the weights that made each token, -1 outside of the mask. `greedy` takes the likeliest
        token. With an agent a response is a conversation, see `Conversations.columns`.
        """
        options = replace(self.spec.sampling, do_sample=not greedy)
        if self.spec.agent is not None:
            yield from self._converse(prompts, options, self.spec.agent)
            return
        for part in self.engine.generate_parts(prompts, options):
            mask = part.data.batch["response_mask"].bool()
            part.data.batch["weight_versions"] = torch.where(mask, self.version, -1)
            yield part

    def _converse(self, prompts: DataProto, options: SamplingOptions, agent: AgentSpec) -> Iterator[Part]:
        """Conversations, as many at a time as the engine writes; finished ones first among those."""
        write = functools.partial(self.engine.write, options=options, version=self.version)
        width = prompts.batch["input_ids"].shape[1] + options.max_response_tokens
        n_rows = max(1, options.max_batch_tokens // width)
        for start in range(0, max(1, len(prompts)), n_rows):
            some = prompts.slice(start, min(start + n_rows, len(prompts)))
            with Conversations(agent, Rows(some, options), fields_of(some), self.tokenizers) as talks:
                if len(some) == 0:
                    yield Part((), talks.columns([]))
                for over in in_turns(talks, write):
                    yield Part([start + row for row in over], talks.columns(over))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_baseline(self, samples: DataProto) -> DataProto:
        """The likeliest answer to each sample's prompt: `baseline_responses`, `baseline_input_ids`, ..."""
        once, own = prompts_once(samples)
        answers = self.engine.generate(as_prompts(once), replace(self.spec.sampling, do_sample=False))
        return as_baseline(answers.select(SEQUENCES), own)
