"""Pages of plans in a real browser: everything is there, inside its chart, and nothing is asked for."""

import json
import re
from pathlib import Path

import pytest
from browser import LAYOUT, complaints, look
from typer.testing import CliRunner

from rolemesh.launch import html, plan_command
from rolemesh.launch.cli import main

pytestmark = pytest.mark.full

BIG = Path(__file__).parents[2] / "examples" / "plan_70b.yaml"
FIXED = [
    "placement.strategy=split", "batch.micro_batch_tokens=5120",
    *(f"{role}.layout.tp=8" for role in ("actor", "rollout", "critic", "ref", "reward")),
    *(f"{role}.{what}" for role in ("actor", "critic") for what in ("layout.pp=4", "recompute=full")),
    *(f"{role}.layout.sequence_parallel=true" for role in ("actor", "critic")),
]  # fmt: skip
SMALL = """
run: {device: cpu}
cluster: {nodes: 1, device: cpu, per_node: 4}
data: {train_files: [train.jsonl], max_prompt_tokens: 8}
algorithm: {name: ppo, kl: {in: reward, coef: 0.01}}
batch: {prompts: 64}
lengths: {max_response_tokens: 64, expect: {kind: lognormal, mean: 16, p95: 40}}
actor: {path: model, dtype: float32}
critic: {path: model, dtype: float32}
ref: {dtype: float32}
reward: {kind: model, path: model, dtype: float32}
placement: split
"""
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip
SCRIPT = LAYOUT.replace(
    "return {",
    """const named = name => [...document.querySelectorAll('svg[aria-label="' + name + '"]')];
return {
  names: [...document.querySelectorAll('svg')].map(s => s.getAttribute('aria-label')),
  cells: document.querySelectorAll('.cell').length,
  cut: [...document.querySelectorAll('.cell')].filter(c => [...c.querySelectorAll('text')].some(t =>
    t.getBoundingClientRect().right > c.querySelector('rect').getBoundingClientRect().right + 1)).length,
  path: named('Gantt chart of a step').map(s => s.querySelectorAll('line.path').length),
  layers: document.querySelectorAll('.layer').length,
  limits: named('memory over a step').map(s => s.querySelectorAll('.limit').length),
  points: document.querySelectorAll('.point').length,
""",
)


def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *args: object) -> tuple[str, Path]:
    monkeypatch.setattr(plan_command, "_DRAWN_S", (8.0, 2.0))
    monkeypatch.setattr(plan_command, "_COUNTS_S", 4.0)
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(main, ["plan", *map(str, args), "--map", "--html", str(page)])
    assert result.exit_code == 0, result.output
    return result.output, page


def check(page: Path) -> dict:
    text = page.read_text()
    assert not re.search(r"https?:|<script|<link|<img|src=|url\((?!#)|@import", text)
    assert complaints(page) == []
    seen = look(page, SCRIPT)
    assert (seen["empty"], seen["outside"], seen["loaded"], seen["cut"]) == (0, [], [], 0)
    assert seen["wider"] <= 0
    for name in ("placement map", "links", "Gantt chart of a step", "memory over a step", "strategies"):
        assert name in seen["names"], seen["names"]
    return seen


def test_the_browser_complains_of_what_the_page_forbids(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(html.page("a page", html.Markup("<script>1</script>")))
    assert any("Content Security Policy" in line for line in complaints(page))


def test_a_small_plan_is_drawn(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(SMALL)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    said, page = drawn(tmp_path, monkeypatch, tmp_path / "recipe.yaml")
    assert "  node-0 [AABB]" in said
    assert re.search(r"note: (the plan stays best from|at a mean of) [\d,]+", said)
    seen = check(page)
    assert seen["cells"] == 4
    assert seen["path"][0] >= 4
    assert seen["limits"] == [0, 0]  # 2 GiB beside some MiB: said, not drawn
    assert "GiB at the fullest moment" in page.read_text()


def test_a_plan_on_128_nodes_is_drawn_in_few_rows(tmp_path, monkeypatch):
    larger = ["batch.prompts=8192", "batch.mini_batch_samples=2048"]
    said, page = drawn(tmp_path, monkeypatch, BIG, "--cluster", "128xh100-80x8", *FIXED, *larger)
    assert "  node-[0-63]   [AAAAAAAA]  64 nodes like this" in said
    seen = check(page)
    assert seen["cells"] == 8 * 8  # four stages on each side, eight devices of a node each
    assert seen["limits"] == [1, 1]
    text = page.read_text()
    assert "16 nodes like this" in text
    assert "does not fit" in text or "loses" in text or "is shorter" in text
