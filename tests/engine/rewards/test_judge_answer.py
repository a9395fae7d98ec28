import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine.rewards.judge_answer import AnswerError, Scale, read_choice, read_scores

UNIT = Scale(0, 1)


def score(text: str, scale: Scale = UNIT) -> float:
    return read_scores(text, ("score",), scale)["score"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.7", 0.7),
        ("'0.7'", 0.7),
        ('"0.7"', 0.7),
        ("**0.7**", 0.7),
        (" 0.7.\n", 0.7),
        ("1", 1.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("7e-1", 0.7),
        ("[[0.7]]", 0.7),
        ("I weighed it. My rating: [[0.7]]", 0.7),
        ("Score: 0.4/1", 0.4),
        ("Score: 0.4 / 1.0", 0.4),
        ("score = 0.4 out of 1", 0.4),
        ("**Score:** 0.4", 0.4),
        ("Score (0-1): 0.4", 0.4),
        ("The score is 0.4.", 0.4),
        ("<score>0.4</score>", 0.4),
        ("It is good.\nFinal score: 0.4\n", 0.4),
        ("Score: 0.4. So the final score: 0.4", 0.4),
        ('{"score": 0.7}', 0.7),
        ('{"score": "0.7"}', 0.7),
        ('{"score": "0.7/1"}', 0.7),
        ('{"Score": 0.7, "other": 7}', 0.7),
        ('{"score": {"value": 3, "score": 0.7}}', 0.7),
        ("{'score': 0.7}", 0.7),
        ('```json\n{"score": 0.7}\n```', 0.7),
        ('Here it is: {"reasoning": "a {b}", "score": 0.7} as asked', 0.7),
        ('{"reasoning": "it says Score: 0.1, and </think> 0.2", "score": 0.7}', 0.7),
        ('The form is {"score": NUMBER}, so {"score": 0.7}', 0.7),
        ("<think>perhaps score: 0.1</think>\n0.7", 0.7),
        ("perhaps score: 0.1</think>Score: 0.7", 0.7),
    ],
)
def test_forms_that_are_read(text, value):
    assert score(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("7", "outside the scale 0 to 1"),
        ("-0.1", "outside the scale"),
        ("0.8x", "no 'score' with a number"),
        ("Score: 0.8x", "no 'score' with a number"),
        ("Score: 0,8", "no 'score' with a number"),
        ("Score: 0-1", "no 'score' with a number"),
        ("Score: 70%", "no 'score' with a number"),
        ("Score: 4/10", "out of 10 on a scale up to 1"),
        ("Score: 0.1. No: the score is 0.9", "could mean 0.1 or 0.9"),
        ('{"score":', "the JSON is broken"),
        ('{"score": 0.', "the JSON is broken"),
        ("{", "the JSON is broken"),
        ("", "empty"),
        (" \n", "empty"),
        ("I would rather not say.", "no 'score'"),
        ("It deserves 0.7", "no 'score'"),
        ("underscore: 0.7", "no 'score'"),
        ('{"grade": 0.7}', r"has no 'score'; it has \['grade'\]"),
        ('{"score": null}', "has no 'score'"),
        ('{"score": true}', "True is not a number"),
        ("true", "True is not a number"),
        ("null", "no 'score'"),
        ('{"score": [0.7]}', r"\[0.7\] is not a number"),
        ('{"score": NaN}', "not a finite number"),
        ('{"score": 1e999}', "not a finite number"),
        ("9" * 5000, "not a finite number"),
        ('{"score": 0.2, "score": 0.9}', r"has \['score'\] twice"),
        ('{"score": 0.2} {"score": 0.9}', "could mean"),
        ("<think>score: 0.7", "before the model's thoughts do"),
        ("<think>score: 0.7</think>", "nothing after"),
        ("[" * 100_000, "no 'score'"),
    ],
)
def test_forms_that_are_failures_say_why(text, why):
    with pytest.raises(AnswerError, match=why):
        score(text)


def test_a_failure_shows_the_text_shortened():
    with pytest.raises(AnswerError, match=r"the judge wrote 'Well' *$"):
        score("Well")
    with pytest.raises(AnswerError) as error:
        score("long " * 10_000)
    assert len(str(error.value)) < 400


def test_clamp_is_only_done_when_asked_and_never_to_another_scale():
    clamped = Scale(0, 1, clamp=True)
    assert score("7", clamped) == 1.0
    assert score("Score: -3", clamped) == 0.0
    assert score("Score: 0.4", clamped) == 0.4
    with pytest.raises(AnswerError, match="out of 10"):
        score("7/10", clamped)
    with pytest.raises(AnswerError, match="finite"):
        score('{"score": Infinity}', clamped)


def test_other_scales():
    assert score("Score: 4/5", Scale(1, 5)) == 4
    assert score("-0.5", Scale(-1, 1)) == -0.5
    with pytest.raises(AnswerError, match="outside the scale 1 to 5"):
        score("0", Scale(1, 5))


@pytest.mark.parametrize(
    "wrong", [(1, 1), (1, 0), (0, float("inf")), (0, 1, 0.3), (0, 1, -1), (0, 1, 0), (0, 1, 1e-9)]
)
def test_a_scale_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="judge scale"):
        Scale(*wrong)


def test_a_scale_with_steps_lists_its_values():
    assert Scale(0, 1, 0.25).values() == [0, 0.25, 0.5, 0.75, 1]
    assert Scale(1, 5, 1).values() == [1, 2, 3, 4, 5]
    assert Scale(0, 1, 0.1).values()[3] == 0.3


@given(
    st.floats(0, 1), st.sampled_from(["{}", "Score: {}", '{{"score": {}}}', "x\n[[{}]]", '{{"score": "{}"}}'])
)
def test_every_number_of_the_scale_is_read_exactly(value, form):
    assert score(form.format(value)) == value


@given(st.text(max_size=60))
def test_any_text_is_a_score_of_the_scale_or_a_failure(text):
    with contextlib.suppress(AnswerError):
        assert 0 <= score(text) <= 1


@given(st.text(alphabet="0123456789.{}\"':[]score /-%e\n", max_size=40))
def test_any_text_of_the_forms_own_characters_is_a_score_of_the_scale_or_a_failure(text):
    with contextlib.suppress(AnswerError):
        assert 0 <= score(text) <= 1


CRITERIA = ("accuracy", "code quality")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"accuracy": 0.5, "code quality": 1}),
        json.dumps({"reasoning": "...", "Accuracy": "0.5", "code_quality": {"why": "...", "score": 1}}),
        "Accuracy: 0.5\nCode quality: 1/1",
        "- **accuracy**: 0.5\n- **code_quality**: 1",
    ],
)
def test_several_criteria_are_read_by_name(text):
    assert read_scores(text, CRITERIA, UNIT) == {"accuracy": 0.5, "code quality": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"accuracy": 0.5}', r"has no \['code quality'\]"),
        ("accuracy: 0.5", "no 'code quality' with a number"),
        ("0.5", "no 'accuracy'"),
        ('{"accuracy": 0.5, "code quality": 7}', "outside the scale"),
    ],
)
def test_a_criterion_that_is_missing_is_a_failure(text, why):
    with pytest.raises(AnswerError, match=why):
        read_scores(text, CRITERIA, UNIT)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("A", "A"),
        ('"B"', "B"),
        ("**tie**", "tie"),
        ("Draw.", "tie"),
        ("Response A", "A"),
        ('{"winner": "A"}', "A"),
        ('{"reasoning": "B is bad", "winner": "A"}', "A"),
        ("A is short, B is right.\nWinner: B", "B"),
        ("My verdict: [[B]]", "B"),
        ("<think>winner: A?</think>winner: tie", "tie"),
    ],
)
def test_choices_that_are_read(text, choice):
    assert read_choice(text) == choice


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("C", "no winner"),
        ("A or B", "no winner"),
        ("Winner: a good question", "no winner"),
        ("Winner: Both", "no winner"),
        ('{"winner": "C"}', "'C' is not A, B or tie"),
        ('{"winner": 1}', "1 is not A, B or tie"),
        ('{"loser": "A"}', "has no 'winner'"),
        ("[[A]] or rather [[B]]", "could mean A or B"),
        ('{"winner":', "broken"),
    ],
)
def test_choices_that_are_failures(text, why):
    with pytest.raises(AnswerError, match=why):
        read_choice(text)
