"""Tokens of one prompt: plain text or chat messages, with one BOS and no EOS."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from rolemesh.engine.data.files import DataError


def prompt_tokens(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt as it is sent to the model.

    Chat messages (`[{role, content}, ...]`) go through the tokenizer's chat template with the generation
    prompt added; the template writes BOS itself where the model wants one, so none is added. Text gets the
    tokenizer's special tokens, but no BOS before one that is written out, and no EOS at its end.

    Raises:
        DataError: neither text nor messages, no or a refusing template, or no token at all.
    """
    if isinstance(prompt, str):
        written = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        ids = token_ids(prompt, tokenizer, add_special_tokens=not written)
    else:
        ids = token_ids(rendered(prompt, tokenizer), tokenizer, add_special_tokens=False)
    if not ids:
        raise DataError("the prompt has no tokens")
    return ids


def rendered(messages: Any, tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool = True) -> str:
    """Chat messages as the tokenizer's template writes them. Raises DataError."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"a prompt is text or a list of chat messages, not {type(messages).__name__}")
    if tokenizer.chat_template is None:
        raise DataError("these are chat messages and the tokenizer has no chat template; use text prompts")
    # Parquet gives every message the fields of all messages: None where it has none.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:
        raise DataError(f"the chat template refuses {messages}: {error}") from error
    return str(text)


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; special tokens at its front only."""
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    eos = tokenizer.eos_token
    if add_special_tokens and eos is not None and not text.endswith(eos):
        # Some tokenizers end every text with EOS; a prompt goes on.
        while ids and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
    return ids
