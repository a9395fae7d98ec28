"""YAML and dotted overrides to a checked `Recipe`, and back.

Two passes: trees (plain mappings: overrides merged, scalars expanded, paths absolute, interpolation
done), then values (the dataclasses of `schema.py`). What needs several keys is checked at the end.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rolemesh.launch.algorithm_presets import preset_keys, with_preset
from rolemesh.launch.fields import Key, RecipeError, Section, declared, members, section_of, without_none
from rolemesh.launch.reward_keys import Part, PartKind, Reward, RewardKind
from rolemesh.launch.roles import Actor, Critic, Ref
from rolemesh.launch.rules import check_across, useless_keys
from rolemesh.launch.schema import Recipe
from rolemesh.launch.suggest import leaves, unknown_key
from rolemesh.placement.hints import did_you_mean

Tree = dict[str, Any]
S = TypeVar("S", bound=Section)
FUNCTION_PATH = re.compile(r"\.py:[A-Za-z_]\w*$")
_SIZES = ("batch", "lengths")  # sections whose defaults a step's time and memory depend on most


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `a.b=value` overrides (values are YAML).

    Relative paths in the file are relative to the file's folder; in overrides, to the working
    directory, where a shell completes them. Raises RecipeError for a file or key that can't be used.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"no recipe at {path}: give the path of a YAML file")
    return parse_recipe(path.read_text(), path.absolute().parent, overrides, source=str(path))


def parse_recipe(
    text: str, folder: Path, overrides: Sequence[str] = (), source: str = "recipe.yaml"
) -> Recipe:
    """`load_recipe` for text that stands in `folder`.

    Keys of the text that an override makes useless (`algorithm.name=grpo`: the critic's) are set aside.
    """
    tree = read_tree(Recipe, text, folder, overrides)
    recipe = _read(tree, source)
    if overrides and (lost := _lost_to_overrides(recipe, text, folder, overrides)):
        recipe = replace(_read(_without(tree, lost), source), set_aside=lost)
    check_across(recipe)
    return recipe


def _read(tree: Tree, source: str) -> Recipe:
    recipe = _filled(build(Recipe, with_preset(tree)), Path(source).stem)
    return replace(recipe, source=source, given=frozenset(leaves(tree)))


def _lost_to_overrides(recipe: Recipe, text: str, folder: Path, overrides: Sequence[str]) -> dict[str, str]:
    """Keys of the text that count for nothing with the overrides, but do without: each with the reason."""
    idle, own = useless_keys(recipe), frozenset(key for item in overrides for key in leaves(_override(item)))
    lost = {
        key: reason
        for path, reason in idle.items()
        for key in recipe.given
        if covers(path, key) and not any(covers(written, key) for written in own)
    }
    try:
        idle_alone = useless_keys(_read(read_tree(Recipe, text, folder), "")) if lost else {}
    except RecipeError:  # the text needs the overrides
        return {}
    return {
        key: why for key, why in sorted(lost.items()) if not any(covers(path, key) for path in idle_alone)
    }


def _without(tree: Mapping[str, Any], lost: Collection[str], prefix: str = "") -> Tree:
    """The tree without the leaves `lost`, and without what is left empty by that."""
    kept: Tree = {}
    for name, value in tree.items():
        inner = _without(value, lost, f"{prefix}{name}.") if isinstance(value, Mapping) and value else value
        if f"{prefix}{name}" not in lost and (inner or inner == value):
            kept[name] = inner
    return kept


def read_tree(root: type[Section], text: str, folder: Path, overrides: Sequence[str] = ()) -> Tree:
    """The keys of a `root` that are written in YAML and overrides: in full, with paths absolute."""
    try:
        written = yaml.safe_load(text) or {}
        if not isinstance(written, Mapping):
            raise RecipeError(f"the recipe is {written!r}, but must be a mapping of keys")
        trees = [(written, folder)]
        trees += [(_override(item), Path.cwd()) for item in overrides]
        merged = OmegaConf.merge(*(OmegaConf.create(_normal(root, tree, base)) for tree, base in trees))
        tree = OmegaConf.to_container(merged, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(
            f"not readable as YAML with interpolation: {str(error).partition(chr(10) + ' ')[0]}"
        ) from error
    return dict(_normal(root, tree, folder))


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML with its constant defaults written out: loading it gives an equal recipe.

    Left out are keys that another makes useless, and defaults that follow from other keys.
    """
    return written_out(recipe, recipe.given, useless_keys(recipe))


def written_out(root: Section, given: Collection[str], useless: Collection[str]) -> str:
    """`to_yaml` of any root section: `given` keys were written, `useless` ones count for nothing."""
    follows = {k.path for k in declared(type(root)) if k.metadata["shown"] and k.path != "run.dir"}
    skip = {path for path in follows if not any(covers(path, key) for key in given)} | set(useless)
    return yaml.safe_dump(_dump(root, "", skip), sort_keys=False, width=100)


def list_defaults(recipe: Recipe) -> list[str]:
    """A line `default: section: key = value, ...` for what was left to its default and counts in this run."""
    return [f"default: {section}: {', '.join(items)}" for section, items in _left_out(recipe).items()]


def mention_defaults(recipe: Recipe) -> list[str]:
    """The lines of `list_defaults` for the sizes of a step, and one with how many keys are left besides."""
    left_out = _left_out(recipe)
    lines = [f"default: {name}: {', '.join(items)}" for name, items in left_out.items() if name in _SIZES]
    n_others = sum(len(items) for name, items in left_out.items() if name not in _SIZES)
    return [*lines, *([f"default: {n_others} other keys; --defaults lists them"] if n_others else [])]


def _left_out(recipe: Recipe) -> dict[str, list[str]]:
    """`key = value` of what was left to its default and counts in this run, by section."""
    idle = useless_keys(recipe)
    sections: dict[str, list[str]] = {}
    for k in declared(Recipe):
        section, _, name = k.path.rpartition(".")
        absent = "NAME" in k.path or (section and value_at(recipe, section) is None)
        if section_of(k.type) or absent or any(covers(path, k.path) for path in idle):
            continue
        if not any(covers(k.path, given) for given in recipe.given):
            by_name = k.path in preset_keys()
            value = show(value_at(recipe, k.path)) if by_name else k.metadata["shown"] or show(k.default)
            sections.setdefault(section, []).append(f"{name} = {value}")
    return sections


def covers(path: str, key: str) -> bool:
    """Whether the dotted `key` is `path` or stands below it."""
    return key == path or key.startswith(path + ".")


def value_at(recipe: Recipe, path: str) -> Any:
    """The value of a dotted key; None below an optional section that is absent."""
    value: Any = recipe
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name, None) if hasattr(value, name) else getattr(value, name + "_")
    return value


def show(value: Any) -> str:
    """A value as it is written in a recipe."""
    return yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _override(item: str) -> Tree:
    name, equals, text = item.partition("=")
    if not equals:
        raise RecipeError(f"override {item!r} has no '=': write key=value, such as actor.layout.tp=2")
    value = yaml.safe_load(text)
    for part in reversed(name.strip().split(".")):
        value = {part: value}
    return value


def with_absolute_paths(tree: Tree, folder: Path) -> Tree:
    """A recipe's tree that stands in `folder`, so that it can be read elsewhere."""
    return dict(_normal(Recipe, tree, folder))


def _normal(section: type[Section], tree: Any, base: Path) -> Any:
    """Bare values expanded to mappings and paths made absolute; what waits for interpolation stays."""
    if isinstance(tree, str) and "${" in tree:
        return tree
    if not isinstance(tree, Mapping):
        if tree is None or not section.scalar:
            return tree
        tree = {section.scalar: tree}
    known = members(section)
    out: Tree = {}
    for name, value in tree.items():
        f, hint = known.get(name, (None, None))
        inner = section_of(hint)
        if inner and typing.get_origin(hint) is dict and isinstance(value, Mapping):
            value = {key: _normal(inner, item, base) for key, item in value.items()}
        elif inner:
            value = _normal(inner, value, base)
        elif f is not None and f.metadata["path"] and value not in f.metadata["words"]:
            value = [_absolute(v, base) for v in value] if isinstance(value, list) else _absolute(value, base)
        out[name] = value
    return out


def _absolute(value: Any, base: Path) -> Any:
    if not isinstance(value, str) or not value or "${" in value:
        return value
    return os.path.normpath(base / Path(value).expanduser())


def _filled(recipe: Recipe, name: str) -> Recipe:
    """The recipe with the defaults that follow from other keys; `name` names the run folder."""
    strategy = recipe.placement.strategy
    if not recipe.placement.pools and not recipe.placement.plan:
        strategy = strategy or "colocate"

    overlong, longest = recipe.algorithm.overlong, recipe.lengths.max_response_tokens
    if overlong.buffer_tokens is None:
        fifth = max(longest // 5, 1) if recipe.algorithm.name == "dapo" else 0
        overlong = replace(overlong, buffer_tokens=fifth)
    norm_tokens = recipe.algorithm.norm_tokens or longest
    sampling = recipe.algorithm.dynamic_sampling
    if sampling.on is None:
        sampling = replace(sampling, on=recipe.algorithm.name == "dapo")

    correction = recipe.algorithm.rollout_correction
    if correction.weights is None:
        mixed = recipe.schedule.staleness or recipe.rollout.partial
        correction = replace(correction, weights="token" if mixed else "none")

    def tokens(role: Actor | Critic | Ref | Reward) -> int:
        return role.micro_batch_tokens or recipe.batch.micro_batch_tokens

    ref_path, ref_kind = recipe.ref.path, recipe.ref.kind
    if ref_kind is None:
        ref_kind = "actor" if recipe.actor.lora.rank and ref_path is None else "model"
    if ref_kind == "model":
        ref_path = ref_path or recipe.actor.path
    return replace(
        recipe,
        algorithm=replace(
            recipe.algorithm,
            overlong=overlong,
            norm_tokens=norm_tokens,
            dynamic_sampling=sampling,
            rollout_correction=correction,
        ),
        run=replace(recipe.run, dir=recipe.run.dir or os.path.abspath(Path("runs") / name)),
        actor=replace(recipe.actor, micro_batch_tokens=tokens(recipe.actor)),
        critic=replace(recipe.critic, micro_batch_tokens=tokens(recipe.critic)),
        ref=replace(recipe.ref, kind=ref_kind, path=ref_path, micro_batch_tokens=tokens(recipe.ref)),
        reward=replace(
            recipe.reward,
            kind=_reward_kind(recipe.reward),
            micro_batch_tokens=tokens(recipe.reward),
            parts={name: _part(name, part) for name, part in recipe.reward.parts.items()},
        ),
        placement=replace(recipe.placement, strategy=strategy),
    )


def _reward_kind(reward: Reward) -> RewardKind:
    if reward.kind == "model" and reward.path and FUNCTION_PATH.search(reward.path):
        raise RecipeError(
            f"reward.path is {reward.path}, a function, but reward.kind is model: leave kind out"
        )
    if reward.kind is not None:
        return reward.kind
    return "function" if reward.path and FUNCTION_PATH.search(reward.path) else "model"


def _part(name: str, part: Part) -> Part:
    if part.kind is not None:
        return part
    if not part.path or not FUNCTION_PATH.search(part.path):
        choices = ", ".join(typing.get_args(PartKind))
        raise RecipeError(
            f"reward.parts.{name}.kind is missing: {choices} (a path file.py:name is a function)"
        )
    return replace(part, kind="function")


def build(section: type[S], tree: Any, prefix: str = "", root: type[Section] | None = None) -> S:
    """The section that a tree describes; `prefix` is its place in `root`. Raises RecipeError."""
    root = root or section
    if not isinstance(tree, Mapping):
        raise RecipeError(f"{prefix.rstrip('.') or 'the recipe'} is {tree!r}, but must be a mapping of keys")
    known = members(section)
    values = {}
    for name, value in tree.items():
        if name in section.later_keys:
            raise RecipeError(f"{prefix}{name} is not in this version: {section.later_keys[name]}")
        if name not in known:
            raise RecipeError(unknown_key(f"{prefix}{name}", value, list(known), root))
        f, hint = known[name]
        if value is not None or without_none(hint) is not hint:
            values[f.name] = _value(hint, value, prefix + name, f.metadata["later"], root)
    for name, (f, hint) in known.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            inner = section_of(hint)
            what = f"{name}.{inner.scalar}" if inner and inner.scalar else name
            raise RecipeError(f"{prefix}{what} is missing: {_doc(root, prefix + what)}")
    try:
        return section(**values)
    except RecipeError as error:
        raise RecipeError(f"{prefix}{error}") from None


def _doc(section: type[Section], path: str) -> str:
    generic = re.sub(r"\b(pools|parts)\.[^.]+", r"\1.NAME", path)
    return next(k.metadata["doc"] for k in declared(section) if k.path == generic)


def _value(hint: Any, value: Any, path: str, later: Mapping[Any, str], root: type[Section]) -> Any:
    """`value` as the declared type, numbers read from text too (YAML reads 1e-6 as text)."""
    if value is None:
        return None
    if value in later if isinstance(value, str | int) else False:
        raise RecipeError(f"{path}: {value} is not in this version: {later[value]}")
    hint = without_none(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value not in args or isinstance(value, bool):
            choices = [str(arg) for arg in args]
            raise RecipeError(
                f"{path} is {value!r}, but must be {' or '.join(choices)}{did_you_mean(value, choices)}"
            )
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_value(args[0], item, f"{path}[{i}]", {}, root) for i, item in enumerate(items))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{path} is {value!r}, but must be a mapping of names")
        return {str(name): _value(args[1], item, f"{path}.{name}", {}, root) for name, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Section):
        return build(hint, value, path + ".", root)
    return _scalar(hint, value, path)


_WORDS = {int: "a whole number", float: "a number", Fraction: "a fraction such as 1/2", bool: "true or false"}


def _scalar(hint: Any, value: Any, path: str) -> Any:
    try:
        if isinstance(value, Mapping | list) or (hint is bool) != isinstance(value, bool):
            raise ValueError
        if hint is int:
            number = float(value)
            if number != int(number):
                raise ValueError
            return int(value) if not isinstance(value, str) or value.lstrip("+-").isdigit() else int(number)
        return Fraction(str(value)) if hint is Fraction else hint(value)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise RecipeError(f"{path} is {value!r}, but must be {_WORDS.get(hint, 'text')}") from None


def _dump(section: Section, prefix: str, skip: set[str]) -> Tree:
    out: Tree = {}
    for name, (f, _) in members(type(section)).items():
        value = getattr(section, f.name)
        if prefix + name in skip:
            continue
        if isinstance(value, Section):
            value = _dump(value, f"{prefix}{name}.", skip)
        elif isinstance(value, dict) and any(isinstance(v, Section) for v in value.values()):
            value = {k: _dump(v, f"{prefix}{name}.{k}.", skip) for k, v in value.items()}
        if value not in ({}, None) or f.default is not None:
            out[name] = _plain(value)
    return {name: value for name, value in out.items() if value != {}}


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Key | Section):
        return {}
    return list(value) if isinstance(value, tuple) else value
