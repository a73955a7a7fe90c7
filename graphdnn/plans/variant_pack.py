"""From a user's variant pack to addresses: which buffer belongs to which tensor, and whether it can be it.

Everything that only depends on the plan is worked out once (see ``slots``). ``Binder.bind`` is on the path of every execute: it looks values up,
checks what it can see (device, data type, room, alignment, overlap) and gives addresses. It holds no state, so threads may share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphdnn import log
from graphdnn.dtypes import info
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.ir.tensor import Tensor, TensorDecl
from graphdnn.plans import buffers, scalars
from graphdnn.plans.buffers import ADDRESSES, KINDS, NUMPY, OTHER, TORCH, Facts
from graphdnn.plans.overlap import disjoint
from graphdnn.plans.quick import Quick

Pack = Mapping[Any, Any]
Bound = tuple[Mapping[int, int], Mapping[int, "float | int"], int]
Placed = tuple[list[int], Mapping[int, "float | int"], int]
_MAX_KEYS = 64
NEVER = 2**62
"""More bytes than a buffer has: it is looked at closely."""


class Misaligned(ValidationError):
    """A buffer is less aligned than its tensor was declared; a plan for what it is would take it."""


class Elsewhere(ValidationError):
    """A buffer lies on another GPU than the plan. ``index``: which."""

    def __init__(self, text: str, index: int) -> None:
        super().__init__(text)
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return Elsewhere, (str(self), self.index)


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """One buffer that a plan needs: ``nbytes`` from its address on, ``below`` in front of it. ``types``: framework data types seen so far that fit
    (they are looked up by identity). ``shown``: how arrays that fit describe themselves by ``__cuda_array_interface__``."""

    index: int
    tensor: Tensor
    nbytes: int
    below: int
    alignment: int
    written: bool
    names: frozenset[str]
    types: set[Any] = field(default_factory=set)
    shown: set[Any] = field(default_factory=set)

    @property
    def label(self) -> str:
        """ "uid 3 ('bias')"."""
        return f"uid {self.tensor.uid} ('{self.tensor.name}')"


@dataclass(frozen=True, eq=False)
class Binder:
    """Binds packs for one plan.

    Positions are those of ``slots``, then those of ``numbers``. ``keys``: position of every key met so far (-1: ignored). ``ids``: tensor ids of the
    slots. ``checks``: per slot data types, bytes, alignment - 1 and whether it is written, in a form that is quick to walk. ``pairs``: positions of
    an output and of another slot, their bytes, those in front of the other, and whether the same address is fine. ``apart``: pairs of slots, with
    the distance of their addresses, that were found to share no element although their byte ranges meet.
    """

    slots: tuple[Slot, ...]
    ids: tuple[int, ...]
    checks: tuple[tuple[set[Any], int, int, bool], ...]
    numbers: tuple[tuple[int, Tensor, Callable[[float | int], float | int]], ...]
    keys: dict[Any, int]
    apart: set[tuple[int, int, int]]
    by_uid: Mapping[int, int]
    by_name: Mapping[str, int | None]
    defaults: Mapping[int, float | int]
    pairs: tuple[tuple[int, int, int, int, int, bool], ...]
    host: bool
    device: str
    ordinal: int
    workspace: int
    workspace_alignment: int
    packed: frozenset[int] = frozenset()
    """Positions of the slots of packed tensors."""
    quick: Quick = field(default_factory=Quick, init=False)

    def bind(self, pack: Pack, workspace: Any) -> Bound:
        """Tensor id -> address, by-value tensor id -> number, workspace address. Raises ValidationError or KindError; nothing has run then."""
        addresses, numbers, at = self.place(pack, workspace)
        return dict(zip(self.ids, addresses, strict=True)), numbers, at

    def place(self, pack: Pack, workspace: Any) -> Placed:
        """What ``bind`` gives, the addresses in the order of ``ids``."""
        if type(pack) is not dict:
            expect_mapping(pack)
        count, quick = len(self.checks), self.quick
        found: Sequence[Any] | None = quick.values(pack)
        if found is None:
            found = self._found(pack)
        tensors = found[:count]
        addresses = quick.addresses(tensors)
        if addresses is None:
            addresses = self._addresses(tensors)
            if not quick.clear and log.enabled("warning"):
                self._tell_layouts(tensors)
            quick.learn(tensors, self.checks, self.host, self.ordinal)
        if addresses != quick.clear:
            for out, other, size, other_size, other_below, same in self.pairs:
                p, q = addresses[out], addresses[other]
                if p < q + other_size and q - other_below < p + size and not (same and p == q):
                    self._check_overlap(out, p, other, q)
            quick.clear = addresses
        numbers = self.defaults
        if self.numbers:
            numbers = dict(numbers)
            for at, (index, tensor, convert) in enumerate(self.numbers, count):
                value = found[at]
                if type(value) is float:
                    numbers[index] = convert(value)
                elif value is not None:
                    numbers[index] = scalars.read(value, tensor, convert)
                elif index not in numbers:
                    raise _missing(f"uid {tensor.uid} ('{tensor.name}')")
        return addresses, numbers, self.workspace_address(workspace) if self.workspace else 0

    def _tell_layouts(self, values: Sequence[Any]) -> None:
        """Log, for the first pack of a plan, the arrays with the declared dims in another order in memory: that may be meant, and no error tells."""
        for slot, value in zip(self.slots, values, strict=False):
            if KINDS.get(type(value)) not in (TORCH, NUMPY) or tuple(value.shape) != slot.tensor.dim:
                continue
            strides = value.stride() if KINDS[type(value)] == TORCH else [s // value.itemsize for s in value.strides]
            if any(n > 1 and s != t for n, s, t in zip(slot.tensor.dim, strides, slot.tensor.stride, strict=True)):
                log.warning(
                    f"buffer for {slot.label} has the declared dims {list(slot.tensor.dim)} and strides {list(strides)}, where "
                    f"{list(slot.tensor.stride)} are declared: its memory is taken as declared. "
                    "Arrays as declared: torch.empty_strided(t.get_dim(), t.get_stride())"
                )

    def _found(self, pack: Pack) -> list[Any]:
        """The values of a pack by position; its keys are remembered."""
        known = self.keys.get
        count = len(self.checks) + len(self.numbers)
        found: list[Any] = [None] * (count + 1)  # the last place takes what is ignored
        positions = []
        for key, value in pack.items():
            at = known(key)
            positions.append(self.position(key) if at is None else at)
            found[positions[-1]] = value
        self.quick.learn_keys(list(pack), positions, count)
        return found

    def rooms(self, pack: Pack) -> dict[int, tuple[int, int]]:
        """For packed tensors bound in ``pack``, which ``bind`` has taken: bytes of the buffer before the address and from it on, where they are
        known."""
        found = {}
        for key, value in pack.items():
            at = self.keys.get(key)
            at = self.position(key) if at is None else at
            if at in self.packed:
                facts = buffers.facts(value)
                if facts.room is not None:
                    found[self.slots[at].index] = (NEVER if facts.before is None else facts.before, facts.room)
        return found

    def _addresses(self, found: Sequence[Any]) -> list[int]:
        """Addresses of the slots. What is seen at a glance to be right is taken; everything else goes the slow way, which says what is wrong."""
        kinds, host, ordinal = KINDS.get, self.host, self.ordinal
        addresses: list[int] = []
        for value, (types, nbytes, mask, written) in zip(found, self.checks, strict=False):
            cls, pointer = type(value), 0
            if cls is int:
                pointer = value if value < ADDRESSES else 0
            elif (kind := kinds(cls)) == TORCH:
                if value.dtype in types and (value.is_cpu if host else value.get_device() == ordinal):
                    pointer = buffers.torch_address(value, nbytes)
            elif kind == NUMPY and host and value.dtype in types and value.nbytes >= nbytes:
                flags = value.flags
                if flags.c_contiguous and (flags.writeable or not written):
                    pointer = value.__array_interface__["data"][0]
            elif kind == OTHER and not host:
                pointer = buffers.address_if_known(value, self.slots[len(addresses)].shown)
            if pointer <= 0 or pointer & mask:
                pointer = self._slow(self.slots[len(addresses)], value)
            addresses.append(pointer)
        return addresses

    def position(self, key: Any) -> int:
        """Position of a key that was not met before; it is remembered, within limits: a tensor object must not be kept alive for long."""
        at = -1
        if isinstance(key, TensorDecl):
            at = self.by_uid.get(key.uid, -1) if key.uid is not None else -1
        elif isinstance(key, str):
            named = self.by_name.get(key, -1)
            if named is None:
                unique = {"expected": "a unique name", "fix": "use the uid or the tensor object"}
                raise ValidationError(explain("a name in the variant pack belongs to several tensors", tensor=key, **unique))
            at = named
        elif hasattr(key, "__index__") and not isinstance(key, bool):
            return self.by_uid.get(int(key), -1)
        elif key is not None:
            kind = type(key).__name__
            raise KindError(explain("a key of the variant pack has the wrong kind", expected="a tensor, a uid, a name or None", found=kind))
        if len(self.keys) < len(self.by_uid) + _MAX_KEYS:
            self.keys[key] = at
        return at

    def _slow(self, slot: Slot, value: Any) -> int:
        """The address of a buffer that is looked at closely, or the error that says what is wrong with it."""
        tensor, what = slot.tensor, f"buffer for {slot.label}"
        if value is None:
            raise _missing(slot.label)
        if isinstance(value, (bool, float)):
            rule = f"a number was given for {slot.label}, which is not a by-value tensor"
            raise KindError(explain(rule, tensor=tensor.name, expected="an array or an address", found=repr(value)))
        facts = buffers.facts(value, what, tensor.name)
        self._check_device(facts, what, tensor.name)
        fault = _fault(slot, facts)
        if fault is not None:
            rule, expected, found, fix = fault
            raise ValidationError(explain(f"{what} {rule}", tensor=tensor.name, expected=expected, found=found, fix=fix))
        if facts.pointer % slot.alignment:
            fix = f"declare it with set_alignment({facts.pointer & -facts.pointer}) before building, or copy the data to aligned memory"
            expected, found = f"an address divisible by {slot.alignment}", f"{facts.pointer:#x}"
            raise Misaligned(explain(f"{what} is not aligned as declared", tensor=tensor.name, expected=expected, found=found, fix=fix))
        if KINDS.get(type(value)) in (TORCH, NUMPY):
            slot.types.add(value.dtype)
        elif not self.host:
            buffers.remember(value, slot.shown)
        return facts.pointer

    def loose(self, **changes: Any) -> Binder:
        """The same, with ``changes``, for buffers that are aligned to their elements only."""
        elements = [replace(s, alignment=min(s.alignment, max(1, info(s.tensor.dtype).bits // 8))) for s in self.slots]
        checks = tuple((s.types, s.nbytes, s.alignment - 1, s.written) for s in elements)
        return replace(self, slots=tuple(elements), checks=checks, **changes)

    def alignments(self, pack: Pack, workspace: Any) -> dict[int, int]:
        """Tensor ids whose buffers are less aligned than declared, with what they are aligned to (at least to an element). Raises as ``bind``."""
        pointers, _, _ = self.loose().bind(pack, workspace)
        return {s.index: pointers[s.index] & -pointers[s.index] for s in self.slots if pointers[s.index] % s.alignment}

    def _check_device(self, facts: Facts, what: str, name: str) -> None:
        place = facts.device
        if not place or (place == "cpu" if self.host else place in (self.device, "cuda")):
            return
        fix = "move it to the CPU" if self.host else f"copy it to {self.device}, or build the graph with device='cpu'"
        text = explain(f"{what} is on the wrong device", tensor=name or None, expected=f"memory of {self.device}", found=place, fix=fix)
        if not self.host and place.startswith("cuda:"):
            raise Elsewhere(text, int(place[5:]))
        raise ValidationError(text)

    def _check_overlap(self, first: int, p: int, second: int, q: int) -> None:
        """Byte ranges meet; do elements? The answer depends on the distance only, and is remembered."""
        out, other, place = self.slots[first], self.slots[second], (first, second, q - p)
        if place in self.apart:
            return
        if disjoint(out.tensor, p, other.tensor, q):
            if len(self.apart) < _MAX_KEYS:
                self.apart.add(place)
            return
        what = "another output" if other.written else "an input"
        raise ValidationError(
            explain(
                f"output {out.label} overlaps {what}, {other.label}, in memory",
                tensor=out.tensor.name,
                expected="separate buffers (in place: only over a tensor of equal dims, strides and element size that pointwise ops alone read)",
                found=f"bytes {p:#x}..{p + out.nbytes:#x} and {q:#x}..{q + other.nbytes:#x}",
                fix="give the output its own buffer",
            )
        )

    def workspace_address(self, value: Any) -> int:
        """The address of the workspace; ValidationError or KindError for one that is missing, too small, elsewhere, read-only or not aligned."""
        need = self.workspace
        if KINDS.get(type(value)) == TORCH:
            at = buffers.torch_address(value, need)
            if (value.is_cpu if self.host else value.get_device() == self.ordinal) and at > 0 and not at % self.workspace_alignment:
                return at
        if value is None:
            raise ValidationError(
                explain("the plan needs a workspace and none was given", expected=f"{need} bytes (get_workspace_size())", found="None")
            )
        facts = buffers.facts(value, "the workspace")
        self._check_device(facts, "the workspace", "")
        if facts.room is not None and facts.room < need:
            raise ValidationError(
                explain("the workspace is too small", expected=f"at least {need} bytes (get_workspace_size())", found=f"{facts.room} bytes")
            )
        if not facts.writable:
            raise ValidationError(explain("the workspace is read-only", expected="writable memory"))
        if facts.pointer <= 0:
            raise ValidationError(explain("the workspace is a null pointer", expected=f"the address of {need} bytes", found=facts.pointer))
        if facts.pointer % self.workspace_alignment:
            raise ValidationError(
                explain("the workspace is not aligned", expected=f"an address divisible by {self.workspace_alignment}", found=f"{facts.pointer:#x}")
            )
        return facts.pointer


def _fault(slot: Slot, facts: Facts) -> tuple[str, str, str, str | None] | None:
    """What is wrong with a buffer: rule, expected, found, way out."""
    tensor = slot.tensor
    if facts.dtype and facts.dtype not in slot.names:
        packed = info(tensor.dtype).bits < 8
        fix = "pack two values a byte into uint8" if packed else f"convert the array, or declare the tensor as {facts.dtype}"
        return "has the wrong data type", f"{tensor.dtype.name} ({', '.join(sorted(slot.names))})", facts.dtype, fix
    short = facts.room is not None and facts.room < slot.nbytes
    if short or (slot.below and facts.before is not None and facts.before < slot.below):
        front = f", and {slot.below} in front of the address" if slot.below else ""
        expected = f"at least {slot.nbytes} bytes{front} (dims {list(tensor.dim)}, strides {list(tensor.stride)}, {tensor.dtype.name})"
        return "is too small", expected, f"{facts.room} bytes" + (f" and {facts.before} before" if slot.below else ""), None
    if slot.written and not facts.writable:
        return "is read-only", "a writable array: it is an output", "a read-only one", None
    if facts.pointer <= 0 < slot.nbytes:
        return "is a null pointer", "an address", str(facts.pointer), None
    return None


def expect_mapping(pack: Any, what: str = "the variant pack", keys: str = "tensors, uids or names") -> None:
    """KindError for what is no mapping."""
    if not isinstance(pack, Mapping):
        raise KindError(explain(f"{what} has the wrong type", expected=f"a mapping of {keys}", found=type(pack).__name__))


def _missing(label: str) -> ValidationError:
    return ValidationError(explain(f"missing buffer for {label}", fix="put it into the variant pack under its tensor, uid or name"))
