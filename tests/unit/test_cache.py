"""The kernel cache: keys, entries that are damaged, folders that cannot be written, many processes, a kill in the middle. A fake target stands in
for a compiler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from graphdnn.codegen.spec import Binary, KernelSpec, PointerParam, ScalarParam, Source
from graphdnn.errors import BuildError, SerializationError
from graphdnn.plans import cache, disk

ROOT = Path(__file__).resolve().parents[2]
SPEC = KernelSpec(
    "cpu/fake.py.j2", "fake_kernel_1", (PointerParam("x", "float32", 16), ScalarParam("s", "float32")), {"body": ["a", "b"], "n": 4}, 128
)


class FakeTarget:
    """Compiles by reversing the text."""

    name = "cpu"

    def __init__(self, key: str = "toolchain 1") -> None:
        self.key = key
        self.compiled = 0

    def toolchain_key(self) -> str:
        return self.key

    def compile(self, source: Source) -> Binary:
        self.compiled += 1
        return Binary(source.entry, source.text[::-1].encode(), {"registers": 7}, {"ptx": "text"})


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An empty cache in a folder, and a renderer that needs no template."""
    from graphdnn.codegen import render

    monkeypatch.setenv("GRAPHDNN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(render, "render", lambda spec: Source(spec, f"def {spec.name}(): pass\n"))
    monkeypatch.setattr(cache, "memory", cache.KernelStore())
    return FakeTarget()


def fresh(monkeypatch) -> None:
    """As a new process: nothing in memory."""
    monkeypatch.setattr(cache, "memory", cache.KernelStore())


def the_entry() -> Path:
    place = disk.disk()
    return place.folder(place.entries()[0][0])


def test_miss_then_memory_then_disk(fake, monkeypatch):
    first = cache.get(SPEC, fake)
    assert first.origin == "compiled" and fake.compiled == 1 and first.registers == 7
    assert cache.get(SPEC, fake).origin == "memory"
    fresh(monkeypatch)
    before = cache.counters.disk_hits
    again = cache.get(SPEC, fake)
    assert again.origin == "disk" and again.binary == first.binary and cache.counters.disk_hits == before + 1
    assert again.source == first.source == "def fake_kernel_1(): pass\n"
    assert fake.compiled == 1


def test_source_lies_beside_the_binary(fake):
    cache.get(SPEC, fake)
    assert sorted(p.name for p in the_entry().iterdir()) == ["fake_kernel_1.py", "kernel.bin"]


def test_a_hit_neither_renders_nor_compiles(fake, monkeypatch):
    from graphdnn.codegen import render

    cache.get(SPEC, fake)
    fresh(monkeypatch)
    monkeypatch.setattr(render, "render", lambda spec: pytest.fail("rendered on a hit"))
    assert cache.get(SPEC, fake).origin == "disk"


CHANGES = {
    "template": replace(SPEC, template="cpu/other.py.j2"),
    "name": replace(SPEC, name="fake_kernel_2"),
    "parameter order": replace(SPEC, params=SPEC.params[::-1]),
    "alignment": replace(SPEC, params=(PointerParam("x", "float32", 4), SPEC.params[1])),
    "storage": replace(SPEC, params=(PointerParam("x", "uint16", 16), SPEC.params[1])),
    "written": replace(SPEC, params=(PointerParam("x", "float32", 16, True), SPEC.params[1])),
    "scalar type": replace(SPEC, params=(SPEC.params[0], ScalarParam("s", "float64"))),
    "field": replace(SPEC, fields=SPEC.fields | {"n": 5}),
    "field type": replace(SPEC, fields=SPEC.fields | {"n": 4.0}),
    "new field": replace(SPEC, fields=SPEC.fields | {"m": 1}),
    "block": replace(SPEC, block=256),
    "shared": replace(SPEC, shared_bytes=16),
    "blocks a multiprocessor": replace(SPEC, min_blocks=2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_part_of_a_spec_is_in_the_key(fake, what):
    assert cache.kernel_key(CHANGES[what], fake) != cache.kernel_key(SPEC, fake)


def test_toolchain_target_templates_and_intrinsics_are_in_the_key(fake, monkeypatch):
    from graphdnn import intrinsics
    from graphdnn.codegen import render

    key = cache.kernel_key(SPEC, fake)
    assert cache.kernel_key(SPEC, FakeTarget()) == key, "and nothing else is"
    assert cache.kernel_key(SPEC, FakeTarget("toolchain 2")) != key
    other = FakeTarget()
    other.name = "cuda"
    assert cache.kernel_key(SPEC, other) != key
    for module in (render, intrinsics):
        with monkeypatch.context() as m:
            m.setattr(module, "digest", lambda: "other")
            assert cache.kernel_key(SPEC, fake) != key


def _damages(data: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "short": data[:20],
        "truncated": data[:-1],
        "longer": data + b"x",
        "magic": b"X" + data[1:],
        "flip in the header": data[:10] + bytes([data[10] ^ 4]) + data[11:],
        "flip in the facts": data[:60] + bytes([data[60] ^ 4]) + data[61:],
        "flip in the code": data[:-3] + bytes([data[-3] ^ 4]) + data[-2:],
        "zeros": bytes(len(data)),
        "another key": disk.pack("0" * 64, Binary("e", b"code")),
    }


@pytest.mark.parametrize("what", _damages(bytes(100)))
def test_a_damaged_entry_is_built_again(fake, monkeypatch, what):
    good = cache.get(SPEC, fake)
    path = the_entry() / disk.BINARY
    path.write_bytes(_damages(path.read_bytes())[what])
    fresh(monkeypatch)
    before = cache.counters.damaged
    assert cache.get(SPEC, fake).binary == good.binary
    assert fake.compiled == 2 and cache.counters.damaged == before + 1
    fresh(monkeypatch)
    assert cache.get(SPEC, fake).origin == "disk", "and the entry is whole again"


def test_an_entry_without_its_binary_is_built_again(fake, monkeypatch):
    cache.get(SPEC, fake)
    (the_entry() / disk.BINARY).unlink()
    fresh(monkeypatch)
    assert cache.get(SPEC, fake).origin == "compiled"
    fresh(monkeypatch)
    assert cache.get(SPEC, fake).origin == "disk" and disk.disk().usable


def test_every_flip_of_a_stored_kernel_is_noticed():
    data = disk.pack("k", Binary("entry", b"machine code", {"registers": 3}, {"ptx": "p"}))
    assert disk.unpack("k", data) == Binary("entry", b"machine code", {"registers": 3}, {"ptx": "p"})
    for i in range(len(data)):
        with pytest.raises(SerializationError):
            disk.unpack("k", data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(SerializationError):
            disk.unpack("k", data[:i])


def test_a_folder_that_cannot_be_made_means_memory_only(fake, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("GRAPHDNN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cache.get(SPEC, fake).origin == "compiled"
    assert cache.get(SPEC, fake).origin == "memory"
    assert not disk.disk().usable and disk.disk().entries() == []


def test_the_cache_can_be_switched_off(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHDNN_CACHE", "0")
    assert cache.get(SPEC, fake).origin == "compiled"
    assert not (tmp_path / "cache").exists()
    assert cache.get(SPEC, fake).source.startswith("def fake_kernel_1")


def test_a_compile_error_leaves_nothing_behind(fake, monkeypatch):
    def fail(source):
        raise BuildError("no compiler")

    monkeypatch.setattr(fake, "compile", fail)
    with pytest.raises(BuildError):
        cache.get(SPEC, fake)
    monkeypatch.undo()


def test_leftovers_of_killed_processes_are_swept(fake):
    old, new = (disk.disk().root / "tmp" / name for name in ("1-old", "2-new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    cache.get(SPEC, fake)
    assert not old.exists() and new.exists()


def test_info_and_clear(fake):
    for n in range(3):
        cache.get(replace(SPEC, name=f"k{n}"), fake)
    place = disk.disk()
    assert len(place.entries()) == 3 and all(size > 100 for _, size in place.entries())
    assert place.clear() == 3 and place.entries() == []


def test_a_store_is_asked_first_and_filled(fake, monkeypatch):
    store = cache.KernelStore()
    made = cache.get(SPEC, fake, store)
    assert store.items() == [(made.key, made.binary)]
    fresh(monkeypatch)
    disk.disk().clear()
    assert cache.get(SPEC, fake, store).origin == "memory" and fake.compiled == 1


def test_a_store_forgets_the_least_recently_used():
    store = cache.KernelStore(2)
    for name in "abc":
        store.put(name, Binary(name, b""))
        store.get("a")
    assert [k for k, _ in store.items()] == ["c", "a"]


def test_listeners_hear_of_compilations(fake, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(cache, "listeners", [lines.append])
    cache.get(SPEC, fake)
    assert len(lines) == 2 and "compiling fake_kernel_1" in lines[0] and " s" in lines[1]
    cache.get(SPEC, fake)
    assert len(lines) == 2


WORKER = textwrap.dedent("""
    import json, os, sys, time
    from pathlib import Path
    from graphdnn.codegen import render
    from graphdnn.codegen.spec import Binary, KernelSpec, PointerParam, Source
    from graphdnn.plans import cache

    class Slow:
        name = "cpu"
        def toolchain_key(self): return "1"
        def compile(self, source):
            print("compiling", flush=True)
            time.sleep(float(sys.argv[1]))
            return Binary(source.entry, source.text.encode() * 5000, {}, {})

    render.render = lambda spec: Source(spec, f"# {spec.name}\\n")
    for n in range(int(sys.argv[2])):
        kernel = cache.get(KernelSpec("t", f"k{n}", (PointerParam("x", "float32"),)), Slow())
        assert kernel.binary.code == f"# k{n}\\n".encode() * 5000, "a wrong or torn kernel"
    print(json.dumps({"misses": cache.counters.misses, "damaged": cache.counters.damaged}), flush=True)
""")


def _worker(folder: Path, sleep: float, kernels: int, **env: str | None) -> subprocess.Popen[str]:
    variables = {k: v for k, v in (os.environ | {"GRAPHDNN_CACHE_DIR": str(folder)} | env).items() if v is not None}
    return subprocess.Popen([sys.executable, "-c", WORKER, str(sleep), str(kernels)], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)


def test_eight_processes_on_a_cold_cache_one_killed_in_the_middle(tmp_path):
    workers = [_worker(tmp_path, 0.05, 4) for _ in range(8)]
    victim = _worker(tmp_path, 30, 4)  # holds the lock of a kernel, if it comes to it
    time.sleep(0.7)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    results = []
    for w in workers:
        out, _ = w.communicate(timeout=60)
        assert w.returncode == 0, out
        results.append(json.loads(out.splitlines()[-1]))
    assert all(r["damaged"] == 0 for r in results)
    assert sum(r["misses"] for r in results) <= 8, "the locks keep most processes from compiling the same kernel"
    last = _worker(tmp_path, 0, 4).communicate(timeout=60)[0]
    assert json.loads(last.splitlines()[-1])["misses"] == 0


def test_a_process_killed_while_it_compiles_blocks_nobody(tmp_path):
    victim = _worker(tmp_path, 30, 1)
    assert victim.stdout is not None and victim.stdout.readline() == "compiling\n"
    follower = _worker(tmp_path, 0, 1)
    time.sleep(0.3)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    out, _ = follower.communicate(timeout=30)
    result = json.loads(out.splitlines()[-1])
    assert result["misses"] == 1


@pytest.mark.parametrize("home", [None, "/proc/nowhere"])
def test_home_unset_or_unwritable(tmp_path, home):
    out, _ = _worker(tmp_path, 0, 2, HOME=home, GRAPHDNN_CACHE_DIR=None, XDG_CACHE_HOME=None if home is None else "/proc/nowhere").communicate(
        timeout=60
    )
    assert json.loads(out.splitlines()[-1])["damaged"] == 0


def test_read_only_folder(tmp_path, fake, monkeypatch):
    """Readable entries are used; nothing is written. (root may write anywhere, so the rename is made to fail.)"""
    cache.get(SPEC, fake)
    fresh(monkeypatch)

    def refuse(*args, **kwargs):
        raise PermissionError(30, "Read-only file system")

    for name in ("mkdir", "write_text", "write_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "rename", refuse)
    place = disk.DiskCache(disk.disk().root)
    monkeypatch.setattr(cache, "disk", lambda: place)
    assert cache.get(SPEC, fake).origin == "disk"
    other = replace(SPEC, name="another")
    assert cache.get(other, fake).origin == "compiled"
    assert not place.usable
    assert cache.get(other, fake).origin == "memory"
