"""What mixtures of experts have in common: a router, routed experts, maybe shared ones."""

from collections.abc import Mapping

from rolemesh.parallel.weights.families.decoder import LayerRules, feed_forward
from rolemesh.parallel.weights.pieces import Buffer, Expert, HfTensor, Replicated, Rule
from rolemesh.placement.model import ModelShape


def mixture(
    block: str = "mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts.",
) -> LayerRules:
    """Rules of a layer whose experts are in the module `block`, with matrices called `names`."""

    def rules(shape: ModelShape, prefix: str) -> Mapping[str, Rule]:
        experts, inside = shape.moe, prefix + block
        assert experts is not None, "only layers with experts have these rules"
        found: dict[str, Rule] = {
            "mlp.router.weight": Replicated(HfTensor(f"{inside}gate.weight", (experts.n, shape.hidden)))
        }
        if experts.router.bias:
            bias = HfTensor(f"{inside}gate.e_score_correction_bias", (experts.n,), fp32=True)
            found["mlp.router.expert_bias"] = Buffer(bias)
        for n in range(experts.n):
            gate_up, down = feed_forward(shape, f"{inside}experts.{n}.", experts.ffn, names)
            found[f"mlp.experts.local_experts.{n}.linear_fc1.weight"] = Expert(n, gate_up)
            found[f"mlp.experts.local_experts.{n}.linear_fc2.weight"] = Expert(n, down)
        if experts.shared_ffn:
            gate_up, down = feed_forward(shape, inside + shared, experts.shared_ffn)
            found["mlp.shared_experts.linear_fc1.weight"] = gate_up
            found["mlp.shared_experts.linear_fc2.weight"] = down
        return found

    return rules
