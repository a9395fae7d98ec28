"""The recipe: one frozen dataclass per section; keys are declared here, in `roles.py`, `rollout_keys.py`,
`algorithm_keys.py`, `reward_keys.py` and `service_keys.py`, and nowhere else.

Each field carries its type (a `Literal` lists the choices), its default and, in the metadata made by
`key`, what it means, its unit, its bounds and what verl calls it. `config.py` builds these values from
YAML, `describe.py` prints them; both read only what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Literal

from rolemesh.launch.algorithm_keys import Algorithm
from rolemesh.launch.environment import BLOCKED, OURS, matches
from rolemesh.launch.fields import RecipeError, Section, key
from rolemesh.launch.reward_keys import Reward
from rolemesh.launch.roles import Actor, Critic, Ref
from rolemesh.launch.rollout_keys import Rollout
from rolemesh.placement.steps import step_graph

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"]
MODEL_ROLES = ("actor", "rollout", "critic", "ref", "reward")


@dataclass(frozen=True, kw_only=True)
class Run(Section):
    """How long, from where, into which folder."""

    dir: str = key(
        "",
        "Run folder: recipe, metrics, timeline, checkpoints, exported models.",
        path=True,
        shown="runs/<name of the recipe> in the working directory",
        verl="trainer.default_local_dir",
    )
    steps: int | None = key(
        None,
        "Training steps.",
        unit="steps",
        at_least=0,
        shown="from run.epochs",
        verl="trainer.total_training_steps",
    )
    epochs: int = key(
        1, "Passes over the training prompts.", unit="epochs", at_least=1, verl="trainer.total_epochs"
    )
    seed: int = key(1, "Seed of shuffling and sampling.", at_least=0, verl="data.seed")
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "Device of the workers; auto takes cuda where torch sees a GPU.", verl="trainer.device"
    )
    validate_every: int = key(
        0,
        "Validate each so many steps; 0: only before the first and after the last.",
        unit="steps",
        at_least=0,
        verl="trainer.test_freq",
    )
    save_every: int = key(
        0,
        "Save a checkpoint each so many steps and after the last; 0: none.",
        unit="steps",
        at_least=0,
        verl="trainer.save_freq",
    )
    keep_last: int | None = key(
        None,
        "Keep the newest so many checkpoints.",
        unit="checkpoints",
        at_least=1,
        shown="all",
        verl="trainer.max_actor_ckpt_to_keep",
    )
    keep_best: int = key(
        0,
        "Keep also the so many best checkpoints by best_metric, which are validated at their step.",
        unit="checkpoints",
        at_least=0,
    )
    best_metric: str = key("val/reward/mean", "Validation metric of keep_best; higher is better.")
    resume: str | None = key(
        None,
        "Go on from a checkpoint: its folder, or auto for the newest good one in the run folder, if any.",
        path=True,
        words=("auto",),
        shown="start at the first step",
        verl="trainer.resume_mode, trainer.resume_from_path",
    )
    loggers: tuple[LoggerName, ...] = key(
        ("console", "jsonl"),
        "Where metrics go: a line per step, metrics.jsonl, and services, whose packages must be installed.",
        verl="trainer.logger",
    )
    project: str = key("rolemesh", "Project of wandb, experiment of mlflow.", verl="trainer.project_name")
    name: str | None = key(
        None,
        "Name of the run in wandb and mlflow.",
        shown="that of the run folder",
        verl="trainer.experiment_name",
    )
    log_offline: bool = key(False, "wandb and mlflow send nothing: what they get stays in the run folder.")
    address: str | None = key(
        None,
        "Address of a running Ray cluster (`auto` or ip:port).",
        shown="start an own local one, stop it at the end",
        verl="ray_kwargs.ray_init.address",
    )
    timeout_s: float = key(1800.0, "Longest time one operation may take.", unit="s", above=0)
    recoveries: int = key(
        3,
        "So many losses of workers or nodes the run survives, going on from its newest checkpoint.",
        unit="losses",
        at_least=0,
    )
    elastic: bool = key(
        False, "Where lost devices do not come back, plan again on those that are left, and go on."
    )
    node_wait_s: float = key(
        300.0, "How long a run that lost devices waits for them to come back.", unit="s", above=0
    )
    silent_s: float = key(
        300.0, "A worker that answers nothing for so long is taken for dead.", unit="s", above=0
    )
    temp_dir: str | None = key(
        None,
        "Folder for Ray's session files.",
        path=True,
        shown="the system's temporary folder",
        verl="ray_kwargs.ray_init._temp_dir",
    )
    stage: str | None = key(
        None,
        "Folder on each node's own disk: models are copied into it once per node, and read from there.",
        path=True,
        shown="read where they are",
    )
    env: dict[str, str] = key(
        {}, "Environment variables of the run's processes on all nodes, such as NCCL_DEBUG."
    )
    stop_before_walltime: float | None = key(
        None,
        "So long before the job's time is over the run saves and ends, before a step that would go beyond.",
        unit="s",
        above=0,
        shown="never",
    )
    walltime: float | None = key(
        None, "Time that the run may take from its start.", unit="s", above=0, shown="until Slurm's job ends"
    )
    requeue: bool = key(False, "Where the time is over, let Slurm start the job again.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.env:
            if matches(name, (*BLOCKED, *OURS)):
                raise RecipeError(f"env.{name} is set by launchers, Ray or the run itself: leave it out")


@dataclass(frozen=True, kw_only=True)
class Cluster(Section):
    """The machines the run expects; compared with the live ones before anything starts."""

    nodes: int = key(1, "Nodes.", unit="nodes", at_least=1, verl="trainer.nnodes")
    device: str | None = key(None, "Device type of the nodes, such as h100-80 or cpu.", shown="any")
    per_node: int | None = key(
        None,
        "Devices per node; on CPU the worker slots, as many as you like.",
        unit="devices",
        at_least=1,
        shown="what the pools and layouts ask for on CPU, the GPUs present otherwise",
        verl="trainer.n_gpus_per_node",
    )


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Prompts, as files or folders of `datasets`."""

    scalar: ClassVar[str] = "train_files"

    train_files: tuple[str, ...] = key(
        doc="Training prompts: .jsonl, .parquet or .arrow files, patterns of them (`train-*.parquet`), "
        "folders that `datasets` saved.",
        path=True,
        verl="data.train_files",
    )
    val_files: tuple[str, ...] = key((), "Files with held-out prompts.", path=True, verl="data.val_files")
    prompt_key: str = key(
        "prompt", "Column with the prompt: text, or a list of chat messages.", verl="data.prompt_key"
    )
    max_prompt_tokens: int = key(
        512, "Longest prompt.", unit="tokens", at_least=1, verl="data.max_prompt_length"
    )
    overlong: Literal["filter", "truncate", "error"] = key(
        "error",
        "What to do with a longer prompt: leave it out, keep its last tokens, or stop.",
        verl="data.truncation, data.filter_overlong_prompts",
    )
    shuffle: bool = key(True, "Shuffle the training prompts each epoch.", verl="data.shuffle")
    weights: dict[str, float] = key(
        {},
        "How often an epoch uses the prompts of a source (column data_source, or name of file or folder): "
        "2 is twice, 0.5 every other one, the others in the next epoch; 1 where not given.",
    )
    val_prompts: int | None = key(
        None,
        "Use only the first so many held-out prompts.",
        unit="prompts",
        at_least=1,
        shown="all",
        verl="data.val_max_samples",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in self.weights.items():
            if not 0 <= weight < float("inf"):
                raise RecipeError(f"weights.{name} is {weight}, but must be at least 0 and finite")
        if self.weights and not self.shuffle:
            raise RecipeError("weights draws prompts at random: leave shuffle true, or weights out")


@dataclass(frozen=True, kw_only=True)
class Batch(Section):
    """How many prompts, samples and updates make one step."""

    prompts: int = key(256, "Prompts per step.", unit="prompts", at_least=1, verl="data.train_batch_size")
    samples_per_prompt: int = key(
        1, "Responses per prompt.", unit="samples", at_least=1, verl="actor_rollout_ref.rollout.n"
    )
    mini_batch_samples: int | None = key(
        None,
        "Samples per optimizer update, over all ranks.",
        unit="samples",
        at_least=1,
        shown="the whole batch: one update per epoch",
        verl="actor_rollout_ref.actor.ppo_mini_batch_size (in prompts)",
    )
    epochs: int = key(
        1, "Passes over each batch.", unit="epochs", at_least=1, verl="actor_rollout_ref.actor.ppo_epochs"
    )
    micro_batch_tokens: int = key(
        16384,
        "Tokens one rank puts through a model at once; a longer sample goes alone.",
        unit="tokens",
        at_least=1,
        verl="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )
    critic_warmup: int = key(
        0,
        "First steps in which only the critic learns (ppo).",
        unit="steps",
        at_least=0,
        verl="trainer.critic_warmup",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mini_batch_samples is not None and self.mini_batch_samples > self.samples:
            raise RecipeError(
                f"mini_batch_samples is {self.mini_batch_samples}, but a step has {self.samples} samples "
                f"({self.prompts} prompts x {self.samples_per_prompt}): at most {self.samples}"
            )

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.prompts * self.samples_per_prompt

    @property
    def mini_batch(self) -> int:
        """Samples of one optimizer update (the last of an epoch may have fewer)."""
        return self.mini_batch_samples or self.samples


@dataclass(frozen=True, kw_only=True)
class Expect(Section):
    """Response lengths to expect, for the arithmetic that `check` prints."""

    kind: Literal["lognormal"] = key("lognormal", "Distribution.")
    mean: float = key(doc="Mean.", unit="tokens", above=0)
    p95: float = key(doc="95th percentile.", unit="tokens", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p95 < self.mean:
            raise RecipeError(f"p95 is {self.p95:g}, below the mean of {self.mean:g}")


@dataclass(frozen=True, kw_only=True)
class Lengths(Section):
    """Response lengths."""

    max_response_tokens: int = key(
        512, "Longest response.", unit="tokens", at_least=1, verl="data.max_response_length"
    )
    expect: Expect | None = key(None, "Lengths to expect.", shown="all as long as allowed")


@dataclass(frozen=True, kw_only=True)
class Where(Section):
    """Which nodes a pool may use."""

    device: str | None = key(None, "Device type, such as h100-80.", shown="any")
    labels: dict[str, str] = key({}, "Ray node labels that must match.")
    resources_per_worker: dict[str, float] = key({}, "Custom Ray resources that each worker takes.")
    node_ip: str | None = key(None, "Address of the node.", shown="any")


@dataclass(frozen=True, kw_only=True)
class Pool(Section):
    """A set of devices and the roles that share it; sized by share, by devices, or by nodes x per_node."""

    later_keys: ClassVar[Mapping[str, str]] = {"python": "workers run the Python of the driver"}

    roles: tuple[str, ...] = key(doc="Roles on this pool: actor, rollout, critic, ref, reward.")
    share: Fraction | None = key(None, "Part of the cluster, such as 1/2.", above=0, at_most=1, shown="none")
    devices: int | None = key(None, "Devices, wherever they are.", unit="devices", at_least=1, shown="none")
    nodes: int | None = key(None, "Nodes.", unit="nodes", at_least=1, shown="none")
    per_node: int | None = key(None, "Devices on each node.", unit="devices", at_least=1, shown="none")
    where: Where = key(Where, "Which nodes.")

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [role for role in self.roles if role not in MODEL_ROLES]
        if unknown or not self.roles:
            raise RecipeError(f"roles is {list(self.roles)}: name one or more of {', '.join(MODEL_ROLES)}")
        if (self.nodes is None) != (self.per_node is None):
            raise RecipeError("nodes and per_node go together: give both or none")
        sizes = [n for n in ("share", "devices", "nodes") if getattr(self, n) is not None]
        if len(sizes) != 1:
            got = " and ".join(sizes) or "none"
            raise RecipeError(f"share, devices, or nodes and per_node: give the size once (got {got})")


@dataclass(frozen=True, kw_only=True)
class Pin(Section):
    """What the user fixes, wishes or would rather not have, as `actor+ref together` or `critic tp=8`."""

    must: tuple[str, ...] = key((), "Holds in every plan.")
    prefer: tuple[str, ...] = key((), "Holds unless the step gets over 5% longer.")
    avoid: tuple[str, ...] = key((), "Does not hold unless the step gets over 5% longer.")


@dataclass(frozen=True, kw_only=True)
class Placement(Section):
    """Which roles share which devices: a strategy by name, explicit pools, or a plan file."""

    scalar: ClassVar[str] = "strategy"

    strategy: Literal["colocate", "split", "standalone", "auto"] | None = key(
        None,
        "colocate: every role on all devices; split: actor side on one half, critic side on the other; "
        "standalone: each role on devices of its own; auto: what the planner finds fastest.",
        shown="colocate, where neither pools nor a plan are given",
    )
    plan: str | None = key(
        None, "A plan file, run as it stands: `rolemesh plan --out` writes one.", path=True, shown="none"
    )
    pin: Pin = key(Pin, "What strategy auto has to keep to.")
    pools: dict[str, Pool] = key(
        {}, "Pools by name.", verl="resource_pool_spec and mapping of ResourcePoolManager"
    )


@dataclass(frozen=True, kw_only=True)
class Schedule(Section):
    """When operations run."""

    overlap: bool = key(True, "Run operations of different pools at the same time.")
    staleness: int = key(
        0,
        "Updates that the weights which make a sample may lack when it is trained on: 0 generates and trains "
        "in turn, 1 generates for the next step meanwhile (one step off), more also hands the weights over "
        "less often, each so many steps.",
        unit="steps",
        at_least=0,
    )


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """A whole recipe. `config.load_recipe` fills what depends on other keys and checks across sections."""

    run: Run = key(Run, "Length, folder, seed, device.")
    cluster: Cluster = key(Cluster, "Machines.")
    data: Data = key(doc="Prompts.")
    algorithm: Algorithm = key(Algorithm, "Estimator and losses.")
    batch: Batch = key(Batch, "Batch arithmetic.")
    lengths: Lengths = key(Lengths, "Response lengths.")
    actor: Actor = key(doc="Trained model.")
    rollout: Rollout = key(Rollout, "Generation.")
    critic: Critic = key(Critic, "Value model.")
    ref: Ref = key(Ref, "Reference policy.")
    reward: Reward = key(doc="Rewards.")
    placement: Placement = key(Placement, "Pools.")
    schedule: Schedule = key(Schedule, "Order and overlap.")
    smoke: bool = field(default=False, compare=False)  # `train --smoke`: see `smoke_recipe`
    source: str = field(default="", compare=False)  # where it was read from
    given: frozenset[str] = field(default=frozenset(), compare=False)  # dotted keys that were written
    set_aside: Mapping[str, str] = field(
        default_factory=dict, compare=False
    )  # written, useless by an override

    @property
    def has_critic(self) -> bool:
        return "critic" in step_graph(self.algorithm.step).roles()

    @property
    def has_ref(self) -> bool:
        return self.algorithm.kl.in_ != "none"

    @property
    def judge_is_placed(self) -> bool:
        """Whether the reward is a judge whose model has devices of this run."""
        return self.reward.kind == "judge" and self.reward.path is not None

    @property
    def engine_roles(self) -> tuple[str, ...]:
        """The roles that an inference engine runs, not Megatron workers."""
        return ("rollout", "reward") if self.judge_is_placed else ("rollout",)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that hold a model in this run, and so need a pool."""
        present = {
            "critic": self.has_critic,
            "ref": self.has_ref and self.ref.kind == "model",
            "reward": self.reward.kind == "model" or self.judge_is_placed,
        }
        return tuple(role for role in MODEL_ROLES if present.get(role, True))
