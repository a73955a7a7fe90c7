"""The JSON text of a graph, as the cuDNN Frontend writes it, and its re-import.

Keys are sorted; enum values are member names, NOT_SET is null; float attributes are the upper-case hex of their float32 bits (of their float64 bits,
16 digits, where the node calculates in DOUBLE). A tensor's key is its uid if it has one, else its name; a second tensor of the same name gets
"#1", "#2", ... appended to its key, so that the text never merges two tensors.

Ours beside the frontend's fields, written only where they are not the default: ``alignment``, ``compile_time_constant``, ``vector_count`` with
``vector_dimension``, and ``rank`` 0 (whose ``dim`` reads like that of an unset tensor).

Text from outside gives a graph, or ValidationError (malformed), or NotSupportedError (an op that graphdnn does not know). Nothing is executed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from graphdnn.dtypes import data_type
from graphdnn.errors import ValidationError, explain
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.tensor import TensorDecl

BACKEND_VERSION = "9.22.0"
FRONTEND_VERSION = 12300
NO_COMPUTE = ("CONCATENATE", "SDPA", "MOE_GROUPED_MATMUL", "MOE_GROUPED_MATMUL_BWD")
"""Tags whose nodes carry a compute_data_type in the text only where it is not the graph's."""
FLOAT_ATTRIBUTES = ("relu_lower_clip", "relu_upper_clip", "relu_lower_clip_slope", "swish_beta", "elu_alpha", "softplus_beta") + (
    "attn_scale_value",
    "dropout_probability",
)
"""Attributes that are written as the hex of their bits."""
_LIMIT = 2**63
_VARIANTS = (data_type.INT64, data_type.INT32, data_type.HALF, data_type.FLOAT, data_type.BFLOAT16, data_type.DOUBLE)
_REORDERINGS = ("NONE", "INT8x32", "F16x16", "F8_128x4")


class Ports(Protocol):
    """What re-import must know of an op: its ports in order, which may be missing, its attributes (opspecs.spec.OpSpec is one). An op without
    named inputs takes any number of them, named "0", "1", ..."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input ports."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output ports."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Ports that may be missing."""

    @property
    def attrs(self) -> tuple[str, ...]:
        """Attribute names."""


@dataclass
class GraphText:
    """What the text of a graph says. ``sm_count`` -1: all multiprocessors."""

    nodes: list[NodeDecl] = field(default_factory=list)
    tensors: list[TensorDecl] = field(default_factory=list)
    io: data_type = data_type.NOT_SET
    intermediate: data_type = data_type.NOT_SET
    compute: data_type = data_type.NOT_SET
    sm_count: int = -1
    dynamic_shape: bool = False
    override_shape: bool = False


# ------------------------------------------------------------------------------------------------------------------------------ numbers and values
def float_hex(value: float, wide: bool = False) -> str:
    """Upper-case hex of the bits of ``value`` as float32 (float64 if ``wide``); what float32 cannot hold becomes infinite."""
    try:
        return struct.pack(">d" if wide else ">f", value).hex().upper()
    except OverflowError:
        return struct.pack(">f", math.copysign(math.inf, value)).hex().upper()


def _bad(where: str, expected: str, found: Any) -> ValidationError:
    text = repr(found)
    return ValidationError(explain(f"graph text: {where} is malformed", expected=expected, found=text if len(text) <= 80 else text[:77] + "..."))


def _hex_float(where: str, value: Any) -> float:
    if isinstance(value, str) and len(value) in (8, 16):
        try:
            return float(struct.unpack(">f" if len(value) == 8 else ">d", bytes.fromhex(value))[0])
        except (ValueError, struct.error):
            pass
    raise _bad(where, "8 or 16 hex digits of a float", value)


def _integer(where: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and -_LIMIT <= value < _LIMIT:
        return value
    raise _bad(where, "a 64-bit integer", value)


def _number(where: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise _bad(where, "a number", value)


def _boolean(where: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise _bad(where, "true or false", value)


def _text(where: str, value: Any) -> str:
    if isinstance(value, str) and not any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        return value
    raise _bad(where, "a string", value)


def _list(where: str, value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    raise _bad(where, "a list", value)


def _object(where: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise _bad(where, "an object", value)


def _integers(where: str, value: Any) -> tuple[int, ...]:
    return tuple(_integer(where, v) for v in _list(where, value))


def _integer_or_integers(where: str, value: Any) -> int | tuple[int, ...]:
    return _integers(where, value) if isinstance(value, list) else _integer(where, value)


def _bound(where: str, value: Any) -> int | None:
    return None if value is None else _integer(where, value)


def _pairs(where: str, value: Any, entry: Callable[[str, Any], Any] = _bound, what: str = "[start, end]") -> tuple[tuple[Any, ...], ...]:
    pairs = tuple(tuple(entry(where, v) for v in _list(where, pair)) for pair in _list(where, value))
    if any(len(pair) != 2 for pair in pairs):
        raise _bad(where, f"a list of {what}", value)
    return pairs


def _steps(where: str, value: Any) -> tuple[Any, ...]:
    """A score_mod: [[mode, [references], [[attribute, value], ...]], ...]."""
    found = []
    for step in _list(where, value):
        parts = _list(where, step)
        if len(parts) != 3:
            raise _bad(where, "a list of [mode, references, attributes]", step)
        references = tuple(r if isinstance(r, str) else _plain_number(where, r) for r in _list(where, parts[1]))
        pairs = [_list(where, a) for a in _list(where, parts[2])]
        if any(len(pair) != 2 for pair in pairs):
            raise _bad(where, "attributes as [name, value]", parts[2])
        found.append((_text(where, parts[0]), references, tuple((_text(where, k), _plain_number(where, v)) for k, v in pairs)))
    return tuple(found)


def _plain_number(where: str, value: Any) -> float | int:
    return _integer(where, value) if isinstance(value, int) else _number(where, value)


def _dtype(where: str, value: Any) -> data_type:
    if value is None:
        return data_type.NOT_SET
    try:
        return data_type[_text(where, value)]
    except KeyError:
        raise _bad(where, "the name of a data type, or null", value) from None


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "mode": _text,
    "reshape_mode": _text,
    "math_mode": _text,
    "axis": _integer,
    "in_place_index": _integer,
    "permutation": _integers,
    "axes": _integers,
    "dim": _integers,
    "stride": _integers,
    "pre_padding": _integers,
    "post_padding": _integers,
    "dilation": _integers,
    "window": _integers,
    "ratio": lambda where, value: _pairs(where, value, _integer, "[numerator, denominator]"),
    "slices": _pairs,
    "slice_strides": _integers,
    "padding_value": _number,
    "is_deterministic": _boolean,
    "keepdim": _boolean,
    "forward_phase": _text,
    "peer_stats": _integers,
    "num_groups": _integer,
    "distribution": _text,
    "top_k": _integer,
    "block_size": _integer_or_integers,
    "transpose": _boolean,
    "is_negative_scale": _boolean,
    "bernoulli_probability": _number,
    "uniform_minimum": _number,
    "uniform_maximum": _number,
    "normal_mean": _number,
    "normal_standard_deviation": _number,
    "score_mod": _steps,
    "score_mod_bprop": _steps,
} | dict.fromkeys(FLOAT_ATTRIBUTES, _hex_float)
_READERS |= dict.fromkeys(("alibi_mask", "padding_mask", "generate_stats", "is_deterministic_algorithm", "is_mxfp8", "unfuse_fma"), _boolean)
_READERS |= dict.fromkeys(("left_bound", "right_bound", "max_seq_len_kv", "max_total_seq_len_q", "max_total_seq_len_kv"), _integer)
_READERS |= dict.fromkeys(("diagonal_alignment", "mma_core_mode", "implementation"), _text)
"""Attribute name -> how its value is read back. An attribute that is not here cannot be in a text."""


# -------------------------------------------------------------------------------------------------------------------------------------- writing
def _name(dtype: data_type) -> str | None:
    return None if dtype is data_type.NOT_SET else dtype.name


def _stored_scalar(decl: TensorDecl) -> dict[str, Any] | None:
    value = decl.value
    if value is None:
        return None
    fallback = data_type.INT32 if isinstance(value, int) else data_type.FLOAT
    kind = decl.dtype if decl.dtype in _VARIANTS else fallback
    index = _VARIANTS.index(kind)
    text: Any = int(value) if index < 2 else float_hex(float(value), kind is data_type.DOUBLE)
    return {"index": index, "value": text}


def tensor_object(decl: TensorDecl) -> dict[str, Any]:
    """The JSON object of one tensor."""
    found: dict[str, Any] = {
        "name": decl.name,
        "data_type": _name(decl.dtype),
        "dim": list(decl.dim or ()),
        "stride": list(decl.stride or ()),
        "is_virtual": decl.virtual,
        "is_pass_by_value": decl.by_value,
        "pass_by_value": _stored_scalar(decl),
        "reordering_type": decl.reordering,
        "uid": decl.uid or 0,
        "uid_assigned": decl.uid is not None,
    }
    if decl.ragged_offset is not None:
        found["ragged_offset_uid"] = decl.ragged_offset.uid or 0
        found["ragged_offset_name"] = decl.ragged_offset.name
    if decl.dim == ():
        found["rank"] = 0
    if decl.alignment != 16:
        found["alignment"] = decl.alignment
    if decl.constant:
        found["compile_time_constant"] = True
    if (decl.vector_count, decl.vector_dimension) != (1, -1):
        found["vector_count"], found["vector_dimension"] = decl.vector_count, decl.vector_dimension
    return found


def tensor_text(decl: TensorDecl) -> str:
    """A one-element list that holds the object of ``decl``."""
    return _compact([tensor_object(decl)])


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def keys_of(graph: GraphText) -> dict[TensorDecl, int | str]:
    """The keys under which the text has its tensors."""
    keys: dict[TensorDecl, int | str] = {t: t.uid for t in graph.tensors if t.uid is not None}
    taken: set[str] = {str(uid) for uid in keys.values()}
    for decl in (t for t in graph.tensors if t.uid is None):
        key, n = decl.name, 0
        while key in taken:
            n += 1
            key = f"{decl.name}#{n}"
        taken.add(key)
        keys[decl] = key
    return keys


def _attribute(name: str, value: Any, wide: bool) -> Any:
    if name in FLOAT_ATTRIBUTES and value is not None:
        return float_hex(value, wide)
    return value


def _node_object(node: NodeDecl, keys: Mapping[TensorDecl, int | str], graph: GraphText) -> dict[str, Any]:
    wide = data_type.DOUBLE in (node.compute, graph.compute, *(t.dtype for t in node.inputs.values()))
    found: dict[str, Any] = {"tag": node.op, "name": node.name}
    if node.op not in NO_COMPUTE or node.compute not in (data_type.NOT_SET, graph.compute):
        found["compute_data_type"] = _name(node.compute)
    found["inputs"] = {port: keys[t] for port, t in node.inputs.items()}
    found["outputs"] = {port: keys[t] for port, t in node.outputs.items()}
    return found | {name: _attribute(name, value, wide) for name, value in node.attrs.items()}


def dumps(graph: GraphText) -> str:
    """The text of a graph."""
    keys = keys_of(graph)
    context = {
        "name": "",
        "io_data_type": _name(graph.io),
        "intermediate_data_type": _name(graph.intermediate),
        "compute_data_type": _name(graph.compute),
        "sm_count": graph.sm_count,
        "is_dynamic_shape_enabled": graph.dynamic_shape,
        "is_override_shape_enabled": graph.override_shape,
    }
    return _compact(
        {
            "context": context,
            "cudnn_backend_version": BACKEND_VERSION,
            "cudnn_frontend_version": FRONTEND_VERSION,
            "json_version": "1.0",
            "nodes": [_node_object(n, keys, graph) for n in graph.nodes],
            "tensors": {str(keys[t]): tensor_object(t) for t in graph.tensors},
        }
    )


# -------------------------------------------------------------------------------------------------------------------------------------- reading
def _read_scalar(where: str, value: Any) -> float | int | None:
    if value is None:
        return None
    stored = _object(where, value)
    index = _integer(f"{where}.index", stored.get("index"))
    if not 0 <= index < len(_VARIANTS):
        raise _bad(f"{where}.index", f"0 to {len(_VARIANTS) - 1}", index)
    read: Callable[[str, Any], float | int] = _integer if index < 2 else _hex_float
    return read(f"{where}.value", stored.get("value"))


def _read_tensor(key: str, value: Any, make: Callable[[], TensorDecl]) -> TensorDecl:
    where, decl = f"tensor '{key}'", make()
    stored = _object(where, value)
    decl.name = _text(f"{where}, name", stored.get("name", ""))
    decl.dtype = _dtype(f"{where}, data_type", stored.get("data_type"))
    dim, stride = (_integers(f"{where}, {part}", stored.get(part)) for part in ("dim", "stride"))
    if "rank" in stored and (_integer(f"{where}, rank", stored["rank"]) != 0 or dim):
        raise _bad(f"{where}, rank", "0, with dim []", stored["rank"])
    decl.dim = dim if dim or "rank" in stored else None
    decl.stride = stride if stride or "rank" in stored else None
    decl.virtual = _boolean(f"{where}, is_virtual", stored.get("is_virtual"))
    decl.by_value = _boolean(f"{where}, is_pass_by_value", stored.get("is_pass_by_value"))
    decl.value = _read_scalar(f"{where}, pass_by_value", stored.get("pass_by_value"))
    decl.constant = _boolean(f"{where}, compile_time_constant", stored.get("compile_time_constant", False))
    if decl.constant and decl.value is None:
        raise _bad(f"{where}, pass_by_value", "the value of a compile-time constant", None)
    decl.reordering = _text(f"{where}, reordering_type", stored.get("reordering_type", "NONE"))
    if decl.reordering not in _REORDERINGS:
        raise _bad(f"{where}, reordering_type", ", ".join(_REORDERINGS), decl.reordering)
    uid = _integer(f"{where}, uid", stored.get("uid", 0))
    decl.uid = uid if _boolean(f"{where}, uid_assigned", stored.get("uid_assigned", False)) else None
    decl.alignment = _integer(f"{where}, alignment", stored.get("alignment", 16))
    if decl.alignment < 1 or decl.alignment & (decl.alignment - 1):
        raise _bad(f"{where}, alignment", "a power of two", decl.alignment)
    decl.vector_count = _integer(f"{where}, vector_count", stored.get("vector_count", 1))
    decl.vector_dimension = _integer(f"{where}, vector_dimension", stored.get("vector_dimension", -1))
    return decl


def _read_ports(where: str, value: Any, ports: tuple[str, ...], optional: Iterable[str], tensors: Mapping[str, TensorDecl]) -> dict[str, TensorDecl]:
    stored = _object(where, value)
    if not ports:  # any number of inputs, named by position
        ports = tuple(str(i) for i in range(len(stored)))
    unknown = sorted(set(stored) - set(ports))
    if unknown:
        raise _bad(where, f"ports {', '.join(ports)}", ", ".join(unknown))
    found: dict[str, TensorDecl] = {}
    for port in ports:
        key = stored.get(port)
        if key is None and port in optional:
            continue
        if isinstance(key, bool) or not isinstance(key, int | str) or str(key) not in tensors:
            raise _bad(f"{where}, port {port}", "the key of a tensor of the text", key)
        found[port] = tensors[str(key)]
    return found


def _read_node(index: int, value: Any, tensors: Mapping[str, TensorDecl], ports_of: Callable[[str], Ports]) -> NodeDecl:
    where = f"node {index}"
    stored = _object(where, value)
    tag = _text(f"{where}, tag", stored.get("tag"))
    spec = ports_of(tag)
    inputs = _read_ports(f"{where}, inputs", stored.get("inputs"), spec.inputs, spec.optional, tensors)
    outputs = _read_ports(f"{where}, outputs", stored.get("outputs"), spec.outputs, spec.optional, tensors)
    attrs: dict[str, Any] = {}
    for name in sorted(set(stored) - {"tag", "name", "compute_data_type", "inputs", "outputs"}):
        if stored[name] is None:
            attrs[name] = None
        elif name in spec.attrs and name in _READERS:
            attrs[name] = _READERS[name](f"{where}, {name}", stored[name])
        else:
            raise _bad(f"{where}, {name}", f"an attribute of {tag}: {', '.join(spec.attrs)}", stored[name])
    compute = _dtype(f"{where}, compute_data_type", stored.get("compute_data_type"))
    return NodeDecl(tag, _text(f"{where}, name", stored.get("name", "")), inputs, outputs, attrs, compute)


def _link_ragged(stored: Mapping[str, Any], tensors: Mapping[str, TensorDecl]) -> None:
    for key, value in stored.items():
        if "ragged_offset_uid" in value or "ragged_offset_name" in value:
            offset = tensors.get(str(value.get("ragged_offset_uid"))) or tensors.get(str(value.get("ragged_offset_name")))
            if offset is None:
                raise _bad(f"tensor '{key}', ragged_offset_uid", "the key of a tensor of the text", value.get("ragged_offset_uid"))
            tensors[key].ragged_offset = offset


def loads(text: str, ports_of: Callable[[str], Ports], make: Callable[[], TensorDecl] = TensorDecl) -> GraphText:
    """The graph of ``text``. ``ports_of(tag)`` gives the ports of an op (NotSupportedError for an unknown one), ``make`` an empty declaration.

    Raises ValidationError that names the place of the first malformed entry.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValidationError(explain("graph text is not JSON", expected="the text of str(graph)", found=str(error)[:120])) from None
    whole = _object("the text", parsed)
    context = _object("context", whole.get("context"))
    stored = _object("tensors", whole.get("tensors"))
    tensors = {key: _read_tensor(key, value, make) for key, value in stored.items()}
    _link_ragged(stored, tensors)
    nodes = [_read_node(i, n, tensors, ports_of) for i, n in enumerate(_list("nodes", whole.get("nodes")))]
    io, intermediate, compute = (
        _dtype(f"context, {part}", context.get(part)) for part in ("io_data_type", "intermediate_data_type", "compute_data_type")
    )
    return GraphText(
        nodes,
        list(tensors.values()),
        io,
        intermediate,
        compute,
        _integer("context, sm_count", context.get("sm_count", -1)),
        _boolean("context, is_dynamic_shape_enabled", context.get("is_dynamic_shape_enabled", False)),
        _boolean("context, is_override_shape_enabled", context.get("is_override_shape_enabled", False)),
    )
