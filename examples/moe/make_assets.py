"""Make what examples/moe.yaml trains: a small mixture of experts and the quickstart's prompts, in a minute.

  python examples/moe/make_assets.py [--out runs/moe-assets] [--seed 0] [--force]

actor/       a Qwen3-MoE of 8 experts, two of them for each token, taught by the quickstart's demonstrator.
train.jsonl  prompts in verl's row format; val.jsonl: prompts that it has not seen.
assets.json  the settings and the measured figures, written last: when they match, nothing is done.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.utils import logging

# In front of this folder, whose file has the same name.
sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
import make_assets as quickstart


@dataclass(frozen=True)
class Settings(quickstart.Settings):
    """What the assets depend on; they are made again when one of these changes."""

    experts: int = 8
    expert_columns: int = 32
    n_train: int = 2048
    n_val: int = 128


def new_policy(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untaught model."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        moe_intermediate_size=settings.expert_columns,
        num_experts=settings.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.hidden // settings.heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def make_assets(out: Path, settings: Settings) -> dict[str, float]:
    """Write all assets into `out`; returns the figures measured on held-out prompts."""
    start_s = time.perf_counter()
    torch.manual_seed(settings.seed)
    tokenizer = quickstart.make_tokenizer()
    teacher = quickstart.Demonstrator(settings, settings.seed)
    prompts = list(dict.fromkeys(teacher.prompt() for _ in range(2 * (settings.n_train + settings.n_val))))
    val, train = prompts[: settings.n_val], prompts[settings.n_val :][: settings.n_train]
    out.mkdir(parents=True, exist_ok=True)
    quickstart.write_rows(out / "val.jsonl", val)
    quickstart.write_rows(out / "train.jsonl", train)
    teacher.held_out = frozenset(val)
    policy = quickstart.train_policy(new_policy(settings, tokenizer), settings, tokenizer, teacher)
    policy.save_pretrained(out / "actor")
    tokenizer.save_pretrained(out / "actor")
    return {
        "policy_parameters": policy.num_parameters(),
        "policy_sampled_accuracy": quickstart.answer_accuracy(policy, tokenizer, val, sample=True),
        "seconds": time.perf_counter() - start_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/moe-assets"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="make them again even if nothing changed")
    args = parser.parse_args()
    settings = Settings(seed=args.seed)
    logging.disable_progress_bar()

    record = args.out / "assets.json"
    made = json.loads(record.read_text()) if record.exists() and not args.force else {}
    if made.get("settings") == asdict(settings):
        print(f"{args.out}: made before with the same settings")
    else:
        print(f"{args.out}: making tokenizer, policy and prompts (about a minute)", flush=True)
        torch.set_num_threads(1)  # such small models are no faster on more, and sums keep their order
        record.unlink(missing_ok=True)
        made = {"settings": asdict(settings), "figures": make_assets(args.out, settings)}
        record.write_text(json.dumps(made, indent=2) + "\n")
    for name, figure in made["figures"].items():
        print(f"  {name:28} {figure:.4g}")


if __name__ == "__main__":
    main()
