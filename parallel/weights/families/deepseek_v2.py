"""DeepSeek-V2: latent attention, and mixtures of experts with shared ones behind a few dense layers."""

from collections.abc import Mapping

from rolemesh.parallel.weights.families.decoder import WeightMap, decoder_map
from rolemesh.parallel.weights.families.mixture import mixture
from rolemesh.parallel.weights.pieces import Columns, HfTensor, Replicated, Rows, Rule
from rolemesh.placement.model import ModelShape


def weight_map(shape: ModelShape) -> WeightMap:
    """DeepSeek-V2's weight map."""
    return decoder_map(shape, attention=latent_attention, experts=mixture())


def latent_attention(shape: ModelShape, prefix: str) -> Mapping[str, Rule]:
    """A layer's attention: every rank has the ways down to the small vectors, those up are cut by head."""
    latent, inside = shape.latent, f"{prefix}self_attn."
    assert latent is not None, "this family has latent attention"
    queries = shape.n_heads * shape.head_dim
    values = shape.n_heads * latent.v_dim

    def tensor(name: str, *sizes: int) -> HfTensor:
        return HfTensor(f"{inside}{name}.weight", sizes)

    if latent.q_rank is None:
        query: dict[str, Rule] = {"linear_q_proj": Rows(tensor("q_proj", queries, shape.hidden))}
    else:
        query = {
            "linear_q_down_proj": Replicated(tensor("q_a_proj", latent.q_rank, shape.hidden)),
            "q_layernorm": Replicated(tensor("q_a_layernorm", latent.q_rank)),
            "linear_q_up_proj": Rows(tensor("q_b_proj", queries, latent.q_rank)),
        }
    down = tensor("kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, shape.hidden)
    up = tensor("kv_b_proj", shape.n_heads * latent.nope_dim + values, latent.kv_rank)
    found: dict[str, Rule] = query | {
        "linear_kv_down_proj": Replicated(down),
        "kv_layernorm": Replicated(tensor("kv_a_layernorm", latent.kv_rank)),
        "linear_kv_up_proj": Rows(up),
        "linear_proj": Columns(tensor("o_proj", shape.hidden, values)),
    }
    return {f"self_attention.{name}.weight": rule for name, rule in found.items()}
