"""explain, draw and check: figures that can be worked out by hand, every picture format, wrong results noticed."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from graphdnn import device as devices
from graphdnn.dtypes import data_type
from graphdnn.errors import BuildError, ValidationError
from graphdnn.inspection import check as checking
from graphdnn.inspection import draw as drawing
from graphdnn.inspection.draw import draw
from graphdnn.inspection.explain import count, explain, seconds, size
from graphdnn.inspection.picture import layout, picture
from graphdnn.ir.layout import packed
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor
from graphdnn.passes import regions
from graphdnn.plans import candidates

F32 = data_type.FLOAT
CPU = devices.cpu()
B, M, N, K = 2, 8, 12, 16


def pattern(name="pattern") -> OperationGraph:
    """y = gelu(x @ w + bias), amax of y."""

    def t(name, dim, **kwargs):
        return Tensor(name, 0, dim, packed(dim), F32, **kwargs)

    tensors = [t("x", (B, M, K)), t("w", (1, K, N)), t("c", (B, M, N), virtual=True), t("bias", (1, 1, N)), t("h", (B, M, N), virtual=True)]
    tensors += [t("y", (B, M, N)), t("amax", (1, 1, 1))]
    nodes = (
        Node("MATMUL", "mm", (("A", 0), ("B", 1)), (("C", 2),), (), F32),
        Node("POINTWISE", "add", (("IN_0", 2), ("IN_1", 3)), (("OUT_0", 4),), (("mode", "ADD"),), F32),
        Node("POINTWISE", "gelu", (("IN_0", 4),), (("OUT_0", 5),), (("mode", "GELU_FWD"),), F32),
        Node("REDUCTION", "top", (("X", 5),), (("Y", 6),), (("mode", "AMAX"),), F32),
    )
    return OperationGraph(tuple(replace(x, uid=i + 1) for i, x in enumerate(tensors)), nodes, name)


@pytest.fixture(scope="module")
def plans():
    return candidates.create(pattern(), CPU)


def test_figures_by_hand(plans):
    e = explain(plans.graph, plans)
    out, x, w, bias, amax = (4 * n for n in (B * M * N, B * M * K, K * N, N, 1))
    assert (e.kernels, e.unfused_kernels) == (1, 4)
    assert e.bytes_read == x + w + bias and e.bytes_written == out + amax and e.bytes == e.bytes_read + e.bytes_written
    assert e.unfused_bytes == (x + w + out) + (out + bias + out) + (out + out) + (out + amax)
    assert e.saved == pytest.approx(1 - e.bytes / e.unfused_bytes)
    assert e.flops == 2 * B * M * N * K + 3 * B * M * N
    assert e.arithmetic_intensity == pytest.approx(e.flops / e.bytes)
    assert e.floor_seconds == pytest.approx(max(e.bytes / (CPU.dram_gbps * 1e9), e.flops / (CPU.flops["FLOAT"] * 1e12)))
    assert e.workspace_bytes == plans.plan_at(0).workspace_bytes
    (r,) = e.regions
    assert r.nodes == ("mm", "add", "gelu", "top") and r.engine == "matmul_simt" and r.bytes_read == e.bytes_read and r.knobs
    assert r.reads == ("x [2, 8, 16] FLOAT", "w [1, 16, 12] FLOAT", "bias [1, 1, 12] FLOAT")


def test_data_is_json_and_text_says_the_same(plans):
    e = explain(plans.graph, plans)
    data = json.loads(json.dumps(e.data))
    assert data["kernels"] == 1 and data["unfused_kernels"] == 4 and data["regions"][0]["engine"] == "matmul_simt"
    assert {"engine", "region", "node", "reason"} == set(data["rejections"][0]) and data["bytes"] == e.bytes and data["saved"] == e.saved
    assert [c["name"] for c in data["candidates"]] == [p.name for p in plans]
    text = str(e)
    for part in (
        "1 (4 with one kernel per op)",
        f"{e.saved:.0%} saved",
        "matmul_simt (eng2)",
        "mm add gelu top",
        "rejections",
        "anchor",
        e.plan,
        CPU.name,
    ):
        assert part in text


def test_cuts_are_told():
    """A second matmul reads the result of the first one in tiles."""
    graph = pattern()
    v, z = (Tensor(n, u, d, packed(d), F32) for n, u, d in (("v", 8, (1, N, 5)), ("z", 9, (B, M, 5))))
    tensors = (*graph.tensors[:5], replace(graph.tensors[5], virtual=True), graph.tensors[6], v, z)
    nodes = (*graph.nodes[:3], Node("MATMUL", "second", (("A", 5), ("B", 7)), (("C", 8),), (), F32))
    plans = candidates.create(OperationGraph(tensors, nodes), CPU)
    e = explain(plans.graph, plans)
    assert e.kernels == 2 and e.stored == ("y",) and any("'y' is stored" in c for c in e.cuts) and "cuts" in str(e)


def test_the_built_plan_is_the_one_explained(plans):
    mine = candidates.create(pattern(), CPU)
    last = mine.count() - 1
    mine.build_at(last)
    assert explain(mine.graph, mine).plan == mine.name_at(last)
    one = explain(mine.graph, mine.plan_at(0))
    assert one.plan == mine.name_at(0) and one.candidates == () and one.rejections == ()


def test_matmul_counts_at_the_rate_of_its_inputs():
    """bf16 on an H200 runs on tensor cores, float32 does not."""
    h200, graph = devices.describe("sm_90"), pattern()
    half = replace(graph, tensors=tuple(replace(t, dtype=data_type.BFLOAT16) for t in graph.tensors))
    slow, quick = (explain(g, candidates.create(g, h200)) for g in (graph, half))
    assert quick.regions[0].seconds < slow.regions[0].seconds and quick.bytes == slow.bytes / 2


def test_numbers_for_people():
    assert [size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5120.0 GiB"]
    assert [count(n) for n in (5, 1500, 2e9, 3e15)] == ["5 ", "1.5 k", "2 G", "3e+03 T"]
    assert [seconds(s) for s in (2.5, 0.0125, 3e-6, 4e-9)] == ["2.5 s", "12.5 ms", "3 us", "4 ns"]


# ------------------------------------------------------------------------------------------------------------------------------ pictures
def everything_is_in(text: str) -> None:
    for part in ("mm", "matmul", "GELU_FWD", "AMAX", "x", "bias", "2x8x12 FLOAT", "1x16x12 FLOAT"):
        assert part in text, part


def test_svg(tmp_path):
    graph = pattern("a <graph> & more")
    path = tmp_path / "picture.svg"
    text = draw(graph, regions.partition(graph), path, engines=["matmul_simt"])
    assert path.read_text(encoding="utf-8") == text
    root = ET.fromstring(text)
    everything_is_in("".join(root.itertext()))
    assert "a <graph> & more" in "".join(root.itertext()) and "r0: matmul_simt" in text
    assert text.count("stroke-dasharray") == 2, "the two virtual tensors"


def test_fusion_groups_have_colours_of_their_own():
    graph = pattern()
    fused, single = draw(graph, regions.partition(graph)), draw(graph, regions.unfused(graph))
    assert len(set(re.findall(r'rx="4.0" fill="(#\w+)"', fused))) == 1
    assert len(set(re.findall(r'rx="4.0" fill="(#\w+)"', single))) == 4 and "(workspace)" in single
    assert set(re.findall(r'rx="4.0" fill="(#\w+)"', draw(graph))) == {"#ffffff"}, "no partition, no colours"


def test_dot_and_mermaid(tmp_path):
    graph = pattern('quoted "name"')
    dot = draw(graph, regions.partition(graph), tmp_path / "g.dot")
    everything_is_in(dot)
    assert dot.startswith('digraph "quoted \\"name\\"" {') and dot.count("style=dashed") == 2 and "subgraph cluster_r0" in dot
    mermaid = draw(graph, regions.unfused(graph), tmp_path / "g.mmd")
    everything_is_in(mermaid)
    assert mermaid.startswith("flowchart TD") and mermaid.count("-.->") == 2 and mermaid.count("subgraph") == 4
    assert draw(graph, format="DOT").startswith("digraph")


def test_unknown_formats(tmp_path):
    for kwargs in ({"format": "gif"}, {"path": tmp_path / "a.gif"}, {"path": tmp_path / "none"}):
        with pytest.raises(ValidationError, match="unknown picture format.*svg, png, dot, mermaid"):
            draw(pattern(), **kwargs)
    assert draw(pattern(), path=tmp_path / "none", format="svg").startswith("<svg")


def test_png_needs_a_renderer(monkeypatch, tmp_path):
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=r"PNG picture needs a renderer.*graphdnn\[viz\]"):
        draw(pattern(), path=tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_png_from_a_renderer(monkeypatch, tmp_path):
    class Renderer:
        @staticmethod
        def svg_to_bytes(svg_string):
            return b"\x89PNG" + svg_string.encode()[:4]

    monkeypatch.setattr(drawing, "find_spec", lambda name: name == "resvg_py" or None)
    monkeypatch.setattr(drawing, "import_module", lambda name: Renderer)
    assert draw(pattern(), path=tmp_path / "a.png") == b"\x89PNG<svg" == (tmp_path / "a.png").read_bytes()


def test_layout_keeps_boxes_apart_and_arrows_downwards():
    graph = pattern()
    p = layout(picture(graph, regions.partition(graph)))
    boxes = list(p.boxes.values())
    for i, a in enumerate(boxes):
        assert 0 <= a.x - a.width / 2 and a.x + a.width / 2 <= p.width and 0 < a.y < p.height
        for b in boxes[i + 1 :]:
            assert abs(a.x - b.x) >= (a.width + b.width) / 2 - 1e-6 or abs(a.y - b.y) >= (a.height + b.height) / 2 - 1e-6, (a, b)
    for arrow in p.arrows:
        way = [p.boxes[k].y for k in (arrow.start, *arrow.stops, arrow.end)]
        assert way == sorted(way) and len(set(way)) == len(way)


def test_a_graph_of_one_op_and_an_empty_one():
    graph = pattern()
    one = OperationGraph(graph.tensors[:3], graph.nodes[:1])
    ET.fromstring(draw(one, regions.partition(one)))
    ET.fromstring(draw(OperationGraph((), ())))


# ------------------------------------------------------------------------------------------------------------------------------ check
def test_a_right_plan_is_found_right(plans):
    found = checking.check(plans.plan_at(0).build(), repeat=1)
    assert found.right and {o.name for o in found.outputs} == {"y", "amax"} and found.best <= found.first
    assert all("right" in line for line in list(found.lines())[:-1]) and "us" in list(found.lines())[-1]


def test_a_wrong_result_is_noticed(plans, monkeypatch):
    plan = plans.plan_at(0).build()
    binder, executable = plan.load()

    class Wrong:
        def run_at(self, addresses, scalars, workspace, stream, rooms=None):
            executable.run_at(addresses, scalars, workspace, stream, rooms)
            out = next(i for i, s in enumerate(binder.slots) if s.tensor.name == "y")
            import ctypes

            ctypes.c_float.from_address(addresses[out]).value += 0.01

    monkeypatch.setattr(plan, "_ready", (binder, Wrong()))
    found = checking.check(plan, repeat=0)
    assert not found.right and "WRONG: 1 of 192 elements" in "\n".join(found.lines())


@pytest.mark.parametrize("dtype", [d for d in data_type if d.name not in ("NOT_SET", "INT8x4", "UINT8x4", "INT8x32", "FAST_FLOAT_FOR_FP8")])
def test_random_inputs_of_every_type(dtype):
    values = checking.random_values(np.random.default_rng(0), Tensor("x", 1, (50,), (1,), dtype))
    from graphdnn import reference

    np.testing.assert_array_equal(reference.round_to(values, dtype), values)
    assert len(np.unique(values)) > 1
