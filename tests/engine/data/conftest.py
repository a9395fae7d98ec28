import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", *(f"w{n}" for n in range(100))]


def word_tokenizer(*, adds: str, template: str | None) -> PreTrainedTokenizerFast:
    """One token per word; `adds` is how it wraps a text: `<s> $A` adds BOS."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=adds, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    return fast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(adds="<s> $A", template=TEMPLATE)
