"""The text of samples as rewards get it: prompt and response, raw or in the reward model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.response import response_tokens

_MARK = "\u2400content\u2400"  # stands for a reply where the text before it is looked for


class TextError(ValueError):
    """Samples that cannot be turned into a reward's text; the message names the row and what to change."""


@dataclass(frozen=True)
class RewardText:
    """One sample: its texts, and the policy's token ids without padding."""

    prompt: str
    response: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


class RewardTexts:
    """Turns a batch into texts. Padding is in none of them.

    Args:
        tokenizer: the policy's.
        template: `raw` gives the text that the policy saw and wrote. `chat` renders the conversation with the
            reward model's chat template; the response is then the part from the reply on, with the end of
            turn that the template writes. A tag that the policy's template opened for the reply counts to it.
        special_tokens: whether the policy's special tokens are in the text (`keep`) or not (`strip`). A
            rendered conversation always has those of its template, and never the policy's end of turn.
        reward_tokenizer: the reward model's; needed for `chat`.

    A rendered conversation begins with one BOS where its template or tokenizer writes any; who encodes a text
    that begins with BOS adds none (`rolemesh.engine.data.encode.prompt_tokens`).

    Raises:
        TextError: `chat` without a tokenizer that has a chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Literal["raw", "chat"] = "raw",
        special_tokens: Literal["strip", "keep"] = "strip",
        reward_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.tokenizer, self.template, self.reward_tokenizer = tokenizer, template, reward_tokenizer
        self.strip = special_tokens == "strip"
        if template == "chat" and (reward_tokenizer is None or reward_tokenizer.chat_template is None):
            raise TextError(
                "template chat needs the reward model's tokenizer, with a chat template; "
                "name one that has it, or use template raw"
            )

    def __call__(self, data: DataProto) -> list[RewardText]:
        """The texts of every row.

        Args:
            data: `prompts` [b, P], `responses` [b, R], `attention_mask` [b, P + R] integer; for `chat` also
                the object column `raw_prompt` [b]: chat messages, or a text that counts as the user's.

        Raises:
            TextError: a conversation cannot be rendered.
        """
        rows = list(zip(*self._ids(data), strict=True))
        if self.template == "raw":
            return [
                RewardText(self._text(prompt), self._text(reply), prompt, reply) for prompt, reply in rows
            ]
        if "raw_prompt" not in data.non_tensor_batch:
            raise TextError("template chat needs column raw_prompt, the conversation; use template raw")
        conversations = data.non_tensor_batch["raw_prompt"]
        return [
            RewardText(*self._chat(row, conversations[row], reply), prompt, reply)
            for row, (prompt, reply) in enumerate(rows)
        ]

    def _ids(self, data: DataProto) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Token ids of prompts and responses, without padding."""
        prompts, responses = data.batch["prompts"], data.batch["responses"]
        in_prompt = data.batch["attention_mask"][:, : prompts.shape[1]].bool()
        return _kept(prompts, in_prompt), _kept(responses, response_tokens(data))

    def _text(self, token_ids: Sequence[int], *, strip: bool | None = None) -> str:
        return str(
            self.tokenizer.decode(
                list(token_ids),
                skip_special_tokens=self.strip if strip is None else strip,
                clean_up_tokenization_spaces=False,
            )
        )

    def _chat(self, row: int, conversation: Any, reply_ids: tuple[int, ...]) -> tuple[str, str]:
        """Prompt and reply, cut where the reply's turn begins; together they are the whole conversation."""
        if isinstance(conversation, str):
            conversation = [{"role": "user", "content": conversation}]
        # Parquet gives every message the fields of all messages: None where it has none.
        messages = [{key: value for key, value in turn.items() if value is not None} for turn in conversation]
        special = set(self.tokenizer.all_special_ids)
        end = len(reply_ids)
        while end and reply_ids[end - 1] in special:
            end -= 1
        content = self._prefill(messages) + self._text(reply_ids[:end])
        assert self.reward_tokenizer is not None
        try:
            whole = _render(self.reward_tokenizer, [*messages, {"role": "assistant", "content": content}])
            prompt = _render(self.reward_tokenizer, messages, add_generation_prompt=True)
            if not whole.startswith(prompt):  # it opens a tag for the reply, or rewrites turns before one
                prompt = _common_start(prompt, whole)
        except Exception as error:
            raise TextError(
                f"the reward model's chat template refuses the conversation of row {row}: {error}; "
                "use template raw, or another template"
            ) from error
        once = one_bos(self.reward_tokenizer, whole)
        return once[: len(once) - len(whole) + len(prompt)], whole[len(prompt) :]

    def _prefill(self, messages: list[dict[str, Any]]) -> str:
        """What the policy's chat template wrote of the reply itself, as an opening tag; else nothing."""
        if self.tokenizer.chat_template is None:
            return ""
        try:
            turn = _render(self.tokenizer, [*messages, {"role": "assistant", "content": _MARK}])
            opened = _render(self.tokenizer, messages, add_generation_prompt=True)
        except Exception:
            return ""  # the conversation is not in the policy's template: nothing was written by it
        header = turn.split(_MARK)[0]
        return opened[len(header) :] if opened.startswith(header) else ""


def one_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text with one BOS in front where it, or its tokenizer, writes any."""
    bos = tokenizer.bos_token
    if not bos:
        return text
    written = text.startswith(bos)
    while text.startswith(bos):
        text = text[len(bos) :]
    return bos + text if written or _adds_bos(tokenizer) else text


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return list(tokenizer("a")["input_ids"])[:1] == [tokenizer.bos_token_id]


def _kept(token_ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, ...]]:
    """Each row's ids where the mask is set."""
    counts = mask.sum(-1).tolist()
    return [tuple(ids.tolist()) for ids in torch.split(token_ids[mask], counts)]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _common_start(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[:length] if length is not None else one[: min(len(one), len(other))]
