"""A graph as JSON-able data: what the generator makes, the harness builds, the shrinker edits and a failing seed prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import graphdnn
from graphdnn.dtypes import data_type
from graphdnn.frontend.names import convolution_mode
from graphdnn.ir.layout import packed
from tests.attention_cases import SCORE_MODS
from tests.helpers import Data, Outcome, check_graph

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """A tensor the user declares. ``mode``: buffer, by_value (a number in the pack), runtime (``tensor_scalar`` with a stored value) or constant
    (compile time). ``offset``: elements between an aligned address and the tensor. ``alignment``: bytes to declare, 0 keeps the default.
    ``ragged``: the name of a packed tensor's offsets."""

    name: str
    dim: Dims
    stride: Dims
    dtype: str
    mode: str = "buffer"
    offset: int = 0
    alignment: int = 0
    value: float | int = 0
    data: Data = field(default_factory=Data)
    ragged: str = ""


@dataclass(frozen=True)
class Made:
    """A tensor that is given by keyword for a result to be written to, row-major FLOAT."""

    argument: str
    name: str
    dim: Dims


@dataclass(frozen=True)
class Op:
    """One call of a pygraph method.

    ``args``: names of tensors, or numbers, in the order of the method's operands; ``tensors``: those given by keyword. ``out_*``: what is set on the
    result (dtype None, dim None, stride None: left to inference), the first one if there are several; ``extra``: (index, name, whether it is an
    output) of others; ``further``: (index, name, dims, strides) of others that are outputs; ``made``: outputs given by keyword. ``ragged``: names of
    packed results and of their offsets. ``tags``: what the op is an example of, beside what its arguments say."""

    method: str
    args: tuple[str | float | int, ...]
    out: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    compute: str | None = None
    out_dtype: str | None = None
    out_dim: Dims | None = None
    out_stride: Dims | None = None
    out_offset: int = 0
    output: bool = False
    tensors: dict[str, str] = field(default_factory=dict)
    extra: tuple[tuple[int, str, bool], ...] = ()
    extra_dtype: str | None = None
    further: tuple[tuple[int, str, Dims, Dims], ...] = ()
    made: tuple[Made, ...] = ()
    ragged: dict[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the tensors that it takes."""
        return (*(a for a in self.args if isinstance(a, str)), *self.tensors.values(), *self.ragged.values())

    @property
    def results(self) -> tuple[str, ...]:
        """Names of what it makes."""
        return (self.out, *(name for _, name, _ in self.extra), *(name for _, name, _, _ in self.further), *(m.name for m in self.made))

    @property
    def lasting(self) -> bool:
        """Whether one of its results is an output."""
        return bool(self.output or self.further or self.made or any(output for _, _, output in self.extra))


@dataclass(frozen=True)
class Program:
    """Inputs, ops in order, and the graph's default data types (None: not set). ``expect``: (dims, strides) that inference must give, by name."""

    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    io: str | None = "FLOAT"
    intermediate: str | None = None
    compute: str | None = None
    seed: int = 0
    binding: str = "numpy"
    expect: dict[str, tuple[Dims, Dims]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads back."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        """Inverse of :meth:`to_json`."""
        raw = json.loads(text)
        inputs = tuple(Input(**{**i, "dim": tuple(i["dim"]), "stride": tuple(i["stride"]), "data": Data(**i["data"])}) for i in raw.pop("inputs"))
        ops = tuple(
            Op(
                **{
                    **o,
                    "args": tuple(o["args"]),
                    "extra": tuple(map(tuple, o["extra"])),
                    "further": tuple((i, n, tuple(d), tuple(s)) for i, n, d, s in o["further"]),
                    "made": tuple(Made(**{**m, "dim": tuple(m["dim"])}) for m in o["made"]),
                    "tags": tuple(o["tags"]),
                    "out_dim": _dims(o["out_dim"]),
                    "out_stride": _dims(o["out_stride"]),
                }
            )
            for o in raw.pop("ops")
        )
        expect = {k: (tuple(d), tuple(s)) for k, (d, s) in raw.pop("expect").items()}
        return Program(inputs=inputs, ops=ops, expect=expect, **raw)

    def graph_arguments(self) -> dict[str, data_type]:
        """Arguments of ``pygraph``."""
        return {"io_data_type": _dtype(self.io), "intermediate_data_type": _dtype(self.intermediate), "compute_data_type": _dtype(self.compute)}

    def feeding(self) -> dict[str, Any]:
        """How buffers are made and filled: the arguments that ``check_graph`` and ``Setup.fill`` share."""
        return {
            "seed": self.seed,
            "data": {i.name: i.data for i in self.inputs},
            "offsets": {i.name: i.offset for i in self.inputs} | {o.out: o.out_offset for o in self.ops},
            "values": {i.name: i.value for i in self.inputs if i.mode == "by_value"},
        }

    def without_expectations(self) -> Program:
        """For edited programs, whose shapes may differ."""
        return replace(self, expect={})


def needed(inputs: tuple[Input, ...], ops: Iterable[Op]) -> tuple[Input, ...]:
    """The inputs that the ops read, and the offsets of packed ones among them."""
    read = {a for o in ops for a in o.reads}
    read |= {i.ragged for i in inputs if i.name in read}
    return tuple(i for i in inputs if i.name in read)


def _dims(value: list[int] | None) -> Dims | None:
    return None if value is None else tuple(value)


def _dtype(name: str | None) -> data_type:
    return data_type.NOT_SET if name is None else data_type[name]


def declare(program: Program, graph: Any) -> dict[str, Any]:
    """Declare everything on ``graph``; tensors by name."""
    tensors: dict[str, Any] = {}
    for i in program.inputs:
        if i.mode in ("runtime", "constant"):
            kind = graphdnn.scalar_type.RUNTIME_PARAM if i.mode == "runtime" else graphdnn.scalar_type.COMPILE_TIME_CONST
            tensors[i.name] = graph.tensor_scalar(i.value, kind)
            continue
        t = graph.tensor(dim=list(i.dim), stride=list(i.stride), data_type=_dtype(i.dtype), is_pass_by_value=i.mode == "by_value", name=i.name)
        tensors[i.name] = t.set_alignment(i.alignment) if i.alignment else t
        if i.ragged:
            t.set_ragged_offset(tensors[i.ragged])
    for op in program.ops:
        tensors |= _call(op, graph, tensors)
    return tensors


ENUMS = {
    "reshape_mode": graphdnn.reshape_mode,
    "norm_forward_phase": graphdnn.norm_forward_phase,
    "convolution_mode": convolution_mode,
    "diagonal_alignment": graphdnn.diagonal_alignment,
}
"""Keywords whose values are members of an enum."""
MODES: dict[str, Any] = {"reduction": graphdnn.reduction_mode, "moe_grouped_matmul": graphdnn.moe_grouped_matmul_mode}
"""Methods whose ``mode`` is one."""


def _call(op: Op, graph: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    operands = [tensors[a] if isinstance(a, str) else a for a in op.args]
    kwargs = {k: ENUMS[k][v] if k in ENUMS else v for k, v in op.kwargs.items()}
    for k, name in op.tensors.items():
        argument, _, member = k.partition(".")
        if argument != "score_mod":
            kwargs[argument] = tensors[name] if not member else (*kwargs.get(argument, ()), tensors[name])
    if "score_mod" in kwargs:
        kwargs["score_mod"] = partial(_score, SCORE_MODS[kwargs["score_mod"]], tensors.get(op.tensors.get("score_mod.extra", "")))
    for m in op.made:
        kwargs[m.argument] = tensors[m.name] = graph.tensor(dim=list(m.dim), stride=list(packed(m.dim)), data_type=data_type.FLOAT, name=m.name)
    if op.method in MODES:
        kwargs["mode"] = MODES[op.method][kwargs["mode"]]
    if "slices" in kwargs:
        kwargs["slices"] = [slice(*s) for s in kwargs["slices"]]
    if op.compute is not None:
        kwargs["compute_data_type"] = data_type[op.compute]
    method = getattr(graph, op.method)
    made = method(operands, **kwargs) if op.method == "concatenate" else method(*operands, **kwargs)
    results = list(made) if isinstance(made, list | tuple) else [made]
    first = results[0].set_name(op.out)
    if op.out_dtype is not None:
        first.set_data_type(data_type[op.out_dtype])
    if op.out_dim is not None:
        first.set_dim(list(op.out_dim))
    if op.out_stride is not None:
        first.set_stride(list(op.out_stride))
    if op.output:
        first.set_output(True)
    for i, _, dim, stride in op.further:
        results[i].set_dim(list(dim)).set_stride(list(stride))
    others = [*op.extra, *((i, name, True) for i, name, _, _ in op.further)]
    found = {op.out: first} | {name: _extra(results[i], name, output, op.extra_dtype) for i, name, output in others}
    for name, offsets in op.ragged.items():
        found[name].set_ragged_offset(tensors[offsets])
    return found | {m.name: tensors[m.name] for m in op.made}


def _score(modify: Callable[[Any, Any, Any], Any], extra: Any, graph: Any, score: Any) -> Any:
    return modify(graph, score, extra)


def _extra(result: Any, name: str, output: bool, dtype: str | None) -> Any:
    """A further result; an output is FLOAT unless the op says otherwise."""
    if dtype is not None:
        result.set_data_type(data_type[dtype])
    if output and result.get_data_type() is data_type.NOT_SET:
        result.set_data_type(data_type.FLOAT)
    return result.set_name(name).set_output(output)


def check(program: Program, device: str, **options: Any) -> Outcome:
    """Build and run ``program`` on ``device`` and compare with the reference; AssertionError or the library's own error if it does not hold."""
    declared: dict[str, Any] = {}

    def build(graph: Any) -> None:
        declared.update(declare(program, graph))

    def inspect(graph: Any) -> None:
        for name, (dim, stride) in program.expect.items():
            found = (tuple(declared[name].get_dim()), tuple(declared[name].get_stride()))
            assert found == (dim, stride), f"inference of '{name}' gave dims and strides {found}, the rules of the API page give {(dim, stride)}"

    return check_graph(
        build,
        device,
        **program.feeding(),
        binding=program.binding,
        graph=program.graph_arguments(),
        after_validate=inspect,
        **options,
    )


def script(program: Program, device: str, problem: str) -> str:
    """A Python script that repeats ``program``; the first lines say what it does in API calls."""
    lines = [f'"""{problem}', "", "The graph:"]
    for i in program.inputs:
        where = "" if i.mode == "buffer" else f" {i.mode} value {i.value}"
        lines.append(f"  {i.name} = tensor(dim={list(i.dim)}, stride={list(i.stride)}, {i.dtype}) offset {i.offset}{where}")
    for o in program.ops:
        settings = {"dtype": o.out_dtype, "dim": o.out_dim, "stride": o.out_stride, "compute": o.compute}
        said = ", ".join(f"{k}={v}" for k, v in settings.items() if v is not None)
        options = "".join(f", {k}={v}" for k, v in (o.tensors | o.kwargs).items())
        made = ", ".join((o.out, *(f"[{i}] {name}{' OUTPUT' * output}" for i, name, output in o.extra)))
        lines.append(f"  {made} = {o.method}({', '.join(map(str, o.args))}{options})  {'OUTPUT ' if o.output else ''}{said}")
    lines += [
        '"""',
        "from tests.fuzz.program import Program, check",
        "",
        f"PROGRAM = r'''{program.to_json()}'''",
        f"print(check(Program.from_json(PROGRAM), {device!r}))",
    ]
    return "\n".join(lines).replace("\\'", "'") + "\n"
