"""Builds that are kept in the disk cache: a graph built from an entry is, in all that a user can ask, the graph built without one."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn import device as devices
from graphdnn import targets
from graphdnn.errors import GraphError, NotSupportedError
from graphdnn.plans import cache, candidates, codec, container, disk, stored
from tests.unit.test_damage import F32, spoiled
from tests.unit.test_damage_caches import anew

ROOT = Path(__file__).resolve().parents[2]
MODES = [graphdnn.heur_mode.A, graphdnn.heur_mode.FALLBACK]
RNG = np.random.default_rng(5)
A, B = (RNG.standard_normal(s).astype(np.float32) for s in ((2, 5, 7), (2, 7, 4)))
WANTED = np.maximum(A.astype(np.float64) @ B, 0)
TYPES = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32}


def declared(device: str, name: str = "a", **options: Any) -> Any:
    """relu(a @ b), and its sums over the rows: several regions, several plans."""
    g = graphdnn.pygraph(device=device, **TYPES | options)
    a, b = (g.tensor(dim=x.shape, layout="row", name=n, uid=u) for x, n, u in ((A, name, 1), (B, "b", 2)))
    y = g.relu(g.matmul(A=a, B=b)).set_output(True).set_uid(3)
    g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((2, 1, 4)).set_stride((4, 4, 1)).set_output(True).set_uid(4)
    g.build_operation_graph()
    return g


def built(device: str, narrow: Callable[[Any], None] = lambda g: None, **options: Any) -> Any:
    g = declared(device, **options)
    g.create_execution_plans(MODES)
    narrow(g)
    g.check_support()
    g.build_plans()
    return g


def run(g: Any) -> list[np.ndarray]:
    y, sums = np.full((2, 5, 4), np.nan, np.float32), np.full((2, 1, 4), np.nan, np.float32)
    g.execute({1: A, 2: B, 3: y, 4: sums}, np.empty(g.get_workspace_size() + 256, np.uint8)[:g.get_workspace_size() or None])
    np.testing.assert_allclose(y, WANTED, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(sums, WANTED.sum(1, keepdims=True), rtol=2e-6, atol=1e-5)
    return [y, sums]


def seen(g: Any) -> dict[str, Any]:
    """All that can be asked of the plans; what a hit does not know comes last."""
    plans, plan = g._planned(), g.plan
    found = {
        "chosen": (plans.chosen_index, plan.name, plan.cost, plan.choices, plan.partition, plan.numeric_notes, plan.behavior_notes),
        "recipe": (codec.encode(plan.recipe), plan.region_kernels, plan.workspace_bytes, [k.key for k in plan.kernels]),
        "names": [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())],
        "keys of what came back": [cache.kernel_key(k.spec, targets.get(plan.device)) for k in plan.kernels],
        "notes": [str(n) for n in g.get_behavior_notes()],
        "size": g.get_workspace_size(),
        "text": (plan.source, repr(plan)),
        "bytes": bytes(g.serialize()),
        "explain": str(g.explain()),
        "all": [(p.name, p.cost, p.choices, p.numeric_notes, p.workspace_bytes) for p in plans],
        "barred": {i: plans.obstacle(i) for i in range(len(plans))},
        "rejections": [str(r) for r in plans.rejections],
        "engines": (g.get_engine_count(), g.get_knobs_for_engine(plan.choices[0].engine)),
        "candidate": (plan.candidate.key, plan.algorithms),
    }
    for bad in (-1, len(found["names"]), True):
        with pytest.raises(GraphError) as error:
            g.get_plan_name_at_index(bad)
        found[f"index {bad}"] = str(error.value).split("graph:")[0]
    return found


@pytest.fixture
def planned(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs that are planned, and not found, from here on."""
    count: list[str] = []
    real = candidates.create

    def counted(graph: Any, *args: Any, **more: Any) -> Any:
        count.append(graph.key)
        return real(graph, *args, **more)

    monkeypatch.setattr(candidates, "create", counted)
    anew(monkeypatch)
    return count


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "kernels" / disk.PLANS).rglob("*") if p.is_file())


def test_a_build_from_an_entry_is_that_without_one(device: str, planned: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built(device)
    result = run(first) if device != "cuda:0" else []
    assert len(planned) == 1 and len(entries(empty_cache)) == 1
    anew(monkeypatch)
    before = cache.stats()
    again = built(device)
    assert {k.origin for k in again.plan.kernels} == {"disk"} and cache.stats().disk_hits == before.disk_hits + len(again.plan.kernels)
    assert again.get_workspace_size() == first.get_workspace_size() and again.get_execution_plan_count() == first.get_execution_plan_count()
    for got, want in zip(run(again) if result else [], result, strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(planned) == 1 and cache.stats().compilations == before.compilations, "nothing was planned or compiled"
    assert seen(again) == seen(first)
    assert len(planned) == 2, "what the entry does not tell was planned then"
    twin = pickle.loads(pickle.dumps(again))
    assert twin.plan.name == first.plan.name


FILTERS: dict[str, Callable[[Any], None]] = {
    "engine": lambda g: g.deselect_engines(["_k12=0"]),
    "first plan": lambda g: g.deselect_engines([g.get_plan_name_at_index(0)]),
    "workspace": lambda g: g.deselect_workspace_greater_than(0),
    "notes": lambda g: g.select_numeric_notes([]),
    "two": lambda g: (g.deselect_workspace_greater_than(1 << 20), g.deselect_behavior_notes([graphdnn.behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API])),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_part_of_the_key(name: str, planned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = seen(built("cudasim"))
    first = seen(built("cudasim", FILTERS[name]))
    anew(monkeypatch)
    planned.clear()
    again = built("cudasim", FILTERS[name])
    assert again.plan.name == first["chosen"][1] and not planned
    assert seen(again) == first
    assert built("cudasim").plan.name == plain["chosen"][1]


def test_filters_that_leave_nothing_say_so_in_the_same_words(planned: list[str]) -> None:
    said = []
    for _ in range(2):
        with pytest.raises(NotSupportedError) as error:
            built("cpu", lambda g: g.deselect_engines(["eng"]))
        said.append(str(error.value))
        built("cpu")
    assert said[0] == said[1]


def test_after_a_hit_everything_else_goes_on(planned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    built("cpu")
    anew(monkeypatch)
    g = built("cpu")
    chosen = g.plan
    g.build_plan_at_index(1)
    run(g)
    assert g.plan.name == g.get_plan_name_at_index(1) and g._planned().plan_at(0) is chosen, "the plan that was there stays in its place"
    g.create_execution_plan(chosen.choices[0].engine, {})
    assert g.get_execution_plan_count() == len(g._planned()) > 2
    g.deselect_engines([g.get_plan_name_at_index(0)])
    g.build_plans()
    assert g.plan is not chosen
    run(g)
    assert len(planned) == 2


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "nothing": lambda m: {},
    "a tensor's name": lambda m: {"name": "other"},
    "deterministic": lambda m: m.setenv("GRAPHDNN_DETERMINISTIC", "1") or {},  # type: ignore[func-returns-value]
    "workspace limit": lambda m: {"workspace_limit": 1 << 20},
    "files": lambda m: m.setattr(stored, "_files", lambda: "others") or {},  # type: ignore[func-returns-value]
    "no files": lambda m: m.setattr(stored, "_files", lambda: None) or {},  # type: ignore[func-returns-value]
    "version": lambda m: m.setattr(stored, "__version__", "0.0.0") or {},  # type: ignore[func-returns-value]
    "engines": lambda m: m.setattr("graphdnn.engines.ENGINES", (*graphdnn.engines.ENGINES,)) or {},  # type: ignore[attr-defined,func-returns-value]
    "no cache": lambda m: m.setenv("GRAPHDNN_CACHE", "0") or {},  # type: ignore[func-returns-value]
    "a kernel cache": lambda m: {"kernel_cache": graphdnn.create_kernel_cache()},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_decides_is_in_the_key(what: str, planned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    built("cudasim")
    assert len(planned) == 1
    built("cudasim", **CHANGES[what](monkeypatch))
    assert len(planned) == (1 if what == "nothing" else 2)


def test_devices_modes_and_the_toolchain_are_in_the_key(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = declared("cpu")._opgraph

    def key(device: str = "sm_90", modes: tuple[str, ...] = ("A", "FALLBACK")) -> str | None:
        return stored._key(graph, devices.parse(device), modes, True)

    keys = [key(), key("sm_80"), key("cpu"), key("cudasim"), key(modes=("A",)), key(modes=("FALLBACK", "A"))]
    monkeypatch.setenv("GRAPHDNN_LINEINFO", "1")
    keys.append(key())
    assert None not in keys and len(set(keys)) == len(keys)
    assert key(modes=()) is None, "a list of custom plans"


def test_mode_b_is_stored_where_nothing_was_measured(planned: list[str], empty_cache: Path) -> None:
    def named() -> list[str]:
        g = declared("cpu")
        g.create_execution_plans([graphdnn.heur_mode.B])
        g.build_plans()
        return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]

    first = named()
    assert named() == first and len(planned) == 1
    (empty_cache / "tuning.db").touch()
    assert named() == first and len(planned) == 2, "a database may know better"


@pytest.mark.parametrize("seed", range(2))
def test_damaged_entries_are_made_again(seed: int, planned: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    built("cudasim")
    (entry,) = entries(empty_cache)
    good = entry.read_bytes()
    damages = [spoiled(good, rng) for _ in range(6)] + [b"", good[: rng.randrange(len(good))], good + b"x"]
    for bad in damages:
        if bad == good:
            continue
        entry.write_bytes(bad)
        anew(monkeypatch)
        planned.clear()
        before = cache.stats()
        run(built("cudasim"))
        assert len(planned) == 1 and cache.stats().damaged == before.damaged + 1 and cache.stats().compilations == before.compilations
        assert entry.read_bytes() == good, "and is whole afterwards"


def edited(good: bytes, rng: random.Random) -> bytes:
    """A well-sealed entry of another content."""
    content, _ = container.unseal(good, stored.MAGIC, stored.FORMAT, "build", "")
    plan = content["plan"]
    where = rng.choice((content, plan, plan, plan, plan["recipe"], plan["partition"], plan["recipe"]["kernels"][0], plan["choices"][0]))
    what = rng.choice(sorted(where))
    if rng.random() < 0.3:
        del where[what]
    else:
        where[what] = rng.choice((None, -1, 10**6, "x", [], {}, [[7]], ["x"], 0.5))
    return container.seal(stored.MAGIC, stored.FORMAT, content)


def test_foreign_content_never_crashes(planned: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only names and estimates are taken as they come; what runs is checked, by the recipe's own rules and by the keys of the kernels."""
    built("cudasim")
    (entry,) = entries(empty_cache)
    good, rng = entry.read_bytes(), random.Random(7)
    for _ in range(20):
        entry.write_bytes(edited(good, rng))
        anew(monkeypatch)
        run(built("cudasim"))


def test_kernels_that_are_gone_are_compiled_again(planned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    built("cudasim")
    place = disk.disk()
    assert place is not None
    place.remove(place.entries()[0][0])
    anew(monkeypatch)
    before = cache.stats()
    g = built("cudasim")
    run(g)
    after, count = cache.stats(), len(g.plan.kernels)
    assert (after.compilations - before.compilations, after.disk_hits - before.disk_hits) == (1, count - 1)
    assert cache.stats().damaged == before.damaged


@pytest.mark.parametrize("where", ["replace", "mkdir", "write_bytes"])
def test_a_disk_that_takes_nothing(where: str, planned: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as m:
        m.setattr(os if where == "replace" else Path, where, fails)
        run(built("cudasim"))
    assert not entries(empty_cache) and not [p for p in empty_cache.rglob("tmp/*") if p.is_file()]
    run(built("cudasim"))


def test_threads_that_write_one_entry(planned: list[str], empty_cache: Path) -> None:
    """Writers replace each other's file in one step; readers see a whole one."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                built("cudasim")
                if number % 2:
                    for entry in entries(empty_cache):
                        entry.unlink(missing_ok=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    run(built("cudasim"))
    assert not list((empty_cache / "kernels" / "tmp").iterdir())


def test_clear_takes_builds_too(planned: list[str], empty_cache: Path) -> None:
    built("cudasim")
    place = disk.disk()
    assert place is not None and entries(empty_cache)
    assert place.clear() == len(place.entries()) or not place.entries()
    assert not entries(empty_cache)
    built("cudasim")
    assert len(planned) == 2


def _is_pipe(place: Path) -> None:
    os.mkfifo(place)


def _is_folder(place: Path) -> None:
    place.mkdir()
    (place / "x").touch()


def _is_huge(place: Path) -> None:
    place.touch()
    os.truncate(place, 1 << 40)


STANDS_THERE: dict[str, Callable[[Path], None]] = {
    "a pipe": _is_pipe,
    "a folder": _is_folder,
    "1 TiB": _is_huge,
    "a device": lambda place: place.symlink_to("/dev/zero"),
    "a link to itself": lambda place: place.symlink_to(place),
    "a link to nothing": lambda place: place.symlink_to(place.parent / "nothing"),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders on this system")
@pytest.mark.parametrize("what", STANDS_THERE)
@pytest.mark.parametrize("where", ["entry", "kernel"])
def test_what_stands_in_an_entrys_place(where: str, what: str, planned: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read, which might never end, and does not end the cache for this process."""
    built("cudasim")
    place = entries(empty_cache)[0] if where == "entry" else next(empty_cache.rglob(disk.BINARY))
    place.unlink()
    STANDS_THERE[what](place)
    anew(monkeypatch)
    run(built("cudasim"))
    found = disk.disk()
    assert found is not None and found.usable and place.is_file() and not place.is_symlink()
    anew(monkeypatch)
    planned.clear()
    assert {k.origin for k in built("cudasim").plan.kernels} == {"disk"} and not planned


def test_kernels_in_each_others_place_are_not_run(planned: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built("cudasim")
    (entry,) = entries(empty_cache)
    content, _ = container.unseal(entry.read_bytes(), stored.MAGIC, stored.FORMAT, "build", "")
    content["plan"]["kernels"].reverse()
    entry.write_bytes(container.seal(stored.MAGIC, stored.FORMAT, content))
    anew(monkeypatch)
    run(built("cudasim"))
    assert len(planned) == 2


def test_a_folder_that_is_deleted_all_the_time(planned: list[str], empty_cache: Path) -> None:
    done = threading.Event()

    def delete() -> None:
        while not done.is_set():
            shutil.rmtree(empty_cache / "kernels", ignore_errors=True)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for _ in range(8):
            cache.memory.clear()
            run(built("cudasim"))
    finally:
        done.set()
        thread.join()
    run(built("cudasim"))
    found = disk.disk()
    assert found is not None and found.usable and entries(empty_cache), "it is used again"


def test_what_was_chosen_because_others_failed_is_not_stored(planned: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that fail three times in a row end the build; another attempt takes the next ones, which others need not be content with."""
    g = declared("cpu")
    g.create_execution_plans(MODES)
    plans, broken = g._planned(), []

    def fails(plan: Any) -> Any:
        if plan.name in broken:
            raise graphdnn.errors.BuildError("no compiler at this moment")
        return plan.build()

    broken += [p.name for p in plans][:-1]
    monkeypatch.setattr("graphdnn.plans.planset.GIVE_UP_AFTER", 1)
    for _ in broken:
        with pytest.raises(graphdnn.errors.BuildError):
            plans.build(make=fails)
    plans.build(make=fails)
    run(g)
    assert g.plan.name not in broken and not entries(empty_cache)


def test_files_of_one_time_are_told_apart_by_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in images and packages that are built to be equal byte by byte: a figure that changes changes neither size nor time. And by links."""
    (tmp_path / "real/graphdnn/plans").mkdir(parents=True)
    (tmp_path / "real/codegen_templates").mkdir()
    source, template = tmp_path / "real/graphdnn/plans/stored.py", tmp_path / "real/codegen_templates/a.j2"
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/graphdnn").symlink_to(tmp_path / "real/graphdnn")

    def seen(text: str, printed: str, time: int = 10**9, second: int = 10**9, name: str = "real") -> str | None:
        source.write_text(text)
        template.write_text(printed)
        os.utime(source, ns=(time, time))
        os.utime(template, ns=(second, second))
        monkeypatch.setattr(stored, "__file__", str(tmp_path / name / "graphdnn/plans/stored.py"))
        return stored._files.__wrapped__()

    first = seen("x = 1", "a")
    assert first == seen("x = 1", "a") and len({first, seen("x = 2", "a"), seen("x = 1", "b"), seen("x = 1", "a", 10**9 + 1)}) == 4
    assert seen("x = 1", "a", name="linked") == first and seen("x = 1", "b", name="linked") != first, "templates lie beside the real one"


def test_a_new_process_imports_no_engine(empty_cache: Path, tmp_path: Path) -> None:
    """Nor what takes graphs apart, prints kernels or ranks plans; and its kernels come from the disk."""
    text = tmp_path / "graph.json"
    text.write_text(str(built("sm_90")))
    script = (
        "import sys, json, graphdnn\n"
        "g = graphdnn.pygraph(device='sm_90')\n"
        f"g.deserialize(open({str(text)!r}).read())\n"
        "g.build([graphdnn.heur_mode.A, graphdnn.heur_mode.FALLBACK])\n"
        "print(json.dumps([sorted(sys.modules), sorted({k.origin for k in g.plan.kernels}), g.plan.name]))\n"
    )
    environment = os.environ | {"GRAPHDNN_CACHE_DIR": str(empty_cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    modules, origins, name = json.loads(done.stdout)
    assert origins == ["disk"] and name == built("sm_90").plan.name
    unwanted = ("graphdnn.engines", "graphdnn.codegen.tape", "graphdnn.plans.candidates", "graphdnn.codegen.render", "graphdnn.intrinsics", "jinja2")
    assert not [m for m in modules if m in unwanted or m.split(".")[0] in ("numba", "llvmlite", "networkx", "torch", "ml_dtypes")]


def test_a_matmul_without_elements_is_stored_too(planned: list[str]) -> None:
    """Its engine estimates no work as the integer 0, which is no float in a file."""
    for _ in range(2):
        g = graphdnn.pygraph(device="cudasim", **TYPES)
        a, b = (g.tensor(dim=dim, layout="row", uid=i) for i, dim in enumerate(((0, 4, 3), (0, 3, 5)), 1))
        g.matmul(A=a, B=b).set_output(True).set_uid(3)
        g.build(MODES)
    assert len(planned) == 1
    twin = graphdnn.pygraph(device="cudasim")
    twin.deserialize(bytes(g.serialize()))
    assert twin.plan.choices == g.plan.choices
