"""What follows from plan and models for the roles of a run, before any of them starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolegraph.algorithms.grpo import GRPO
from rolegraph.config import load
from rolegraph.config.schema import RunConfig, Spec
from rolegraph.errors import ConfigError
from rolegraph.models import tiny
from rolegraph.placement import PlacementConfig, RoleRequest, plan, requests
from rolegraph.placement.clusters import cluster
from rolegraph.reading import load_own
from rolegraph.run import _turns
from rolegraph.turns import PHASES
from rolegraph.wiring import backend_of, with_models
from roles.sampler.config import VLLMSamplerConfig

SHARED = PlacementConfig(colocate_groups=(("train", "rollout"),))


@pytest.mark.parametrize(
    ("nodes", "placement", "train", "rollout", "expected"),
    [
        ("1x1xH100", SHARED, {"gpus": 1}, {}, "ipc"),
        ("1x2xH100", SHARED, {"gpus": 2}, {}, "gloo"),
        ("1x2xH100", SHARED, {"gpus": 2}, {"tensor": 2}, "gloo"),
        # GPU 0 of one node is not GPU 0 of the other.
        ("2x1xH100", SHARED, {"gpus": 2}, {}, "gloo"),
        ("1x2xH100", PlacementConfig(), {"gpus": 1}, {"gpus": 1}, "nccl"),
        # The machine has GPUs, and one of the two is not on them.
        ("1x2xH100", PlacementConfig(), {"gpus": 0}, {"gpus": 1}, "gloo"),
        ("1x2xH100", PlacementConfig(), {"gpus": 1}, {"gpus": 0}, "gloo"),
        ("1xcpu8", SHARED, {}, {}, "gloo"),
    ],
)
def test_weights_go_the_way_that_their_devices_allow(
    nodes: str, placement: PlacementConfig, train: dict[str, int], rollout: dict[str, int], expected: str
) -> None:
    asked = [RoleRequest("train", **train), RoleRequest("rollout", is_spmd=False, **rollout)]
    assert backend_of(plan(cluster(nodes), asked, placement)) == expected


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "policy"
    tiny.make(str(folder))
    return str(folder)


def another(policy: str, name: str, *, rename: str | None = None, more: str | None = None) -> str:
    """A model with the policy's tokenizer, but for one token that is called otherwise, or one more; a wider table."""
    folder = Path(policy).with_name(name)
    shutil.copytree(policy, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    if rename is not None:
        vocab["renamed"] = vocab.pop(rename)
    if more is not None:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": len(vocab) + 40, "content": more})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 128}))
    return str(folder)


def distilled(*overrides: str) -> Any:
    gkd = ["algorithm=gkd", "algorithm.gkd_logits_topk=8", "model=tiny", "data=arithmetic", "teacher=huggingface"]
    return load([*gkd, *overrides]).run


def test_a_teacher_with_another_tokenizer_is_refused_by_the_first_token_that_differs(policy: str) -> None:
    words = json.loads(Path(policy, "tokenizer.json").read_text())["model"]["vocab"]
    word, token = sorted(words.items(), key=lambda item: item[1])[70]
    other = another(policy, "renamed", rename=word)
    for role in ("teacher", "teacher_math"):
        more = ["+teacher@teacher_math=huggingface", "data.preprocessors=[mine.with_key]"] if role != "teacher" else []
        with pytest.raises(ConfigError) as caught:
            with_models(distilled(*more, f"{role}.model={other}"), policy)
        message = str(caught.value)
        assert f"{role}.model={other} has another tokenizer than the policy" in message
        assert f"token {token} is {word!r} for the policy and 'renamed' there" in message


def test_a_sampler_reads_ids_as_the_policy_does(policy: str) -> None:
    words = json.loads(Path(policy, "tokenizer.json").read_text())["model"]["vocab"]
    other = another(policy, "renamed sampler", rename=sorted(words)[70])
    run = distilled()

    def sampling(model: str) -> RunConfig:
        target = "roles.sampler.vllm.VLLMSampler"
        return replace(run, roles={**run.roles, "sampler": Spec(target, VLLMSamplerConfig(model=model))})

    with_models(sampling(policy), policy)
    with pytest.raises(ConfigError, match=r"sampler\.model=.* has another tokenizer than the policy"):
        with_models(sampling(other), policy)


def test_a_teacher_with_the_same_tokenizer_and_a_wider_table_passes(policy: str) -> None:
    for folder in (policy, another(policy, "wider"), another(policy, "more", more="<|image|>")):
        run = with_models(distilled(f"teacher.model={folder}"), policy)
        assert run.roles["teacher"].config.model == folder


def test_roles_without_a_model_of_their_own_have_the_policys(policy: str) -> None:
    run = with_models(distilled(), policy)
    assert {run.roles[role].config.model for role in ("train", "rollout", "teacher")} == {policy}


async def test_rows_without_their_teacher_are_refused_as_soon_as_they_are_read(policy: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1 + 1"}) + "\n")
    words = ["algorithm=gkd", "teacher=huggingface", "+teacher@teacher_math=huggingface", "placement=separate"]
    config = load([*words, "algorithm.gkd_logits_topk=4", "data=jsonl", f"data.path={rows}"]).run
    config = replace(config, use_ray=False)
    with pytest.raises(ConfigError, match="2 teachers take part"):
        await load_own(config, policy)
    rows.write_text(json.dumps({"prompt": "1 + 1", "teacher_key": "math"}) + "\n")
    assert len(await load_own(config, policy)) == 1


def test_roles_without_a_device_keep_nobody_from_one() -> None:
    config = load(["algorithm=grpo", "placement=colocate", "prm=functions"]).run
    placed = plan(cluster("1x1xH100"), requests(config.roles), config.placement)
    assert {"orm", "prm"} < set(placed.group_of("train"))
    turns = _turns(config, placed, GRPO).turns
    generate = turns.ask("generate", PHASES["generate"])
    turns.begin(generate)
    assert [move.role for move in turns.moves(generate)] == ["train"]
    for name in ("score", "score_prm"):
        ticket = turns.ask(name, PHASES[name])
        assert turns.may_begin(ticket), "functions score beside it"
        assert turns.moves(ticket) == []
    assert not turns.may_begin(turns.ask("train", PHASES["train"]))
