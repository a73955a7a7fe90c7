"""Plans built ahead of time: several architectures in one file, the choice at load, what is refused and how, files that are written in one step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import graphdnn
from graphdnn import cli
from graphdnn import device as devices
from graphdnn.plans import bundle, container, pieces, serialize
from tests.fake_driver import install
from tests.unit.fake_cuda import FakeCuda, parameters_of

F32 = graphdnn.data_type.FLOAT
ROWS, COLUMNS = 6, 70
ARCHS = ("sm_80", "sm_90a", "cpu")


def declared(scale: float = 0.5, **options: object) -> graphdnn.pygraph:
    """gelu(x * scale + shift), and its row sums: uids 1 to 4."""
    g = graphdnn.pygraph(io_data_type=F32, compute_data_type=F32, intermediate_data_type=F32, **options)
    x = g.tensor(dim=(ROWS, COLUMNS), layout="row", name="x", uid=1)
    shift = g.tensor(dim=(1, COLUMNS), layout="row", name="shift", uid=2)
    y = g.gelu(g.add(g.mul(x, scale), shift)).set_output(True).set_uid(3).set_name("y")
    g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((ROWS, 1)).set_stride((1, 1)).set_output(True).set_uid(4).set_name("sums")
    return g


@pytest.fixture(scope="module")
def file() -> bytes:
    return graphdnn.compile_for(declared(), ARCHS)


def check_numbers(g: graphdnn.pygraph) -> None:
    from math import erf

    rng = np.random.default_rng(3)
    x, shift = rng.standard_normal((ROWS, COLUMNS), np.float32), rng.standard_normal((1, COLUMNS), np.float32)
    y, sums = np.full((ROWS, COLUMNS), np.nan, np.float32), np.full((ROWS, 1), np.nan, np.float32)
    g.execute({1: x, "shift": shift, 3: y, 4: sums}, np.empty(g.get_workspace_size(), np.uint8))
    wide = x.astype(np.float64) * 0.5 + shift
    want = wide * 0.5 * (1 + np.vectorize(erf)(wide / 2**0.5))
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(sums, want.sum(1, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("here", "chosen"), [("sm_80", "sm_80"), ("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_90", "sm_90a"), ("cpu", "x")])
def test_the_plan_for_the_device_at_hand_is_loaded(file: bytes, here: str, chosen: str) -> None:
    g = graphdnn.pygraph(device=here)
    g.deserialize(file)
    assert g.plan.device == devices.parse(here)
    if here == "cpu":
        check_numbers(g)
    else:
        assert {k.binary.facts["arch"] for k in g.plan.kernels} == {chosen} and f".target {chosen}" in g.plan.ptx


def test_of_two_plans_that_run_the_newer_is_taken() -> None:
    both = graphdnn.compile_for(declared(), "sm_80,sm_86")
    for here, chosen in (("sm_80", "sm_80"), ("sm_86", "sm_86"), ("sm_89", "sm_86")):
        assert serialize.load(both, devices.parse(here)).kernels[0].binary.facts["arch"] == chosen
    assert [serialize.read(p)[0].device.arch for p in serialize.parts(both)] == ["sm_80", "sm_86"]


def test_one_plan_runs_on_later_gpus_of_its_generation_too(file: bytes) -> None:
    old = next(p for p in serialize.parts(file) if serialize.read(p)[0].device.arch == "sm_80")
    assert serialize.load(old, devices.parse("sm_89")).built
    with pytest.raises(graphdnn.SerializationError, match="code for sm_80 does not run on sm_90a"):
        serialize.load(old, devices.parse("sm_90"))


def test_no_plan_for_this_device(file: bytes) -> None:
    with pytest.raises(graphdnn.SerializationError) as caught:
        graphdnn.pygraph(device="sm_120").deserialize(file)
    text = str(caught.value)
    for part in (
        "no plan of the file runs",
        "sm_80 (",
        "sm_90a (",
        "cpu (",
        "found sm_120",
        "RTX 5090",
        "--arch sm_80,sm_90a,cpu,sm_120",
        "device='cpu'",
    ):
        assert part in text, text


def test_of_plans_for_several_cpus_the_one_for_this_cpu_is_taken(file: bytes) -> None:
    """What another CPU was compiled for would be compiled again."""
    own = next(p for p in serialize.parts(file) if serialize.read(p)[0].device.kind == "cpu")
    content, rest = container.unseal(own, serialize.MAGIC, serialize.FORMAT, "plan", "here")
    other = container.seal(serialize.MAGIC, serialize.FORMAT, content | {"host": "another CPU"}, [bytes(rest)])
    for files, origin in (([other, own], {"file"}), ([own, other], {"file"}), ([other], {"memory", "disk"})):
        plan = serialize.load(serialize.merge(files), devices.cpu())
        assert {k.origin for k in plan.kernels} <= origin


def test_a_block_that_takes_more_than_the_device_has() -> None:
    assert pieces.unfit("cuda", "sm_80", 160 << 10, devices.parse("sm_80")) is None
    assert "163840 bytes of shared memory" in str(pieces.unfit("cuda", "sm_80", 160 << 10, devices.parse("sm_86")))


@pytest.mark.parametrize(("capability", "arch"), [((8, 6), "sm_80"), ((9, 0), "sm_90a")])
def test_the_gpu_at_hand_is_asked(file: bytes, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    """Nobody names a device: the driver's current one is taken, its plan's machine code loaded, its kernels launched."""
    fake = fake_driver(file, arch, capability, monkeypatch)
    g = graphdnn.pygraph()
    g.deserialize(file)
    assert g.plan.device.kind == "cuda" and g.plan.device.name == "Fake GPU"
    g.execute({1: 0x1000, 2: 0x2000, 3: 0x3000, 4: 0x4000}, 0x8000)
    loaded = next(entry[1] for entry in fake.log if entry[0] == "load")
    assert any(k.binary.code.startswith(loaded) for k in g.plan.kernels) and any(entry[0] == "launch" for entry in fake.log)
    assert {k.binary.facts["arch"] for k in g.plan.kernels} == {arch}


def test_the_flow_of_the_api_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties of a device as text, a build from them that asks no driver, the plan on a handle: tensor cores, descriptors encoded and moved."""
    fake = FakeCuda({})
    install(monkeypatch, fake)
    monkeypatch.delenv("GRAPHDNN_DEVICE", raising=False)
    text = graphdnn.create_device_properties(0).serialize()
    fake.calls.clear()
    bf16 = graphdnn.data_type.BFLOAT16
    g = graphdnn.pygraph(
        device_property=graphdnn.create_device_properties(text), io_data_type=bf16, intermediate_data_type=F32, compute_data_type=F32
    )
    a = g.tensor(dim=(1, 128, 64), layout="row", name="a", uid=1)
    b = g.tensor(dim=(1, 64, 128), layout="row", name="b", uid=2)
    g.matmul(a, b).set_output(True).set_uid(3)
    g.build([graphdnn.heur_mode.A])
    data = g.serialize()
    assert not fake.calls, "no driver is asked before the plan is loaded"
    fake.parameters.update(parameters_of(g.plan))
    handle = graphdnn.create_handle("cuda:0")
    h = graphdnn.pygraph(handle=handle)
    h.deserialize(handle, data)
    graphdnn.set_stream(handle, 0x77)
    h.execute({1: 0x10000, 2: 0x20000, 3: 0x30000}, 0x40000, handle=handle)
    kinds = [entry[0] for entry in fake.log]
    assert "load" in kinds and kinds.count("encode") == 2
    launch = next(entry for entry in fake.log if entry[0] == "launch")
    assert launch[5] == 0x77 and set(launch[6]) >= {0x10000, 0x20000, 0x30000}


def fake_driver(file: bytes, arch: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A driver in Python for the kernels of the plan for ``arch``."""
    plan = next(p for p, _ in map(serialize.read, serialize.parts(file)) if p.device.arch == arch)
    fake = FakeCuda(parameters_of(plan), capability)
    monkeypatch.delenv("GRAPHDNN_DEVICE", raising=False)
    return install(monkeypatch, fake)


def test_what_does_not_belong_in_one_file() -> None:
    for archs in ("sm_90,sm_90a", "", [], "cpu,cpu"):
        with pytest.raises(graphdnn.ValidationError):
            graphdnn.compile_for(declared(), archs)
    for archs in (None, 80, [80]):
        with pytest.raises(TypeError):
            graphdnn.compile_for(declared(), archs)
    one, other = graphdnn.compile_for(declared(), "cpu"), graphdnn.compile_for(declared(), "sm_80")
    assert serialize.merge([one, other]) == serialize.merge([serialize.merge([one]), other])
    with pytest.raises(graphdnn.ValidationError, match="one plan for each device"):
        serialize.merge([one, one])
    g = graphdnn.pygraph(io_data_type=F32, compute_data_type=F32)
    g.relu(g.tensor(dim=(3,), layout="row", name="x")).set_output(True)
    with pytest.raises(graphdnn.ValidationError, match="one graph"):
        serialize.merge([one, graphdnn.compile_for(g, "sm_80")])


def test_rows_that_do_not_fit(file: bytes) -> None:
    """The checksum is right, the rows are not."""
    content, rest = container.unseal(file, container.BUNDLE, bundle.FORMAT, "file", "here")
    first = content["plans"][0]
    for rows in (
        None, [], {}, [1], [first], [first | {"size": -1}], content["plans"] * 2, [first | {"size": "1"}, *content["plans"][1:]],
        [{k: v for k, v in r.items() if k != "host"} for r in content["plans"]], [first | {"extra": 1}, *content["plans"][1:]],
    ):  # fmt: skip
        with pytest.raises(graphdnn.SerializationError):
            serialize.load(container.seal(container.BUNDLE, bundle.FORMAT, content | {"plans": rows}, [bytes(rest)]), devices.cpu())
    # a row that promises another device than its plan was built for
    swapped = [content["plans"][1] | {"size": first["size"]}, first | {"size": content["plans"][1]["size"]}, content["plans"][2]]
    forged = container.seal(container.BUNDLE, bundle.FORMAT, content | {"plans": swapped}, [bytes(rest)])
    with pytest.raises(graphdnn.SerializationError, match="another device"):
        serialize.load(forged, devices.parse("sm_90"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "graph.json", tmp_path / "plan.gdnn"
    g = declared()
    g.build_operation_graph()
    source.write_text(str(g))
    assert cli.main(["compile", str(source), "--arch", "sm_80,sm_90a,cpu", "-o", str(out), "-q"]) == 0
    told = capsys.readouterr().out
    assert all(f" on {arch}: kernels" in told for arch in ARCHS) and str(out) in told
    assert [serialize.read(p)[0].device.arch for p in serialize.parts(out.read_bytes())][:2] == ["sm_80", "sm_90a"]
    assert cli.main(["run", str(out), "--device", "cpu", "--repeat", "1", "-q"]) == 0
    h = graphdnn.pygraph(io_data_type=graphdnn.data_type.FLOAT)
    h.relu(h.tensor(dim=(graphdnn.Dim("n", max=9), 4), layout="row", name="x")).set_output(True).set_name("y")
    (dims := tmp_path / "dims.json").write_text(str(h))
    for argv, part in (
        (["compile", str(source), "--arch", "sm_80", "--device", "cpu"], "exclude each other"),
        (["compile", str(source), "--arch", "sm_42"], "unknown CUDA architecture"),
        (["compile", str(source), "--arch", ""], "unknown device"),
        (["compile", str(out), "--arch", "sm_80"], "no JSON text of a graph"),
        (["compile", str(dims), "--arch", "sm_80,cpu"], "one shape"),
        (["compile", str(dims), "--device", "cpu"], "one shape"),
        (["compile", str(source), "--arch", "cpu", "-o", str(tmp_path / "none" / "x.gdnn")], "cannot be written"),
        (["compile", str(source), "--arch", "cpu", "-o", "/"], "'/' cannot be written"),
        (["draw", str(source), "--device", "cpu", "-o", str(tmp_path / "none" / "x.svg")], "cannot be written"),
    ):
        assert cli.main([*argv, "-q"]) == 1 and part in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dims.json", "graph.json", "plan.gdnn"], "nothing is left behind"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.gdnn"
    container.write(path, b"old")

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as f:
            f.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(graphdnn.SerializationError, match="No space left"):
        container.write(path, b"new content")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["plan.gdnn"]


def test_an_interrupted_write_leaves_nothing_and_links_and_pipes_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link, pipe = tmp_path / "plan.gdnn", tmp_path / "link", tmp_path / "pipe"
    path.write_bytes(b"old")
    link.symlink_to(path)
    container.write(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    container.write(pipe, b"data")
    assert os.read(reader, 10) == b"data" and pipe.is_fifo()
    os.close(reader)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        container.write(path, b"newer")
    assert path.read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 3
