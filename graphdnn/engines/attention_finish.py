"""The end of a row of attention (forward), as text: the sink, division by the sum of weights, Stats, Max and Sum_exp."""

from __future__ import annotations

from collections.abc import Sequence

from graphdnn.codegen.body import decoded
from graphdnn.codegen.dialect import literal, to_register
from graphdnn.dtypes import info
from graphdnn.engines.attention_score import ScoreText

_ROWS = ("Stats", "Max", "Sum_exp")
"""Outputs with one number a row."""


class Finish:
    """Text for one row. A kernel has set ``zero`` and ``low`` (0 and -inf in the compute type), ``row``, ``m`` (largest score, -inf if there is
    none) and ``z`` (sum of exp(score - m), 0 if there is none);
    both are as if there were none in rows past the length of a batch. ``part``: name of the part of the row of V that an item makes, if there are
    several: the first one writes the numbers of a row."""

    def __init__(self, text: ScoreText, part: str = "") -> None:
        self.text, self.part, self.calc = text, part, text.calc
        self.zero, self.low = "zero", "low"
        self.sink = text.problem.has("SINK_TOKEN")

    @property
    def item(self) -> list[str]:
        """Lines of an item's set-up."""
        found = [line for port in ("O", *_ROWS) if self.text.problem.has(port) for line in self.text.base(port, f"{port.lower()}_at")]
        return [*found, f"sink = {self._sink()}"] if self.sink else found

    def _sink(self) -> str:
        p = self.text.problem
        t = p.tensor("SINK_TOKEN")
        stored = decoded(self.text.signature, p.ports["SINK_TOKEN"], self.text.linear((self.text.head, t.strides[1])))
        return to_register(stored, info(t.dtype).register, self.calc)

    @property
    def lines(self) -> list[str]:
        """Lines once a row: ``lead`` and ``whole`` (factor and divisor of the sums of the row), and the numbers of the row are stored."""
        calc, zero, low = self.calc, self.zero, self.low
        lines = ["whole = z", f"lead = {literal(1, calc)}"]
        if self.sink:
            lines += [
                f"if row < {self.text.sq}:",
                "    highest = nanmax(m, sink)",
                f"    base = {zero} if highest == {low} else highest",
                f"    lead = exp({calc}(m - base))",
                f"    whole = {calc}({calc}(z * lead) + exp({calc}(sink - base)))",
                "    m = highest",
            ]
        values = {"Stats": f"({calc}(m + log(whole)) if whole != {zero} else {low})", "Max": "m", "Sum_exp": "whole"}
        rows: list[str] = []
        for port, value in values.items():
            if self.text.problem.has(port):
                name = f"{port.lower()}_row"
                written = [*self.text.row(port, f"{port.lower()}_at", "row", name), self.text.store(port, name, "0", value)]
                rows += self._guarded(port, written)
        if rows and self.part:
            rows = [f"if {self.part} == {self.text.number(0)}:", *_indented(rows)]
        return [*lines, *rows]

    @property
    def row(self) -> list[str]:
        """Lines that find the row of O."""
        return self.text.row("O", "o_at", "row", "o_row")

    def _guarded(self, port: str, lines: Sequence[str]) -> list[str]:
        """A row past the length of its batch is the next batch's in a ragged tensor."""
        if not self.text.problem.has(f"Ragged_{port}"):
            return list(lines)
        return [f"if row < {self.text.sq}:", *_indented(lines)]

    def result(self, total: str) -> str:
        """Text of an element of O, from the sum ``total`` of weights times V."""
        calc = self.calc
        return f"{calc}({calc}({total} * lead) / whole) if whole != {self.zero} else {self.zero}"

    def store(self, column: str, value: str = "y") -> list[str]:
        """Lines that store ``value`` as element ``column`` of the row of O."""
        return self._guarded("O", [self.text.store("O", "o_row", column, value)])


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
