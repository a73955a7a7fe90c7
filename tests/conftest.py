"""Fixtures of the tests that run graphs: one test, every target."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARES = {
    ("test_api_table", "cpu"): 64,
    ("test_api_table", "cudasim"): 128,
    ("test_attention", "cpu"): 20,
    ("test_attention", "cudasim"): 48,
    ("test_attention_inputs", "cpu"): 4,
    ("test_attention_inputs", "cudasim"): 48,
    ("test_bitwise", "cpu"): 16,
    ("test_bitwise", "cudasim"): 32,
    ("test_zero_workspace", "cpu"): 2,
    ("test_zero_workspace", "cudasim"): 8,
    ("conformance", "cpu"): 14,
    ("conformance", "cudasim"): 80,
    ("cases", "cudasim"): 16,
    ("compile", ""): 12,
    ("sim", ""): 5,
}
"""One test in so many of a file or folder, on a target, is in the default run; the others are marked slow. The choice depends on the test's name
alone. ``pytest -m "not gpu"`` runs all of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the default run within what two cores do in a few minutes."""
    for item in items:
        parts = Path(item.path).parts
        folder = next((f for f in ("conformance", "cases", "compile", "sim") if f in parts), "")
        target = next((t for t in ("cudasim", "cpu") if t in item.name), "")
        share = SHARES.get((Path(item.path).stem, target)) or SHARES.get((folder, target)) or SHARES.get((folder, ""), 1)
        always = "planted_faults" in item.name and "shared" in item.name or "left_out" in item.name or "every_form" in item.name
        if zlib.crc32(item.name.encode()) % share and not always:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["cpu", pytest.param("cudasim", marks=pytest.mark.sim), pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every target in turn; a GPU only with ``-m gpu``, and then a missing one is a failure."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kernel cache of this session's own, so that no test depends on what an earlier session compiled. xdist workers share nothing.

    GRAPHDNN_TEST_CACHE names a folder to use instead, which stays: tests/gpu/sanitize.py runs the same tests several times."""
    before, kept = os.environ.get("GRAPHDNN_CACHE_DIR"), os.environ.get("GRAPHDNN_TEST_CACHE")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("kernel-cache")
    folder.mkdir(parents=True, exist_ok=True)
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
