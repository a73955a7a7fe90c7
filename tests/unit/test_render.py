"""What rendering refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphdnn import device
from graphdnn.codegen.render import render
from graphdnn.codegen.spec import Buffer, KernelSpec
from graphdnn.engines import ENGINES
from graphdnn.passes.regions import partition
from tests.opgraphs import Builder


def spec() -> KernelSpec:
    b = Builder()
    x = b.tensor(4, 8)
    b.add(x, x, 4, 8, virtual=False)
    (region,) = partition(b.graph()).regions
    where = device.cpu()
    (knobs, *_) = ENGINES[0].candidates(b.graph(), region, where)
    return ENGINES[0].lower(b.graph(), region, where, knobs, {t: Buffer("tensor", t) for t in (*region.reads, *region.stores)}).kernels[0]


@pytest.mark.parametrize("line", ["p0 = 1", "    p0 += 1", "for p0 in range(3):"])
def test_a_text_that_assigns_a_parameter_is_refused(line: str) -> None:
    """A loop once had the name of a number given by value, which was lost with the first item."""
    good = spec()
    assert "p0" in {p.name for p in good.params} and render(good).text
    with pytest.raises(ValueError, match=r"assigns \['p0'\]"):
        render(replace(good, fields=good.fields | {"header": [line]}))
