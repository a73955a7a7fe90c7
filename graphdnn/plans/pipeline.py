"""Several plans one after another, on buffers with names, in one workspace: who needs which memory, and when.

A buffer belongs to the caller if a stage reads it before any has written it, if no stage reads it after the last that writes it, or if the caller
says so. All others are intermediates. They and the workspace of every stage share memory where their lives, counted in stages, do not meet: the
largest is placed first, each as low as it fits, at multiples of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from graphdnn.dtypes import data_type
from graphdnn.errors import GraphError, KindError, ValidationError, explain
from graphdnn.ir.tensor import Tensor, TensorDecl
from graphdnn.plans import cuda_graphs
from graphdnn.plans.assemble import Arena
from graphdnn.plans.plan import ExecutionPlan
from graphdnn.plans.variant_pack import Binder, Placed

if TYPE_CHECKING:
    from graphdnn.targets.cuda_graph import Replay

Pack = Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """One plan. ``names``: uid -> name of the buffer, for everything that the plan needs. ``label``: how messages call the stage."""

    plan: ExecutionPlan
    binder: Binder
    names: Mapping[int, str]
    label: str

    @cached_property
    def below(self) -> dict[int, int]:
        """Bytes of a tensor in front of its address, by uid: more than 0 with negative strides."""
        return {slot.tensor.uid: slot.below for slot in self.binder.slots}

    def values(self, given: Pack, starts: Mapping[str, int]) -> dict[int, Any]:
        """The plan's pack: what the caller gave, and addresses in intermediates, which begin at ``starts``."""
        inside = {uid: starts[name] + self.below[uid] for uid, name in self.names.items() if name in starts}
        return inside | {uid: given[name] for uid, name in self.names.items() if name in given}

    def placed(self, values: dict[int, Any], scratch: int, stream: int | None) -> tuple[ExecutionPlan, Placed]:
        """What runs the stage, and its addresses. ValidationError for arrays on another GPU: a plan would follow them there, but not its neighbours
        whose buffers are all inside of the pipeline."""
        plan, found = self.plan.placed(values, scratch, stream)
        if plan.device.index != self.plan.device.index:
            rule, fix = "a pipeline runs on the GPU that it was built for", f"build it from graphs with device='{plan.device.text}'"
            raise ValidationError(explain(rule, expected=f"arrays on {self.plan.device.text}", found=plan.device.text, fix=fix))
        return plan, found

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of the plan tell which stage it is."""
        try:
            yield
        except GraphError as error:
            error.add_note(f"pipeline: {self.label}")
            raise


@dataclass
class Buffer:
    """What all stages together say of one name. ``nbytes``: of the largest. ``reads``, ``writes``: stages."""

    name: str
    dtype: data_type
    nbytes: int = 0
    alignment: int = 1
    number: bool = False
    optional: bool = False
    packed: bool = False
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)

    @property
    def life(self) -> tuple[int, int]:
        """The first and the last stage that touches it."""
        touched = [*self.reads, *self.writes]
        return min(touched), max(touched)

    @property
    def within(self) -> bool:
        """Whether it is written before it is read, and read after the last stage that writes it."""
        return bool(self.writes) and bool(self.reads) and min(self.reads) > min(self.writes) and max(self.reads) > max(self.writes)


@dataclass(frozen=True)
class Block:
    """A part of the workspace: of buffer ``name``, or the workspace of a stage (name ""), alive from stage ``first`` to stage ``last``."""

    name: str
    nbytes: int
    first: int
    last: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """``places``: offset of every intermediate; ``scratch``: offset of each stage's workspace; ``nbytes``: of all."""

    blocks: tuple[Block, ...]
    places: Mapping[str, int]
    scratch: tuple[int, ...]
    nbytes: int


def stage(plan: ExecutionPlan, given: Mapping[Any, str], number: int) -> Stage:
    """The stage of ``plan``, whose tensors (by tensor, uid or name) lie in the buffers ``given``; others in the buffer of their own name. The
    buffer of a tensor that nobody has named is "1/0::OUT_0": that of stage 1.

    ValidationError for a tensor that the plan does not need or that has no name, KindError for a key or a name of the wrong kind."""
    binder = plan.binder()
    label = f"stage {number} ('{plan.graph.name}')" if plan.graph.name else f"stage {number}"
    tensors = {t.uid: t for t in [*(s.tensor for s in binder.slots), *(t for _, t, _ in binder.numbers)]}
    names = {_uid(binder, list(tensors), key, label): _name(name, label) for key, name in given.items()}
    for uid, tensor in tensors.items():
        if uid not in names:
            names[uid] = _own_name(binder, tensor, label, number)
    return Stage(plan, binder, names, label)


def _own_name(binder: Binder, tensor: Tensor, label: str, number: int) -> str:
    """The buffer of a tensor that add() was not told of. Names that the user has not given ("0::OUT_0") say nothing outside of their graph."""
    if not tensor.name or binder.by_name.get(tensor.name) is None:
        rule = f"{label}: {'a tensor has neither a buffer nor a name' if not tensor.name else 'several tensors have one name'}"
        fix = "name its buffer, by uid or tensor, in the dict given to add()"
        raise ValidationError(explain(rule, tensor=tensor.name or f"uid {tensor.uid}", expected="a name for its buffer", fix=fix))
    return f"{number}/{tensor.name}" if "::" in tensor.name else tensor.name


def _uid(binder: Binder, uids: Sequence[int], key: Any, label: str) -> int:
    if isinstance(key, TensorDecl):
        found = key.uid
    elif isinstance(key, str):
        at = binder.by_name.get(key)
        found = None if at is None else uids[at]
    elif hasattr(key, "__index__") and not isinstance(key, bool):
        found = int(key)
    else:
        raise KindError(explain(f"{label}: a key has the wrong kind", expected="a tensor, a uid or a name", found=type(key).__name__))
    if found not in uids:
        known = ", ".join(f"{uid}" for uid in uids)
        found_key = repr(getattr(key, "name", key))
        raise ValidationError(explain(f"{label}: its plan needs no such tensor", expected=f"one of uids {known}, or a unique name", found=found_key))
    assert found is not None, "a uid of the list"
    return found


def _name(name: Any, label: str) -> str:
    if not isinstance(name, str) or not name:
        raise KindError(explain(f"{label}: a buffer has no name", expected="a text that is not empty", found=repr(name)))
    return name


def buffers(stages: Sequence[Stage]) -> dict[str, Buffer]:
    """All buffers, in the order in which stages name them. ValidationError where two uses of a buffer do not fit together."""
    found: dict[str, Buffer] = {}
    for number, s in enumerate(stages):
        _check_shared(s)
        for slot in s.binder.slots:
            buffer = _joined(found, s, slot.tensor.uid, slot.tensor.dtype, number=False)
            nbytes = slot.below + slot.nbytes
            if not slot.written and buffer.writes and not slot.tensor.ragged and nbytes > buffer.nbytes:
                sizes = f"at most {buffer.nbytes} bytes", f"{nbytes} bytes"
                raise _unfit(s, slot.tensor.name, buffer.name, "is read further than it was written", *sizes)
            buffer.nbytes, buffer.alignment = max(buffer.nbytes, nbytes), max(buffer.alignment, slot.alignment)
            buffer.packed = buffer.packed or slot.tensor.ragged
            (buffer.writes if slot.written else buffer.reads).append(number)
        for index, tensor, _ in s.binder.numbers:
            buffer = _joined(found, s, tensor.uid, tensor.dtype, number=True)
            buffer.optional = (buffer.optional or not buffer.reads) and index in s.binder.defaults
            buffer.reads.append(number)
    return found


def _joined(found: dict[str, Buffer], s: Stage, uid: int, dtype: data_type, number: bool) -> Buffer:
    name = s.names[uid]
    buffer = found.setdefault(name, Buffer(name, dtype, number=number))
    if buffer.number != number:
        kinds = ("a tensor in memory", "a number passed by value")
        raise _unfit(s, f"uid {uid}", name, "is passed in two ways", kinds[buffer.number], kinds[number])
    if buffer.dtype != dtype:
        raise _unfit(s, f"uid {uid}", name, "has two data types", buffer.dtype.name, dtype.name)
    return buffer


def _check_shared(s: Stage) -> None:
    """Two tensors of a stage in one buffer: two that are only read, or an output over an input that allows it."""
    for out, other, _, _, _, same in s.binder.pairs:
        a, b = s.binder.slots[out], s.binder.slots[other]
        if s.names[a.tensor.uid] == s.names[b.tensor.uid] and not same:
            raise _unfit(s, a.tensor.name, s.names[a.tensor.uid], f"is that of {b.label} as well", "separate buffers", "one", "name another buffer")


def _unfit(s: Stage, tensor: str, name: str, rule: str, expected: str, found: str, fix: str | None = None) -> ValidationError:
    return ValidationError(explain(f"{s.label}: buffer '{name}' {rule}", tensor=tensor, expected=expected, found=found, fix=fix))


def intermediates(found: Mapping[str, Buffer], keep: Sequence[str]) -> list[Buffer]:
    """Buffers that the pipeline keeps to itself. ValidationError for a name in ``keep`` that no stage writes, and for a packed tensor."""
    for name in keep:
        if name not in found or not found[name].writes:
            written = [b.name for b in found.values() if b.writes]
            raise ValidationError(explain("no stage writes a buffer that is to be kept", expected=f"one of {written}", found=repr(name)))
    within = [b for b in found.values() if b.within and b.name not in keep]
    for b in within:
        if b.packed:
            rule = f"buffer '{b.name}' holds a packed tensor, whose size only its offsets tell"
            fix = f"build(keep=['{b.name}']), and provide it"
            raise ValidationError(explain(rule, expected="a buffer of the caller's", found="an intermediate", fix=fix))
    return within


def layout(within: Sequence[Buffer], stages: Sequence[Stage]) -> Layout:
    """Offsets of the intermediates and of the stages' workspaces."""
    wanted = [(b.nbytes, *b.life, b.name) for b in within]
    wanted += [(s.plan.workspace_bytes, number, number, "") for number, s in enumerate(stages)]
    arena, blocks = Arena(), []
    for nbytes, first, last, name in sorted(wanted, key=lambda w: (-w[0], *w[1:])):
        blocks.append(Block(name, nbytes, first, last, arena.place(nbytes, first, last)))
    places = {b.name: b.offset for b in blocks if b.name}
    scratch = {b.first: b.offset for b in blocks if not b.name}
    return Layout(tuple(blocks), places, tuple(scratch[n] for n in range(len(stages))), arena.size)


@dataclass(frozen=True)
class Program:
    """A pipeline that is laid out. Immutable: any number of threads may run it, each with a workspace of its own."""

    stages: tuple[Stage, ...]
    buffers: Mapping[str, Buffer]
    within: tuple[Buffer, ...]
    layout: Layout

    @classmethod
    def of(cls, stages: Sequence[Stage], keep: Sequence[str]) -> Program:
        """Raises ValidationError, see :func:`buffers` and :func:`intermediates`."""
        found = buffers(stages)
        within = intermediates(found, keep)
        return cls(tuple(stages), found, tuple(within), layout(within, stages))

    @property
    def external(self) -> dict[str, Buffer]:
        """What the caller provides."""
        return {name: b for name, b in self.buffers.items() if name not in self.layout.places}

    def bind(self, pack: Pack, workspace: Any) -> list[tuple[dict[int, Any], int]]:
        """Each stage's pack and workspace address. ValidationError for a buffer that is missing or that no stage knows, and for the workspace."""
        given = {name: value for name, value in pack.items() if value is not None}
        external = self.external
        for name in given:
            if name not in external:
                what = "is an intermediate: it lies in the workspace" if name in self.buffers else "is in no stage"
                fix = f"build(keep=['{name}'])" if name in self.buffers else None
                raise ValidationError(explain(f"buffer {name!r} {what}", expected=f"buffers named {', '.join(external)}", found=repr(name), fix=fix))
        missing = [name for name, b in external.items() if name not in given and not b.optional]
        if missing:
            raise ValidationError(explain("missing buffers of the pipeline", expected=", ".join(map(repr, missing)), fix="put them into the pack"))
        base = self._workspace(workspace) if self.layout.nbytes else 0
        starts = {name: base + offset for name, offset in self.layout.places.items()}
        return [(s.values(given, starts), base + scratch) for s, scratch in zip(self.stages, self.layout.scratch, strict=True)]

    def _workspace(self, value: Any) -> int:
        binders = [s.binder for s in self.stages]
        alignment = max([b.workspace_alignment for b in binders] + [b.alignment for b in self.within])
        return replace(binders[0], workspace=self.layout.nbytes, workspace_alignment=alignment).workspace_address(value)

    def execute(self, pack: Pack, workspace: Any, stream: int) -> None:
        """Enqueue every stage on ``stream``. Raises as a plan's execute; nothing has run then unless running fails."""
        runs = []
        for s, (values, scratch) in zip(self.stages, self.bind(pack, workspace), strict=True):
            with s.named():
                s.plan.ready(stream)
                plan, (addresses, numbers, at) = s.placed(values, scratch, stream)
                binder, executable = plan.load()
                runs.append((s, executable, addresses, numbers, at, binder.rooms(values) if binder.packed else None))
        for s, executable, addresses, numbers, at, rooms in runs:
            with s.named():
                executable.run_at(addresses, numbers, at, stream, rooms)

    def capture(self, pack: Pack, workspace: Any) -> Replay:
        """All stages as one instantiated CUDA graph on these buffers. NotSupportedError unless the stages are plans of a CUDA device."""
        parts = []
        for s, (values, scratch) in zip(self.stages, self.bind(pack, workspace), strict=True):
            with s.named():
                s.placed(values, scratch, None)
                parts.append(cuda_graphs.nodes(s.plan, values, scratch))
        from graphdnn.targets.cuda_graph import Replay

        return Replay(parts, (dict(pack), workspace))
