"""What happens to a score of an attention node, as text: scale, bias, ALiBi, score_mod, masks, dropout; which columns and rows are worth visiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphdnn.codegen.body import decoded
from graphdnn.codegen.dialect import literal, substitute, to_register
from graphdnn.codegen.tape import plain_number
from graphdnn.dtypes import info
from graphdnn.engines.attention_parts import AttentionText
from graphdnn.opspecs import score_steps
from graphdnn.opspecs.pointwise import POINTWISE

MASK_BLOCK = 128
"""Rows and columns that one bit of a block mask stands for."""


class ScoreText(AttentionText):
    """See the module. All lines need what :meth:`AttentionText.item` sets."""

    # -- scores -------------------------------------------------------------------------------------------------------------------------------
    def score(self, s: str = "s", row: str = "row", col: str = "col") -> list[str]:
        """Lines that turn the raw product ``s`` into the score before masks: scale, bias, ALiBi, score_mod. ``row`` and ``col`` must be inside."""
        return [*self.score_before(s, row, col), *self.score_mod(s, row, col)]

    def score_before(self, s: str = "s", row: str = "row", col: str = "col") -> list[str]:
        """Lines that turn the raw product ``s`` into the score that a score_mod changes: scale, bias, ALiBi."""
        p, calc = self.problem, self.calc
        lines = []
        scale = self.scale()
        if scale:
            lines.append(f"{s} = {calc}({s} * {scale})")
        if p.has("Bias"):
            bias = self.broadcast(p.ports["Bias"], row, col)
            lines.append(f"{s} = {calc}({s} + {to_register(bias, info(p.tensor('Bias').dtype).register, calc)})")
        if p.node.attr("alibi_mask"):
            lines.append(f"{s} = {calc}({s} + {calc}(slope * {calc}({self.linear((col, 1), (row, -1))})))")
        return lines

    def score_mod(self, s: str = "s", row: str = "row", col: str = "col") -> list[str]:
        """Lines that change the score ``s`` as the score_mod says; step i leaves its result in the name ``<s>_mod<i>``."""
        steps = self.problem.node.attr("score_mod")
        if not steps:
            return []
        lines, result = self.tape(steps, {"S": s}, row, col, f"{s}_mod")
        return [*lines, f"{s} = {result}"]

    def scale(self) -> str:
        """Text of the factor of the raw product; empty where there is none."""
        if self.problem.has("Attn_scale"):
            return "attn_scale"
        value = self.problem.node.attr("attn_scale_value")
        return literal(value, self.calc) if value is not None and value != 1.0 else ""

    def tape(self, steps: Sequence[Any], names: Mapping[str, str], row: str, col: str, prefix: str) -> tuple[list[str], str]:
        """Lines of a score_mod (or score_mod_bprop) and the text of its result. ``names``: what its references "S" (and "P") are called here."""
        calc = self.calc
        lines: list[str] = []
        made: list[str] = []
        for n, step in enumerate(steps):
            text = substitute(POINTWISE[step[0]].expression(self.problem.node.compute), calc, self.words(step, names, made, row, col))
            made.append(f"{prefix}{n}")
            lines.append(f"{made[-1]} = {calc}({text})")
        return lines, made[-1] if made else names["S"]

    def words(self, step: Any, names: Mapping[str, str], made: Sequence[str], row: str = "row", col: str = "col") -> dict[str, str]:
        """What the names in the expression of a step stand for: operands, attributes, the index. ``made``: results of the steps before it."""
        mode, inputs, attrs = step
        op = POINTWISE[mode]
        words = dict(zip("abc", (self._reference(x, names, made, row, col) for x in inputs), strict=False))
        words |= {k: plain_number(v) for k, v in op.values(dict(attrs), self.problem.node.compute).items()}
        if "axis" in op.attrs:
            words["index"] = (self.batch, self.head, row, col)[int(dict(attrs).get("axis", 0)) % 4]
        return words

    def _reference(self, x: Any, names: Mapping[str, str], made: Sequence[str], row: str, col: str) -> str:
        def loaded(port: str) -> str:
            return to_register(self.broadcast(self.problem.ports[port], row, col), info(self.problem.tensor(port).dtype).register, self.calc)

        return score_steps.meaning(x, lambda n: literal(n, self.calc), made, loaded, names)

    def keep(self, row: str = "row", col: str = "col", inside: bool = False) -> str:
        """Text that is true where a score counts; empty where every one does. ``inside``: ``col`` is known to lie before the batch's length."""
        p = self.problem
        tests = []
        if p.padded and not inside:
            tests.append(f"({col} < {self.skv})")
        if p.right is not None:
            tests.append(f"({col} <= {self._diagonal(row, p.right)})")
        if p.left is not None:
            tests.append(f"({col} > {self._diagonal(row, -p.left)})")
        if p.has("Block_mask"):
            tests.append(self._block(row, col))
        return " & ".join(tests)

    def clear(self, first_row: str, last_row: str, first_col: str, last_col: str) -> str:
        """Text that is true only where all scores of these rows and columns (inclusive, inside of the batch's lengths) count."""
        p = self.problem
        tests = ["False"] if p.has("Block_mask") else []
        if p.right is not None:
            tests.append(f"({last_col} <= {self._diagonal(first_row, p.right)})")
        if p.left is not None:
            tests.append(f"({first_col} > {self._diagonal(last_row, -p.left)})")
        return " & ".join(tests)

    def _diagonal(self, row: str, bound: int) -> str:
        return self.linear((row, 1), *((("shift", 1),) if self.problem.shifted else ()), const=bound)

    def _block(self, row: str, col: str) -> str:
        i, t = self.itype, self.problem.tensor("Block_mask")
        tile, bit = f"{i}({row} // {self.number(MASK_BLOCK)})", f"{i}({i}({col} // {self.number(MASK_BLOCK)}) % {self.number(8)})"
        byte = f"{i}({col} // {self.number(MASK_BLOCK * 8)})"
        terms = [(n, s) for n, d, s in zip((self.batch, self.head, tile, byte), t.dim, t.strides, strict=True) if d != 1]
        stored = decoded(self.signature, self.problem.ports["Block_mask"], self.linear(*terms))
        return f"(({i}({stored}) >> {bit}) & {self.number(1)} != {self.number(0)})"

    def kept(self, row: str = "row", col: str = "col", name: str = "kept") -> list[str]:
        """Lines that set ``name`` to the factor of dropout on a weight, 1 or 0 before scaling; none where nothing is dropped."""
        p, calc = self.problem, self.calc
        if p.has("Dropout_mask"):
            mask = self.broadcast(p.ports["Dropout_mask"], row, col)
            return [f"{name} = {to_register(mask, info(p.tensor('Dropout_mask').dtype).register, calc)}"]
        if p.dropout is None:
            return []
        flat = f"int64({self.batch})"
        for size, index in ((p.h_q, self.head), (p.s_q, row), (p.s_kv, col)):
            flat = f"({flat} * int64({size}) + int64({index}))"
        drawn = f"philox_uniform(seed, philox_offset, {flat})"
        return [f"{name} = {literal(1, calc)} if {drawn} >= {literal(p.dropout, 'float32')} else {literal(0, calc)}"]

    def dropout_scale(self) -> str:
        """Text of the factor of the weights that are kept; empty where nothing is dropped."""
        if self.problem.has("Dropout_scale"):
            return "dropout_scale"
        p = self.problem.dropout
        return "" if p is None else literal(1.0 / (1.0 - p), self.calc)

    def weight(self, p: str = "p", row: str = "row", col: str = "col") -> list[str]:
        """Lines that turn the weight ``p`` into what the second product takes: dropout and its scale."""
        lines = self.kept(row, col)
        if lines:
            lines.append(f"{p} = {self.calc}({p} * kept)")
            lines.append(f"{p} = {self.calc}({p} * {self.dropout_scale() or literal(1, self.calc)})")
        return lines

    # -- what is worth visiting -----------------------------------------------------------------------------------------------------------------
    def columns(self, first_row: str, last_row: str) -> tuple[str, str]:
        """Texts of the columns [first, last) that rows ``first_row`` ... ``last_row`` (inclusive) may count."""
        p = self.problem
        first, last = self.number(0), self.skv
        if p.left is not None:
            first = f"max({first}, {self._diagonal(first_row, 1 - p.left)})"
        if p.right is not None:
            last = f"min({last}, {self._diagonal(last_row, p.right + 1)})"
        return first, last

    def rows(self, first_col: str, last_col: str) -> tuple[str, str]:
        """Texts of the rows [first, last) that may count columns ``first_col`` ... ``last_col`` (inclusive)."""
        p = self.problem
        back = (("shift", -1),) if p.shifted else ()
        first, last = self.number(0), self.sq
        if p.right is not None:
            first = f"max({first}, {self.linear((first_col, 1), *back, const=-p.right)})"
        if p.left is not None:
            last = f"min({last}, {self.linear((last_col, 1), *back, const=p.left)})"
        return first, last

