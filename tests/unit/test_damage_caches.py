"""Damaged kernel caches: 500 random damages of the entries of a disk cache, 500 of the texts of kernel-cache objects. Every build gives right
numbers: from what is whole, or compiled again; a text is refused with a SerializationError. Full and write-protected disks cost nothing but time."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn.plans import cache, disk
from tests.unit.test_damage import F32, spoiled, spoiled_text

PARTS = 50
DAMAGES = 10
"""In each part; the first part is in the default run."""
SHARE = [pytest.param(part, marks=[pytest.mark.slow] if part else []) for part in range(PARTS)]
X = np.linspace(-2, 2, 21, dtype=np.float32).reshape(3, 7)


def build(device: str, **options: Any) -> graphdnn.pygraph:
    """relu(x * 0.5 + 1), its sums of rows, and of columns: several kernels."""
    g = graphdnn.pygraph(device=device, io_data_type=F32, compute_data_type=F32, intermediate_data_type=F32, **options)
    x = g.tensor(dim=(3, 7), layout="row", name="x", uid=1)
    y = g.relu(g.add(g.mul(x, 0.5), 1.0)).set_output(True).set_uid(2)
    for uid, dim in ((3, (3, 1)), (4, (1, 7))):
        g.reduction(y, graphdnn.reduction_mode.ADD).set_dim(dim).set_stride((dim[1], 1)).set_output(True).set_uid(uid)
    g.build([graphdnn.heur_mode.A])
    return g


def numbers(g: graphdnn.pygraph) -> list[np.ndarray]:
    out = [np.full(s, np.nan, np.float32) for s in ((3, 7), (3, 1), (1, 7))]
    g.execute({1: X, 2: out[0], 3: out[1], 4: out[2]}, np.empty(g.get_workspace_size(), np.uint8))
    return out


def right() -> list[np.ndarray]:
    y = np.maximum(X.astype(np.float64) * 0.5 + 1, 0)
    return [y, y.sum(1, keepdims=True), y.sum(0, keepdims=True)]


def check(g: graphdnn.pygraph) -> None:
    for got, want in zip(numbers(g), right(), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-6)


def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process: nothing in memory, nothing known of the disk."""
    monkeypatch.setattr(cache, "memory", cache.KernelStore())
    monkeypatch.setattr(disk, "_disks", {})


# ------------------------------------------------------------------------------------------------------------------------------------ disk cache
def spoil(entry: Path, others: list[Path], rng: random.Random) -> str:
    """One random damage of an entry; what it was."""
    binary = entry / disk.BINARY
    kind = rng.choice(("bytes", "bytes", "bytes", "bytes", "empty", "gone", "folder", "file", "link", "swapped", "source", "shard", "half"))
    if kind == "bytes":
        good = bad = binary.read_bytes()
        while bad == good:
            bad = spoiled(good, rng)
        binary.write_bytes(bad)
    elif kind == "empty":
        binary.write_bytes(b"")
    elif kind == "half":
        os.truncate(binary, binary.stat().st_size // 2)
    elif kind == "swapped":
        shutil.copy(rng.choice(others) / disk.BINARY, binary)
    elif kind == "source":
        text = next(entry.glob("*.py"))
        text.write_bytes(spoiled(text.read_bytes(), rng))
    elif kind == "shard":
        shutil.rmtree(entry.parent)
        entry.parent.write_text("a file")
    elif kind in ("gone", "folder", "link"):
        binary.unlink()
        if kind == "folder":
            binary.mkdir()
        elif kind == "link":
            binary.symlink_to(entry / "nowhere")
    else:
        shutil.rmtree(entry)
        entry.write_text("a file")
    return kind


@pytest.mark.parametrize("part", SHARE)
def test_damages_of_a_disk_cache(part: int, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(20261130 + part)
    whole = tmp_path / "whole"
    device = ("cudasim", "cpu")[part % 2]
    anew(monkeypatch)
    check(build(device))
    shutil.copytree(empty_cache, whole)
    entries = [p.parent.relative_to(empty_cache) for p in empty_cache.glob("kernels/??/*/" + disk.BINARY)]
    assert len(entries) > 1
    for _ in range(DAMAGES):
        shutil.rmtree(empty_cache)
        shutil.copytree(whole, empty_cache)
        entry = rng.choice(entries)
        kind = spoil(empty_cache / entry, [whole / e for e in entries if e != entry], rng)
        anew(monkeypatch)
        before = cache.counters.misses
        check(build(device))
        assert cache.counters.misses - before == (kind != "source") or kind == "shard", kind
        if kind != "shard":  # there the folder cannot be made, and kernels stay in memory
            anew(monkeypatch)
            before = cache.counters.misses
            check(build(device))
            assert cache.counters.misses == before, f"{kind}: the entry was not made whole again"
            assert not list((empty_cache / "kernels" / "tmp").iterdir()), f"{kind}: something was left behind"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("where", ["mkdir", "write_text", "write_bytes", "rename"])
def test_a_disk_that_takes_nothing(code: int, where: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full, write-protected, over quota, broken: kernels are kept in memory, and no part of an entry stays behind."""

    def fails(*args: Any, **more: Any) -> Any:
        raise OSError(code, os.strerror(code))

    anew(monkeypatch)
    monkeypatch.setattr(os if where == "rename" else Path, where, fails)
    check(build("cudasim"))
    monkeypatch.undo()
    left = [p for p in empty_cache.rglob("*") if p.is_file() and p.parent.name != "locks"]
    assert not left, left


# ------------------------------------------------------------------------------------------------------------------------- kernel-cache objects
@pytest.mark.parametrize("part", SHARE)
def test_damages_of_a_kernel_caches_text(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(20261201 + part)
    monkeypatch.setenv("GRAPHDNN_CACHE", "0")
    device = ("cudasim", "cpu")[part % 2]
    kept = graphdnn.create_kernel_cache()
    check(build(device, kernel_cache=kept))
    text = kept.serialize()
    refused = 0
    for _ in range(DAMAGES):
        made = graphdnn.create_kernel_cache()
        try:
            made.deserialize(spoiled_text(text, rng) if rng.random() < 0.7 else spoiled(text.encode(), rng).decode("latin1"))
        except graphdnn.SerializationError as error:
            assert "expected" in str(error)
            refused += 1
            assert len(made.store) == 0, "nothing is taken from a text that is refused"
            continue
        anew(monkeypatch)
        check(build(device, kernel_cache=made))
    assert refused > DAMAGES // 2
    for other in ("", "[]", "null", "7", json.dumps({"format": "graphdnn kernel cache 1"}), "[" * 100_000):
        with pytest.raises(graphdnn.SerializationError):
            graphdnn.create_kernel_cache().deserialize(other)
