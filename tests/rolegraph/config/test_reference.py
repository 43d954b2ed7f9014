"""The composed main configs are those that are committed."""

from __future__ import annotations

import pytest

from tests.reference import CASES, FOLDER, text


@pytest.mark.parametrize("name", CASES)
def test_composed_config_is_the_committed_one(name: str) -> None:
    committed = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert text(CASES[name]) == committed, "a default changed: run `make reference` and look at the diff"
