"""The reference policy behind HTTP: the role of `RefWorker`, without a model of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import AutoConfig, AutoTokenizer

from rolemesh.engine.dispatch import Dispatch, register
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.remote.http import Limits
from rolemesh.engine.remote.reference import RemoteReference
from rolemesh.engine.worker import Worker


@dataclass(frozen=True)
class RemoteRefSpec:
    """Where the reference is, and the actor that it is compared with.

    `actor` is its folder, `longest_tokens` the longest prompt and response together.
    """

    endpoints: tuple[str, ...]
    limits: Limits
    actor: str
    temperature: float
    longest_tokens: int
    token: str | None = field(default=None, repr=False)


class RemoteRefWorker(Worker):
    """The client's process; it needs no device."""

    def __init__(self, spec: RemoteRefSpec) -> None:
        self.spec = spec

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Connect, and refuse a reference that is not made for the actor."""
        spec = self.spec
        self.reference = RemoteReference(
            spec.endpoints, spec.limits, token=spec.token, temperature=spec.temperature
        )
        self.service = self.reference.check(
            AutoTokenizer.from_pretrained(spec.actor, trust_remote_code=False),
            AutoConfig.from_pretrained(spec.actor, trust_remote_code=False).vocab_size,
            spec.longest_tokens,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Column `ref_log_prob`, fp32 `[b, R]`, 0 outside the response."""
        log_probs = self.reference.log_probs(data)
        metrics = self.reference.client.take_metrics("ref")
        return DataProto.from_dict({"ref_log_prob": log_probs}, meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint(self) -> str:
        """The model and revision, for messages."""
        return self.service
