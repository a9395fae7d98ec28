"""Which pools outlive a loss: stand-ins that note what is asked of them."""

from types import SimpleNamespace

from rolemesh.engine.ray.recovery import Spared


class Pool:
    def __init__(self, name: str, asked: list[str], settles: bool = True) -> None:
        self.name, self._asked, self._settles = name, asked, settles

    def settles(self, within_s: float) -> bool:
        assert within_s <= 60
        self._asked.append(f"settle {self.name}")
        return self._settles

    def shutdown(self) -> None:
        self._asked.append(f"end {self.name}")


def test_pools_that_learn_end_first_and_others_stay_where_they_are_done_in_time():
    asked: list[str] = []
    rollout, train, ref, reward = (
        Pool(name, asked, settles=name != "ref") for name in ("rollout", "train", "ref", "reward_process")
    )
    groups = {
        role: SimpleNamespace(resource_pool=pool)
        for role, pool in (("rollout", rollout), ("actor", train), ("ref", ref), ("reward", reward))
    }
    spared = Spared()
    assert spared.take() == {}
    assert spared.keep([rollout, train, ref, reward], groups, {"train"}) == [rollout, reward]
    assert asked[0] == "end train"
    assert asked[1:] == ["settle rollout", "settle ref", "end ref", "settle reward_process"]
    assert spared.take() == {"rollout": groups["rollout"], "reward": groups["reward"]}
    assert spared.take() == {}
