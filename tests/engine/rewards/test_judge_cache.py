import os
import subprocess
import sys
import textwrap

import pytest

from rolemesh.engine.rewards.judge_cache import JudgeCache, content_key


def test_keys_depend_on_content_alone():
    key = content_key({"model": "m", "temperature": 0.0})
    assert key == content_key({"temperature": 0.0, "model": "m"})
    assert key != content_key({"model": "m", "temperature": 0.1})
    assert content_key({"text": "\ud800"}) != content_key({"text": "\ud801"})


def test_an_answer_is_there_in_the_next_run(tmp_path):
    key = content_key({"a": 1})
    cache = JudgeCache(tmp_path / "deep" / "cache")
    assert cache.get(key) is None
    cache.put(key, "Score: 0.4 \u2713\ud800")
    assert JudgeCache(tmp_path / "deep" / "cache").get(key) == "Score: 0.4 \u2713\ud800"


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path):
    cache = JudgeCache(tmp_path, entries=20)
    keys = [content_key({"number": number}) for number in range(21)]
    for age, key in enumerate(keys[:20]):
        cache.put(key, key)
        os.utime(tmp_path / key[:2] / f"{key}.json", (age, age))
    assert cache.get(keys[0]) == keys[0]  # now used last
    cache.put(keys[20], "new")
    kept = [key for key in keys if cache.get(key) is not None]
    assert kept == [keys[0], *keys[4:]]  # 18: nine tenths
    for key in keys:
        cache.put(key, key)
    assert len(list(tmp_path.glob("*/*"))) <= 20


def test_putting_an_answer_again_is_not_one_more(tmp_path):
    cache = JudgeCache(tmp_path, entries=2)
    first, second = content_key({"a": 1}), content_key({"a": 2})
    cache.put(first, "1")
    for _ in range(5):
        cache.put(second, "2")
    assert (cache.get(first), cache.get(second)) == ("1", "2")


@pytest.mark.parametrize(
    "content", [b"", b'{"key": "', b"[]", b'{"key": "other", "answer": "1"}', b'{"answer": 1}', b"\xff"]
)
def test_a_damaged_entry_counts_as_absent_and_can_be_replaced(tmp_path, content):
    key = content_key({"a": 1})
    cache = JudgeCache(tmp_path)
    cache.put(key, "1")
    (tmp_path / key[:2] / f"{key}.json").write_bytes(content)
    assert cache.get(key) is None
    cache.put(key, "2")
    assert cache.get(key) == "2"


def test_what_a_dead_process_left_half_written_is_cleared(tmp_path):
    key = content_key({"a": 1})
    JudgeCache(tmp_path).put(key, "1")
    old, new = (tmp_path / key[:2] / f"{key}.aside-{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (0, 0))
    assert JudgeCache(tmp_path).get(key) == "1"
    assert (old.exists(), new.exists()) == (False, True)  # the new one may still be written


def test_two_processes_may_share_a_folder(tmp_path):
    source = """
        import sys
        from rolemesh.engine.rewards.judge_cache import JudgeCache, content_key
        cache = JudgeCache(sys.argv[1], entries=50)
        for turn in range(4):
            for number in range(60):
                key = content_key({"number": number})
                assert cache.get(key) in (None, key)
                cache.put(key, key)
    """
    command = [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("*/*.json"))) <= 2 * 50
    assert not list(tmp_path.glob("*/*.aside-*"))


def test_a_cache_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        JudgeCache(tmp_path, entries=0)
