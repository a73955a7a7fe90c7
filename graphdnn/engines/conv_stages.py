"""Stages of a convolution by transformed tiles: kernels that gather the values of one tile (or of one line of it), map them by straight lines of text
and scatter the results, and products of stacks of matrices between them.

A stage's items count through ``loops``, the last of which is contiguous in the workspace: on a GPU neighbouring threads, on a CPU vector lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.access import Guard
from graphdnn.codegen.body import Signature, condition, lanes, tape_lines
from graphdnn.codegen.dialect import IndexWriter, decompose, index_type
from graphdnn.codegen.recipes import mapped
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Recipe
from graphdnn.codegen.tape import Tape
from graphdnn.device import DeviceProps
from graphdnn.dtypes import data_type
from graphdnn.engines.base import ceil_div, entry_name
from graphdnn.engines.matmul_simt import MatmulSimt
from graphdnn.ir.index import Linear, Var, rename, var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor
from graphdnn.passes import regions

REACHED = {"cpu": 0.37, "cuda": 0.67}
"""Share of the model's speed that stages and stacks of small products reach beside the plain sums. CPU: measured against conv_direct, whose register
tiles pass the model's peak (F(4 x 4) 5.2 to 6.0 ms, F(2 x 2) 38 to 27, a 7 x 7 filter by Fourier 12.6 to 18; one Zen 3 core, 2026-11-29). CUDA: a
guess on the safe side."""
LAUNCH_S = {"cpu": 4e-6, "cuda": 2.5e-6}
"""Seconds that each kernel costs beside its work."""
THREADS = 128
"""Threads of a block."""
LANES = 128
"""Most vector lanes of an item on a CPU: they hold all values of a tile on the stack."""


@dataclass(frozen=True)
class Taken:
    """Values that a tape calculates, one for each of ``loops``; ``value``: its name there."""

    tape: Tape
    value: str
    loops: tuple[Var, ...]


@dataclass(frozen=True)
class Placed:
    """Values in scratch memory: the first at ``base``, the others ``steps`` elements further."""

    buffer: Buffer
    base: Linear
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """Results that an epilogue tape stores, one for each of ``loops`` where all guards hold; ``c``: text of the tape's input from a sum ``total``."""

    tape: Tape
    c: str
    loops: tuple[Var, ...]
    guards: tuple[Guard, ...]


@dataclass(frozen=True)
class Stage:
    """``lines`` read x0, x1, ... (the values of ``source``); ``results``: what goes to ``target``, name by name."""

    words: str
    loops: tuple[Var, ...]
    source: Taken | Placed
    lines: Sequence[str]
    results: Sequence[str]
    target: Placed | Finished


def kernel(stage: Stage, signature: Signature, calc: str, title: list[str], cpu: bool) -> tuple[KernelSpec, Launch]:
    """The kernel of a stage and its launch."""
    return (_cpu if cpu else _cuda)(stage, signature, calc, title)


# ------------------------------------------------------------------------------------------------------------------------------------------- CPU
def _lanes_of(stage: Stage) -> int:
    size = stage.loops[-1].size
    return next(n for n in range(min(size, LANES), 0, -1) if size % n == 0)


def _cpu(stage: Stage, signature: Signature, calc: str, title: list[str]) -> tuple[KernelSpec, Launch]:
    width, last = _lanes_of(stage), stage.loops[-1]
    chunk, lane = Var("chunk", last.size // width), Var("jl", width)
    outer = (*stage.loops[:-1], chunk)

    def change(e: Linear) -> Linear:
        return rename(e, {last: var(chunk).scaled(width) + var(lane)})

    scratch = 0
    fields: dict[str, Any] = {"header": title, "calc": calc, "lanes": width, "fill": None, "after": None}
    fields["setup"] = decompose("o", list(outer), "int64")
    body = []
    if isinstance(stage.source, Taken):
        scratch = len(_steps(stage.source.loops))
        part = lanes(stage.source.tape.mapped(change), signature, lane, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        lines = [*part.body, f"line[u * {width} + jl] = {stage.source.value}"]
        fields["fill"] = {"count": scratch, "middle": [*decompose("u", list(stage.source.loops), "int64"), *part.setup], "body": lines}
        body += [f"x{k} = line[{k * width} + jl]" for k in range(scratch)]
    else:
        body += _loads(stage.source, signature, calc, IndexWriter("int64"), change)
    body += stage.lines
    if isinstance(stage.target, Placed):
        body += _stores(stage, signature, calc, IndexWriter("int64"), change)
    else:
        end = stage.target
        scratch = max(scratch, len(stage.results))
        body += [f"line[{k * width} + jl] = {r}" for k, r in enumerate(stage.results)]
        part = lanes(end.tape.mapped(change), signature, lane, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        fields["after"] = {
            "count": len(stage.results),
            "middle": decompose("u", list(end.loops), "int64"),
            "inside": condition(end.guards, IndexWriter("int64")) or "True",
            "setup": part.setup,
            "body": [f"total = line[u * {width} + jl]", f"c = {end.c}", *part.body],
        }
    fields |= {"body": body, "scratch": max(scratch, 1) * width}
    spec = KernelSpec("cpu/conv_stage.py.j2", entry_name(stage.words, fields, signature.params), signature.params, fields)
    work = width * (len(stage.lines) + 8)
    return spec, Launch(0, math.prod(v.size for v in outer), signature.args, max(1, (1 << 16) // work))


# ------------------------------------------------------------------------------------------------------------------------------------------ CUDA
def _cuda(stage: Stage, signature: Signature, calc: str, title: list[str]) -> tuple[KernelSpec, Launch]:
    items = math.prod(v.size for v in stage.loops)
    blocks = ceil_div(items, THREADS)
    itype = _index_type(stage, blocks * THREADS)
    fields: dict[str, Any] = {"header": title, "calc": calc, "itype": itype, "items": items, "threads": THREADS, "fill": None, "after": None}
    fields["setup"] = decompose("item", list(stage.loops), itype)
    body, scratch = [], 0

    def slot(u: str) -> str:
        return f"line[{itype}({itype}({u} * {itype}({THREADS})) + thread)]"

    if isinstance(stage.source, Taken):
        scratch = len(_steps(stage.source.loops))
        lines = [*decompose("u", list(stage.source.loops), itype), *tape_lines(stage.source.tape, signature, IndexWriter(itype))]
        fields["fill"] = {"count": scratch, "body": [*lines, f"{slot('u')} = {stage.source.value}"]}
        body += [f"x{k} = {slot(f'{itype}({k})')}" for k in range(scratch)]
    else:
        body += _loads(stage.source, signature, calc, IndexWriter(itype, "qi"), lambda e: e)
    body += stage.lines
    if isinstance(stage.target, Placed):
        body += _stores(stage, signature, calc, IndexWriter(itype, "qo"), lambda e: e)
    else:
        end = stage.target
        scratch = max(scratch, len(stage.results))
        body += [f"{slot(f'{itype}({k})')} = {r}" for k, r in enumerate(stage.results)]
        writer = IndexWriter(itype, "qg")
        inside = condition(end.guards, writer) or "True"
        fields["after"] = {
            "count": len(stage.results),
            "middle": [*decompose("u", list(end.loops), itype), *writer.lines],
            "inside": inside,
            "body": [f"total = {slot('u')}", f"c = {end.c}", *tape_lines(end.tape, signature, IndexWriter(itype))],
        }
    fields |= {"body": body, "scratch": max(scratch, 1) * THREADS}
    spec = KernelSpec("cuda/conv_stage.py.j2", entry_name(stage.words, fields, signature.params), signature.params, fields, block=THREADS)
    return spec, Launch(0, blocks, signature.args)


def _index_type(stage: Stage, threads: int) -> str:
    expressions = []
    for part in (stage.source, stage.target):
        if isinstance(part, Placed):
            expressions += [part.base.shifted(s) for s in part.steps]
        else:
            expressions += part.tape.linears()
            expressions += [g.value for g in part.guards] if isinstance(part, Finished) else []
    return index_type(expressions, cuda=True) if threads < 2**31 else "int64"


# ------------------------------------------------------------------------------------------------------------------------------------------ both
def _steps(loops: Sequence[Var]) -> range:
    return range(math.prod(v.size for v in loops))


def _loads(source: Placed, signature: Signature, calc: str, writer: IndexWriter, change: Any) -> list[str]:
    p, text = signature.buffer(calc, source.buffer), writer(change(source.base))
    lines = [f"x{k} = {p}[{_moved('first', s, writer)}]" for k, s in enumerate(source.steps)]
    return [*writer.lines, f"first = {text}", *lines]


def _stores(stage: Stage, signature: Signature, calc: str, writer: IndexWriter, change: Any) -> list[str]:
    target = stage.target
    assert isinstance(target, Placed), "of stages that scatter"
    p, text = signature.buffer(calc, target.buffer, written=True), writer(change(target.base))
    lines = [f"{p}[{_moved('place', s, writer)}] = {r}" for s, r in zip(target.steps, stage.results, strict=True)]
    return [*writer.lines, f"place = {text}", *lines]


def _moved(name: str, by: int, writer: IndexWriter) -> str:
    return f"{writer.itype}({name} + {writer.number(by)})" if by else name


# -------------------------------------------------------------------------------------------------------------------------------------- products
def product_graph(calc: str, sizes: tuple[int, int, int, int]) -> tuple[OperationGraph, regions.Region]:
    """A graph of one product of stacks of packed matrices, of so many batches, rows, columns and terms."""
    batch, m, n, k = sizes
    dtype = data_type.DOUBLE if calc == "float64" else data_type.FLOAT
    shapes = ((batch, m, k), (batch, k, n), (batch, m, n))
    tensors = tuple(Tensor("ABC"[i], -1 - i, s, (s[1] * s[2], s[2], 1), dtype) for i, s in enumerate(shapes))
    node = Node("MATMUL", "product", (("A", 0), ("B", 1)), (("C", 2),), (), dtype)
    graph = OperationGraph(tensors, (node,))
    return graph, regions.partition(graph).regions[0]


def cost(calc: str, sizes: tuple[int, int, int, int], nbytes: int, stages: int, device: DeviceProps) -> float:
    """Seconds of products by the portable engine and of ``stages`` that move ``nbytes``, with what launches beyond a region's first cost."""
    graph, region = product_graph(calc, sizes)
    engine = MatmulSimt()
    seconds = engine.cost(graph, region, device, engine.candidates(graph, region, device)[0]) + nbytes / (device.dram_gbps * 1e9)
    return seconds / REACHED.get(device.kind, REACHED["cuda"]) + stages * LAUNCH_S.get(device.kind, LAUNCH_S["cuda"])


def product(calc: str, sizes: tuple[int, int, int, int], device: DeviceProps, a: Buffer, b: Buffer, c: Buffer, scratch: int) -> Recipe:
    """C = A @ B by the portable engine, whose own scratch memory starts at ``scratch``; ``workspace`` of the recipe: its end."""
    graph, region = product_graph(calc, sizes)
    engine = MatmulSimt()
    places = {-2 - i: x for i, x in enumerate((a, b, c))}
    recipe = engine.lower(graph, region, device, engine.candidates(graph, region, device)[0], {i: Buffer("workspace", -2 - i) for i in range(3)})

    def placed(x: Buffer) -> Buffer:
        return Buffer("workspace", -1, (places[x.index].offset if x.index in places else scratch) + x.offset)

    return Recipe(recipe.kernels, tuple(mapped(s, placed) for s in recipe.steps), scratch + recipe.workspace)
