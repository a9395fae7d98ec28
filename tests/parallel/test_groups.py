import pytest
import torch.distributed as dist
from gloo import run_ranks

from rolemesh.parallel.groups import make_groups
from rolemesh.placement.layout import Layout, LayoutError

pytestmark = pytest.mark.full


def test_groups_are_the_layouts_and_same_ranks_are_one_group():
    layout = Layout(tp=2, pp=4)

    def ranks_of(rank: int, world: int) -> dict[str, list[int]]:
        groups = make_groups(layout, timeout_s=30)
        assert groups.dp is groups.cp is groups.ep  # this rank alone
        assert groups.mp is groups.intra_dist_opt is dist.group.WORLD
        names = ("tp", "pp", "dp", "mp", "embd", "pos_embd", "tp_dp_cp")
        return {name: dist.get_process_group_ranks(getattr(groups, name)) for name in names}

    found = run_ranks(ranks_of, 8)
    for rank, groups in enumerate(found):
        for name, axes in (("tp", ["tp"]), ("pp", ["pp"]), ("dp", ["dp"]), ("mp", ["tp", "pp"])):
            assert groups[name] in layout.groups(*axes)
            assert rank in groups[name]
        assert groups["tp_dp_cp"] == groups["tp"]
    assert [groups["embd"] for groups in found] == [[0, 6], [1, 7], [2], [3], [4], [5], [0, 6], [1, 7]]


def test_a_world_of_another_size_is_refused():
    def build(rank: int, world: int) -> None:
        with pytest.raises(LayoutError, match=r"tp=2 pp=2\) has 4 ranks, the world has 2"):
            make_groups(Layout(tp=2, pp=2))

    run_ranks(build, 2)
