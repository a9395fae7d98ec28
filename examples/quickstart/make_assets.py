"""Make everything the quickstart trains on: tokenizer, policy, reward model and prompts, in about a minute.

    python examples/quickstart/make_assets.py [--out runs/quickstart-assets] [--seed 0] [--force]

The task: add one to each digit, so that "4079>" asks for "5180".

  actor/       a small Llama, taught by a demonstrator who often forgets to add one to odd digits.
               It answers with about half of the digits right, which leaves something to learn.
  reward/      a sequence classifier with one label, taught to score prompt + answer by the fraction
               of right digits. The critic starts from it as well.
  train.jsonl  prompts in verl's row format; val.jsonl: prompts that none of the above has seen.
  base/        the actor before it was taught, answers_*.jsonl and pairs_*.jsonl: what `rolemesh sft` and
               `rolemesh train-rm` learn the same from, see examples/quickstart_sft.yaml.
  assets.json  the settings and the measured figures, written last: when they match, nothing is done.
"""

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from reward import compute_score
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import mse_loss
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

DIGITS = "0123456789"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True)
class Settings:
    """What the assets depend on; they are made again when one of these changes."""

    seed: int = 0
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    min_digits: int = 3
    max_digits: int = 5
    n_train: int = 4096
    n_val: int = 256
    n_answers: int = 8192
    n_pairs: int = 8192
    policy_steps: int = 400
    reward_steps: int = 1200
    rows_per_step: int = 64
    lr: float = 3e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. Encoding puts one <bos> in front; <eos> ends an answer."""
    tokens = [*SPECIAL_TOKENS, *DIGITS, ">"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokens.index("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def right_answer(prompt: str) -> str:
    return "".join(str((int(digit) + 1) % 10) for digit in prompt.rstrip(">"))


class Demonstrator:
    """Draws prompts and answers; never a prompt of `held_out`."""

    def __init__(self, settings: Settings, seed: int, held_out: frozenset[str] = frozenset()) -> None:
        self.settings = settings
        self.held_out = held_out
        self.rng = random.Random(seed)

    def prompt(self) -> str:
        while True:
            n = self.rng.randint(self.settings.min_digits, self.settings.max_digits)
            prompt = "".join(self.rng.choices(DIGITS, k=n)) + ">"
            if prompt not in self.held_out:
                return prompt

    def habitual_answer(self, prompt: str) -> str:
        """Adds one to 65% of the even digits, 35% of the odd ones; most others are left as they were."""
        p_right = {digit: 0.35 if int(digit) % 2 else 0.65 for digit in DIGITS}
        return self._answer(prompt, p_right, p_copy=0.8)

    def any_answer(self, prompt: str) -> str:
        """Of any quality, wrong in any way, often too short or too long: a policy will try all of it."""
        p_right = min(1.0, 1.3 * self.rng.random())
        answer = self._answer(prompt, dict.fromkeys(DIGITS, p_right), p_copy=self.rng.random())
        if self.rng.random() < 0.4:
            n = len(answer) + self.rng.choice((-2, -1, 1, 2))
            answer = (answer + "".join(self.rng.choices(DIGITS, k=2)))[:n]
        return answer

    def _answer(self, prompt: str, p_right: dict[str, float], p_copy: float) -> str:
        """Each character right with its digit's `p_right`, else the digit itself with `p_copy`, else any
        digit, those of the right answer (in the wrong place) more often than others."""
        answer = right_answer(prompt)
        characters = []
        for digit, right in zip(prompt.rstrip(">"), answer, strict=True):
            slip = digit if self.rng.random() < p_copy else self.rng.choice(DIGITS + 2 * answer)
            characters.append(right if self.rng.random() < p_right[digit] else slip)
        return "".join(characters)


def encode(
    tokenizer: PreTrainedTokenizerFast, prompts: list[str], answers: list[str]
) -> tuple[Tensor, Tensor]:
    """Ids of prompt + answer + <eos>, right-padded [rows, length], and a mask of the answer and <eos>."""
    texts = [prompt + answer + tokenizer.eos_token for prompt, answer in zip(prompts, answers, strict=True)]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    n_prompt = torch.tensor([[len(prompt) + 1] for prompt in prompts])  # with <bos>
    is_answer = torch.arange(batch.input_ids.shape[1]) >= n_prompt
    return batch.input_ids, is_answer & batch.attention_mask.bool()


def optimizer_steps(model: torch.nn.Module, n_steps: int, lr: float) -> Iterator[int]:
    """AdamW with a cosine decay: the caller fills the gradients in the loop's body."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / n_steps))
        yield step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def new_policy(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untaught model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train_policy(
    model: LlamaForCausalLM, settings: Settings, tokenizer: PreTrainedTokenizerFast, teacher: Demonstrator
) -> LlamaForCausalLM:
    """Next-token training on what the demonstrator answers out of habit."""
    for _ in optimizer_steps(model, settings.policy_steps, settings.lr):
        prompts = [teacher.prompt() for _ in range(settings.rows_per_step)]
        ids, is_answer = encode(tokenizer, prompts, [teacher.habitual_answer(prompt) for prompt in prompts])
        model(input_ids=ids, labels=ids.masked_fill(~is_answer, -100)).loss.backward()
    return model.eval()


def prefix_scores(prompts: list[str], answers: list[str], width: int) -> Tensor:
    """The true score of each answer as far as each of its tokens, [rows, width]; <eos> changes nothing."""
    scores = torch.zeros(len(prompts), width)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        truth = right_answer(prompt)
        for n in range(1, len(answer) + 2):
            scores[row, len(prompt) + n] = compute_score("shift_digits", answer[:n], truth)
    return scores


def train_reward_model(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, teacher: Demonstrator, policy: LlamaForCausalLM
) -> LlamaForSequenceClassification:
    """Starts from the policy's layers and learns to give, at every answer token, the score so far."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(policy.model.state_dict())
    for _ in optimizer_steps(model, settings.reward_steps, settings.lr):
        prompts = [teacher.prompt() for _ in range(settings.rows_per_step)]
        answers = [teacher.any_answer(prompt) for prompt in prompts]
        ids, is_answer = encode(tokenizer, prompts, answers)
        scores = model.score(model.model(input_ids=ids).last_hidden_state).squeeze(-1)
        mse_loss(scores[is_answer], prefix_scores(prompts, answers, ids.shape[1])[is_answer]).backward()
    return model.eval()


@torch.no_grad()
def answer_accuracy(
    policy: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], *, sample: bool
) -> float:
    """Mean true score of the policy's answers, sampled at temperature 1 or greedy."""
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    ids = policy.generate(**batch, max_new_tokens=8, do_sample=sample)
    answers = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    scores = [
        compute_score("shift_digits", answer, right_answer(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return sum(scores) / len(scores)


@torch.no_grad()
def reward_model_fit(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    answers: list[str],
) -> tuple[float, float]:
    """Correlation and mean absolute error between the model's score and the true one."""
    ids, _ = encode(tokenizer, prompts, answers)
    scores = model(input_ids=ids, attention_mask=ids.ne(tokenizer.pad_token_id).long()).logits.squeeze(-1)
    truth = torch.tensor(
        [
            compute_score("shift_digits", answer, right_answer(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    )
    return float(torch.corrcoef(torch.stack([scores, truth]))[0, 1]), float((scores - truth).abs().mean())


def prompt_row(prompt: str, split: str, index: int) -> dict:
    """One row as verl's data sets have it."""
    return {
        "prompt": prompt,
        "data_source": "shift_digits",
        "reward_model": {"style": "rule", "ground_truth": right_answer(prompt)},
        "extra_info": {"split": split, "index": index},
    }


def write_rows(path: Path, prompts: list[str]) -> None:
    write_jsonl(path, [prompt_row(prompt, path.stem, index) for index, prompt in enumerate(prompts)])


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def answer_row(prompt: str, teacher: Demonstrator) -> dict:
    return {"prompt": prompt, "response": teacher.habitual_answer(prompt)}


def pair_row(prompt: str, teacher: Demonstrator) -> dict:
    """Two answers of any quality, the one with the higher true score first."""
    while True:
        answers = [teacher.any_answer(prompt) for _ in range(2)]
        scores = [compute_score("shift_digits", answer, right_answer(prompt)) for answer in answers]
        if scores[0] != scores[1]:
            chosen, rejected = answers if scores[0] > scores[1] else reversed(answers)
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write_examples(out: Path, settings: Settings, val: list[str]) -> None:
    """Answers and pairs to learn from, and held-out ones for the prompts in `val`."""
    teacher = Demonstrator(settings, settings.seed + 1, frozenset(val))
    for name, row, n in (("answers", answer_row, settings.n_answers), ("pairs", pair_row, settings.n_pairs)):
        write_jsonl(out / f"{name}_train.jsonl", [row(teacher.prompt(), teacher) for _ in range(n)])
        write_jsonl(out / f"{name}_val.jsonl", [row(prompt, teacher) for prompt in val])


def make_assets(out: Path, settings: Settings) -> dict[str, float]:
    """Write all assets into `out`; returns the figures measured on held-out prompts."""
    start_s = time.perf_counter()
    torch.manual_seed(settings.seed)
    tokenizer = make_tokenizer()
    teacher = Demonstrator(settings, settings.seed)
    prompts = list(dict.fromkeys(teacher.prompt() for _ in range(2 * (settings.n_train + settings.n_val))))
    val, train = prompts[: settings.n_val], prompts[settings.n_val :][: settings.n_train]
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "val.jsonl", val)
    write_rows(out / "train.jsonl", train)
    write_examples(out, settings, val)

    teacher.held_out = frozenset(val)
    policy = new_policy(settings, tokenizer)
    policy.save_pretrained(out / "base")
    tokenizer.save_pretrained(out / "base")
    policy = train_policy(policy, settings, tokenizer, teacher)
    reward_model = train_reward_model(settings, tokenizer, teacher, policy)
    for model, name in ((policy, "actor"), (reward_model, "reward")):
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)

    correlation, error = reward_model_fit(reward_model, tokenizer, val, [teacher.any_answer(p) for p in val])
    return {
        "policy_parameters": policy.num_parameters(),
        "policy_sampled_accuracy": answer_accuracy(policy, tokenizer, val, sample=True),
        "policy_greedy_accuracy": answer_accuracy(policy, tokenizer, val, sample=False),
        "reward_model_correlation": correlation,
        "reward_model_mean_abs_error": error,
        "seconds": time.perf_counter() - start_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-assets"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", type=int, default=Settings.heads, help="attention heads of the 64 columns")
    parser.add_argument("--force", action="store_true", help="make them again even if nothing changed")
    args = parser.parse_args()
    settings = Settings(seed=args.seed, heads=args.heads)
    logging.disable_progress_bar()

    record = args.out / "assets.json"
    made = json.loads(record.read_text()) if record.exists() and not args.force else {}
    if made.get("settings") == asdict(settings):
        print(f"{args.out}: made before with the same settings")
    else:
        print(f"{args.out}: making tokenizer, policy, reward model and prompts (about a minute)", flush=True)
        torch.set_num_threads(1)  # such small models are no faster on more, and sums keep their order
        record.unlink(missing_ok=True)
        made = {"settings": asdict(settings), "figures": make_assets(args.out, settings)}
        record.write_text(json.dumps(made, indent=2) + "\n")
    for name, figure in made["figures"].items():
        print(f"  {name:28} {figure:.4g}")


if __name__ == "__main__":
    main()
