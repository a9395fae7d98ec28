"""Nothing that comes from outside is run: pickles, code of models, Python files that no key names."""

import ast
import functools
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from tiny import tiny_checkpoint
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoTokenizer

from rolemesh.launch.check import check_recipe
from rolemesh.launch.config import parse_recipe
from rolemesh.launch.fields import RecipeError
from rolemesh.parallel.checkpoint_error import CheckpointError
from rolemesh.parallel.checkpoint_metadata import check_metadata
from rolemesh.parallel.sealed import SealError, sealed, unsealed
from rolemesh.parallel.weights.convert import convert
from rolemesh.parallel.weights.shard import shard

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "kernels", "launch", "parallel", "placement")
UNPICKLES = {
    "engine/batch_ref.py": "blocks of Ray's object store, which workers of the run have put there",
    "engine/rollout/kept_weights.py": "memory of a rollout rank, which its own engine opens",
    "engine/spmd/rank.py": "what ranks send each other over their own connections",
    "parallel/sealed.py": "values that carry the run's seal",
}
RUNS_FILES = {
    "engine/user_file.py": "algorithm.file, rollout.agent, ROLE.worker",
    "engine/worker_log.py": "its own neighbour, by the process that writes a log",
    "engine/rewards/scorer.py": "reward.path, reward.parts.NAME.path, serve-rm file.py:function",
}


class Touch:
    """Makes a file when its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


TOLD = re.compile(r"pickle|torch\.load|np\.load|from_pretrained|exec|runpy|eval|os\.system|yaml\.")


@functools.cache
def calls() -> tuple[tuple[str, str, ast.Call], ...]:
    """Every call in the product's files that name what is of interest: file, dotted name, the call."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if TOLD.search(text := path.read_text()):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                    found.append((str(path.relative_to(ROOT)), _dotted(node.func), node))
    return tuple(found)


def _dotted(name: ast.expr) -> str:
    if isinstance(name, ast.Attribute):
        return f"{_dotted(name.value)}.{name.attr}"
    return name.id if isinstance(name, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> str:
    return next((ast.unparse(given.value) for given in call.keywords if given.arg == name), "")


def test_files_are_loaded_as_weights_only_and_models_bring_no_code():
    loads = [(where, call) for where, name, call in calls() if name == "torch.load"]
    assert loads
    assert [where for where, call in loads if keyword(call, "weights_only") != "True"] == []
    models = [(where, call) for where, name, call in calls() if name.endswith(".from_pretrained")]
    assert models
    assert [where for where, call in models if keyword(call, "trust_remote_code") != "False"] == []
    arrays = [(where, call) for where, name, call in calls() if name == "np.load"]
    assert [where for where, call in arrays if keyword(call, "allow_pickle") != "False"] == []


def test_pickles_are_read_and_files_are_run_in_these_places_alone():
    unpickling = {where for where, name, _ in calls() if name in ("pickle.load", "pickle.loads")}
    assert unpickling == set(UNPICKLES)
    running = {where for where, name, _ in calls() if name.endswith((".exec_module", "runpy.run_path"))}
    assert running == set(RUNS_FILES)
    never = ("eval", "exec", "os.system", "yaml.unsafe_load", "yaml.full_load")
    assert not [where for where, name, _ in calls() if name in never]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> tuple[Path, Path]:
    """A model's folder, and its weights as a sharded checkpoint."""
    root = tmp_path_factory.mktemp("security")
    source = tiny_checkpoint(root / "source", layers=1, hidden=32)
    shard(source, root / "shards")
    check_metadata(root / "shards")
    return source, root / "shards"


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_a_checkpoint_that_would_run_something_is_refused(shards, tmp_path, file):
    source, good = shards
    folder = shutil.copytree(good, tmp_path / "shards")
    (folder / file).write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises((CheckpointError, pickle.UnpicklingError), match=r"system|[Ww]eights.only"):
        convert(folder, source, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_a_description_may_not_name_more_than_its_own_classes(tmp_path):
    class Inside(Touch):
        def __reduce__(self):
            return Metadata, (Touch(self.path),)

    inner = pickle.dumps(Inside(tmp_path / "ran"))
    dotted = b"\x80\x04\x8c$torch.distributed.checkpoint.metadata\x8c\tos.system\x93."
    for text in (inner, dotted, b"cos\nsystem\n.", b"cbuiltins\neval\n.", b"garbage", b""):
        (tmp_path / ".metadata").write_bytes(text)
        with pytest.raises(CheckpointError):
            check_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_no_process_of_the_run_left_in_a_store_is_not_read(tmp_path):
    store = dist.HashStore()
    store.set("ask/1/1", sealed({"role": "actor"}, b"secret", "ask/1/1"))
    assert unsealed(store.get("ask/1/1"), b"secret", "ask/1/1") == {"role": "actor"}
    forged = pickle.dumps(Touch(tmp_path / "ran"))
    for data in (forged, b"\0" * 32 + forged, sealed(Touch(tmp_path / "ran"), b"guess", "ask/1/1"), b""):
        with pytest.raises(SealError, match="'ask/1/1' that no process of it has written"):
            unsealed(data, b"secret", "ask/1/1")
    with pytest.raises(SealError):
        unsealed(store.get("ask/1/1"), b"secret", "ask/2/1")  # of another key
    assert not (tmp_path / "ran").exists()


RECIPE = "data: train.jsonl\nalgorithm: grpo\nbatch: {prompts: 2, samples_per_prompt: 2}\nactor: actor\n"


@pytest.fixture
def with_code(tmp_path) -> Path:
    """A recipe's folder whose model has a tokenizer of its own making."""
    actor = tiny_checkpoint(tmp_path / "actor", layers=1, hidden=32)
    (actor / "tokenizer_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = json.loads((actor / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenizer_own.Own", None]}}
    (actor / "tokenizer_config.json").write_text(json.dumps(config))
    config = json.loads((actor / "config.json").read_text())
    (actor / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    (tmp_path / "reward.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(*given): return 0.0\n")
    return tmp_path


def test_a_tokenizers_own_code_is_never_run_and_told_of_before(with_code):
    with pytest.raises(ValueError, match="custom code"):
        AutoTokenizer.from_pretrained(with_code / "actor", trust_remote_code=False)
    report = check_recipe(parse_recipe(RECIPE + "reward: reward.py:f\n", with_code, ["run.device=cpu"]))
    told = {row.area: row.text for row in report.rows if row.state == "problem"}
    assert "is Python code of its own, which is not run" in told["tokenizers"]
    assert not (with_code / "ran").exists()


def test_checking_a_recipe_runs_no_file_that_it_names(with_code):
    report = check_recipe(parse_recipe(RECIPE + "reward: reward.py:f\n", with_code, ["run.device=cpu"]))
    assert [row for row in report.rows if row.area == "reward"] == []
    assert not (with_code / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "reward: !!python/object/apply:os.system ['touch RAN']",
        "reward: ${python:touch RAN}",
        "reward: ${eval:open('RAN','w')}",
        "run: {dir: reward.py}\nreward: {kind: function}",
    ],
)
def test_a_recipe_itself_runs_nothing(with_code, text):
    with pytest.raises(RecipeError):
        parse_recipe(RECIPE + text.replace("RAN", str(with_code / "ran")) + "\n", with_code)
    assert not (with_code / "ran").exists()


def test_a_plan_or_cluster_file_is_plain_data(tmp_path):
    from rolemesh.placement.cluster import ClusterSpec
    from rolemesh.placement.plan import PlacementPlan

    text = f"strategy: !!python/object/apply:os.system ['touch {tmp_path / 'ran'}']\n"
    for read in (PlacementPlan.from_yaml, ClusterSpec.from_yaml):
        with pytest.raises((ValueError, yaml.YAMLError)):
            read(text)
    assert not (tmp_path / "ran").exists()


def test_a_stored_batch_that_is_a_pickle_is_refused(tmp_path):
    from rolemesh.engine.protocol import DataProto

    path = tmp_path / "batch.pt"
    path.write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"batch\.pt"):
        DataProto.load_from_disk(path)
    torch.save({"x": Touch(tmp_path / "ran")}, path)
    with pytest.raises(ValueError, match=r"batch\.pt"):
        DataProto.load_from_disk(path)
    assert not (tmp_path / "ran").exists()


def test_services_listen_on_loopback_unless_told():
    import inspect

    from rolemesh.launch import cli_services

    for serve in (cli_services.serve_rm, cli_services.serve_ref):
        assert inspect.signature(serve).parameters["host"].default == "127.0.0.1"
