"""What the kernels of attention's backward pass print: loads of both sides, the scores calculated again, what is made of them, and the stores.

With P = exp(S - Stats) calculated again from Q and K, D = sum dO * O of a row and dP = drop(dO V^T), the gradient of a score is dS = P (dP - D);
dV = drop(P)^T dO, dK = scale dS^T Q, dQ = scale dS K (Dao, "FlashAttention-2", 2023, section 3.1). A kernel keeps a tile of one side of the scores,
the ``still`` one, and lets tiles of the ``moving`` one go past, so that every sum is made by one block in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import literal, to_dtype
from graphdnn.codegen.spec import Buffer
from graphdnn.dtypes import info
from graphdnn.engines.attention_parts import AttentionProblem
from graphdnn.engines.attention_score import ScoreText
from graphdnn.opspecs.score_grad import gradient_steps

Kind = Literal["kv", "q", "bias"]
"""What a kernel makes: dK and dV, dQ, or dBias."""


@dataclass(frozen=True)
class Gradient:
    """One result: the sum over the moving side of ``tile``, which holds ``value`` of every score, times the rows of ``moving``. ``scaled``: by the
    scale of the scores."""

    tile: str
    value: str
    moving: str
    scaled: bool


GRADIENTS = {
    "dK": Gradient("left_tile", "ds", "Q", True),
    "dV": Gradient("right_tile", "weight", "dO", False),
    "dQ": Gradient("left_tile", "ds", "K", True),
}
SIDES = {"kv": (("K", "Q"), ("V", "dO")), "bias": (("K", "Q"), ("V", "dO")), "q": (("Q", "K"), ("dO", "V"))}
"""Kind -> (still, moving) ports of the two products, the scores and dP."""


def split(flat: str, sizes: Sequence[tuple[str, int]], itype: str) -> list[str]:
    """Lines that take the number ``flat`` apart into named numbers, the last fastest."""
    lines, rest = [], flat
    for n, (name, size) in enumerate(reversed(sizes)):
        if n == len(sizes) - 1:
            lines.append(f"{name} = {rest}")
        else:
            lines.append(f"{name} = {itype}({rest} % {itype}({max(size, 1)}))")
            lines.append(f"{flat}_{n} = {itype}({rest} // {itype}({max(size, 1)}))")
            rest = f"{flat}_{n}"
    return lines


class BackwardText:
    """Prints one kernel: fields that the templates of every target share. ``scratch``: buffers of D and of Stats, one number a row of Q each;
    ``fills``: this kernel writes them."""

    def __init__(self, problem: AttentionProblem, signature: Signature, itype: str, kind: Kind, scratch: tuple[Buffer, Buffer], fills: bool) -> None:
        self.problem, self.kind, self.itype, self.signature = problem, kind, itype, signature
        self.text = ScoreText(problem, signature, itype)
        self.calc = problem.calc
        self.delta, self.lse = (signature.buffer(self.calc, b, written=fills) for b in scratch)
        self.still, self.moving = ("row", "col") if kind == "q" else ("col", "row")
        self.masked = bool(self.text.keep(inside=True))

    # -- loads ------------------------------------------------------------------------------------------------------------------------------
    def side(self, port: str, name: str) -> dict[str, Any]:
        """How rows of the tensor at ``port`` are read: lines once a row (``name``: its index), lines and value of element ``d``."""
        base = f"{port.lower()}_base"
        at = f"{port.lower()}_row"
        size = self.problem.d_v if port in ("V", "dO") else self.problem.d_qk
        strides = self.problem.tensor(port).strides
        return {
            "row": self.text.row(port, base, name, at),
            "lines": [],
            "value": self.text.load(port, at, "d"),
            "size": size,
            "along": abs(strides[3]) <= abs(strides[2]) or strides[2] == 0,
        }

    def bases(self) -> list[str]:
        """Lines that set where each input begins, once batch and head are known."""
        p, t = self.problem, self.text
        stats = f"stats_base = {t.linear(('b', p.h_q * p.s_q), ('h', p.s_q))}"
        return [stats, *(line for pair in SIDES[self.kind] for port in pair for line in t.base(port, f"{port.lower()}_base"))]

    def limits(self, extent: int) -> list[str]:
        """Lines that set ``s_limit`` and the range ``first`` ... ``last`` of the moving side that meets the tile of ``extent`` at ``begin``."""
        limit, visit = ("sq", self.text.columns) if self.kind == "q" else ("skv", self.text.rows)
        end = f"min({self.text.linear(('begin', 1), const=extent - 1)}, {self.text.linear((limit, 1), const=-1)})"
        first, last = visit("begin", "s_end")
        return [f"s_limit = {limit}", f"s_end = {end}", f"first = {first}", f"last = {last}"]

    # -- scores -----------------------------------------------------------------------------------------------------------------------------
    def score(self) -> list[str]:
        """Lines from the product ``s`` and ``dp`` = dO V^T to ``weight`` = drop(P) and ``ds``, the gradient of the score. Both are -0.0 where a mask
        hides the score, and never else: sums leave such terms out, since what they would be multiplied with may be NaN."""
        t, calc = self.text, self.calc
        zero = literal(0, calc)
        lines = [f"stats_at = {t.linear(('stats_base', 1), ('row', 1))}", *t.score_before("s")]
        if self.problem.node.attr("score_mod"):
            lines += ["raw = s", *t.score_mod("s")]
        lines.append(f"p = exp({calc}(s - {self.lse}[stats_at]))")
        keep = t.keep(inside=True)
        if keep:
            lines += [f"keep = {keep}", f"p = p if keep else {zero}"]
        lines.append("weight = p")
        kept, scale = t.kept(), t.dropout_scale()
        if kept:
            factor = f"{calc}(kept * {scale})" if scale else "kept"
            lines += [*kept, f"kept = {factor}", f"weight = {calc}(weight * kept)", f"dp = {calc}(dp * kept)"]
        lines += [f"ds = {calc}(p * {calc}(dp - {self.delta}[stats_at]))", *self._through_mod()]
        if keep:
            lines += [f"{x} = {calc}({x} + {zero}) if keep else -{zero}" for x in ("weight", "ds")]
        return lines

    def _through_mod(self) -> list[str]:
        """The gradient of the modified score as that of the score: through score_mod_bprop, given or derived."""
        steps = gradient_steps(self.problem.node.attrs)
        if not steps:
            return []
        lines, result = self.text.tape(steps, {"S": "ds", "P": "raw"}, "row", "col", "ds_mod")
        return [*lines, f"ds = {result}"]

    # -- stores -----------------------------------------------------------------------------------------------------------------------------
    def result(self, port: str, value: str, head: str) -> tuple[list[str], list[str], str]:
        """Lines once an item, lines once a row, and the line that writes element ``d`` of the gradient at ``port``. ``head``: name of its head."""
        base, at = f"{port.lower()}_base", f"{port.lower()}_row"
        if GRADIENTS[port].scaled and self.text.scale():
            value = f"{self.calc}({value} * {self.text.scale()})"
        return self.text.base(port, base, head), self.text.row(port, base, self.still, at), self.text.store(port, at, "d", value)

    def peak(self, value: str) -> tuple[list[str], list[str]]:
        """Lines once an item, and those that write dS_max of row ``row``, by the first part of a head."""
        t = self.text
        own = [*t.row("dS_max", "ds_max_base", "row", "ds_max_row"), t.store("dS_max", "ds_max_row", t.number(0), value)]
        return t.base("dS_max", "ds_max_base", "hs"), own

    def bias_shape(self) -> tuple[list[int], list[int]]:
        """Dims and strides of dBias over [b, h_q, s_q, s_kv]."""
        t = self.problem.tensor("dBias")
        lacking = 4 - len(t.dim)
        return [1] * lacking + list(t.dim), [0] * lacking + list(t.strides)

    def bias_line(self, value: str) -> str:
        """The line that writes element (``bb``, ``hb``, ``row``, ``d``) of dBias."""
        t = self.problem.tensor("dBias")
        at = self.text.linear(*zip(("bb", "hb", "row", "d"), self.bias_shape()[1], strict=True))
        pointer = self.signature.pointer(self.problem.ports["dBias"], written=True)
        return f"{pointer}[{at}] = {info(t.dtype).encode.format(to_dtype(value, self.calc, t.dtype))}"

    def store_limit(self, port: str) -> str:
        """Rows that are written: all of a padded tensor (zeros past the length), those that exist of a ragged one."""
        if self.problem.has(f"Ragged_{port}"):
            return "s_limit"
        return self.text.number(self.problem.tensor(port).dim[2])
