"""Compiled kernels on disk, for the next process.

An entry is a folder ``<key>`` that holds the source text ``<kernel>.py`` and ``kernel.bin`` (header, SHA-256, JSON facts, code). It is written in a
temporary folder and renamed in one step; it is checked before use, and a damaged one is removed, to be built again. Any number of processes may
share the folder: a lock per key keeps them from compiling the same kernel twice, but nothing depends on it. A folder that cannot be written means
memory only. In folder ``plans`` lie files that say which kernels a graph was built to (``stored``).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphdnn import env, log
from graphdnn.codegen.spec import Binary, Source
from graphdnn.errors import SerializationError, explain

MAGIC = b"GDNNKRN1"
BINARY = "kernel.bin"
PLANS = "plans"
STALE_S = 3600.0
LARGEST = 1 << 28
"""Bytes; what is larger was not written here."""
LOCK_WAIT_S = 120.0
_HEADER = struct.Struct("<8s32sI")


@dataclass
class Counters:
    """What the cache did in this process. ``misses`` are compilations, ``compile_s`` the seconds spent in them, ``reasons`` why they were needed."""

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    damaged: int = 0
    compile_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


counters = Counters()


def pack(key: str, binary: Binary) -> bytes:
    """One kernel as bytes: magic, SHA-256 of the rest, length of the JSON, JSON, code."""
    facts = {"key": key, "entry": binary.entry, "facts": binary.facts, "texts": binary.texts, "code": len(binary.code)}
    text = json.dumps(facts, sort_keys=True, default=_plain).encode()
    size = struct.pack("<I", len(text))
    return MAGIC + hashlib.sha256(size + text + binary.code).digest() + size + text + binary.code


def _plain(value: Any) -> Any:
    """NumPy numbers among the facts."""
    return value.item() if hasattr(value, "item") else str(value)


def unpack(key: str, data: bytes) -> Binary:
    """The kernel that :func:`pack` wrote. SerializationError says what is wrong with it."""
    if len(data) < _HEADER.size:
        raise _damaged(key, f"{len(data)} bytes")
    magic, digest, size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _damaged(key, f"magic {magic!r}")
    if hashlib.sha256(data[40:]).digest() != digest:
        raise _damaged(key, "another checksum")
    try:
        facts = json.loads(data[44 : 44 + size])
        code = data[44 + size :]
        if facts["key"] != key or facts["code"] != len(code):
            raise _damaged(key, f"the entry of {facts['key']}, {len(code)} bytes of code")
        return Binary(str(facts["entry"]), code, dict(facts["facts"]), dict(facts["texts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(key, f"{type(error).__name__}: {error}") from error


def _damaged(key: str, found: str) -> SerializationError:
    return SerializationError(explain(f"kernel {key[:16]} of the cache is damaged", expected="an entry written by this version", found=found))


@dataclass
class DiskCache:
    """The folder of compiled kernels. ``usable`` turns False at the first write that fails; reads go on."""

    root: Path
    usable: bool = True
    trusted: bool = True
    _swept: bool = field(default=False, repr=False)

    def folder(self, key: str) -> Path:
        """Folder of one entry."""
        return self.root / key[:2] / key

    def get(self, key: str) -> Binary | None:
        """The kernel of ``key``; None if it is not here or is damaged (it is then removed and counted)."""
        path = self.folder(key) / BINARY
        data = _content(path)
        if data is None:
            return None
        try:
            return unpack(key, data)
        except SerializationError as error:
            counters.damaged += 1
            log.warning(f"{error}; it is built again ({path})")
            self.remove(key)
            return None

    def source(self, key: str) -> str | None:
        """The source text that lies beside the binary."""
        try:
            return next(self.folder(key).glob("*.py")).read_text(encoding="utf-8")
        except (OSError, StopIteration, UnicodeDecodeError):
            return None

    def put(self, key: str, source: Source, binary: Binary) -> None:
        """Write an entry; another process that was first wins."""
        if not self.usable:
            return
        final, work = self.folder(key), self._scratch()
        try:
            self._sweep()
            work.mkdir(parents=True)
            (work / f"{_file_name(source.entry)}.py").write_text(source.text, encoding="utf-8")
            (work / BINARY).write_bytes(pack(key, binary))
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(work, final)
            except OSError:
                if self.get(key) is None:  # something lies there that is no entry
                    self.remove(key)
                    os.rename(work, final)
        except OSError as error:
            self._give_up(error)
        finally:
            _delete(work)

    def remove(self, key: str) -> None:
        """Take an entry out: out of the way in one step, then deleted."""
        self._take_out(self.folder(key))

    def _take_out(self, path: Path) -> None:
        try:
            if not path.exists():
                return
            gone = self._scratch()
            gone.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, gone)
            _delete(gone)
        except OSError as error:
            log.debug(f"cache entry {path.name[:16]} cannot be removed: {error}")

    def read(self, key: str) -> bytes | None:
        """The bytes that :meth:`write` has put beside the kernels; None if there are none."""
        return _content(self._beside(key))

    def write(self, key: str, data: bytes) -> None:
        """Put bytes beside the kernels, in one step; they replace what is there."""
        if not self.usable:
            return
        final, work = self._beside(key), self._scratch()
        try:
            self._sweep()
            for folder in (work.parent, final.parent):
                folder.mkdir(parents=True, exist_ok=True)
            work.write_bytes(data)
            try:
                os.replace(work, final)
            except IsADirectoryError:
                self._take_out(final)
                os.replace(work, final)
        except OSError as error:
            self._give_up(error)
        finally:
            _delete(work)

    def _beside(self, key: str) -> Path:
        return self.root / PLANS / key[:2] / key

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by one process or thread a key. Best effort: where the file system has no locks, or the holder hangs, the caller goes on without."""
        handle = self._take(key) if self.usable else None
        try:
            yield
        finally:
            if handle is not None:
                os.close(handle)  # releases the lock; the kernel does so too when a process is killed

    def _take(self, key: str) -> int | None:
        try:
            import fcntl
        except ImportError:
            return None
        handle = -1
        try:
            path = self.root / "locks" / key[:3]
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            pause, end = 0.001, time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return handle
                except BlockingIOError:
                    if time.monotonic() > end:
                        break
                    time.sleep(pause)
                    pause = min(2 * pause, 0.05)
        except OSError as error:
            log.debug(f"no lock for cache entry {key[:16]}: {error}")
        if handle >= 0:
            os.close(handle)
        return None

    def _scratch(self) -> Path:
        return self.root / "tmp" / f"{os.getpid()}-{os.urandom(6).hex()}"

    def _sweep(self) -> None:
        """Once a process: delete what killed processes left behind."""
        if self._swept:
            return
        self._swept = True
        try:
            for path in (self.root / "tmp").iterdir():
                if time.time() - path.stat().st_mtime > STALE_S:
                    _delete(path)
        except OSError:
            return

    def _give_up(self, error: OSError) -> None:
        if isinstance(error, FileNotFoundError):  # somebody deletes the folder at this moment: the next entry finds it gone, and makes it
            log.debug(f"kernel cache {self.root}: {error}")
            return
        self.usable = False
        log.debug(f"kernel cache {self.root} cannot be written ({error}); kernels are kept in memory only")

    def entries(self) -> list[tuple[str, int]]:
        """Keys and sizes in bytes of all entries."""
        found = []
        for path in sorted(self.root.glob("??/*/" + BINARY)):
            try:
                found.append((path.parent.name, sum(f.stat().st_size for f in path.parent.iterdir())))
            except OSError:
                continue
        return found

    def clear(self) -> int:
        """Delete every entry, and what lies beside them; how many kernels there were."""
        entries = self.entries()
        for key, _ in entries:
            self.remove(key)
        self._take_out(self.root / PLANS)
        return len(entries)


def _content(path: Path) -> bytes | None:
    """What is in a file; None for one that is not there, and for what no entry is: a pipe would never end, nor would a device."""
    try:
        facts = path.stat()
        return path.read_bytes() if stat.S_ISREG(facts.st_mode) and facts.st_size <= LARGEST else None
    except OSError:
        return None


def _delete(path: Path) -> None:
    """Delete what is there, a folder or whatever else stands in its place."""
    try:
        if path.is_dir() and not path.is_symlink():
            import shutil

            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.debug(f"{path} cannot be deleted: {error}")


_disks: dict[Path, DiskCache] = {}


def disk() -> DiskCache | None:
    """The cache on disk that the environment names; None if it is switched off."""
    if not env.cache():
        return None
    root = env.cache_dir() / "kernels"
    found = _disks.get(root)
    if found is None:
        found = _disks[root] = DiskCache(root)
        if not env.cache_dir.is_set and _foreign(root):
            found.usable = found.trusted = False
            log.warning(f"kernel cache {root} belongs to another user; kernels are kept in memory only (GRAPHDNN_CACHE_DIR names another place)")
    return found if found.trusted else None


def _foreign(root: Path) -> bool:
    """Whether somebody else could have planted machine code in a folder that nobody chose (the default place may be under /tmp)."""
    for path in (root, root.parent):
        try:
            if hasattr(os, "getuid") and path.stat().st_uid not in (os.getuid(), 0):
                return True
        except OSError:
            continue
    return False


def _file_name(entry: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in entry)[:100] or "kernel"
