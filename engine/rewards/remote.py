"""Rewards from a service behind HTTP, in OpenRLHF's, slime's or our form."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.remote.forms import FormError, Protocol, Sample, Score, read_answer, request_body
from rolemesh.engine.remote.http import BadAnswer, Client, RemoteError
from rolemesh.engine.response import own_tokens
from rolemesh.engine.rewards.extras import present_means, ragged_columns
from rolemesh.engine.rewards.failure import Failed, FailurePolicy
from rolemesh.engine.rewards.function import at_last_token
from rolemesh.engine.rewards.pool import RewardError
from rolemesh.engine.rewards.texts import RewardTexts


class RemoteReward:
    """Scores samples by requests of at most `client.limits.batch` samples, many in flight together.

    A sample is in one request, which is sent until it succeeds or has failed for good. Then, unless failures
    end the run anyway, its samples are sent one by one where the fault lies in what was sent: one bad sample
    costs no others.

    Args:
        protocol: the form of requests and answers; slime's holds one sample.
        on_failure: what becomes of samples without a score.
        score_key: which entry is the score where the service answers with a dict.
        send_ids: token ids too (protocol rolemesh), for a service with the policy's tokenizer.
    """

    def __init__(
        self,
        client: Client,
        texts: RewardTexts,
        on_failure: FailurePolicy,
        *,
        protocol: Protocol,
        score_key: str | None = None,
        send_ids: bool = False,
    ) -> None:
        self.client, self.texts, self.on_failure = client, texts, on_failure
        self.protocol, self.score_key, self.send_ids = protocol, score_key, send_ids

    def score(self, data: DataProto) -> DataProto:
        """Column `rm_scores` float32 [b, R]: the score at the model's last token, 0 elsewhere.

        Args:
            data: `prompts` [b, P], `responses` [b, R], `attention_mask` [b, P + R]; `reward_model`, whose
                `ground_truth` is the label, and `uid`, where there are any.

        Returns:
            Also `dropped` bool [b]: rows of groups that `drop_group` leaves out. What else the service says
            of a sample becomes object columns. Meta information has `metrics`: those of the failure policy
            and the client, and the mean of every numeric extra as `reward/NAME/mean`.

        Raises:
            RewardError: samples without a score, as `on_failure` says; or extras named as columns are.
        """
        samples = self._samples(data)
        outcomes = self.client.run(self._all(samples))
        rows = [outcomes[sample.id] for sample in samples]
        uids = data.non_tensor_batch.get("uid")
        decided = self.on_failure.apply([o.score if isinstance(o, Score) else o for o in rows], uids)
        extras = ragged_columns([o.extra if isinstance(o, Score) else {} for o in rows])
        taken = sorted(extras.keys() & {*data.columns, "rm_scores", "dropped"})
        if taken:
            raise RewardError(f"the service at {self._where} returns {taken}, which are columns of the batch")
        metrics = decided.metrics | self.client.take_metrics("reward")
        metrics |= {f"reward/{name}/mean": mean for name, mean in present_means(extras).items()}
        scores = torch.from_numpy(decided.scores).float()
        tensors = {
            "rm_scores": at_last_token(scores, own_tokens(data)),
            "dropped": torch.from_numpy(decided.dropped),
        }
        return DataProto.from_dict(tensors, extras, {"metrics": metrics})

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _where(self) -> str:
        return ", ".join(endpoint.url for endpoint in self.client.endpoints.all)

    def _samples(self, data: DataProto) -> list[Sample]:
        """The rows as samples, whose ids tell the row and are used once."""
        batch = uuid.uuid4().hex[:12]
        truths = data.non_tensor_batch.get("reward_model", [None] * len(data))
        return [
            Sample(
                f"{row}-{batch}",
                text.prompt,
                text.response,
                (truth or {}).get("ground_truth"),
                text.prompt_ids if self.send_ids else None,
                text.response_ids if self.send_ids else None,
            )
            for row, (text, truth) in enumerate(zip(self.texts(data), truths, strict=True))
        ]

    async def _all(self, samples: Sequence[Sample]) -> dict[str, Score | Failed]:
        """Every sample's outcome by id. With `raise`, the first failure ends the others."""
        size = 1 if self.protocol == "slime" else self.client.limits.batch
        requests = [samples[start : start + size] for start in range(0, len(samples), size)]
        tasks = [asyncio.create_task(self._outcomes(request)) for request in requests]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return {name: outcome for answer in answers for name, outcome in answer.items()}

    async def _outcomes(self, samples: Sequence[Sample]) -> dict[str, Score | Failed]:
        """The outcomes of the samples of one request, or of one request each once that failed."""
        try:
            return {score.id: score for score in await self._request(samples)}
        except RemoteError as error:
            if self.on_failure.do == "raise":
                raise RewardError(f"{_named(samples)} got no score: {error}") from error
            if len(samples) == 1 or not error.of_content:
                return {sample.id: Failed(str(error)) for sample in samples}
        alone = await asyncio.gather(*(self._outcomes([sample]) for sample in samples))
        return {name: outcome for answer in alone for name, outcome in answer.items()}

    async def _request(self, samples: Sequence[Sample]) -> list[Score]:
        """The scores of samples that are sent together, in their order."""

        def read(body: bytes, kind: str) -> list[Score]:
            try:
                parsed = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise BadAnswer(f"the answer is not JSON ({error})") from None
            try:
                return read_answer(self.protocol, parsed, samples, score_key=self.score_key)
            except FormError as error:
                raise BadAnswer(str(error)) from None

        content = json.dumps(request_body(self.protocol, samples), default=_plain).encode()
        return await self.client.post(content, "application/json", read)


def _plain(value: Any) -> Any:
    """A label's numpy values as JSON has them."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise RewardError(
        f"a label holds {value!r:.80}, a {type(value).__name__}, which JSON cannot; make it text"
    )


def _named(samples: Sequence[Sample]) -> str:
    """Which samples a request held, by row."""
    rows = [sample.id.split("-")[0] for sample in samples]
    return f"sample {rows[0]}" if len(rows) == 1 else f"samples {rows[0]} to {rows[-1]}"
