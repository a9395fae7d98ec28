"""Process groups of one layout, as a value: nothing reads or writes megatron-core's `parallel_state`."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rolemesh.placement.layout import Layout, LayoutError


def make_groups(layout: Layout, *, timeout_s: float = 1800) -> ProcessGroupCollection:
    """Create the groups of `layout` over the default torch world; every rank of it must call.

    Groups of the same ranks are one group. A collective on them fails after `timeout_s` seconds.
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
            if tuple(ranks) not in made:
                made[tuple(ranks)] = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        return made[tuple(next(ranks for ranks in partition if rank in ranks))]

    tp, pp, dp, alone = (create(layout.groups(*axes)) for axes in (["tp"], ["pp"], ["dp"], []))
    tp_dp = create(layout.groups("tp", "dp"))
    ends = [sorted({stages[0], stages[-1]}) for stages in layout.groups("pp")]
    inner = [[stage] for stages in layout.groups("pp") for stage in stages[1:-1]]
    return ProcessGroupCollection(
        tp=tp,
        pp=pp,
        dp=dp,
        mp=create(layout.groups("tp", "pp")),
        cp=alone,
        tp_cp=tp,
        dp_cp=dp,
        intra_dp_cp=dp,
        tp_dp_cp=tp_dp,
        hcp=None,
        embd=create(ends + inner),
        pos_embd=alone,
        ep=alone,
        expt_tp=alone,
        tp_ep=alone,
        tp_ep_pp=pp,
        expt_dp=tp_dp,
        intra_expt_dp=tp_dp,
        inter_dist_opt=None,
        intra_dist_opt=create(layout.groups("tp", "dp", "pp")),
    )
