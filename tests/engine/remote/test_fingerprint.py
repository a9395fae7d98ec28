"""Two tokenizers have one fingerprint when they make the same ids, and a person can read what differs."""

import json

import pytest
from tiny import char_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rolemesh.engine.remote.fingerprint import differences, tokenizer_fingerprint


def bpe(merges=(("h", "e"), ("l", "l")), normalizer=None, vocab=("h", "e", "l", "he", "ll"), **special):
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_saving_and_loading_changes_nothing(tmp_path):
    for name, tokenizer in (("chars", char_tokenizer()), ("bpe", bpe(eos_token="</s>"))):
        tokenizer.save_pretrained(tmp_path / name)
        loaded = AutoTokenizer.from_pretrained(tmp_path / name)
        sent = json.loads(json.dumps(tokenizer_fingerprint(tokenizer)))
        assert differences(tokenizer_fingerprint(loaded), sent) == []


def test_padding_and_templates_do_not_count():
    plain, changed = char_tokenizer(), char_tokenizer()
    changed.padding_side, changed.pad_token, changed.chat_template = "right", "<eos>", "{{ messages }}"
    changed("text", padding="max_length", max_length=9, truncation=True)
    assert differences(tokenizer_fingerprint(plain), tokenizer_fingerprint(changed)) == []


@pytest.mark.parametrize(
    ("changed", "part", "says"),
    [
        (bpe(merges=[("l", "l"), ("h", "e")]), "merges", "hash"),
        (bpe(normalizer=normalizers.Lowercase()), "normalizer", "Lowercase"),
        (bpe(vocab=("e", "h", "l", "he", "ll")), "vocabulary", "hash"),
        (bpe(eos_token="ll"), "special_tokens", "eos 4"),
        (bpe(eos_token=AddedToken("<e>", special=True)), "vocab_size", "theirs 6"),
    ],
)
def test_what_differs_is_named(changed, part, says):
    lines = differences(tokenizer_fingerprint(bpe()), tokenizer_fingerprint(changed))
    (line,) = [line for line in lines if line.startswith(f"{part}:")]
    assert says in line


def test_a_fingerprint_from_a_server_that_lacks_a_part_differs():
    ours = tokenizer_fingerprint(bpe())
    theirs = {name: value for name, value in ours.items() if name != "merges"}
    (line,) = differences(ours, theirs)
    assert line.endswith("theirs None")
