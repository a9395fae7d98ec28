import re

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rolemesh.engine.data.encode import prompt_tokens
from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rewards.texts import RewardTexts, TextError, one_bos

VOCAB = ["<pad>", "<s>", "</s>", "<im_end>", "<think>", "</think>", "<answer>", "</answer>", "\n"]
VOCAB += ["he", "llo", "hello", "user", "bot", ":", "a", "b", "x", "4", " "]
SPECIAL = ["<pad>", "<s>", "</s>", "<im_end>"]
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}<im_end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:PREFILL{% endif %}"
)


def make(*, adds_bos: bool = False, template: str | None = None, words=VOCAB) -> PreTrainedTokenizerFast:
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        # the longest words first, so that "hello" is one token of a text
        Regex("|".join(re.escape(w) for w in sorted(words, key=len, reverse=True))),
        "removed",
        invert=True,
    )
    tokenizer.add_special_tokens(SPECIAL)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


def samples(rows: list[tuple[list[str], list[str]]], **objects) -> DataProto:
    """Prompts padded on the left, responses on the right; the padding is the pad token."""
    n, p, r = len(rows), max(len(row[0]) for row in rows) + 1, max(len(row[1]) for row in rows) + 1
    prompts, responses = torch.zeros(n, p, dtype=torch.long), torch.zeros(n, r, dtype=torch.long)
    mask = torch.zeros(n, p + r, dtype=torch.long)
    for row, (prompt, response) in enumerate(rows):
        prompts[row, p - len(prompt) :] = torch.tensor([VOCAB.index(word) for word in prompt])
        responses[row, : len(response)] = torch.tensor([VOCAB.index(word) for word in response])
        mask[row, p - len(prompt) : p + len(response)] = 1
    return DataProto.from_dict({"prompts": prompts, "responses": responses, "attention_mask": mask}, objects)


THOUGHT = ["<think>", "a", "</think>", "<answer>", "b", "</answer>", "<im_end>"]


def test_special_tokens_are_stripped_or_kept_and_padding_never_sent():
    data = samples([(["a"], THOUGHT), (["a", "b"], ["x"])])
    stripped, short = RewardTexts(make(), special_tokens="strip")(data)
    assert re.fullmatch(r"<think>.*</think><answer>.*</answer>", stripped.response)
    kept = RewardTexts(make(), special_tokens="keep")(data)
    assert kept[0].response == stripped.response + "<im_end>"
    assert "<pad>" not in "".join(text.prompt + text.response for text in kept)
    assert (short.prompt, short.response, len(short.prompt_ids), len(short.response_ids)) == ("ab", "x", 2, 1)


def test_the_tag_that_the_template_opened_is_in_the_prompt_and_the_whole_text():
    data = samples([(["a", "<think>", "\n"], ["x", "</think>", " ", "4"])])
    (text,) = RewardTexts(make())(data)
    assert text.prompt.endswith("<think>\n")
    assert re.search(r"<think>\n.*</think> 4$", text.prompt + text.response)


def test_ids_that_would_be_encoded_otherwise_are_kept_and_the_text_is_theirs():
    tokenizer = make()
    (text,) = RewardTexts(tokenizer)(samples([(["a"], ["he", "llo"])]))
    assert text.response == "hello"
    assert [VOCAB[i] for i in text.response_ids] == ["he", "llo"]
    assert prompt_tokens("hello", tokenizer) == [VOCAB.index("hello")]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_that_holds_bos_gives_one_and_the_policys_ids(adds_bos):
    tokenizer = make(adds_bos=adds_bos)
    (text,) = RewardTexts(tokenizer, special_tokens="keep")(samples([(["<s>", "a"], ["b", "</s>"])]))
    assert (text.prompt, text.response) == ("<s>a", "b</s>")
    assert prompt_tokens(text.prompt + text.response, tokenizer) == [*text.prompt_ids, *text.response_ids]
    assert prompt_tokens("ab", tokenizer).count(tokenizer.bos_token_id) == adds_bos
    assert one_bos(tokenizer, "<s><s>a") == "<s>a"


def test_a_conversation_is_rendered_with_the_reward_models_template():
    policy = make(template=PLAIN.replace("PREFILL", ""))
    judge = make(adds_bos=True, template=PLAIN.replace("PREFILL", "").replace("assistant", "bot"))
    data = samples(
        [(["<s>", "a"], ["b", "<im_end>"]), (["<s>", "x"], ["4"])],
        raw_prompt=[[{"role": "user", "content": "a", "name": None}], "x"],
    )
    texts = RewardTexts(policy, "chat", reward_tokenizer=judge)(data)
    assert [text.prompt + text.response for text in texts] == [
        "<s>user:a<im_end>assistant:b<im_end>",
        "<s>user:x<im_end>assistant:4<im_end>",
    ]
    assert texts[1].response.endswith("4<im_end>")
    assert prompt_tokens(texts[0].prompt + texts[0].response, judge).count(judge.bos_token_id) == 1


def test_a_tag_that_the_policys_template_opened_counts_to_the_reply():
    policy = make(template=PLAIN.replace("PREFILL", "<think>\n"))
    judge = make(template=PLAIN.replace("PREFILL", ""))
    data = samples([(["a"], ["x", "</think>", " ", "4", "<im_end>"])], raw_prompt=["a"])
    (text,) = RewardTexts(policy, "chat", reward_tokenizer=judge)(data)
    assert text.prompt == "<s>user:a<im_end>assistant:"
    assert text.response == "<think>\nx</think> 4<im_end>"


def test_a_template_that_writes_bos_twice_gives_one():
    judge = make(adds_bos=True, template="{{ bos_token }}" + PLAIN.replace("PREFILL", ""))
    (text,) = RewardTexts(make(), "chat", reward_tokenizer=judge)(samples([(["a"], ["b"])], raw_prompt=["a"]))
    assert (text.prompt, text.response) == ("<s>user:a<im_end>assistant:", "b<im_end>")


def test_what_cannot_be_rendered_is_an_error_that_says_what_to_do():
    with pytest.raises(TextError, match="needs the reward model's tokenizer, with a chat template"):
        RewardTexts(make(), "chat", reward_tokenizer=make())
    refusing = make(template="{{ raise_exception('roles must alternate') }}")
    texts = RewardTexts(make(), "chat", reward_tokenizer=refusing)
    with pytest.raises(TextError, match=r"refuses the conversation of row 0: roles must alternate"):
        texts(samples([(["a"], ["b"])], raw_prompt=["a"]))
    with pytest.raises(TextError, match="needs column raw_prompt"):
        texts(samples([(["a"], ["b"])]))


def test_rows_without_response_and_batches_without_rows_have_texts():
    texts = RewardTexts(make())
    assert texts(samples([(["a"], [])]))[0].response == ""
    assert texts(samples([(["a"], ["b"])])[:0]) == []
