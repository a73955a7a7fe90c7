"""From the arguments of an attention call to a node: old and new ways to say the same become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphdnn.errors import BuildError, KindError, ValidationError, explain
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.enums import attention_implementation, diagonal_alignment
from graphdnn.frontend.score_mod import ScoreTape
from graphdnn.frontend.tensor import as_integer, as_number
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.opspecs import registry


class Call:
    """The inputs, attributes and outputs of one call, argument by argument."""

    def __init__(self, graph: Declarations, op: str, name: str) -> None:
        self.graph, self.op, self.node = graph, op, graph._node_name(op, name)
        self.inputs: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self.attrs: dict[str, Any] = {}

    def wrong(self, argument: str, expected: str, found: Any) -> BuildError:
        """The frontend's class for arguments that it casts by hand."""
        return BuildError(explain(f"argument '{argument}' has the wrong type", node=self.node, expected=expected, found=repr(found)[:80]))

    def tensors(self, **ports: tuple[str, Any]) -> None:
        """Required tensors."""
        self.inputs |= {port: self.graph._operand(self.node, argument, t) for port, (argument, t) in ports.items()}

    def options(self, **ports: tuple[str, Any]) -> None:
        """Tensors that may be None."""
        self.tensors(**{port: (argument, t) for port, (argument, t) in ports.items() if t is not None})

    def results(self, **ports: tuple[str, Any]) -> None:
        """The caller's tensors to write to."""
        self.given |= {port: self.graph._operand(self.node, argument, t) for port, (argument, t) in ports.items() if t is not None}

    def integer(self, attr: str, value: Any) -> None:
        """An attribute that is an integer or None."""
        self.attrs[attr] = None if value is None else as_integer(f"node '{self.node}': argument '{attr}'", value)

    def scale(self, value: Any) -> None:
        """``attn_scale``: a float or a tensor."""
        self.attrs["attn_scale_value"] = None
        if isinstance(value, Tensor):
            self.tensors(Attn_scale=("attn_scale", value))
        elif value is not None:
            if isinstance(value, int) or hasattr(value, "__index__") or not hasattr(value, "__float__") or hasattr(value, "__len__"):
                raise self.wrong("attn_scale", "a float or a graph tensor", value)
            self.attrs["attn_scale_value"] = as_number(f"node '{self.node}': argument 'attn_scale'", value)

    def padding(self, alibi: Any, padding: Any, seq_len_q: Any, seq_len_kv: Any) -> None:
        """Masks that are flags, and the lengths."""
        self.attrs |= {"alibi_mask": bool(alibi), "padding_mask": bool(padding)}
        self.options(SEQ_LEN_Q=("seq_len_q", seq_len_q), SEQ_LEN_KV=("seq_len_kv", seq_len_kv))

    def bounds(self, causal: tuple[Any, Any], alignment: Any, left: tuple[Any, Any], right: Any) -> None:
        """Old and new ways to say which diagonals count, as one."""
        if not isinstance(alignment, diagonal_alignment):
            rule = "argument 'diagonal_alignment' has the wrong type"
            raise KindError(explain(rule, node=self.node, expected="graphdnn.diagonal_alignment", found=repr(alignment)[:80]))
        window, first, right = (None if x is None else as_integer(f"node '{self.node}': a bound", x) for x in (*left, right))
        clash = "both causal masks" if all(causal) else ""
        clash = clash or ("a sliding window and another left bound" if None not in (window, first) and window != first else "")
        clash = clash or ("a causal mask and another right bound" if any(causal) and right not in (None, 0) else "")
        if causal[0] and alignment is diagonal_alignment.BOTTOM_RIGHT:
            clash = clash or "use_causal_mask, which starts at the top left, and BOTTOM_RIGHT"
        if clash:
            raise ValidationError(explain("two masks contradict each other", node=self.node, expected="one of them", found=clash))
        bottom = causal[1] or alignment is diagonal_alignment.BOTTOM_RIGHT
        self.attrs |= {"left_bound": window if first is None else first, "right_bound": 0 if any(causal) else right}
        self.attrs["diagonal_alignment"] = "BOTTOM_RIGHT" if bottom else "TOP_LEFT"

    def dropout(self, value: Any, backward: bool = False) -> None:
        """(probability, seed, offset), or (mask, scale) and in a gradient 1 / scale."""
        self.attrs["dropout_probability"] = None
        if value is None:
            return
        masked = ("Dropout_mask", "Dropout_scale", "Dropout_scale_inv")[: 3 if backward else 2]
        if isinstance(value, tuple | list):
            numbers, tensors = [x for x in value if not isinstance(x, Tensor)], [x for x in value if isinstance(x, Tensor)]
            if len(tensors) == len(value) == len(masked):
                self.tensors(**{port: ("dropout", t) for port, t in zip(masked, tensors, strict=True)})
                return
            if len(value) == 3 and len(tensors) == 2 and value[0] is numbers[0]:
                try:
                    self.attrs["dropout_probability"] = as_number(f"node '{self.node}': the dropout probability", value[0])
                except KindError as error:  # the frontend's class for it is another one
                    raise self.wrong("dropout", "a number as probability", value[0]) from error
                self.tensors(Seed=("dropout", tensors[0]), Offset=("dropout", tensors[1]))
                return
        expected = f"(probability, seed, offset) or ({', '.join(p.removeprefix('Dropout_') for p in masked)})"
        raise self.wrong("dropout", expected, value)

    def gradient(self, numbers: tuple[Any, Any], padding: tuple[Any, Any, Any], deterministic: Any, sink: tuple[Any, Any]) -> None:
        """What gradients on 8-bit floats share: (attn_scale, dropout), (use_padding_mask, seq_len_q, seq_len_kv), the sink and its gradient."""
        self.scale(numbers[0])
        self.dropout(numbers[1], backward=True)
        self.padding(False, *padding)
        self.options(SINK_TOKEN=("sink_token", sink[0]))
        self.results(DSINK_TOKEN=("dSink_token", sink[1]))
        self.attrs["is_deterministic_algorithm"] = bool(deterministic)

    def scores(self, forward: Any, backward: Any = None) -> None:
        """The callbacks as steps, and the tensors that they use."""
        from graphdnn.frontend.pygraph import pygraph

        if forward is None and backward is None:
            return
        scratch = pygraph("score_mod")
        scratch._owner = self.graph._owner
        q, k = self.inputs["Q"].dim, self.inputs["K"].dim
        paged = "Page_table_K" in self.inputs
        tape = ScoreTape(self.node, scratch, (*q[:3], k[2]) if q and k and len(q) == len(k) == 4 and not paged else None)
        for attr, callback in (("score_mod", forward), ("score_mod_bprop", backward)):
            if callback is not None:
                self.attrs[attr] = tape.trace(attr, callback, attr == "score_mod")
        self.inputs |= {port: self.graph._adopt(t, self.node) for port, t in tape.tensors.items()}

    def statistics(self, generate: Any, inference: Any) -> bool:
        """Whether Stats are wanted."""
        if (generate is None) == (inference is None):
            found = "neither" if generate is None else "both"
            raise BuildError(explain("exactly one of generate_stats and is_inference must be given", node=self.node, expected="one", found=found))
        self.attrs["generate_stats"] = bool(generate) if inference is None else not inference
        return bool(self.attrs["generate_stats"])

    def add(self, outputs: tuple[str, ...], compute: Any) -> list[Tensor]:
        """The node, with its ports in the order of its op."""
        ports = registry.spec(self.op)
        made = self.graph._add(self.op, self.node, _ordered(self.inputs, ports.inputs), outputs, self.attrs, compute)
        node = self.graph._nodes[-1]
        node.outputs = _ordered({**node.outputs, **self.given}, ports.outputs)
        return made


def _ordered(found: Mapping[str, Any], ports: tuple[str, ...]) -> dict[str, Any]:
    return {p: found[p] for p in ports if p in found}


def implementation_name(node: str, value: Any) -> str:
    """AUTO is resolved: a call is one kernel."""
    if not isinstance(value, attention_implementation):
        rule = "argument 'implementation' has the wrong type"
        raise KindError(explain(rule, node=node, expected="graphdnn.attention_implementation", found=repr(value)[:80]))
    return "UNIFIED" if value is attention_implementation.AUTO else value.name
