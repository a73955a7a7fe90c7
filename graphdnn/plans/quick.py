"""What the last packs of a plan looked like, so that the next one that looks the same is bound without a Python loop over its tensors.

Data type, device, size, layout and address are read from every tensor, and compared with those of a pack that was looked at closely; only the reading
is done in C, one attribute of all tensors at a time. What is kept is replaced as a whole and never changed, so threads may share it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import and_, attrgetter, itemgetter
from typing import Any

from graphdnn.plans.buffers import KINDS, TORCH

_MAX_LOOKS = 64
"""So many looks are kept in the life of a plan: packs that are never alike shall not pay for it."""
_Layout = tuple[Any, Any]
_dtype, _nbytes, _is_cpu = attrgetter("dtype"), attrgetter("nbytes"), attrgetter("is_cpu")


@dataclass(frozen=True, slots=True)
class _Order:
    """The keys of a pack, in its order, and what fetches the values in the order of the plan (None where the pack has none)."""

    keys: list[Any]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class _Look:
    """Torch tensors that fitted. ``layouts``: dims and strides of those that are not contiguous, None for the others."""

    classes: list[type]
    dtypes: list[Any]
    nbytes: list[int]
    flat: list[bool]
    layouts: list[_Layout | None]
    masks: list[int]
    place: list[Any]
    """What ``is_cpu`` says of all of them for a plan that runs on the host, else what ``get_device()`` says."""
    where: Callable[[Any], Any]
    is_contiguous: Callable[[Any], bool]
    data_ptr: Callable[[Any], int]
    is_neg: Callable[[Any], bool]


class Quick:
    """The memory of one plan's binder. ``clear``: addresses at which all tensors were found aligned and apart."""

    __slots__ = ("_left", "_look", "_order", "clear")

    def __init__(self) -> None:
        self._left = _MAX_LOOKS
        self._order: _Order | None = None
        self._look: _Look | None = None
        self.clear: list[int] = []

    def values(self, pack: Mapping[Any, Any]) -> tuple[Any, ...] | None:
        """The values of a pack with the keys of the last one, in the order of the plan; None for other keys."""
        order = self._order
        if order is None or list(pack) != order.keys:
            return None
        return order.pick([*pack.values(), None])

    def learn_keys(self, keys: Sequence[Any], positions: Sequence[int], count: int) -> None:
        """Keep the keys of a pack; ``positions``: of each key among ``count``, -1 if it is ignored."""
        at = {p: i for i, p in enumerate(positions) if p >= 0}
        picked = [at.get(p, len(keys)) for p in range(count)]
        if count > 1:
            self._order = _Order(list(keys), itemgetter(*picked))

    def addresses(self, values: Sequence[Any]) -> list[int] | None:
        """Addresses of torch tensors that look as the last ones did; None if they do not, or are not aligned, and have to be looked at closely."""
        look = self._look
        try:
            return None if look is None else self._recognized(look, values)
        except RuntimeError:  # torch has tensors without strides, without memory, and wrapped ones; the close look says so
            return None

    def _recognized(self, look: _Look, values: Sequence[Any]) -> list[int] | None:
        if list(map(type, values)) != look.classes or list(map(_dtype, values)) != look.dtypes:
            return None
        if list(map(look.where, values)) != look.place or list(map(_nbytes, values)) != look.nbytes:
            return None
        flat = list(map(look.is_contiguous, values))
        if flat != look.flat:
            return None
        if False in flat and [None if f else (v.shape, v.stride()) for v, f in zip(values, flat, strict=True)] != look.layouts:
            return None
        if any(map(look.is_neg, values)):
            return None
        found = list(map(look.data_ptr, values))
        if found != self.clear and (0 in found or any(map(and_, found, look.masks))):
            return None
        return found

    def learn(self, values: Sequence[Any], checks: Sequence[tuple[set[Any], int, int, bool]], host: bool, ordinal: int) -> None:
        """Keep how ``values`` look, which were found to fit ``checks`` (see ``Binder``), if all are torch tensors that show the bytes needed."""
        if not values or not self._left or any(KINDS.get(type(v)) != TORCH for v in values):
            return
        self._left -= 1
        tensor = sys.modules["torch"].Tensor
        flat = [v.is_contiguous() for v in values]
        if any(reach(v) < nbytes for v, (_, nbytes, _, _) in zip(values, checks, strict=True)):
            return
        self._look = _Look(
            classes=[type(v) for v in values],
            dtypes=[v.dtype for v in values],
            nbytes=[v.nbytes for v in values],
            flat=flat,
            layouts=[None if f else (v.shape, v.stride()) for v, f in zip(values, flat, strict=True)],
            masks=[mask for _, _, mask, _ in checks],
            place=[True if host else ordinal] * len(values),
            where=_is_cpu if host else tensor.get_device,
            is_contiguous=tensor.is_contiguous,
            data_ptr=tensor.data_ptr,
            is_neg=tensor.is_neg,
        )


def reach(value: Any) -> int:
    """Bytes from the first element to one past the highest that a torch tensor shows."""
    if value.numel() == 0:
        return 0
    return int(value.element_size() * (1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))))
