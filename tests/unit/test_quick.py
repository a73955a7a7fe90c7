"""A pack that looks as the last one is bound quickly: the same addresses, and no check is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import graphdnn
from graphdnn.errors import ValidationError
from graphdnn.plans.variant_pack import Binder, Misaligned

F32 = graphdnn.data_type.FLOAT
DIM, STRIDE = (2, 4, 3, 5), (60, 1, 20, 4)  # channels last


def binder() -> Binder:
    """y = (a + b) * s: a and y contiguous, b channels last; alignment 16 as on a GPU."""
    g = graphdnn.pygraph(io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, device="cpu")
    a = g.tensor(name="a", dim=list(DIM), stride=[60, 15, 5, 1], uid=1)
    b = g.tensor(name="b", dim=list(DIM), stride=list(STRIDE), uid=2)
    s = g.tensor(name="s", dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], is_pass_by_value=True, uid=3)
    g.mul(a=g.add(a=a, b=b), b=s).set_output(True).set_uid(4).set_dim(list(DIM)).set_stride([60, 15, 5, 1])
    g.build([graphdnn.heur_mode.A])
    made = g.plan.load()[0]
    return replace(made, slots=tuple(replace(x, alignment=16) for x in made.slots), checks=tuple((t, n, 15, w) for t, n, _, w in made.checks))


def tensors() -> dict[Any, Any]:
    return {1: torch.zeros(DIM), 2: torch.zeros(DIM).to(memory_format=torch.channels_last), 3: 0.5, 4: torch.zeros(DIM)}


def learnt() -> tuple[Binder, dict[Any, Any]]:
    """A binder that has met two packs of the same looks."""
    made, pack = binder(), tensors()
    for given in (tensors(), pack):
        made.bind(given, None)
    assert made.quick.values(pack) is not None and made.quick.addresses([pack[1], pack[2], pack[4]]) is not None
    return made, pack


def test_addresses_are_those_of_the_tensors_in_any_order_of_keys() -> None:
    made, pack = learnt()
    for given in (pack, tensors(), dict(reversed(tensors().items())), tensors() | {"unknown": 1, None: None}):
        pointers, numbers, _ = made.bind(given, None)
        assert [pointers[s.index] for s in made.slots] == [given[u].data_ptr() for u in (1, 2, 4)] and list(numbers.values()) == [0.5]


def _offset(pack: dict[Any, Any]) -> None:
    pack[1] = torch.zeros(121)[1:].view(DIM)


def _overlap(pack: dict[Any, Any]) -> None:
    memory = torch.zeros(200)
    pack[1], pack[4] = memory[:120].view(DIM), memory[40:160].view(DIM)


def _shrunk(pack: dict[Any, Any]) -> None:
    pack[1].data = torch.zeros(2, 4, 3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update({1: torch.zeros(DIM, dtype=torch.int32)}), "wrong data type"),
        (lambda p: p.update({1: torch.zeros(2, 4, 3, 4)}), "too small"),
        (lambda p: p.update({2: torch.zeros(60).as_strided(DIM, (1, 1, 1, 1))}), "too small"),
        (lambda p: p.update({1: torch.zeros(DIM, device="meta")}), "wrong device"),
        (lambda p: p.update({1: np.zeros((2, 4, 3, 4), np.float32)}), "too small"),
        (lambda p: p.update({1: None}), "missing buffer"),
        (lambda p: p.pop(1), "missing buffer"),
        (_offset, "not aligned"),
        (_overlap, "overlaps"),
        (_shrunk, "too small"),
    ],
)
def test_every_check_is_made_again(change: Any, message: str) -> None:
    made, pack = learnt()
    change(pack)
    for _ in range(2):
        with pytest.raises(ValidationError, match=message) as error:
            made.bind(pack, None)
        assert isinstance(error.value, Misaligned) == (message == "not aligned")
    made.bind(tensors(), None)


def test_packs_that_are_never_alike_cost_no_more_than_a_few_looks() -> None:
    made = binder()
    for n in range(200):
        pack = tensors()
        pack[2] = torch.zeros(2, 4, 3, 5 + n % 7).to(memory_format=torch.channels_last)
        pointers, _, _ = made.bind(pack, None)
        assert pack[2].data_ptr() in pointers.values()
    assert made.quick._left == 0
