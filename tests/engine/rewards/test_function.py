import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.rewards.function import FunctionReward, at_last_token
from rolemesh.engine.rewards.pool import RewardError

ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"
VOCAB = ["<pad>", "</s>", "<im_end>", "<think>", "</think>", "<answer>", "</answer>"]
VOCAB += ["a", "b", "he", "llo", "hello", "\n", "4"]
SPECIAL = ("<pad>", "</s>", "<im_end>")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def samples(rows: list[tuple[list[str], list[str]]], width: int = 8, **objects) -> DataProto:
    """Prompts [b, 3] padded on the left and responses [b, width] padded on the right."""
    prompts, responses = (
        torch.zeros(len(rows), 3, dtype=torch.long),
        torch.zeros(len(rows), width, dtype=torch.long),
    )
    mask = torch.zeros(len(rows), 3 + width, dtype=torch.long)
    for row, (prompt, response) in enumerate(rows):
        prompts[row, 3 - len(prompt) :] = torch.tensor([VOCAB.index(word) for word in prompt])
        responses[row, : len(response)] = torch.tensor([VOCAB.index(word) for word in response])
        mask[row, 3 - len(prompt) : 3 + len(response)] = 1
    return DataProto.from_dict({"prompts": prompts, "responses": responses, "attention_mask": mask}, objects)


@pytest.fixture
def score(tmp_path, tokenizer):
    """Score samples with a function given as source text."""

    def score(source: str, data: DataProto, **options) -> DataProto:
        (tmp_path / "reward.py").write_text(textwrap.dedent(source))
        options = {"limit_s": 20, "workers": 1} | options
        with FunctionReward(f"{tmp_path}/reward.py:compute_score", tokenizer, **options) as reward:
            return reward.score(data)

    return score


ECHO = """
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1, "seen": [data_source, solution_str, ground_truth, extra_info]}
"""


def test_the_score_is_at_the_last_response_token():
    tokens = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    scores = at_last_token(torch.tensor([1.0, 2.0, 3.0, -1.0]), tokens)
    assert scores.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0] * 5, [-1, 0, 0, 0, 0]]
    assert at_last_token(torch.zeros(0), torch.zeros(0, 4).bool()).shape == (0, 4)


def test_the_function_sees_source_texts_truth_and_extra_info(score):
    data = samples(
        [(["a"], ["b", "</s>"]), (["a", "b"], ["he", "llo"])],
        data_source=["sums", "words"],
        reward_model=[{"ground_truth": "4"}, {"ground_truth": None}],
        extra_info=[{"index": 7}, None],
    )
    result = score(ECHO, data)
    assert result.non_tensor_batch["seen"].tolist() == [
        ["sums", "b", "4", {"index": 7, "prompt_str": "a"}],
        ["words", "hello", None, {"prompt_str": "ab"}],
    ]
    assert result.batch["rm_scores"].tolist() == [[0, 1, 0, 0, 0, 0, 0, 0]] * 2
    assert result.meta_info["metrics"] == {"reward/timeouts": 0, "reward/died": 0}


def test_columns_that_are_not_there_are_passed_as_none_and_0_rows_are_fine(score):
    result = score(ECHO, samples([([], ["a"])]))
    assert result.non_tensor_batch["seen"].tolist() == [[None, "a", None, {"prompt_str": ""}]]
    assert score(ECHO, samples([])).batch["rm_scores"].shape == (0, 8)


@pytest.mark.parametrize(("option", "end"), [("strip", ""), ("keep", "<im_end>")])
def test_special_tokens_are_kept_or_stripped_and_padding_is_never_sent(score, option, end):
    words = ["<think>", "a", "</think>", "<answer>", "b", "</answer>", "<im_end>"]
    result = score(ECHO, samples([(["a"], words)]), special_tokens=option)
    assert result.non_tensor_batch["seen"][0][1] == "<think>a</think><answer>b</answer>" + end


def test_a_function_that_asks_for_the_prompt_gets_what_the_template_prefilled(score):
    source = r"""
        import re
        def compute_score(data_source, solution_str, ground_truth, extra_info, prompt_str):
            return bool(re.search(r"<think>\n.*</think>.*4$", prompt_str + solution_str, re.S))
    """
    data = samples([(["a", "<think>", "\n"], ["b", "</think>", "4"]), (["a"], ["b", "</think>", "4"])])
    assert score(source, data).batch["rm_scores"].sum(-1).tolist() == [1, 0]


def test_extra_entries_become_columns_and_means(score):
    source = """
        def compute_score(solution_str, **rest):
            return {"score": 0.5} | ({"acc": len(solution_str)} if solution_str != "b" else {})
    """
    result = score(source, samples([([], ["a"]), ([], ["b"]), ([], ["a", "a", "a"])]))
    assert result.non_tensor_batch["acc"].tolist() == [1, None, 3]
    assert result.meta_info["metrics"]["reward/acc/mean"] == 2


def test_the_functions_file_may_import_its_neighbours(score, tmp_path):
    (tmp_path / "my_helper.py").write_text("def half(): return 0.5")
    source = """
        from dataclasses import dataclass
        from my_helper import half
        @dataclass
        class Result:
            value: float
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return Result(half()).value
    """
    assert score(source, samples([([], ["a"])])).batch["rm_scores"].sum() == 0.5


HANGS = """
    import time
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        while extra_info["hang"]:
            pass
        return 1.0
"""


def test_a_hung_call_is_stopped_and_counted_and_its_process_replaced(tmp_path, tokenizer, caplog):
    (tmp_path / "reward.py").write_text(textwrap.dedent(HANGS))
    data = samples([([], ["a"])] * 8, extra_info=[{"hang": row == 2} for row in range(8)])
    path = f"{tmp_path}/reward.py:compute_score"
    with FunctionReward(path, tokenizer, limit_s=1, workers=4, default_score=-1.0) as reward:
        for _ in range(5):
            start = time.monotonic()
            result = reward.score(data)
            assert time.monotonic() - start < 3
            assert result.batch["rm_scores"].sum(-1).tolist() == [1, 1, -1, 1, 1, 1, 1, 1]
            assert result.meta_info["metrics"]["reward/timeouts"] == 1
            assert len(reward.pool.pids) == 4
            assert all(map(runs, reward.pool.pids))
        assert "took more than 1 s on sample 2" in caplog.text
        pids = reward.pool.pids
    assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_call_that_ends_its_process_is_counted(score):
    source = """
        import os
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "b":
                os._exit(3)
            return 1.0
    """
    result = score(source, samples([([], ["a"]), ([], ["b"]), ([], ["a"])]), default_score=0.25)
    assert result.batch["rm_scores"].sum(-1).tolist() == [1, 0.25, 1]
    assert result.meta_info["metrics"]["reward/died"] == 1


def test_a_process_that_was_killed_between_steps_costs_no_sample(tmp_path, tokenizer):
    (tmp_path / "reward.py").write_text(textwrap.dedent(HANGS))
    data = samples([([], ["a"])] * 3, extra_info=[{"hang": False}] * 3)
    with FunctionReward(f"{tmp_path}/reward.py:compute_score", tokenizer, workers=1) as reward:
        os.kill(reward.pool.pids[0], signal.SIGKILL)
        time.sleep(0.2)
        assert reward.score(data).batch["rm_scores"].sum() == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise KeyError('x')",
            r"reward\.py:compute_score failed on sample 0 \(uid u0\).*KeyError: 'x'",
        ),
        ("return {'acc': 1}", r"sample 0 .*has no 'score'; it has \['acc'\]"),
        ("return None", r"sample 0 .*the score is None; return a number"),
        ("return float('nan')", r"returned nan for sample 0 \(uid u0\)"),
        ("return {'score': 1, 'uid': 2}", r"returns \['uid'\], which are columns"),
        ("return {'score': 1, 'x': lambda: 0}", r"sample 0 .*pickle"),
        ("return {'score': 1, 'x': Local()}", r"sample 0 .*cannot be read in another process"),
    ],
)
def test_what_the_function_does_wrong_is_said_with_sample_and_function(score, body, message):
    source = f"class Local: pass\ndef compute_score({ARGUMENTS}):\n  {body}"
    with pytest.raises(RewardError, match=f"(?s){message}"):
        score(source, samples([([], ["a"])], uid=["u0"]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(): pass", r"has no function 'compute_score'; it has \['other'\]"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def compute_score(text): pass", "TypeError: .*argument"),
        ("def compute_score(:", "SyntaxError"),
        ("raise SystemExit(1)", "cannot load.*SystemExit"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_once(score, source, message):
    with pytest.raises(RewardError, match=f"(?s){message}"):
        score(source, samples([]))


def test_a_path_without_file_or_function_is_explained(tokenizer, tmp_path):
    with pytest.raises(RewardError, match="no Python file"):
        FunctionReward(f"{tmp_path}/none.py:compute_score", tokenizer)
    with pytest.raises(RewardError, match=r"file\.py:compute_score"):
        FunctionReward("reward.py", tokenizer)


def test_no_scorer_outlives_a_killed_parent(tmp_path):
    (tmp_path / "reward.py").write_text(textwrap.dedent(HANGS))
    script = f"""
import sys
from pathlib import Path
from rolemesh.engine.rewards.pool import ScorerPool
pool = ScorerPool(Path({str(tmp_path / "reward.py")!r}), "compute_score", workers=2, limit_s=100)
print(*pool.pids, flush=True)
call = dict(data_source=None, solution_str="", ground_truth=None, extra_info={{"hang": True}}, prompt_str="")
pool.map([call, call])
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, parent.stdout.readline().split()))
    time.sleep(0.5)
    assert all(map(runs, pids))
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(runs, pids))
