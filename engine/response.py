"""Which columns of a response hold tokens, and which of those the model wrote itself."""

from torch import Tensor

from rolemesh.engine.protocol import DataProto


def response_tokens(data: DataProto) -> Tensor:
    """Where a token of the response stands, the model's own or an observation's: bool [b, R]."""
    attention, width = data.batch["attention_mask"], data.batch["responses"].shape[1]
    return attention[:, attention.shape[1] - width :].bool()


def own_tokens(data: DataProto) -> Tensor:
    """Which tokens of the response the model wrote: bool [b, R]. All, where no `response_mask` says more."""
    if "response_mask" in data.batch:
        return data.batch["response_mask"].bool()
    return response_tokens(data)
