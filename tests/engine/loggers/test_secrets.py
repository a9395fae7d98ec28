import pytest

from rolemesh.engine.loggers.secrets import hide, is_secret, without_secrets

ENVIRON = {"HF_TOKEN": "hf-value-123", "WANDB_API_KEY": "abcdef123456", "HOME": "/home/someone", "A_KEY": "x"}


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "HF_TOKEN",
        "api_key",
        "apiKey",
        "AWS_SECRET_ACCESS_KEY",
        "password",
        "DB_PASSWD",
        "Authorization",
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_prompt_tokens",
        "special_tokens",
        "prompt_key",
        "tokenizer",
        "micro_batch_tokens",
        "key",
        "secretary",
    ],
)
def test_names_of_recipe_keys_are_no_secrets(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("401 for key abcdef123456 at host", "401 for key *** at host"),
        ("http://me:pass@host:80/x", "http://***@host:80/x"),
        ("GET /score?api_key=q1w2e3&n=1", "GET /score?api_key=***&n=1"),
        ("{'Authorization': 'Bearer q1w2e3'}", "{'Authorization': '*** ***'}"),
        ("headers Bearer q1w2e3", "headers Bearer ***"),
        ("used hf_abcdefghijklmnop", "used ***"),
        ("step 3/6 1.2 s critic/score/mean 0.5", "step 3/6 1.2 s critic/score/mean 0.5"),
        ("actor: at most 3 micro-batches of 128 tokens", "actor: at most 3 micro-batches of 128 tokens"),
        ("/home/someone/runs", "/home/someone/runs"),
        ("max_prompt_tokens=16", "max_prompt_tokens=16"),
    ],
)
def test_texts_without_secrets(text, shown):
    assert hide(text, ENVIRON) == shown


def test_a_stored_recipe_reads_the_environments_secrets_from_there_again():
    tree = {
        "reward": {"url": "https://me:pw@host/", "headers": {"Authorization": "Bearer hf-value-123"}},
        "run": {"seed": 1, "api_key": "written out", "dir": "/home/someone/x"},
        "list": ["abcdef123456"],
    }
    assert without_secrets(tree, ENVIRON) == {
        "reward": {"url": "https://***@host/", "headers": {"Authorization": "Bearer ${oc.env:HF_TOKEN}"}},
        "run": {"seed": 1, "api_key": "***", "dir": "/home/someone/x"},
        "list": ["${oc.env:WANDB_API_KEY}"],
    }
