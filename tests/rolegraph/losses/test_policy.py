"""The policy loss against a plain reference, against hand-computed numbers, and under every split."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolegraph.interfaces import LossSpec
from rolegraph.losses import resolve
from rolegraph.losses.config import PolicyLossConfig
from rolegraph.losses.policy import PolicyLoss
from tests.rolegraph.losses.batches import Row, batch, run

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
LEVELS = ["token", "sequence", "sequence_token"]
MAX_LENGTH = 16


def make(**options: Any) -> PolicyLoss:
    if options.get("loss_type") == "dr_grpo":
        options.setdefault("max_completion_length", MAX_LENGTH)
    return PolicyLoss(**options)


def random_rows(seed: int, count: int = 5, longest: int = 6) -> list[Row]:
    """Rows with ratios far enough from 1 to be clipped on both sides, masked tokens and an empty response."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        length = 0 if index == 1 else draw.randint(1, longest)
        tokens = [-draw.uniform(0.1, 3) for _ in range(length)]
        near = {
            name: [x + draw.gauss(0, 0.5) for x in tokens] for name in ("logprobs", "ref_logprobs", "rollout_logprobs")
        }
        near["teacher_token_logprobs"] = [x + draw.gauss(0, 1) for x in tokens]
        near["entropy"] = [draw.uniform(0, 3) for _ in tokens]
        mask = [draw.choice([0, 1, 1, 1]) for _ in tokens]
        if index == 2:
            mask = [0] * length
        per_row = {"advantage": draw.gauss(0, 1), "reward": draw.gauss(0, 1), "group": float(index // 2)}
        rows.append(Row(tokens, mask, near, per_row))
    return rows


def reference(rows: list[Row], options: dict[str, Any]) -> tuple[float, list[float]]:
    """The loss as the papers write it: a sum over rows and tokens, in float64, without any of the code under test."""
    get = options.get
    low, high = 1 - get("epsilon", 0.2), 1 + (get("epsilon_high") or get("epsilon", 0.2))
    kept_rows = [row for row in rows if sum(row.flags)]
    all_tokens = sum(sum(row.flags) for row in rows)
    leaves, loss = [], torch.zeros((), dtype=torch.float64)
    for row in rows:
        x = torch.tensor(row.logprobs, dtype=torch.float64, requires_grad=True)
        leaves.append(x)
        chosen = [i for i, flag in enumerate(row.flags) if flag]
        if not chosen:
            continue
        log_ratios = [x[i] - row.per_token["logprobs"][i] for i in chosen]
        mean = sum(log_ratios) / len(chosen)  # type: ignore[arg-type]
        row_loss = torch.zeros((), dtype=torch.float64)
        for i, log_ratio in zip(chosen, log_ratios, strict=True):
            level = get("importance_sampling_level", "token")
            if level == "token":
                ratio = log_ratio.exp()
            elif level == "sequence":
                ratio = mean.exp()
            else:
                ratio = mean.exp().detach() * x[i].exp() / x[i].exp().detach()
            row_loss = row_loss + reference_token(x[i], ratio, row, i, low, high, options)
        loss_type = get("loss_type", "grpo")
        if loss_type in ("grpo", "sapo"):
            loss = loss + row_loss / len(chosen) / len(kept_rows)
        elif loss_type == "dr_grpo":
            loss = loss + row_loss / (len(kept_rows) * MAX_LENGTH)
        else:
            loss = loss + row_loss / all_tokens
    loss.backward()
    gradient = [g for x in leaves for g in (x.grad.tolist() if x.grad is not None else [0.0] * len(x))]
    return float(loss.detach()), gradient


def reference_token(
    x: torch.Tensor, ratio: torch.Tensor, row: Row, i: int, low: float, high: float, options: dict[str, Any]
) -> torch.Tensor:
    get, advantage = options.get, row.per_row["advantage"]
    difference = row.per_token["teacher_token_logprobs"][i] - row.per_token["logprobs"][i]
    advantage += get("teacher_kl_coef", 0.0) * difference
    loss_type = get("loss_type", "grpo")
    if loss_type == "cispo":
        term = -min(max(float(ratio.detach()), low), high) * advantage * x
    elif loss_type == "sapo":
        tau = (get("tau_pos") or 1.0) if advantage > 0 else (get("tau_neg") or 1.05)
        term = -advantage * (4 / tau) / (1 + torch.exp(-tau * (ratio - 1)))
    else:
        first = ratio
        if get("delta") and float(ratio.detach()) > get("delta"):
            first = torch.tensor(get("delta"), dtype=torch.float64)
        value = float(ratio.detach())
        second = ratio if low <= value <= high else torch.tensor(min(max(value, low), high), dtype=torch.float64)
        candidates = (first * advantage, second * advantage)
        term = -min(candidates, key=lambda c: float(c.detach()))
    if get("beta"):
        difference = row.per_token["ref_logprobs"][i] - x
        term = term + get("beta") * (difference.exp() - difference - 1)
    return term


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    "extra",
    [{}, {"beta": 0.3}, {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5}, {"teacher_kl_coef": 0.7}],
    ids=["plain", "beta", "bounds", "teacher"],
)
def test_loss_and_gradient_equal_the_reference(loss_type: str, level: str, extra: dict[str, float]) -> None:
    if "delta" in extra and loss_type == "cispo":
        extra = {key: value for key, value in extra.items() if key != "delta"}
    if "delta" in extra and loss_type == "sapo":
        extra = {"tau_pos": 1.3, "tau_neg": 0.7}
    options = {"loss_type": loss_type, "importance_sampling_level": level, **extra}
    for seed in range(4):
        rows = random_rows(seed)
        expected, gradient = reference(rows, options)
        result = run(make(**options), [rows])
        assert result.loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert result.gradient == pytest.approx(gradient, rel=1e-8, abs=1e-12)


def random_options(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "loss_type": draw.choice(LOSS_TYPES),
        "importance_sampling_level": draw.choice(LEVELS),
        "beta": draw.choice([0.0, 0.2]),
        "top_entropy_quantile": draw.choice([1.0, 0.4]),
        "teacher_kl_coef": draw.choice([0.0, 0.5]),
        "rollout_importance_correction": draw.choice([None, "truncate", "mask"]),
    }
    if options["beta"]:
        options["kl_returns"] = draw.choice([None, "batch", "none"])
    return options


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_the_split_over_micro_batches_and_ranks_does_not_matter(seed: int) -> None:
    draw = random.Random(seed)
    rows = random_rows(seed, count=draw.randint(1, 8))
    options = random_options(draw)
    cuts = sorted(draw.randint(0, len(rows)) for _ in range(draw.randint(0, 3)))
    parts = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True) if a < b]
    loss = make(**options)
    whole, split = run(loss, [rows]), run(loss, parts)
    assert split.loss == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
    assert split.gradient == pytest.approx(whole.gradient, rel=1e-9, abs=1e-12)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_all_masked_is_a_finite_zero_gradient(loss_type: str, level: str) -> None:
    rows = random_rows(3)
    options = {"beta": 0.1, "kl_returns": "batch", "top_entropy_quantile": 0.5}
    for row in rows:
        row.mask = [0] * len(row.logprobs)
        # what stands at masked places must not matter, not even what no arithmetic survives
        row.per_token = {name: [math.nan] * len(row.logprobs) for name in row.per_token}
        row.logprobs = [-math.inf] * len(row.logprobs)
    result = run(
        make(loss_type=loss_type, importance_sampling_level=level, rollout_importance_correction="mask", **options),
        [rows],
    )
    assert result.loss == 0.0
    assert result.gradient == [0.0] * len(result.gradient)
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_rows_change_nothing(loss_type: str) -> None:
    options = {"loss_type": loss_type, "top_entropy_quantile": 0.5, "beta": 0.1}
    rows = [row for row in random_rows(5) if sum(row.flags)]
    masked = Row([-1.0] * 3, [0, 0, 0], {name: [-9.0] * 3 for name in rows[0].per_token}, rows[0].per_row)
    plain, padded = run(make(**options), [rows]), run(make(**options), [[masked, *rows]])
    assert padded.loss == pytest.approx(plain.loss, rel=1e-12)
    assert padded.gradient == pytest.approx([0.0] * 3 + plain.gradient, rel=1e-12)


def test_an_empty_batch_of_tokens() -> None:
    result = run(make(), [[Row([], [], {"logprobs": []}, {"advantage": 1.0})]])
    assert (result.loss, result.gradient) == (0.0, [])


def test_far_apart_policies_stay_finite() -> None:
    row = Row([-1.0], None, {"logprobs": [-500.0], "ref_logprobs": [-600.0]}, {"advantage": -1.0})
    result = run(make(beta=0.1), [[row]])
    assert math.isfinite(result.loss)
    assert all(math.isfinite(g) for g in result.gradient)


# One token a case, ratio r = exp(logprob - old); what flipping each option does to the loss, by hand.
def one(ratio: float, advantage: float, options: dict[str, Any], **per_token: float) -> float:
    row = Row(
        [math.log(ratio)],
        None,
        {"logprobs": [0.0], **{k: [v] for k, v in per_token.items()}},
        {"advantage": advantage},
    )
    return run(make(**options), [[row]]).loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "expected"),
    [
        (1.1, 2.0, {}, -2.2),
        (1.5, 2.0, {}, -2.4),
        (1.5, 2.0, {"epsilon": 0.3}, -2.6),
        (1.5, 2.0, {"epsilon_high": 0.4}, -2.8),
        (0.5, -1.0, {}, 0.8),
        (0.5, -1.0, {"epsilon": 0.3}, 0.7),
        (0.5, -1.0, {"epsilon_high": 0.4}, 0.8),
        (5.0, -1.0, {}, 5.0),
        (5.0, -1.0, {"delta": 3.0}, 3.0),
        (1.5, 2.0, {"loss_type": "dr_grpo"}, -2.4 / MAX_LENGTH),
        (1.5, 2.0, {"loss_type": "dr_grpo", "max_completion_length": 8}, -2.4 / 8),
        (1.5, 2.0, {"loss_type": "cispo"}, -1.2 * 2 * math.log(1.5)),
        (0.5, 2.0, {"loss_type": "cispo", "epsilon": 0.4}, -0.6 * 2 * math.log(0.5)),
        (0.5, 2.0, {"loss_type": "cispo", "epsilon": 1.0}, -0.5 * 2 * math.log(0.5)),
        (1.5, 2.0, {"loss_type": "sapo"}, -4 / (1 + math.exp(-0.5)) * 2),
        (1.5, 2.0, {"loss_type": "sapo", "tau_pos": 2.0}, -2 / (1 + math.exp(-1)) * 2),
        (1.5, -2.0, {"loss_type": "sapo"}, 4 / 1.05 / (1 + math.exp(-0.525)) * 2),
        (1.5, -2.0, {"loss_type": "sapo", "tau_neg": 2.0}, 2 / (1 + math.exp(-1)) * 2),
    ],
)
def test_options_by_hand(ratio: float, advantage: float, options: dict[str, Any], expected: float) -> None:
    assert one(ratio, advantage, options) == pytest.approx(expected)


def test_beta_adds_the_k3_kl() -> None:
    assert one(1.0, 1.0, {"beta": 0.5}, ref_logprobs=-1.0) == pytest.approx(-1 + 0.5 * (math.exp(-1) + 1 - 1))


@pytest.mark.parametrize(
    ("how", "threshold", "weight"),
    [
        (None, None, 1.0),
        ("truncate", None, 2.0),
        ("truncate", 2.5, 2.5),
        ("truncate", 9.0, 3.0),
        ("mask", None, 0.0),
        ("mask", 9.0, 3.0),
    ],
)
def test_rollout_importance_correction(how: str | None, threshold: float | None, weight: float) -> None:
    """Trainer probability 3 times the rollout's."""
    options = {"rollout_importance_correction": how, "rollout_importance_threshold": threshold}
    assert one(1.0, 1.0, options, rollout_logprobs=-math.log(3)) == pytest.approx(-weight)


def test_the_correction_leaves_the_kl_alone() -> None:
    columns = {"rollout_logprobs": -math.log(3), "ref_logprobs": -1.0}
    options = {"rollout_importance_correction": "mask", "beta": 1.0}
    assert one(1.0, 1.0, options, **columns) == pytest.approx(math.exp(-1))


def two_rows(**options: Any) -> float:
    """Ratios 1 and 1.44 in a row with advantage 1, ratio 1 in a row with advantage -3; nothing is clipped."""
    rows = [
        Row([0.0, math.log(1.44)], None, {"logprobs": [0.0, 0.0]}, {"advantage": 1.0}),
        Row([0.0], None, {"logprobs": [0.0]}, {"advantage": -3.0}),
    ]
    return run(make(**{"epsilon": 0.9, **options}), [rows]).loss


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (-1.22 + 3) / 2),
        ({"loss_type": "bnpo"}, (-2.44 + 3) / 3),
        ({"loss_type": "dapo"}, (-2.44 + 3) / 3),
        ({"loss_type": "dr_grpo"}, (-2.44 + 3) / (2 * MAX_LENGTH)),
        ({"importance_sampling_level": "sequence"}, (-1.2 + 3) / 2),
        ({"importance_sampling_level": "sequence_token"}, (-1.2 + 3) / 2),
    ],
)
def test_denominators_and_levels_by_hand(options: dict[str, Any], expected: float) -> None:
    assert two_rows(**options) == pytest.approx(expected)


def test_without_old_logprobs_the_ratio_is_one_and_has_a_gradient() -> None:
    result = run(make(), [[Row([-3.0, -1.0], None, {}, {"advantage": 2.0})]])
    assert result.loss == pytest.approx(-2.0)
    assert result.gradient == pytest.approx([-1.0, -1.0])


def test_top_entropy_tokens_are_chosen_over_the_whole_batch() -> None:
    """The three highest of 6 entropies are all in the second row: the first gets no gradient, denominators stay."""
    rows = [
        Row([-1.0] * 3, None, {"entropy": [0.1, 0.2, 0.3]}, {"advantage": 1.0}),
        Row([-1.0] * 3, None, {"entropy": [0.4, 0.5, 0.6]}, {"advantage": 1.0}),
    ]
    result = run(make(loss_type="dapo", top_entropy_quantile=0.5), [rows[:1], rows[1:]])
    assert result.gradient == pytest.approx([0, 0, 0, -1 / 6, -1 / 6, -1 / 6])
    fifth = run(make(loss_type="dapo", top_entropy_quantile=0.17), [rows[:1], rows[1:]])
    assert fifth.gradient == pytest.approx([0, 0, 0, 0, -1 / 6, -1 / 6])


def test_kl_returns_by_hand() -> None:
    """Token KLs 1, 2 and 4; beta 0.5: the returns are 3 - 1.5, 3 - 1 and 1 - 2, their mean 2.5 / 3."""
    rows = [
        Row([-1.0, -1.0], None, {"logprobs": [-1.0, -1.0], "ref_logprobs": [-2.0, -3.0]}, {"reward": 3.0}),
        Row([-1.0], None, {"logprobs": [-1.0], "ref_logprobs": [-5.0]}, {"reward": 1.0}),
    ]
    centred = [1.5 - 2.5 / 3, 2 - 2.5 / 3, -1 - 2.5 / 3]
    for parts in ([rows], [rows[:1], rows[1:]]):
        result = run(make(loss_type="dapo", beta=0.5, kl_returns="none"), parts)
        assert result.gradient == pytest.approx([-a / 3 for a in centred])
        deviation = math.sqrt(sum(a * a for a in centred) / 2) + 1e-4
        scaled = run(make(loss_type="dapo", beta=0.5, kl_returns="batch"), parts)
        assert scaled.gradient == pytest.approx([-a / 3 / deviation for a in centred])


def test_metrics_by_hand() -> None:
    per_token = {
        "logprobs": [0.0, 0.0, 0.0, 0.0],
        "ref_logprobs": [math.log(r) for r in (1.5, 0.5, 1.0, 1.0)],
        "rollout_logprobs": [0.0, -0.5, 0.1, -7.0],
        "entropy": [1.0, 2.0, 3.0, 99.0],
    }
    row = Row([math.log(r) for r in (1.5, 0.5, 1.0, 9.0)], [1, 1, 1, 0], per_token, {"advantage": 1.0})
    negative = Row(row.logprobs, row.mask, per_token, {"advantage": -1.0})
    metrics = run(make(rollout_importance_correction="truncate", delta=1.4), [[row], [negative]]).metrics
    assert metrics == pytest.approx(
        {
            "ratio/mean": 1.0,
            "ratio/max": 1.5,
            "clip/low": 1 / 6,
            "clip/high": 1 / 6,
            "clip/delta": 1 / 6,
            "kl": 0.0,
            "entropy": 2.0,
            "rollout_logprob_difference/mean": 0.2,
            "rollout_logprob_difference/max": 0.5,
            "importance_weight/mean": (1 + math.exp(0.5) + math.exp(-0.1)) / 3,
        }
    )


def test_a_missing_column_is_named() -> None:
    row = Row([-1.0], None, {"logprobs": [-1.0]}, {"advantage": 1.0})
    with pytest.raises(KeyError, match=r"needs the column 'ref_logprobs', and the batch has advantage, logprobs"):
        make(beta=0.1)(batch([row]))


def test_dr_grpo_asks_for_its_length() -> None:
    with pytest.raises(TypeError, match=r"PolicyLoss.*colour"):
        resolve(LossSpec("rolegraph.losses.policy.PolicyLoss", {"colour": 1}))
    with pytest.raises(ValueError, match="max_completion_length"):
        PolicyLoss(loss_type="dr_grpo")


def test_the_loss_has_exactly_the_options_of_its_config() -> None:
    assert [f.name for f in fields(PolicyLoss)] == [f.name for f in fields(PolicyLossConfig)]


def test_a_teacher_moves_each_token_by_how_much_likelier_it_finds_it() -> None:
    """coef 0.5; differences of 1 and -2 nats; an advantage of the row of 0.25; on-policy, so the ratio is 1."""
    rows = [Row([-1.0, -2.0], None, {"teacher_token_logprobs": [0.0, -4.0]}, {"advantage": 0.25})]
    result = run(PolicyLoss(teacher_kl_coef=0.5), [rows])
    assert result.gradient == pytest.approx([-(0.25 + 0.5) / 2, -(0.25 - 1.0) / 2])
    assert result.metrics["teacher/kl"] == pytest.approx((-1.0 + 2.0) / 2)
