"""Rules across fields and nodes, each a small function, and the values that follow from others.

A role's or an algorithm's Config adds rules of its own by `problems()` (its fields alone) or `check(run)` (the whole
run), both yielding one sentence a fault that begins with the key.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterator

from rolegraph.algorithms.distillation import TEACHER_KEY
from rolegraph.config.checkpoint_rules import checkpoints_can_be_made, checkpoints_that_stay, resuming_is_possible
from rolegraph.config.eval_rules import eval_sets_have_what_they_need, evaluation_is_due, rollout_has_work
from rolegraph.config.eval_sets import reward_of, with_scorers
from rolegraph.config.model_rules import experts_are_whole, positions_suffice, room, sizes_divide
from rolegraph.config.reward_rules import text_is_enough
from rolegraph.config.schema import RunConfig
from rolegraph.config.targets import fields_in_source
from rolegraph.config.turn_rules import algorithm_roles, needs_sleep_mode, turns_make_room
from rolegraph.placement import Plan, requests
from rolegraph.placement.memory import USABLE
from rolegraph.role import is_scorer, is_teacher


def broken(run: RunConfig, *, elsewhere: bool = False) -> Iterator[str]:
    """A sentence for every rule the run breaks; `elsewhere`: it is planned for other machines than this one."""
    for rule in RULES:
        if not (elsewhere and rule in ABOUT_THIS_INSTALLATION):
            yield from rule(run)
    for spec in (run.algorithm, *run.roles.values()):
        if hasattr(spec.config, "check"):
            yield from spec.config.check(run)


def roles_take_part(run: RunConfig) -> Iterator[str]:
    """The algorithm's roles are all there, and no others."""
    try:
        roles, prefixes = algorithm_roles(run.algorithm.target)
    except Exception as error:  # a user's module may raise anything
        yield f"algorithm._target_={run.algorithm.target} cannot be read: {type(error).__name__}: {error}"
        return
    for role, (_, optional) in roles.items():
        if role not in run.roles and not optional:
            yield f"{run.algorithm.name} needs the role `{role}`: choose one with {role}=NAME"
    for role in run.roles:
        if role not in roles and not role.startswith(tuple(prefixes)):
            yield f"{role}: {run.algorithm.name} uses no role `{role}` (it uses {', '.join(roles)}): set {role}=null"


def colocated_roles_exist(run: RunConfig) -> Iterator[str]:
    """Colocate groups name roles of this run."""
    for index, group in enumerate(run.placement.colocated):
        for role in dict.fromkeys(group):
            if role not in run.roles:
                yield (
                    f"placement.colocate_groups[{index}] names `{role}`, which takes no part in this run; its roles "
                    f"are {', '.join(run.roles)}. Use placement=separate, or list those"
                )


def workers_are_roles(run: RunConfig) -> Iterator[str]:
    """Device groups name roles of this run."""
    if run.placement.device_groups is not None:
        yield from run.placement.device_groups.strangers(list(run.roles))


def roles_ask_for_something(run: RunConfig) -> Iterator[str]:
    """Numbers of ranks, devices and cores are none that placement would take for null, or for less than nothing."""
    for role, spec in run.roles.items():
        for key, least in (("ranks", 1), ("replicas", 1), ("gpus", 0), ("cpus", 0)):
            value = getattr(spec.config, key, None)
            if value is not None and value < least:
                yield f"{role}.{key}={value} must be at least {least}, or null"
        replicas, ranks = (getattr(spec.config, key, None) for key in ("replicas", "ranks"))
        if None not in (replicas, ranks) and replicas != ranks:
            yield f"{role}.replicas={replicas} and {role}.ranks={ranks} name the same number: give one"


def context_fits(run: RunConfig) -> Iterator[str]:
    """Engines have room for the longest prompt and the longest response."""
    for role, spec in run.roles.items():
        need, given = room(run, role), getattr(spec.config, "max_model_len", None)
        if need is not None and given is not None and given < need.tokens:
            yield f"{role}.max_model_len={given} is less than {need}: set it to {need.tokens}, or to null"


def context_parallelism_works(run: RunConfig) -> Iterator[str]:
    """Context parallelism needs Transformer Engine."""
    for role, spec in run.roles.items():
        size = getattr(spec.config, "context_parallel_size", 1)
        if size > 1 and importlib.util.find_spec("transformer_engine") is None:
            yield (
                f"{role}.context_parallel_size={size} needs Transformer Engine, whose attention exchanges keys and "
                "values between ranks, and it is not installed: set it to 1, or install the extra `gpu`"
            )


def rewards_have_a_role(run: RunConfig) -> Iterator[str]:
    """Reward functions and the role that runs them come together."""
    scorers = [role for role, spec in run.roles.items() if hasattr(spec.config, "reward")]
    evaluated = any(each.reward is None and reward_of(run, each) for each in run.eval.drawing.values())
    if run.reward is not None and not scorers and not evaluated:
        others = " or ".join(role for role in run.roles if is_scorer(role))
        beside = f" (or +orm@orm_functions=functions, to score beside {others})" if others else ""
        yield (
            "reward is configured, and no role runs reward functions: set reward=null, or add orm=functions" + beside
        )
    for role in scorers:
        if run.reward is None and run.roles[role].config.reward is None:
            yield f"{role} has no reward functions: choose some with reward=NAME, or set reward.reward_funcs"


def every_rank_has_rows(run: RunConfig) -> Iterator[str]:
    """A step has at least a row for each data-parallel rank."""
    size = getattr(run.algorithm.config, "global_batch_size", None)
    if size is None or "train" not in run.roles:
        return
    (train,) = requests({"train": run.roles["train"]})
    ranks = _processes(run).get("train", train.actors) // train.model_parallel
    if size < ranks:
        yield (
            f"algorithm.global_batch_size={size} leaves some of the {ranks} data-parallel ranks of train without a "
            f"row: set it to {ranks} or more, or lower {train.key}"
        )


def _processes(run: RunConfig) -> dict[str, int]:
    """The processes of each role that device groups name."""
    named = run.placement.device_groups
    return {role: group.processes for role, group in named.for_roles(run.roles).workers().items()} if named else {}


def schedules_end(run: RunConfig) -> Iterator[str]:
    """A learning rate that falls has an end, and one that does not fall has none."""
    for role, spec in run.roles.items():
        schedule = getattr(spec.config, "lr_schedule", None)
        if schedule is None:
            continue
        if schedule == "constant":
            for key in ("decay_steps", "min_lr"):
                if getattr(spec.config, key):
                    yield f"{role}.{key} has no effect with lr_schedule=constant: set {role}.lr_schedule, or remove it"
        if schedule != "constant" and run.max_steps is None and spec.config.decay_steps is None:
            yield (
                f"{role}.lr_schedule={schedule} ends with the run, and max_steps=null leaves that to the dataset: set "
                f"{role}.decay_steps, or max_steps"
            )


def raw_text_is_no_chat(run: RunConfig) -> Iterator[str]:
    """What is about chats has no say where rows are raw text."""
    if getattr(run.algorithm.config, "data_needs", None) != "text":
        return
    if run.data.source == "reasoning_gym":
        yield (
            f"data.source=reasoning_gym has questions and answers, and {run.algorithm.name} trains on a column `text`: "
            "choose data=jsonl, parquet or huggingface"
        )
    for key in ("system_prompt", "chat_template", "chat_template_kwargs"):
        if getattr(run.data, key):
            yield f"data.{key} has no effect: {run.algorithm.name} trains on raw text, without a chat: remove it"


def rows_name_their_teacher(run: RunConfig) -> Iterator[str]:
    """With several teachers, rows can say which one they have. What files say is known once they are read."""
    teachers = [role for role in run.roles if is_teacher(role)]
    made = run.data.source == "reasoning_gym" and not run.data.preprocessors
    if len(teachers) > 1 and made and TEACHER_KEY not in run.data.columns:
        yield (
            f"{len(teachers)} teachers take part ({', '.join(teachers)}), and rows of data.source=reasoning_gym have "
            f"no column {TEACHER_KEY} that says which one a row has: add it by data.preprocessors, or keep one teacher"
        )


def chats_are_not_tokenised(run: RunConfig) -> Iterator[str]:
    """What is about tokens has no say where rows are read as text: for a service, or with candidates made by one."""
    if run.data_needs != "chat":
        return
    for key in ("chat_template", "chat_template_kwargs", "max_teacher_prompt_length"):
        if getattr(run.data, key):
            yield f"data.{key} has no effect: prompts are text, and the service has a template of its own: remove it"
    if run.data.truncation_strategy != "drop":
        yield "data.truncation_strategy has no effect: prompts are read as text, however long: remove it"


def free_fields_are_known(run: RunConfig) -> Iterator[str]:
    """Keys that a role hands on to a library are fields there, as far as the library is installed.

    A role's Config names them by a class attribute `fields_of`: the key of a mapping, and the dataclasses whose fields
    it may hold.
    """
    for role, spec in run.roles.items():
        for key, targets in getattr(spec.config, "fields_of", {}).items():
            if not getattr(spec.config, key):
                continue  # reading the library's source takes longer than everything else here
            known = [fields_in_source(target) for target in targets]
            if any(fields is None for fields in known):
                continue
            names = sorted(set().union(*(fields or () for fields in known)))
            for name in getattr(spec.config, key):
                if name not in names:
                    classes = " or ".join(target.rpartition(".")[2] for target in targets)
                    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    yield f"{role}.{key}.{name} is no field of {classes}{hint}"


def overlap_has_devices(run: RunConfig) -> Iterator[str]:
    """What generates while the trainer trains does not share its devices, and gives up exact reproduction.

    A teacher may share them: it has its turn between two steps, while the next samples are drawn elsewhere.
    """
    staleness = getattr(run.algorithm.config, "max_staleness", 0)
    if not staleness:
        return
    for group in run.placement.sharing(run.roles):
        busy = next((role for role in ("train", "rollout") if role in group), None)
        waits = [role for role in group if role == busy or (busy == "train" and is_teacher(role))]
        others = " and ".join(role for role in dict.fromkeys(group) if role not in waits)
        if busy and others:
            what = "while train does" if busy == "train" else "at its pace, while weights come to rollout"
            yield (
                f"algorithm.max_staleness={staleness} lets {others} work {what}, and placement puts them on the same "
                "devices, where they take turns: set placement=separate (or device groups of their own), or "
                "algorithm.max_staleness=0"
            )
    if run.deterministic:
        yield (
            f"deterministic=true needs algorithm.max_staleness=0: with {staleness}, which weights draw a token depends "
            "on when the trainer was done"
        )


PROCESS_NUMBERS = (
    "ranks",
    "replicas",
    "gpus",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "tensor_parallel_size",
)
"""Keys of a role that ask for several processes."""


def one_process_suffices(run: RunConfig) -> Iterator[str]:
    """Without Ray there is one rank and one replica."""
    if run.use_ray:
        return
    for role, spec in run.roles.items():
        for key in PROCESS_NUMBERS:
            value = getattr(spec.config, key, None)
            if value is not None and value > 1:
                yield f"{role}.{key}={value} needs processes of its own, and use_ray is false: set it to 1"
    for role, count in _processes(run).items():
        if count > 1:
            yield (
                f"placement.device_groups has {count} processes for {role}, and use_ray is false: give its group one, "
                "or leave device_groups out"
            )


ABOUT_THIS_INSTALLATION = (context_parallelism_works,)
"""Rules that ask what is installed here."""

RULES: list[Callable[[RunConfig], Iterator[str]]] = [
    roles_take_part,
    resuming_is_possible,
    checkpoints_can_be_made,
    checkpoints_that_stay,
    colocated_roles_exist,
    workers_are_roles,
    turns_make_room,
    roles_ask_for_something,
    context_fits,
    positions_suffice,
    sizes_divide,
    experts_are_whole,
    context_parallelism_works,
    rewards_have_a_role,
    text_is_enough,
    every_rank_has_rows,
    schedules_end,
    raw_text_is_no_chat,
    rows_name_their_teacher,
    chats_are_not_tokenised,
    free_fields_are_known,
    one_process_suffices,
    overlap_has_devices,
    evaluation_is_due,
    eval_sets_have_what_they_need,
    rollout_has_work,
]


def derive(run: RunConfig) -> RunConfig:
    """Fill in what is null and follows from the rest: seeds, lengths, rewards, reference weights, roles that score."""
    run = with_scorers(run)
    follows = {
        "seed": run.seed,
        "reward": run.reward,
        "reference": "initial" if run.keeps_reference else None,
        "decay_steps": run.max_steps,
    }
    for role, spec in run.roles.items():
        need = room(run, role)
        changes = {
            name: value
            for name, value in {**follows, "max_model_len": need and need.tokens}.items()
            if value is not None and getattr(spec.config, name, value) is None
        }
        if changes:
            run = run.with_role(role, **changes)
    return run


def settle(run: RunConfig, plan: Plan) -> RunConfig:
    """Fill in what follows from the plan, on GPUs: an engine's share of the memory is its share of the device.

    And whether it has to be able to give it back. And what a role's config, by `settled(run)`, takes from other roles.
    """
    for role, spec in run.started.items():
        if hasattr(spec.config, "settled"):
            run = run.with_role(role, **spec.config.settled(run))
        slot = plan.roles[role][0]
        follows = {
            "gpu_memory_utilization": round(USABLE * slot.share, 4),
            "enable_sleep_mode": needs_sleep_mode(run, role),
        }
        changes = {name: value for name, value in follows.items() if getattr(spec.config, name, value) is None}
        if slot.device == "cuda" and changes:
            run = run.with_role(role, **changes)
    return run
