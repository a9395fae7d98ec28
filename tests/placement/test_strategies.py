"""From roles to pools: halves, shares, counts, and what is refused."""

import pytest

from rolemesh.placement.cluster import ClusterSpec, NodeSpec
from rolemesh.placement.pools import PlacementError, Where, fit_pools
from rolemesh.placement.strategies import explicit_pools, named_pools, register_strategy

PPO = ("actor", "rollout", "ref", "critic", "reward")


def _sizes(pools):
    return {pool.name: pool.process_on_nodes for pool in pools}


def _nodes(*devices):
    return ClusterSpec(tuple(NodeSpec(f"n{i}", count) for i, count in enumerate(devices)))


def test_colocate_puts_every_role_on_every_device():
    cluster = ClusterSpec(
        (NodeSpec("head", 0), NodeSpec("a", 8), NodeSpec("b", 4), NodeSpec("c", 8, alive=False))
    )
    (pool,) = named_pools("colocate", PPO, cluster)
    assert (pool.roles, pool.process_on_nodes) == (PPO, (8, 4))


def test_split_puts_the_actors_side_and_the_critics_side_on_halves():
    actor_side, critic_side = named_pools("split", PPO, ClusterSpec.uniform(16, 8))
    assert actor_side.roles == ("actor", "rollout", "ref")
    assert critic_side.roles == ("critic", "reward")
    assert actor_side.process_on_nodes == critic_side.process_on_nodes == (8,) * 8


def test_split_without_a_critic_puts_the_reference_on_the_other_half():
    pools = named_pools("split", ("actor", "rollout", "ref", "reward"), _nodes(4))
    assert {pool.name: pool.roles for pool in pools} == {
        "actor_side": ("actor", "rollout"),
        "ref_side": ("ref", "reward"),
    }


@pytest.mark.parametrize(
    ("devices", "halves", "idle"),
    [
        ((2,), ((1,), (1,)), {}),
        ((5,), ((2,), (2,)), {"n0": 1}),
        ((8, 8), ((8,), (8,)), {}),
        ((8, 8, 8), ((8, 4), (4, 8)), {}),
        ((1, 1, 1), ((1,), (1,)), {"n2": 1}),
        ((4, 3, 3), ((3, 2), (2, 3)), {}),
        ((3, 3, 3, 3, 3), ((3, 3), (3, 3)), {"n4": 3}),
    ],
)
def test_split_halves_the_nodes_or_the_odd_one_or_leaves_it_over(devices, halves, idle):
    cluster = _nodes(*devices)
    pools = named_pools("split", PPO, cluster)
    assert tuple(pool.process_on_nodes for pool in pools) == halves
    free = fit_pools(pools, cluster).free(cluster)
    assert {name: count for name, count in free.items() if count} == idle


def test_a_single_device_or_a_single_side_cannot_be_split():
    with pytest.raises(
        PlacementError, match=r"single device cannot be split: use colocate.*\n  n0: 1 devices"
    ):
        named_pools("split", PPO, _nodes(1))
    with pytest.raises(PlacementError, match="actor, rollout are all on one: use colocate"):
        named_pools("split", ("actor", "rollout"), _nodes(2))


def test_processes_share_the_cpus_of_a_small_node():
    slots = ClusterSpec((NodeSpec("laptop", 3, cpus=2),), device_kind="cpu")
    (pool,) = named_pools("colocate", PPO, slots)
    assert pool.cpus_per_process == 0.6666
    assert pool.device_kind == "cpu"
    fit_pools([pool], slots)


def test_shares_written_out_are_the_same_as_split():
    written = {
        "actor_side": {"roles": ["actor", "rollout", "ref"], "share": "1/2"},
        "critic_side": {"roles": ["critic", "reward"], "share": 0.5},
    }
    for devices in ((2,), (8, 8), (8, 8, 8)):
        cluster = _nodes(*devices)
        assert explicit_pools(written, PPO, cluster) == named_pools("split", PPO, cluster)


def test_pools_take_nodes_counts_and_places():
    cluster = ClusterSpec(
        (
            *(NodeSpec(f"h{i}", 8, device_type="h100-80") for i in range(4)),
            NodeSpec("v", 8, resources={"v100": 8}),
        )
    )
    pools = explicit_pools(
        {
            "h100": {"roles": PPO[:2], "nodes": 4, "per_node": 8, "where": {"device": "h100-80"}},
            "v100": {
                "roles": ["ref", "critic", "reward"],
                "devices": 8,
                "where": {"resources_per_worker": {"v100": 1}},
            },
        },
        PPO,
        cluster,
    )
    assert _sizes(pools) == {"h100": (8, 8, 8, 8), "v100": (8,)}
    assert pools[1].where == Where(resources_per_worker={"v100": 1})
    assert fit_pools(pools, cluster).nodes["v100"] == (("v", 8),)


def test_a_count_stays_on_one_node_where_it_can():
    roles = ("actor", "critic", "ref")
    written = {role: {"roles": role, "devices": n} for role, n in zip(roles, (3, 3, 2), strict=True)}
    cluster = _nodes(4, 4)
    pools = explicit_pools(written, roles, cluster)
    assert _sizes(pools) == {"actor": (3,), "critic": (3,), "ref": (1, 1)}
    fit_pools(pools, cluster)


def test_a_count_is_spread_by_what_each_process_takes_of_a_resource():
    cluster = ClusterSpec(tuple(NodeSpec(f"v{i}", 4, resources={"v100": 2}) for i in range(3)))
    where = {"resources_per_worker": {"v100": 1}}
    request = {"ref": {"roles": "ref", "devices": 4, "where": where}, "a": {"roles": "actor", "devices": 4}}
    pools = explicit_pools(request, ("ref", "actor"), cluster)
    assert _sizes(pools) == {"ref": (2, 2), "a": (4,)}
    assert fit_pools(pools, cluster).nodes["ref"] == (("v0", 2), ("v1", 2))


def test_more_devices_than_there_are_is_the_fits_refusal():
    pools = explicit_pools({"a": {"roles": "actor", "devices": 16}}, ("actor",), _nodes(8))
    with pytest.raises(PlacementError, match=r"'a' asks 16 devices .* 8 present"):
        fit_pools(pools, _nodes(8))
    twice = {"a": {"roles": "actor", "share": "3/4"}, "b": {"roles": "critic", "share": "3/4"}}
    with pytest.raises(PlacementError, match=r"exclusive: a 6 \+ b 6 = 12 devices wanted > 8"):
        fit_pools(explicit_pools(twice, ("actor", "critic"), _nodes(8)), _nodes(8))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"share": "1/3"}, r"share 1/3 of 8 devices is 2.67, not whole; shares that are: 1/1, 1/2, 1/4, 1/8"),
        ({"share": "half"}, "share must be like 1/2"),
        ({"share": 2}, "share must be like 1/2"),
        ({"devices": 0}, "devices must be a whole number of at least 1, got 0"),
        ({"nodes": 1}, r"exactly one size: .* \(given: nodes\)"),
        ({}, r"exactly one size: .* \(given: none\)"),
        ({"share": 1, "devices": 8}, r"\(given: share, devices\)"),
        ({"shar": 1}, "no key 'shar' .*did you mean share"),
        ({"share": 1, "where": {"labl": {}}}, "where has no key 'labl' .*did you mean labels"),
    ],
)
def test_a_pool_written_wrongly_is_refused(request_, message):
    with pytest.raises(PlacementError, match=message):
        explicit_pools({"a": {"roles": ["actor"], **request_}}, ("actor",), _nodes(8))


@pytest.mark.parametrize("size", [{"share": "1/2"}, {"devices": 4}, {"nodes": 1, "per_node": 4}])
def test_a_place_that_does_not_exist_is_named_whatever_the_size(size):
    written = {"a": {"roles": ["actor"], **size, "where": {"labels": {"kind": "tiny"}}}}
    with pytest.raises(PlacementError, match="pool 'a': no node has label kind=tiny"):
        fit_pools(explicit_pools(written, ("actor",), _nodes(8)), _nodes(8))


def test_labels_are_compared_as_text_and_must_be_a_mapping():
    cluster = ClusterSpec((NodeSpec("n", 2, labels={"rack": "1"}),))
    written = {"a": {"roles": ["actor"], "share": 1, "where": {"labels": {"rack": 1}}}}
    assert _sizes(explicit_pools(written, ("actor",), cluster)) == {"a": (2,)}
    with pytest.raises(PlacementError, match=r"where.labels must be a mapping, got 'big'"):
        Where(labels="big")


def test_every_role_is_in_one_pool():
    one = {"share": "1/2"}
    with pytest.raises(PlacementError, match=r"role 'critic' is in no pool \(pools: a\)"):
        explicit_pools({"a": {"roles": ["actor"], **one}}, ("actor", "critic"), _nodes(8))
    with pytest.raises(PlacementError, match="role 'actor' is in several pools: a, b"):
        explicit_pools(
            {"a": {"roles": ["actor"], **one}, "b": {"roles": ["actor"], **one}}, ("actor",), _nodes(8)
        )
    with pytest.raises(PlacementError, match=r"'actr', which needs no devices .*did you mean actor"):
        explicit_pools({"a": {"roles": ["actor", "actr"], **one}}, ("actor",), _nodes(8))


def test_strategies_are_known_by_name():
    with pytest.raises(
        PlacementError, match=r"no strategy 'splitt' \(registered: .*split.*\); did you mean split"
    ):
        named_pools("splitt", PPO, _nodes(8))
    with pytest.raises(PlacementError, match="registered already"):
        register_strategy("split")(lambda roles, cluster: ())
    with pytest.raises(PlacementError, match="no node has a device"):
        named_pools("colocate", PPO, _nodes(0))


@pytest.mark.parametrize(
    ("devices", "each"),
    [
        ((1,) * 5, [(1,)] * 5),
        ((8,) * 5, [(8,)] * 5),
        ((8,) * 16, [(8,) * 4, *[(8,) * 3] * 4]),
        ((8,), [(2,), (2,), (2,), (1,), (1,)]),
        ((8, 8), [(3,), (3,), (2,), (4,), (4,)]),
        ((8, 2), [(2,), (2,), (2,), (2,), (2,)]),
        ((8, 8, 8, 8), [(4,), (4,), (8,), (8,), (8,)]),
    ],
)
def test_standalone_gives_each_role_devices_of_its_own_on_whole_nodes_where_there_are_enough(devices, each):
    cluster = _nodes(*devices)
    pools = named_pools("standalone", PPO, cluster)
    assert [pool.roles for pool in pools] == [(role,) for role in PPO]
    assert [pool.name for pool in pools] == list(PPO)
    assert [pool.process_on_nodes for pool in pools] == each
    assert not any(fit_pools(pools, cluster).free(cluster).values())


def test_standalone_says_how_many_devices_it_lacks():
    with pytest.raises(PlacementError, match=r"the 5 roles .* there are 4: use colocate or split"):
        named_pools("standalone", PPO, _nodes(2, 2))
