"""Partial rollouts: a step does not wait for its longest responses; the next ones write them on.

A step trains on the first prompts whose samples are all finished; the others stop where they are. The next
step continues them with its own weights, beside new prompts, so their tokens were made by several versions
of the weights: `weight_versions` and `rollout_log_probs` are those of each token's own.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rolemesh.engine.batch_ref import BatchRef
from rolemesh.engine.parts import PartRef
from rolemesh.engine.protocol import DataProto
from rolemesh.placement.timeline import Span

BEGUN = ("responses", "response_mask", "rollout_log_probs", "weight_versions")
"""The columns of a response that is to be continued, beside those of its prompt."""


@dataclass(frozen=True)
class PartialSpec:
    """A step trains on the first `share` of the prompts in flight; responses are `max_response_tokens`
    wide.
    """

    share: float
    max_response_tokens: int


@dataclass
class Generated:
    """The finished samples of a step, how it went, and when its ranks worked."""

    batch: BatchRef
    metrics: dict[str, float]
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first rank's start to the last one's end."""
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)


class _Stop:
    """Stops the engines once enough groups have all their rows."""

    def __init__(self, group_of: Sequence[str], enough: int, stop: Callable[[], Any]) -> None:
        self._group_of, self._enough = group_of, enough
        self._lacking = Counter(group_of)
        self._n_whole = 0
        self._stopping = threading.Thread(target=self._call, args=(stop,), name="stop responses", daemon=True)
        self._error: BaseException | None = None

    def part(self, part: PartRef) -> None:
        """Rows that are finished. Quick, as it is called where parts are made."""
        for row in part.rows:
            self._lacking[self._group_of[row]] -= 1
            self._n_whole += self._lacking[self._group_of[row]] == 0
        if self._n_whole >= self._enough and self._stopping.ident is None:
            self._stopping.start()

    def settle(self) -> None:
        """Wait until nobody stops anything any more. Raises what went wrong with that."""
        if self._stopping.ident is not None:
            self._stopping.join()
        if self._error is not None:
            raise self._error

    def _call(self, stop: Callable[[], Any]) -> None:
        try:
            stop()
        except BaseException as error:
            self._error = error


class PartialRollout:
    """The responses that are begun, from step to step.

    Args:
        group: the rollout's worker group; its engines can be stopped (`abort`).
        store, fetch: between the driver and the object store.
    """

    def __init__(
        self,
        spec: PartialSpec,
        group: Any,
        store: Callable[[DataProto], BatchRef],
        fetch: Callable[[BatchRef], DataProto],
    ) -> None:
        self.spec, self._group, self._store, self._fetch = spec, group, store, fetch
        self.begun: DataProto | None = None

    def generate(self, prompts: DataProto, step: int, *, wait: bool = False) -> Generated:
        """Write on what is begun, and begin `prompts` [b, P] with `uid` and `row_ids`; the rows of the groups
        that finished first, in their order. `wait`: for all of them.
        """
        prompts = self._with_no_response(prompts, step)
        batch = prompts if self.begun is None else DataProto.concat([self.begun, prompts])
        n_begun = 0 if self.begun is None else len(self.begun)
        uids = batch.non_tensor_batch["uid"].tolist()
        share = 1.0 if wait else self.spec.share
        ref = self._store(batch)
        tensors = ref.select(name for name, column in ref.columns.items() if column.kind == "tensor")
        running = self._group.generate_sequences(tensors, blocking=False)
        stop = _Stop(uids, math.ceil(share * len(set(uids))), lambda: self._group.ask("abort"))
        running.on_part(stop.part)
        try:
            made = running.ref()
        finally:
            stop.settle()
        finished = self._fetch(made.select(["finished"])).batch["finished"].tolist()
        open_ = {uid for uid, done in zip(uids, finished, strict=True) if not done}
        rows = [row for row, uid in enumerate(uids) if uid not in open_]
        left = [row for row, uid in enumerate(uids) if uid in open_]
        self.begun = self._held(batch, made, left) if left else None
        metrics = {
            "partial/continued_rows": float(n_begun),
            "partial/begun_rows": float(len(left)),
            **{name: sum(values) / len(values) for name, values in made.meta_info.get("metrics", {}).items()},
        }
        return Generated(_whole(ref, made, rows), metrics, self._spans(running, step))

    def state(self) -> dict[str, Any]:
        """What is begun, for a checkpoint: tensors, and lists of plain values."""
        if self.begun is None:
            return {}
        others = {name: column.tolist() for name, column in self.begun.non_tensor_batch.items()}
        tensors = {name: column.clone() for name, column in self.begun.batch.items()}
        return {"begun": {"tensors": tensors, "others": json.loads(json.dumps(others, default=_plain))}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave in an earlier run."""
        if (begun := state.get("begun")) is not None:
            self.begun = DataProto.from_dict(begun["tensors"], begun["others"])

    def _with_no_response(self, prompts: DataProto, step: int) -> DataProto:
        """The prompts with columns of responses that have no token; `uid` tells the step too."""
        batch, size = prompts.batch, (len(prompts), self.spec.max_response_tokens)
        batch["responses"] = torch.zeros(size, dtype=batch["input_ids"].dtype)
        batch["response_mask"] = torch.zeros(size, dtype=batch["attention_mask"].dtype)
        batch["rollout_log_probs"] = torch.zeros(size)
        batch["weight_versions"] = torch.full(size, -1)
        uids = prompts.non_tensor_batch["uid"]
        for row, uid in enumerate(uids):
            uids[row] = f"{step}.{uid}"
        return prompts

    def _held(self, batch: DataProto, made: BatchRef, rows: Sequence[int]) -> DataProto:
        """Rows of the prompts with what is there of their responses."""
        held = batch.select_idxs(list(rows))
        for name, column in self._fetch(made.select(BEGUN).take(rows)).batch.items():
            held.batch[name] = column.clone()
        return held

    def _spans(self, running: Any, step: int) -> list[Span]:
        pool = self._group.resource_pool.name
        return [
            Span(
                "generate",
                "rollout",
                pool,
                span.rank,
                span.start_s,
                span.end_s,
                {
                    "step": step,
                    "bytes_fetched": span.nbytes_fetched,
                    "kernels": list(span.kernels),
                    **span.notes,
                },
            )
            for span in running.spans
        ]


def _plain(value: Any) -> Any:
    """For JSON: numpy's arrays and numbers, as datasets have them."""
    return value.tolist()


def _whole(prompts: BatchRef, made: BatchRef, rows: Sequence[int]) -> BatchRef:
    """Prompts and their finished responses, rows of them."""
    written = made.select(name for name in made.columns if name != "finished").take(rows)
    given = prompts.select(name for name in prompts.columns if name not in written.columns).take(rows)
    return BatchRef({**given.columns, **written.columns}, written.n_rows, tokens=written.tokens)
