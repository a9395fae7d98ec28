"""Rewards from a user's Python function, called as verl calls its `compute_score`."""

import logging
import math
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import PreTrainedTokenizerBase

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.response import own_tokens
from rolemesh.engine.rewards.extras import present_means, ragged_columns
from rolemesh.engine.rewards.pool import Outcome, RewardError, ScorerPool
from rolemesh.engine.rewards.texts import RewardTexts

log = logging.getLogger(__name__)


class FunctionReward:
    """Scores samples with function `name` of a file, given as `path.py:name`, in processes of its own.

    The function gets `data_source`, `solution_str` (the response's text), `ground_truth` (of `reward_model`)
    and `extra_info` by name, and returns a number, or a dict with `score` and further entries, which become
    object columns. The prompt's text is in `extra_info["prompt_str"]`, and is passed as `prompt_str` too
    where the function has such a parameter. Padding is in neither text. The response's text holds what an
    agent answered, too; how many turns the model had is in `extra_info["num_turns"]` then.

    Args:
        limit_s: longest time for one sample. A call that takes longer, or ends its process, is stopped and
            counted, and its sample gets `default_score`.
        workers: processes.
        special_tokens: whether the texts hold special tokens (`keep`) or not (`strip`).

    Raises:
        RewardError: the function cannot be loaded.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limit_s: float = 30.0,
        workers: int = 2,
        special_tokens: Literal["keep", "strip"] = "strip",
        default_score: float = 0.0,
    ) -> None:
        file, _, self.name = path.rpartition(":")
        if not file:
            raise RewardError(f"reward {path!r} names no function; write file.py:compute_score")
        self.path, self.default_score = path, default_score
        self.texts = RewardTexts(tokenizer, special_tokens=special_tokens)
        self.limit_s = limit_s
        self.pool = ScorerPool(Path(file).resolve(), self.name, workers=workers, limit_s=limit_s)

    def score(self, data: DataProto) -> DataProto:
        """Column `rm_scores` float32 [b, R]: the score at the model's last token, 0 elsewhere; the extras.

        Args:
            data: `prompts` [b, P], `responses` [b, R], `attention_mask` [b, P + R]; `response_mask` [b, R],
                `data_source`, `reward_model`, `extra_info` and `num_turns` [b] where there are any.

        Returns:
            Meta information has `metrics`: `reward/timeouts` and `reward/died` (samples), and the mean of
            every numeric extra as `reward/NAME/mean`. A row without response tokens has no place for a score.

        Raises:
            RewardError: the function failed on a sample, or its score is not finite.
        """
        outcomes = self.pool.map(self._calls(data))
        results = [self._result(data, row, outcome) for row, outcome in enumerate(outcomes)]
        extras = ragged_columns([extra for _, extra in results])
        taken = sorted(extras.keys() & {*data.columns})
        if taken:
            raise RewardError(f"{self.path} returns {taken}, which are columns of the batch; rename them")
        kinds = [outcome.kind for outcome in outcomes]
        metrics: dict[str, float] = {
            "reward/timeouts": kinds.count("timeout"),
            "reward/died": kinds.count("died"),
        }
        metrics |= {f"reward/{name}/mean": mean for name, mean in present_means(extras).items()}
        scores = torch.tensor([score for score, _ in results], dtype=torch.float32)
        return DataProto.from_dict(
            {"rm_scores": at_last_token(scores, own_tokens(data))}, extras, {"metrics": metrics}
        )

    def close(self) -> None:
        """End the processes."""
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _calls(self, data: DataProto) -> list[dict[str, Any]]:
        """The function's arguments for each sample."""
        objects = data.non_tensor_batch
        turns = data.batch["num_turns"].tolist() if "num_turns" in data.batch else None
        calls = []
        for row, text in enumerate(self.texts(data)):
            truth, extra_info = (
                (objects[name][row] if name in objects else None) or {}
                for name in ("reward_model", "extra_info")
            )
            calls.append(
                {
                    "data_source": objects["data_source"][row] if "data_source" in objects else None,
                    "solution_str": text.response,
                    "ground_truth": truth.get("ground_truth"),
                    "extra_info": {
                        **extra_info,
                        "prompt_str": text.prompt,
                        **({} if turns is None else {"num_turns": turns[row]}),
                    },
                    "prompt_str": text.prompt,
                }
            )
        return calls

    def _result(self, data: DataProto, row: int, outcome: Outcome) -> tuple[float, dict[str, Any]]:
        """The score and extras of one sample."""
        uid = data.non_tensor_batch["uid"][row] if "uid" in data.non_tensor_batch else None
        sample = f"sample {row}" + (f" (uid {uid})" if uid is not None else "")
        match outcome.kind:
            case "scored":
                score, extra = outcome.value
                if not math.isfinite(score):
                    raise RewardError(f"{self.path} returned {score} for {sample}")
                return score, extra
            case "error":
                raise RewardError(f"{self.path} failed on {sample}:\n{outcome.value}")
            case kind:
                why = f"took more than {self.limit_s:g} s" if kind == "timeout" else "ended its process"
                log.warning("%s %s on %s; its score is %g", self.path, why, sample, self.default_score)
                return self.default_score, {}


def at_last_token(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Scores [b] at each row's last token of `tokens` (bool [b, R]), 0 elsewhere: float32 [b, R]."""
    position = torch.arange(tokens.shape[1]).expand_as(tokens)
    last = torch.where(tokens, position, -1).amax(-1, keepdim=True)
    return torch.where(tokens & (position == last), scores[:, None], 0.0)
