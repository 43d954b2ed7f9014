"""The types of a checked config: what every other part of rolegraph is handed, as plain and immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from rolegraph.checkpoints.config import CheckpointConfig
from rolegraph.data.config import DataConfig
from rolegraph.evaluation.config import EvalConfig
from rolegraph.health import HealthConfig
from rolegraph.models.config import ModelConfig
from rolegraph.placement import PlacementConfig
from rolegraph.rewards.config import RewardConfig

if TYPE_CHECKING:
    from rolegraph.algorithms.options import Needs


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Trackers beside `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    wandb: bool = False
    trackio: bool = False
    samples_every: Annotated[int, Ge(0)] = 10
    """Optimizer steps between two files of samples; 0 writes none."""

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are on."""
        return tuple(name for name in ("tensorboard", "wandb", "trackio") if getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    """The keys at the top level, beside the nodes of the roles and of the algorithm."""

    seed: Annotated[int, Ge(0)] = 0
    """Of everything drawn in the run: data order, samples, initial weights."""
    deterministic: bool = False
    """Same seed, same figures bit for bit on a CPU; costs speed."""
    ray_exp_name: str | None = None
    """Names the run, its output folder, and its actors on a cluster that several runs share."""
    use_ray: bool = True
    """false runs every role in this process, for debugging, where the graph allows it."""
    output_dir: str | None = None
    """Where the run writes; null: outputs/NAME/TIME."""
    resume: bool | str = False
    """true: go on in `output_dir` behind its newest checkpoint (a sampling run: with what is missing there); a run that
    is finished does nothing. auto: that, or begin where there is nothing to go on from. A path: begin in `output_dir`
    from this checkpoint, or from the newest of this run."""
    max_steps: Annotated[int, Ge(1)] | None = 100
    """Optimizer steps of the run, a warm start's aside; null: one pass over the dataset."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    reward: RewardConfig | None = None
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    health: HealthConfig = field(default_factory=HealthConfig)


@dataclass(frozen=True)
class Spec:
    """A class by its import path, and its checked config."""

    target: str
    config: Any
    """An instance of the class's `Config` dataclass."""

    @property
    def name(self) -> str:
        """The bare class name."""
        return self.target.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run: checked, with derived values filled in."""

    seed: int
    deterministic: bool
    ray_exp_name: str | None
    use_ray: bool
    output_dir: str | None
    resume: bool | str
    max_steps: int | None
    algorithm: Spec
    roles: Mapping[str, Spec]
    placement: PlacementConfig
    data: DataConfig
    model: ModelConfig
    reward: RewardConfig | None
    logger: LoggerConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    health: HealthConfig
    python_path: tuple[str, ...] = ()
    """Folders with the user's own code (`--config-dir`), for the `sys.path` of every actor."""
    tree: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The same as plain containers, all defaults filled in, as the run's folder keeps it."""

    @property
    def started(self) -> dict[str, Spec]:
        """The roles with actors of their own: not those that another role's actors play."""
        return {role: spec for role, spec in self.roles.items() if not getattr(spec.config, "binds", None)}

    @property
    def data_needs(self) -> Needs:
        """How rows are read: as text where the sampler takes text, else as the algorithm says."""
        sampler = self.roles.get("sampler")
        if sampler is not None and getattr(sampler.config, "takes_text", False):
            return "chat"
        needs: Needs = getattr(self.algorithm.config, "data_needs", "prompt")
        return needs

    @property
    def keeps_reference(self) -> bool:
        """Whether the train role keeps the weights of the start: an algorithm or a teacher compares with them."""
        wanted = getattr(self.algorithm.config, "needs_reference", False)
        return bool(wanted) or any(getattr(spec.config, "keeps_reference", False) for spec in self.roles.values())

    def with_role(self, role: str, **changes: Any) -> RunConfig:
        """A copy with some fields of one role's config changed."""
        spec = self.roles[role]
        return replace(self, roles={**self.roles, role: Spec(spec.target, replace(spec.config, **changes))})

    def adding(self, role: str, target: str, config: Any) -> RunConfig:
        """A copy with one more role."""
        return replace(self, roles={**self.roles, role: Spec(target, config)})

    def with_model_path(self, path: str) -> RunConfig:
        """A copy whose roles that name no model, or no policy, of their own read it from `path`."""
        config = self
        for role, spec in self.roles.items():
            named = [name for name in ("model", "policy") if getattr(spec.config, name, path) is None]
            if named:
                config = config.with_role(role, **dict.fromkeys(named, path))
        return config
