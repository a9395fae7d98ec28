"""Process groups of one layout, as a value: nothing reads or writes megatron-core's `parallel_state`."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rolemesh.placement.layout import Layout, LayoutError


def make_groups(layout: Layout, *, timeout_s: float = 1800, own_only: bool = False) -> ProcessGroupCollection:
    """Create the groups of `layout` over the default torch world; every rank of it must call.

    Groups of the same ranks are one group. A collective on them fails after `timeout_s` seconds. `own_only`
    leaves out those of other ranks, for a world of fakes, where creating a group is not collective.
    Raises LayoutError when the world has another size than the layout.
    """
    if layout.world != dist.get_world_size():
        raise LayoutError(
            f"the layout ({layout}) has {layout.world} ranks, the world has {dist.get_world_size()}"
        )
    rank = dist.get_rank()
    made = {tuple(range(layout.world)): dist.group.WORLD}

    def create(partition: list[list[int]]) -> dist.ProcessGroup | None:
        for ranks in partition:  # also those without this rank: creating a group is collective
            if tuple(ranks) not in made and (rank in ranks or not own_only):
                made[tuple(ranks)] = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        return made[tuple(next(ranks for ranks in partition if rank in ranks))]

    tp, pp, dp, cp, alone = (create(layout.groups(*axes)) for axes in (["tp"], ["pp"], ["dp"], ["cp"], []))
    dp_cp, tp_dp_cp = create(layout.groups("dp", "cp")), create(layout.groups("tp", "dp", "cp"))
    expert_dp = create(layout.expert_groups("edp"))
    ends = [sorted({stages[0], stages[-1]}) for stages in layout.groups("pp")]
    inner = [[stage] for stages in layout.groups("pp") for stage in stages[1:-1]]
    return ProcessGroupCollection(
        tp=tp,
        pp=pp,
        dp=dp,
        mp=create(layout.groups("tp", "pp")),
        cp=cp,
        tp_cp=create(layout.groups("tp", "cp")),
        dp_cp=dp_cp,
        intra_dp_cp=dp_cp,
        tp_dp_cp=tp_dp_cp,
        hcp=None,
        embd=create(ends + inner),
        pos_embd=alone,
        ep=create(layout.expert_groups("ep")),
        expt_tp=create(layout.expert_groups("etp")),
        tp_ep=create(layout.expert_groups("ep", "etp")),
        tp_ep_pp=create(layout.expert_groups("ep", "etp", "pp")),
        expt_dp=expert_dp,
        intra_expt_dp=expert_dp,
        inter_dist_opt=None,
        intra_dist_opt=create(layout.groups("tp", "cp", "dp", "pp")),
    )
