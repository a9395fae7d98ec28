"""A judge as a placed role: vLLM engines on its devices, asked by the group's first rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.ray.judges import EngineClient, JudgeProcess
from rolemesh.engine.rewards.build import Judge, judge_reward
from rolemesh.engine.rollout.vllm import VLLMSpec
from rolemesh.engine.worker import Worker
from rolemesh.engine.workers.baseline import as_reward, as_samples, prompts_once
from rolemesh.engine.workers.vllm_rollout import replica_places


@dataclass(frozen=True)
class JudgeSpec:
    """The engines, what they are asked, and the folder of the actor's tokenizer, which the samples have."""

    engine: VLLMSpec
    judge: Judge
    actor: str


class JudgeWorker(Worker):
    """One rank of a placed judge. Rank 0 starts an engine for each replica and asks them all, so that samples
    of a prompt are judged together; the others hold devices.
    """

    def __init__(self, spec: JudgeSpec) -> None:
        self.spec = spec

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the engines with the judge's weights, and ask a short question.

        Raises RolloutError for a replica on several nodes, JudgeError for a judge that is set up wrong.
        """
        places = replica_places(self)
        if self.rank:
            return
        self.context.phase("starting the engines")
        service = self.spec.judge.service
        leads = [self.layout.collect_rank(replica) for replica in range(self.layout.dp)]

        def start(replica: int) -> JudgeProcess:
            devices = [places[rank] for rank in self.layout.replica(replica)]
            engine = JudgeProcess(
                f"the judge's engine of replica {replica}, role {self.context.role}",
                self.spec.engine,
                bundle=leads[replica],
                devices=devices if self.device.type == "cuda" else [],
                threads=torch.get_num_threads(),
                timeout_s=self.context.collective_timeout_s,
                log=self.context.logs and f"{self.context.logs}/{self.context.role}_engine_{replica}.log",
            )
            engine.start()
            return engine

        self.client = EngineClient(start, self.layout.dp, service.limits)
        self.reward = judge_reward(self.spec.judge, self.spec.actor, self.client)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def compute_score(self, data: DataProto) -> DataProto:
        """Column `rm_scores`, fp32 `[b, R]`: the score at the model's last token, 0 elsewhere; and which
        rows are to be left out: `dropped`, bool `[b]`.
        """
        scored = self.reward.score(data)
        self.client.sleep()
        return scored

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def compute_baseline(self, data: DataProto) -> DataProto:
        """Columns `reward_baselines`, fp32 `[b]`, the score of each prompt's greedy answer, and
        `baseline_dropped`, bool `[b]`.
        """
        once, own = prompts_once(data)
        scored = as_reward(self.reward.score(as_samples(once)), own)
        self.client.sleep()
        return scored

    def engine_pids(self) -> list[int | None]:
        """The processes of the engines, for rank 0."""
        return self.client.pids if self.rank == 0 else []
