"""Who is healthy: sequences of what may happen, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rolegraph.errors import HealthError
from rolegraph.health import BACKOFF_S, MOST_BACKOFF_S, Health, State


def healthy(max_restarts: int) -> Health:
    health = Health(max_restarts)
    health.started()
    health.joined()
    return health


def test_a_unit_that_died_starts_joins_and_works_again() -> None:
    health = healthy(2)
    seen = [health.state]
    health.died()
    seen.append(health.state)
    health.restart(now=0.0)
    seen.append(health.state)
    health.started()
    seen.append(health.state)
    health.joined()
    assert [*seen, health.state] == [State.HEALTHY, State.DEAD, State.STARTING, State.JOINING, State.HEALTHY]
    assert health.restarts == 1


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_a_unit_is_given_up_when_its_restarts_are_used_up_and_stays_so(max_restarts: int) -> None:
    health = healthy(max_restarts)
    for count in range(max_restarts):
        health.died()
        health.restart(now=1000.0 * count)
        health.started()
        health.joined()
    health.died()
    assert (health.state, health.restarts, health.may_return) == (State.GIVEN_UP, max_restarts, False)
    health.died()
    for back in (health.started, health.joined, health.withdraw, lambda: health.restart(now=1e9)):
        with pytest.raises(HealthError, match="given up"):
            back()


def test_what_has_not_joined_does_not_work_and_what_lives_is_not_started_again() -> None:
    health = Health(3)
    with pytest.raises(HealthError, match="starting joins; only one that is joining can"):
        health.joined()
    for live in (health, healthy(3)):
        with pytest.raises(HealthError, match="started again; only one that is dead can"):
            live.restart(now=0.0)


def test_each_restart_waits_twice_as_long_as_the_one_before_unless_that_is_long_ago() -> None:
    health, now, waits = healthy(20), 0.0, []
    for _ in range(9):
        health.died()
        waits.append(health.wait_s(now))
        if waits[-1]:
            with pytest.raises(HealthError, match="too early"):
                health.restart(now + waits[-1] / 2)
        now += waits[-1]
        health.restart(now)
    assert waits[:4] == [0.0, BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S]
    assert waits[-1] == MOST_BACKOFF_S
    health.died()
    assert health.wait_s(now + MOST_BACKOFF_S) == 0.0


def test_a_restart_that_was_broken_off_does_not_count() -> None:
    health = healthy(1)
    health.died()
    health.restart(now=0.0)
    health.withdraw()
    assert (health.state, health.restarts) == (State.DEAD, 0)
    health.restart(now=health.wait_s(0.0))
    health.died()
    assert health.state is State.GIVEN_UP
    with pytest.raises(HealthError, match="no restart that could be broken off"):
        healthy(1).withdraw()


@given(
    some.integers(0, 3),
    some.lists(some.tuples(some.sampled_from(["started", "joined", "died", "restart", "withdraw"]), some.floats(0, 5))),
)
def test_whatever_happens_in_whatever_order_nothing_forbidden_does(most: int, events: list[tuple[str, float]]) -> None:
    health, now, deaths = Health(most), 0.0, 0
    begun: list[float] = []
    for what, passed in events:
        now += passed
        before = health.state
        try:
            getattr(health, what)(*([now] if what == "restart" else []))
        except HealthError:
            assert health.state is before, "what is refused changes nothing"
            continue
        after = health.state
        deaths += before is not after and what == "died"
        if after is State.HEALTHY:
            assert before is State.JOINING
        if what == "restart":
            assert before is State.DEAD
            begun.append(now)
        if before is State.GIVEN_UP:
            assert after is State.GIVEN_UP
        assert 0 <= health.restarts <= most
        assert health.may_return == (after not in (State.HEALTHY, State.GIVEN_UP))
    assert all(later - earlier >= BACKOFF_S - 1e-9 for earlier, later in itertools.pairwise(begun))
    assert (health.state is State.GIVEN_UP) <= (deaths > most)
