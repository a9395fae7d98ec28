"""Names and shapes of checkpoints without weights, and that they are those which transformers writes."""

import importlib.util
import json
from pathlib import Path

import pytest
from tiny import CONFIGS, OWN_SETTINGS, tiny_checkpoint, tiny_config, tiny_model

from rolemesh.engine.rollout.stored_names import stored_views
from rolemesh.parallel.weights import CheckpointError
from rolemesh.parallel.weights.plan import hf_tensors
from rolemesh.parallel.weights.stored_shapes import SHAPES_FILE, compressed, expand, stored_shapes
from rolemesh.placement.model import ModelShape

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("family", [*CONFIGS, *OWN_SETTINGS])
def test_names_and_shapes_are_those_that_save_pretrained_writes(tmp_path, family):
    """What the lists of published models, and this project's weight maps, are made by."""
    saved = stored_shapes(tiny_checkpoint(tmp_path, family, layers=3))
    config = tiny_config(family, layers=3)
    views = stored_views(tiny_model(config).state_dict(), family)
    assert {name: tuple(view.shape) for name, view in views.items()} == saved
    planned = hf_tensors(ModelShape.from_config(json.loads((tmp_path / "config.json").read_text())))
    assert {name: tensor.shape for name, tensor in planned.items()} == saved
    assert dict(expand(compressed(saved))) == saved


def test_patterns_leave_out_layers_of_another_kind():
    shapes = {
        f"layers.{n}.{name}.weight": (2, n // 4) for n in range(8) for name in "ab" if (n, name) != (5, "b")
    }
    shapes |= {f"layers.{n}.experts.{e}.w": (3,) for n in (1, 3) for e in range(4)} | {"head": (1,)}
    patterns = compressed(shapes)
    assert dict(expand(patterns)) == shapes
    assert patterns["layers.{1-1}.experts.{0-3}.w"] == [3]
    assert len(patterns) == 8


def test_shapes_come_from_headers_of_one_or_several_files(tmp_path):
    one = stored_shapes(tiny_checkpoint(tmp_path / "one"))
    several = tiny_checkpoint(tmp_path / "several", max_shard_size="60KB")
    assert stored_shapes(several) == one
    assert stored_shapes(tmp_path) is None
    lost = sorted(several.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"names files that are not there: {lost.name}"):
        stored_shapes(several)


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-70b",
        "llama-3.1-405b",
        pytest.param("qwen3-235b-a22b", marks=pytest.mark.full),
        pytest.param("deepseek-v3", marks=pytest.mark.full),
    ],
)
def test_published_models_have_the_tensors_that_their_weight_maps_take(name):
    shape = ModelShape.from_config(json.loads((DATA / name / "config.json").read_text()))
    planned = {name: tensor.shape for name, tensor in hf_tensors(shape).items()}
    assert planned == stored_shapes(DATA / name)


@pytest.mark.slow
def test_the_lists_are_what_their_script_makes():
    spec = importlib.util.spec_from_file_location("make_shapes", DATA / "make_shapes.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, config in script.MODELS.items():
        assert json.loads((DATA / name / "config.json").read_text()) == config
        made = compressed(script.shapes_of(config))
        assert json.loads((DATA / name / SHAPES_FILE).read_text()) == made
