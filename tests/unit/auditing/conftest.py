"""Models on disk that the tests of one file share, and a scene for certificates that each test may change."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import tiny
from tests.unit.auditing.certifying import Scene, scene, write_safety
from tests.unit.auditing.making import write_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), base)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture
def made(shared: Scene, tmp_path: Path) -> Scene:
    """The models are shared; safety file and output are the test's own."""
    return shared._replace(
        safety=write_safety(tmp_path / "safety.jsonl", tiny.rows(20, seed=3)), output=tmp_path / "out"
    )
