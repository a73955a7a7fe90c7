"""One row of the API page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import graphdnn
from graphdnn import data_type
from graphdnn.errors import BuildError, ValidationError

SAME, RUNS, OURS = "same", "runs here", "our error"
F32, F16 = data_type.FLOAT, data_type.HALF
IO = {"io_data_type": F16, "intermediate_data_type": F32, "compute_data_type": F32}
"""Data types of a row's graph unless it says otherwise."""
Shape = tuple[tuple[int, ...], tuple[int, ...]] | None


@dataclass(frozen=True)
class Row:
    """``part``: of the page. ``node``, ``what``: which of its rows, in a few words. ``kind``: how graphdnn compares. ``page``, ``here``: what the
    real library and graphdnn do with it; only where they differ. ``test(graph)``: declares it and asserts. ``types``: arguments of the graph."""

    part: str
    node: str
    what: str
    test: Callable[[Any], None]
    kind: str = SAME
    page: str = ""
    here: str = ""
    types: tuple[tuple[str, Any], ...] = tuple(IO.items())

    @property
    def name(self) -> str:
        """For tests."""
        return f"{self.part} {self.node}: {self.what}"

    def graph(self) -> Any:
        """The graph that it is declared on."""
        return graphdnn.pygraph(device="cpu", **dict(self.types))


def t(g: Any, *dim: int, stride: Sequence[int] | None = None, name: str = "", **more: Any) -> Any:
    """A row-major tensor, or one of these strides."""
    return g.tensor(dim=dim, **({"layout": "row"} if stride is None else {"stride": stride}), name=name, **more)


def results(made: Any) -> list[Any]:
    """As a list."""
    return list(made) if isinstance(made, list | tuple) else [made]


def runs(declare: Callable[[Any], Any], check: Callable[..., bool] = lambda *made: True) -> Callable[[Any], None]:
    """The graph is valid, an engine takes it, and ``check`` holds of the results."""

    def test(g: Any) -> None:
        made = results(declare(g))
        g.validate()
        g.validate()
        assert check(*made)
        for x in made:
            if x is not None and x.get_is_virtual():
                x.set_output(True)
                if x.get_data_type() is data_type.NOT_SET:
                    x.set_data_type(F32)
        g.build_operation_graph()
        g.create_execution_plans([graphdnn.heur_mode.A])
        g.check_support()

    return test


def shapes(declare: Callable[[Any], Any], *wanted: Shape) -> Callable[[Any], None]:
    """Dims and strides of the results; None for a result that is None."""

    def found(*made: Any) -> bool:
        got = tuple(None if x is None else (tuple(x.get_dim()), tuple(x.get_stride())) for x in made)
        assert got == wanted, f"{got} instead of {wanted}"
        return True

    return runs(declare, found)


def names(declare: Callable[[Any], Any], *wanted: str | None) -> Callable[[Any], None]:
    """Names of the results, before anything is validated."""

    def test(g: Any) -> None:
        assert [x and x.get_name() for x in results(declare(g))] == list(wanted)

    return test


def fails(declare: Callable[[Any], Any], *words: str, error: type[Exception] = ValidationError, at: str = "validate") -> Callable[[Any], None]:
    """``error`` at the step ``at`` ("call": while it is declared), whose text says all of ``words`` (patterns)."""

    def test(g: Any) -> None:
        try:
            declare(g)
            assert at != "call", "the call was accepted"
            g.validate()
            assert at != "validate", "validate accepted it"
            g.build_operation_graph()
        except error as found:
            for word in words:
                assert re.search(word, str(found)), f"{word!r} is not in: {found}"
            return
        raise AssertionError("it was accepted")

    return test


def breaks(declare: Callable[[Any], Any], *words: str) -> Callable[[Any], None]:
    """A RuntimeError in validate."""
    return fails(declare, *words, error=BuildError)


def same(part: str, node: str, what: str, test: Callable[[Any], None], **more: Any) -> Row:
    """As on the page."""
    return Row(part, node, what, test, **more)


def here(part: str, node: str, what: str, page: str, here: str, test: Callable[[Any], None], **more: Any) -> Row:
    """The page refuses it, or says something that serves nobody; it runs here."""
    return Row(part, node, what, test, RUNS, page, here, **more)


def ours(part: str, node: str, what: str, page: str, test: Callable[[Any], None], here: str = "`ValidationError`", **more: Any) -> Row:
    """The page lets it pass, or crashes; an error here."""
    return Row(part, node, what, test, OURS, page, here, **more)
