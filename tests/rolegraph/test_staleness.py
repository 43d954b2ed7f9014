"""The bookkeeping of weight versions, in every order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolegraph.errors import StalenessError
from rolegraph.staleness import Staleness


def test_without_staleness_everything_is_in_turn() -> None:
    staleness = Staleness(0)
    for version in (1, 2, 3):
        staleness.synced(version)
        assert staleness.admits
        staleness.start()
        assert not staleness.admits
        staleness.take(oldest=version)
        assert not staleness.admits, "the next one begins with the weights that come of this one"


def test_a_generation_runs_beside_the_training_of_the_one_before() -> None:
    staleness = Staleness(1)
    staleness.synced(1)
    staleness.start()
    staleness.take(oldest=1)
    staleness.start()  # while the first is trained on
    assert not staleness.admits
    staleness.synced(2)
    assert staleness.admits
    staleness.take(oldest=1)
    assert staleness.admits
    staleness.start()


def test_more_of_them_wait_where_more_versions_are_allowed() -> None:
    staleness = Staleness(3)
    staleness.synced(1)
    started = 0
    while staleness.admits:
        staleness.start()
        started += 1
    assert started == 4, "one for each of the versions 1 to 4"


def test_nothing_begins_before_the_first_sync() -> None:
    staleness = Staleness(2)
    assert not staleness.admits
    with pytest.raises(StalenessError, match="begins after the first weight sync"):
        staleness.start()


def test_what_would_come_too_late_is_not_begun() -> None:
    staleness = Staleness(1)
    staleness.synced(5)
    staleness.start()
    staleness.start()
    with pytest.raises(
        StalenessError,
        match="begun with weight version 5 would be trained on at version 7, and max_staleness is 1",
    ):
        staleness.start()


def test_a_version_that_a_waiting_generation_cannot_bear_is_refused() -> None:
    staleness = Staleness(1)
    staleness.synced(1)
    staleness.start()
    staleness.synced(2)
    with pytest.raises(StalenessError, match=r"version 3 would leave the generation begun with version 1 more than"):
        staleness.synced(3)
    staleness.take(oldest=1)
    staleness.synced(3)


def test_rows_of_an_engine_that_missed_a_sync_are_refused() -> None:
    staleness = Staleness(1)
    staleness.synced(4)
    staleness.start()
    with pytest.raises(StalenessError, match=r"weight version 2, 2 behind the trainer's 4.*began with version 4"):
        staleness.take(oldest=2)
    staleness.take(oldest=3)


def test_misuse_is_refused() -> None:
    staleness = Staleness(0)
    with pytest.raises(StalenessError, match="no generation was started"):
        staleness.take()
    staleness.synced(2)
    with pytest.raises(StalenessError, match="versions only rise"):
        staleness.synced(1)
    with pytest.raises(ValueError, match="max_staleness=-1"):
        Staleness(-1)


@given(limit=st.integers(0, 4), events=st.lists(st.sampled_from(["start", "take", "sync"]), max_size=60))
def test_no_order_of_events_lets_a_stale_row_through(limit: int, events: list[str]) -> None:
    """Anything may be tried at any time; what is not refused keeps the promise."""
    staleness, version, waiting = Staleness(limit), 0, list[int]()
    for event in events:
        try:
            if event == "start":
                staleness.start()
                waiting.append(version)
            elif event == "sync":
                staleness.synced(version + 1)
                version += 1
            else:
                staleness.take(oldest=waiting[0] if waiting else None)
                assert version - waiting.pop(0) <= limit
        except StalenessError:
            continue


@given(limit=st.integers(0, 4), greedy=st.lists(st.booleans(), min_size=40, max_size=40))
def test_a_loop_that_syncs_before_each_generation_is_never_refused_nor_stuck(limit: int, greedy: list[bool]) -> None:
    staleness, waiting = Staleness(limit), list[int]()

    def start() -> None:
        staleness.start()
        waiting.append(staleness.version)

    for version, runs_ahead in enumerate(greedy, start=1):
        staleness.synced(version)
        if not waiting:
            assert staleness.admits
            start()
        while runs_ahead and staleness.admits:
            start()
        oldest = waiting.pop(0)
        staleness.take(oldest)
        assert 0 <= version - oldest <= limit
        while runs_ahead and staleness.admits:
            start()
        assert len(waiting) <= limit, "what is waiting has a bound"


def test_a_run_that_goes_on_has_what_was_made_and_is_synced_before_more_is() -> None:
    staleness = Staleness(2)
    staleness.synced(1)
    for _ in range(3):
        staleness.start()
    staleness.take()
    state = staleness.state(made=1)
    assert state == {"version": 1, "is_used": True, "made": [1]}, "the third was in progress"
    again = Staleness(2)
    again.restore(state)
    assert not again.admits
    with pytest.raises(StalenessError, match="a generation begins after the first weight sync"):
        again.start()
    again.synced(2)
    assert again.admits
    again.take(oldest=1)
    again.synced(3)
    with pytest.raises(StalenessError, match="no generation was started"):
        again.take()


def test_what_was_made_before_is_not_trained_on_when_it_is_too_old() -> None:
    again = Staleness(1)
    again.restore({"version": 4, "is_used": True, "made": [3]})
    with pytest.raises(StalenessError, match="it has to be trained on first"):
        again.synced(5)
