"""Torch tensors that are not what lies in their memory, or have none: each is refused by an error of graphdnn, before and after plans know packs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdnn
from graphdnn.errors import KindError, ValidationError

ONES = torch.ones(4, 8)


def declared(stride: tuple[int, ...]) -> Any:
    """relu(x)."""
    g = graphdnn.pygraph(io_data_type="float32", compute_data_type="float32", device="cpu")
    x = g.tensor(dim=(4, 8), stride=stride, name="x", uid=1)
    g.relu(x).set_dim((4, 8)).set_stride((8, 1)).set_output(True).set_uid(2)
    g.build([graphdnn.heur_mode.A])
    return g


@pytest.fixture(scope="module")
def graph() -> Any:
    return declared((8, 1))


def wrapped() -> Any:
    """What torch.vmap hands to the function that it maps."""
    found: list[Any] = []
    torch.vmap(lambda t: (found.append(t), t)[1])(torch.ones(3, 4, 8))
    return found[0]


STRANGE: dict[str, Callable[[], Any]] = {
    "sparse": ONES.to_sparse,
    "compressed": ONES.to_sparse_csr,
    "of mkldnn": ONES.to_mkldnn,
    "meta": lambda: ONES.to("meta"),
    "zeros without memory": lambda: torch._efficientzerotensor((4, 8)),
    "negated": lambda: torch._neg_view(ONES),
    "conjugated": lambda: ONES.to(torch.complex64).conj(),
    "wrapped": wrapped,
    "uninitialized": torch.nn.parameter.UninitializedParameter,
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_strange_tensors_are_refused(name: str, graph: Any) -> None:
    for _ in range(2):
        y = torch.full((4, 8), float("nan"))
        with pytest.raises((KindError, ValidationError), match="uid 1 \\('x'\\)"):
            graph.execute({1: STRANGE[name](), 2: y}, None)
        assert y.isnan().all()
        graph.execute({1: ONES, 2: y}, None)  # from now on tensors like this one are known
        assert torch.equal(y, ONES)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["sparse", "compressed", "negated", "wrapped"])
def test_as_workspace(name: str) -> None:
    g = graphdnn.pygraph(io_data_type="float32", compute_data_type="float32", device="cpu")
    a = g.tensor(dim=(1, 64, 64), layout="row", name="a", uid=1)
    y = g.matmul(g.matmul(a, a), a).set_output(True).set_uid(2)
    g.build([graphdnn.heur_mode.A])
    need = g.get_workspace_size()
    assert need
    pack = {1: torch.ones(1, 64, 64), 2: torch.zeros(tuple(y.get_dim()))}
    work = {"sparse": lambda w: w.to_sparse(), "compressed": lambda w: w[None].to_sparse_csr(), "negated": torch._neg_view}
    with pytest.raises((KindError, ValidationError), match="workspace"):
        g.execute(pack, wrapped() if name == "wrapped" else work[name](torch.ones(need // 4 + 1)))


def test_the_imaginary_part_of_conjugates_is_no_plain_memory() -> None:
    g, z = declared((16, 2)), torch.full((4, 8), 2j, dtype=torch.complex64)
    for _ in range(2):
        y = torch.zeros(4, 8)
        g.execute({1: z.imag, 2: y}, None)
        assert (y == 2).all()
        with pytest.raises(KindError, match="resolve_neg"):
            g.execute({1: z.conj().imag, 2: y}, None)


def test_a_single_element_of_a_conjugate() -> None:
    """It is contiguous, and still negated when torch reads it."""
    g = graphdnn.pygraph(io_data_type="float32", compute_data_type="float32", device="cpu")
    g.relu(g.tensor(dim=(1, 1), layout="row", name="x", uid=1)).set_output(True).set_uid(2)
    g.build([graphdnn.heur_mode.A])
    z, y = torch.full((1, 1), 2j, dtype=torch.complex64), torch.zeros(1, 1)
    for _ in range(2):
        g.execute({1: z.imag, 2: y}, None)
        assert y.item() == 2
        with pytest.raises(KindError, match="resolve_neg"):
            g.execute({1: z.conj().imag, 2: y}, None)
