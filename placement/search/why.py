"""Why one plan takes longer than another, in words."""

from __future__ import annotations

from rolemesh.placement.search.plans import Assignment


def why_it_loses(best: Assignment, other: Assignment) -> str:
    """The operation that costs `other` most, and the pool that stands idle most."""
    lost_s = other.makespan_s - best.makespan_s
    if lost_s <= 0:
        if other.objective_s > best.objective_s:
            return f"leaves wishes unmet: {', '.join(map(str, other.unmet))}"
        return "takes as long"
    reasons = [f"{lost_s:.3g} s longer ({lost_s / best.makespan_s:.1%})", _worst_operation(best, other)]
    idle = {pool.name: other.schedule.idle_s(pool.name) for pool in other.pools}
    devices = {pool.name: pool.devices.world for pool in other.pools}
    name = max(idle, key=lambda pool: (idle[pool] * devices[pool], pool))
    if idle[name] * devices[name] > 0.05 * other.makespan_s * other.n_devices:
        reasons.append(f"pool {name} ({devices[name]} devices) is idle for {idle[name]:.3g} s of the step")
    return "; ".join(reason for reason in reasons if reason)


def _worst_operation(best: Assignment, other: Assignment) -> str:
    """The operation of the longest chain that takes most longer, or that the best plan runs beside others."""
    hidden = set(other.schedule.critical_path) - set(best.schedule.critical_path)

    def lost(name: str) -> float:
        return other.seconds[name] - (0.0 if name in hidden else best.seconds[name])

    name = max(other.schedule.critical_path, key=lost)
    if lost(name) <= 0:
        return ""
    if name in hidden and other.seconds[name] <= best.seconds[name] * 1.5:
        return f"{name} ({other.seconds[name]:.3g} s) is waited for; the best plan runs it beside others"
    text = f"{name} takes {other.seconds[name]:.3g} s instead of {best.seconds[name]:.3g} s"
    return text + _because(best, other, name)


def _because(best: Assignment, other: Assignment, name: str) -> str:
    roles = [role for role in other.costs if name in other.costs[role].seconds]
    if not roles:
        return ""
    there, here = other.pool_of(roles[0]).devices, best.pool_of(roles[0]).devices
    if (there.world, there.device_type) != (here.world, here.device_type):
        return f" on {there.world} x {there.device_type} instead of {here.world} x {here.device_type}"
    option, wished = other.costs[roles[0]].option, best.costs[roles[0]].option
    if option != wished:
        filled = other.costs[roles[0]].resident > 0 and len(other.pool_of(roles[0]).roles) > 1
        shared = ", beside the memory of " + " and ".join(
            role for role in other.pool_of(roles[0]).roles if role != roles[0]
        )
        return f" ({option.layout} instead of {wished.layout}){shared if filled else ''}"
    return ""
