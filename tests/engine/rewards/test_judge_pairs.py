from collections import Counter

import pytest
from judged import batch, judge, scores
from ollama_server import ollama

from rolemesh.engine.rewards.failure import Failed, FailurePolicy
from rolemesh.engine.rewards.judge_forms import JudgeSample
from rolemesh.engine.rewards.judge_pairs import Pairwise, round_robin
from rolemesh.engine.rewards.judge_template import JudgeError, JudgeTemplate
from rolemesh.engine.rewards.pool import RewardError

BOTH = JudgeTemplate("{{ response_a }} {{ response_b }}", pairs=True)

# The judge prefers the longer response, wherever it is shown.
LONGER = """
    def answer(request, text):
        if text.startswith("A test of the connection."):
            return "tie"
        a, b = text.split(" ")[:2]
        return '{"winner": "%s"}' % ("A" if len(a) > len(b) else "B" if len(b) > len(a) else "tie")
"""
ALWAYS_A = 'def answer(request, text): return "A"'
GROUP = ["a", "aaaa", "aa", "aaa"]


def test_win_rates_order_the_samples_of_a_group(tmp_path):
    data = batch([*GROUP, "b", "bb"], uids=["g"] * 4 + ["h"] * 2)
    with (
        ollama(tmp_path, LONGER) as server,
        judge(server.endpoint, form=Pairwise(), template=BOTH) as reward,
    ):
        result = reward.score(data)
        questions = server.requests()[1:]
        assert reward.whole_groups
    assert scores(result) == pytest.approx([0, 1, 1 / 3, 2 / 3, 0, 1])
    assert len(questions) == 2 * (6 + 1)  # every pair of a group in both orders, none across groups
    assert result.non_tensor_batch["judge_pairs"].tolist() == [3, 3, 3, 3, 1, 1]
    assert result.meta_info["metrics"]["reward/judge_flips/mean"] == 0


def test_a_judge_that_prefers_a_position_prefers_no_response(tmp_path):
    with (
        ollama(tmp_path, ALWAYS_A) as server,
        judge(server.endpoint, form=Pairwise(), template=BOTH) as reward,
    ):
        result = reward.score(batch(GROUP, uids=["g"] * 4))
    assert scores(result) == [0.5] * 4
    assert result.meta_info["metrics"]["reward/judge_flips/mean"] == 1


def test_equal_responses_tie_unasked(tmp_path):
    with (
        ollama(tmp_path, ALWAYS_A) as server,
        judge(server.endpoint, form=Pairwise(), template=BOTH) as reward,
    ):
        result = reward.score(batch(["a", "a"], uids=["g", "g"]))
        assert len(server.requests()) == 1  # the probe
    assert scores(result) == [0.5, 0.5]


def test_against_the_label_each_sample_meets_its_reference(tmp_path):
    with (
        ollama(tmp_path, LONGER) as server,
        judge(server.endpoint, form=Pairwise("label"), template=BOTH) as reward,
    ):
        result = reward.score(batch(["a", "aaa", "aa"], labels=["bb", "bb", "bb"]))
        assert not reward.whole_groups
        with pytest.raises(JudgeError, match="sample 1 has none"):
            reward.score(batch(["a", "b"], labels=["bb", None]))
    assert scores(result) == [0, 1, 0.5]


@pytest.mark.parametrize(("uids", "why"), [(["g", "h"], "sample 0 .uid g. is alone"), (None, "has no uid")])
def test_a_sample_without_another_to_compare_with_is_named(tmp_path, uids, why):
    with (
        ollama(tmp_path, ALWAYS_A) as server,
        judge(server.endpoint, form=Pairwise()) as reward,
        pytest.raises(JudgeError, match=why),
    ):
        reward.score(batch(["a", "b"], uids=uids))


def test_the_built_in_template_shows_both_responses_and_the_label(tmp_path):
    with ollama(tmp_path, ALWAYS_A) as server, judge(server.endpoint, form=Pairwise()) as reward:
        reward.score(batch(["good", "bad"], uids=["g", "g"], labels=["4", "4"]))
        text = server.requests()[1]["messages"][-1]["content"]
    assert "<response_a>\ngood\n</response_a>\n<response_b>\nbad\n</response_b>" in text
    assert "<reference>\n4\n</reference>" in text


def test_a_pair_that_failed_is_left_out(tmp_path):
    source = LONGER.replace("a, b =", 'if "aaaa aa " in text + " ": return "?"\n        a, b =')
    data = batch(GROUP, uids=["g"] * 4)
    with ollama(tmp_path, source) as server:
        with judge(
            server.endpoint, FailurePolicy("drop_group"), form=Pairwise(), template=BOTH, retries=0
        ) as reward:
            result = reward.score(data)
        assert scores(result) == pytest.approx([0, 1, 1 / 2, 2 / 3])
        assert result.non_tensor_batch["judge_pairs"].tolist() == [3, 2, 2, 3]
        metrics = result.meta_info["metrics"]
        assert (metrics["reward/parse_failures"], metrics["reward/failed"]) == (1, 0)
        with (
            judge(server.endpoint, form=Pairwise(), template=BOTH, retries=0) as reward,
            pytest.raises(RewardError, match=r"no answer for sample 1 \(uid g\) and sample 2 \(uid g\)"),
        ):
            reward.score(data)


def test_a_sample_all_whose_pairs_failed_has_no_reward():
    samples = [JudgeSample(f"sample {row}", "p", text, uid="g") for row, text in enumerate("abc")]
    form = Pairwise()
    assert len(form.questions(samples)) == 6
    failed = Failed("no answer")
    first, second, third = form.results(samples, [failed, "A", "A", failed, "A", "B"])
    assert first == failed
    assert (second.score, third.score) == (1.0, 0.0)


@pytest.mark.parametrize(("n", "opponents"), [(2, 2), (5, 4), (5, 8), (16, 4), (17, 8), (4, 2)])
def test_in_a_large_group_each_sample_meets_as_many_others(n, opponents):
    pairs = round_robin(n, opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    met = Counter(row for pair in pairs for row in pair)
    assert met == dict.fromkeys(range(n), min(opponents, n - 1))


@pytest.mark.parametrize("opponents", [0, 1, 3])
def test_opponents_come_in_twos(opponents):
    with pytest.raises(JudgeError, match="even number"):
        Pairwise(opponents=opponents)


def test_a_template_for_one_response_is_refused():
    one = JudgeTemplate("{{ response }}")
    with (
        pytest.raises(JudgeError, match="shows one response"),
        judge("http://h", form=Pairwise(), template=one),
    ):
        pass
    with pytest.raises(JudgeError, match="does not show response_b"):
        JudgeTemplate("{{ response_a }}", pairs=True)
