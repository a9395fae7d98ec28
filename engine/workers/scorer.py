"""The reward role as what scores text, on the CPU."""

from __future__ import annotations

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rewards.build import Scorer, build
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.baseline import as_reward, as_samples, prompts_once


class ScoreWorker(Worker):
    """What scores text as the reward role: a function, a service, a judge, or several of them. It needs no
    device.

    `tokenizer` is the actor's folder.
    """

    def __init__(self, scorer: Scorer, tokenizer: str) -> None:
        self.scorer, self.tokenizer = scorer, tokenizer

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load functions in processes of their own, connect to services."""
        self.reward = build(self.scorer, self.tokenizer)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_score(self, data: DataProto) -> DataProto:
        """Column `rm_scores`, fp32 `[b, R]`: the score at the model's last token, 0 elsewhere.

        Services also tell which rows are to be left out: `dropped`, bool `[b]`.
        """
        return self.reward.score(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_baseline(self, data: DataProto) -> DataProto:
        """Column `reward_baselines`, fp32 `[b]`: the score of each prompt's greedy answer; of a service also
        `baseline_dropped`, bool `[b]`.
        """
        once, own = prompts_once(data)
        return as_reward(self.reward.score(as_samples(once)), own)
