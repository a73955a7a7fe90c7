"""Fixtures of the tests that run graphs: one test, every target."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(params=["cpu", pytest.param("cudasim", marks=pytest.mark.sim), pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every target in turn; a GPU only with ``-m gpu``, and then a missing one is a failure."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kernel cache of this session's own, so that no test depends on what an earlier session compiled. xdist workers share nothing."""
    before = os.environ.get("GRAPHDNN_CACHE_DIR")
    folder = tmp_path_factory.mktemp("kernel-cache")
    os.environ["GRAPHDNN_CACHE_DIR"] = str(folder)
    yield folder
    if before is None:
        os.environ.pop("GRAPHDNN_CACHE_DIR")
    else:
        os.environ["GRAPHDNN_CACHE_DIR"] = before


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that nothing has written to."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRAPHDNN_CACHE_DIR", str(folder))
    return folder
