"""What importers share: settings that remember what was used, and pools."""

import pytest

from rolemesh.placement.importers import ForeignConfigError, import_config
from rolemesh.placement.importers.settings import Settings, placed


def test_what_is_not_used_is_ignored_with_the_first_reason_that_matches():
    said = Settings({"a": 1, "b": "x", "c.d": True, "none": None, "empty": {}})
    assert said.take("a") == 1
    said.ignore("b", "because")
    said.ignore("b", "twice")
    said.ignore("absent", "never")
    assert [str(entry) for entry in said.ignored([("^c", "a section", True)])] == [
        "b = x: because",
        "c.d = True: a section",
    ]


def test_a_number_that_is_none_names_its_setting():
    said = Settings({"n": "$((1+1))", "half": 0.5, "yes": "no"})
    with pytest.raises(
        ForeignConfigError, match=r"n must be a whole number, got '\$\(\(1\+1\)\)': give its value"
    ):
        said.count("n")
    with pytest.raises(ForeignConfigError, match=r"half must be a whole number, got 0\.5"):
        said.count("half")
    with pytest.raises(ForeignConfigError, match="yes must be true or false, got 'no'"):
        said.flag("yes")


def test_one_pool_is_colocate_and_several_are_written_out():
    assert placed([(["actor"], 2, 8)], ["actor"]) == {
        "cluster": {"nodes": 2, "per_node": 8},
        "placement": {"strategy": "colocate"},
    }
    assert placed([(["actor"], 2, 8), (["critic", "reward"], 1, 4)], ["actor", "critic", "reward"]) == {
        "cluster": {"nodes": 3, "per_node": 8},
        "placement": {
            "pools": {
                "actor": {"roles": ["actor"], "nodes": 2, "per_node": 8},
                "critic_reward": {"roles": ["critic", "reward"], "nodes": 1, "per_node": 4},
            }
        },
    }


def test_an_unknown_system_names_those_there_are():
    with pytest.raises(ForeignConfigError, match=r"no importer for 'trl' \(there are: verl, openrlhf\)"):
        import_config("trl", "")
