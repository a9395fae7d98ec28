"""CompositeReward: the weighted sum of several rewards, which work at the same time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from rolemesh.engine.columns import object_column
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rewards.pool import RewardError


class Reward(Protocol):
    """Anything that scores a batch: column `rm_scores` float32 [b, R], perhaps `dropped` bool [b]."""

    def score(self, data: DataProto) -> DataProto: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """A reward and the weight of its score in the sum."""

    reward: Reward
    weight: float = 1.0


class CompositeReward:
    """Sums the scores of named parts, each times its weight. A row that any part drops is dropped.

    Parts run in threads of their own. They share nothing that is not safe for that: each needs its own
    tokenizer.

    Raises:
        RewardError: no part, or a weight that is not finite.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        if not parts:
            raise RewardError("a composite reward needs parts")
        if wrong := {name: part.weight for name, part in parts.items() if not math.isfinite(part.weight)}:
            raise RewardError(f"reward parts: weights must be finite; got {wrong}")
        self.parts = dict(parts)
        self._pool = ThreadPoolExecutor(len(parts), thread_name_prefix="reward-part")

    @property
    def whole_groups(self) -> bool:
        """Whether a part needs all samples of a group (`uid`) in one batch."""
        return any(getattr(part.reward, "whole_groups", False) for part in self.parts.values())

    def score(self, data: DataProto) -> DataProto:
        """Column `rm_scores` float32 [b, R], where the parts have their scores: at the last response token.

        Returns:
            Also `dropped` bool [b], and object columns: each part's score as `NAME_score` (None where
            dropped) and its own as `NAME_COLUMN`. Meta information has `metrics`: each part's mean over rows
            that are not dropped as `reward/NAME/mean`, before its weight, and its own `reward/METRIC` as
            `reward/NAME/METRIC`; of all parts together `reward/failed` (the sum), `reward/dropped` (rows) and
            `reward/dropped_groups`.

        Raises:
            RewardError: a part failed (once the others have ended), or gives no finite scores of the batch's
                shape.
        """
        futures = {name: self._pool.submit(part.reward.score, data) for name, part in self.parts.items()}
        results: dict[str, DataProto] = {}
        failures: dict[str, Exception] = {}
        for name, future in futures.items():
            try:
                results[name] = self._checked(name, future.result(), data)
            except Exception as error:
                failures[name] = error
        if failures:
            name, failure = next(iter(failures.items()))
            others = f" (so did {', '.join([*failures][1:])})" if len(failures) > 1 else ""
            raise RewardError(f"reward part {name!r} failed{others}: {failure}") from failure
        total = torch.zeros(data.batch["responses"].shape, dtype=torch.float64)
        dropped = torch.zeros(len(data), dtype=torch.bool)
        for name, result in results.items():
            total += self.parts[name].weight * result.batch["rm_scores"].double()
            if "dropped" in result.columns:
                dropped |= result.batch["dropped"]
        total[dropped] = 0.0
        columns, metrics = self._logged(results, dropped.numpy())
        if "uid" in data.columns:
            metrics["reward/dropped_groups"] = float(len({*data.non_tensor_batch["uid"][dropped.numpy()]}))
        if taken := sorted(columns.keys() & {*data.columns}):
            raise RewardError(f"reward parts make columns {taken}, which the batch has; rename the parts")
        tensors = {"rm_scores": total.float(), "dropped": dropped}
        return DataProto.from_dict(tensors, columns, {"metrics": metrics})

    def close(self) -> None:
        """Close every part."""
        with contextlib.ExitStack() as stack:
            for part in self.parts.values():
                stack.callback(part.reward.close)
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _checked(self, name: str, result: DataProto, data: DataProto) -> DataProto:
        """A part's result, if its scores fit the batch."""
        shape, wanted = tuple(result.batch["rm_scores"].shape), tuple(data.batch["responses"].shape)
        if shape != wanted:
            raise RewardError(f"its rm_scores are {list(shape)}, the batch's responses {list(wanted)}")
        finite = result.batch["rm_scores"].isfinite().all(-1)
        if not finite.all():
            raise RewardError(f"its score of sample {int((~finite).nonzero()[0])} is not finite")
        return result

    def _logged(
        self, results: Mapping[str, DataProto], dropped: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The parts' scores and extras as columns, and their metrics."""
        columns: dict[str, np.ndarray] = {}
        metrics: dict[str, Any] = {"reward/dropped": float(dropped.sum())}
        for name, result in results.items():
            scores = result.batch["rm_scores"].double().sum(-1).numpy()
            kept = scores[~dropped]
            columns[f"{name}_score"] = object_column(
                None if out else float(score) for score, out in zip(scores, dropped, strict=True)
            )
            columns |= {f"{name}_{key}": column for key, column in result.non_tensor_batch.items()}
            own = result.meta_info.get("metrics", {})
            metrics |= {f"reward/{name}/{key.removeprefix('reward/')}": value for key, value in own.items()}
            metrics[f"reward/{name}/mean"] = float(kept.mean()) if len(kept) else math.nan
        failed = [value for key, value in metrics.items() if key.endswith("/failed")]
        if failed:
            metrics["reward/failed"] = float(sum(failed))
        return columns, metrics
