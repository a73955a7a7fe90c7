"""What a template and a target see of a kernel: KernelSpec (pure data), rendered Source, compiled Binary, launch recipe.

A recipe is an ordered tuple of steps. Buffers are named, never addressed: a tensor of the operation graph by its id, or a byte offset in the one
workspace. So CUDA graphs, serialization and ``explain`` see the same thing, and two executions of one plan share nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from graphdnn.dtypes import data_type


@dataclass(frozen=True, slots=True)
class PointerParam:
    """A raw typed pointer. ``storage`` is the numba element type (dtypes.DTypeInfo.storage); ``alignment`` in bytes is what the kernel relies on."""

    name: str
    storage: str
    alignment: int = 1
    written: bool = False


@dataclass(frozen=True, slots=True)
class ScalarParam:
    """A by-value scalar; ``type`` is float32, float64, int32, int64 or uint32."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class DescriptorParam:
    """A TMA descriptor by value: 128 bytes of parameter space, aligned to 64."""

    name: str


Param = PointerParam | ScalarParam | DescriptorParam


@dataclass(frozen=True, slots=True)
class SharedPart:
    """``nbytes`` bytes of a block's dynamic shared memory, ``offset`` bytes from its (1024-byte aligned) base."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Role:
    """A part of a block's threads, in order from thread 0, and the registers that each of them keeps (0: what the launch gives)."""

    name: str
    threads: int
    registers: int = 0


@dataclass(frozen=True)
class KernelSpec:
    """All that a template sees. ``template`` is a path under codegen_templates, ``name`` the stable entry name, ``fields`` the finished
    values that the template prints (JSON-like: str, int, bool, tuples and dicts of such). ``block``: threads of a CUDA block (0 on a CPU).
    CPU entries take ``(lo: int64, hi: int64, *params)`` and work on items [lo, hi); CUDA entries take ``(*params)``.
    ``cluster``: blocks that share their shared memory (the grid is a multiple of it). ``shared`` and ``roles``: how dynamic shared memory and
    the threads are divided, where they are; a template sees the offsets and the registers by name."""

    template: str
    name: str
    params: tuple[Param, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    block: int = 0
    shared_bytes: int = 0
    min_blocks: int = 0
    cluster: int = 1
    shared: tuple[SharedPart, ...] = ()
    roles: tuple[Role, ...] = ()

    def digest(self) -> str:
        """SHA-256 of the spec: the part of the cache key that graphs decide. The same for a spec that was stored and read again."""
        layout = (self.block, self.shared_bytes, self.min_blocks, self.cluster, self.shared, self.roles)
        fields = json.dumps(self.fields, sort_keys=True, default=repr)  # a list and a tuple print the same, and come back from a file as one
        text = repr((self.template, self.name, self.params, fields, *layout))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Buffer:
    """``kind`` "tensor": the pointer bound to tensor ``index`` plus ``offset`` bytes; "workspace": workspace pointer plus ``offset``."""

    kind: Literal["tensor", "workspace"]
    index: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorScalar:
    """The value of by-value tensor ``index``, read from the pack (or the graph's stored value) at execute, as register type ``type``."""

    index: int
    type: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A number known at build."""

    value: float | int
    type: str


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor to be: how the copy engine sees the memory at ``buffer``. Encoded when the kernel is loaded, its address patched per execute.

    ``dims`` in elements, the contiguous one first; ``strides`` in bytes of the others (multiples of 16, below 2**40); ``box``: what one copy
    moves, in elements; ``swizzle``: 0, 32, 64 or 128 bytes. Elements outside ``dims`` arrive as zeros. The address must be a multiple of 16.
    """

    buffer: Buffer
    dtype: data_type
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


Arg = Buffer | TensorScalar | Constant | TensorMap


@dataclass(frozen=True, slots=True)
class Memset:
    """Fill ``nbytes`` bytes with ``value`` (0..255)."""

    buffer: Buffer
    nbytes: int
    value: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """Run kernel ``kernel`` (index into the recipe's kernels). CUDA: ``grid`` blocks (linear in x). CPU: items [0, grid), split over the thread
    pool in chunks of at least ``grain`` items. ``grid`` 0: nothing to do."""

    kernel: int
    grid: int
    args: tuple[Arg, ...]
    grain: int = 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """A stack of matrices for the CPU's BLAS step: ``strides`` of (batch, row, column) in elements; a stride of 0 broadcasts."""

    buffer: Buffer
    dtype: data_type
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Panels:
    """CPU only: C[b, rows] = A[b, rows] @ B[b] by panels of ``rows`` rows with np.matmul, each panel followed by its epilogue while it is in cache.

    Items are rows counted through the batches, b * M + m. With ``rows`` < M a panel is rows [m0, m1) of one batch; with ``rows`` >= M it is
    ``rows // M`` whole batches (fewer at the end). The cut depends on the plan alone, so results do too. K = 0 gives panels of 0.

    ``pack_a`` / ``pack_b``: launches that fill the workspace copies that ``a`` / ``b`` name. Pack B: all its items, once, before. Pack A: per
    panel, on the panel's items; it writes the first of them at row 0. ``panel``: the result (workspace, shape (1, rows, N), unit column stride),
    first item at row 0. ``epilogue``: per panel, on the panel's items. The last argument of pack A and of the epilogue, a ``Constant`` of type
    int64, is replaced by the first item of the panel; their ``grid`` is not read. Without a pack, a matrix needs a unit stride along rows or
    columns, or np.matmul leaves BLAS for a slow loop. ``block``: items of the epilogue are blocks of so many rows of a batch (fewer at its end),
    counted through the batches; a panel of less than a batch is then whole blocks.
    """

    a: Matrix
    b: Matrix
    panel: Matrix
    rows: int
    epilogue: Launch
    pack_a: Launch | None = None
    pack_b: Launch | None = None
    block: int = 1


@dataclass(frozen=True, slots=True)
class Listing:
    """``count`` integers in memory, ``stride`` elements from one to the next; ``name``: of the tensor, for error messages."""

    buffer: Buffer
    dtype: data_type
    count: int
    stride: int
    name: str


@dataclass(frozen=True, slots=True)
class Starts:
    """First rows of groups: ``values`` must not decrease, nor leave 0 .. ``total``. Checked where :class:`Limits` are."""

    values: Listing
    total: int


@dataclass(frozen=True, slots=True)
class Places:
    """Rows that a kernel addresses: entry i is ``index``[i] * ``factor`` + ``extra``[i], which must be in 0 .. ``limit`` - 1, and, if ``distinct``,
    no entry twice: a row that is written twice would hold whichever came last. Checked where :class:`Limits` are."""

    index: Listing
    factor: int
    extra: Listing | None
    limit: int
    distinct: bool


@dataclass(frozen=True, slots=True)
class Groups:
    """CPU only: products over groups of rows, whose bounds are read when it runs: group g has rows ``starts``[g] up to ``starts``[g + 1], the last
    one up to ``total``; a step :class:`Starts` comes before it.

    Not ``inner``: C[rows of g] = A[rows of g] @ B[g], 0 for rows before the first start; A is (1, total, K), items are rows. ``inner``: C[g] =
    A[:, rows of g] @ B[rows of g]; A is (1, M, total), B (1, total, N), items are rows of the stack C, g * M + m. ``panel``, ``rows``, ``epilogue``
    and the packs are as in :class:`Panels`, but with ``inner`` A too is packed at once, before.
    """

    starts: Listing
    total: int
    inner: bool
    a: Matrix
    b: Matrix
    panel: Matrix
    rows: int
    epilogue: Launch
    pack_a: Launch | None = None
    pack_b: Launch | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Integers that kernels read must be in ``low`` .. ``high``, else ExecutionError with the text ``rule``. Checked on a CPU always, on other
    devices where the switch GRAPHDNN_CHECK_VALUES is on; kernels stay in bounds in any case.

    Batch b of ``batches`` has ``values``.count numbers, from element ``starts``[b] on, or else b * ``batch_stride``; with ``used`` only the first
    ``used``[b] / ``per``, rounded up, count.
    """

    values: Listing
    batches: int
    batch_stride: int
    low: int
    high: int
    rule: str
    used: Listing | None = None
    per: int = 1
    starts: Listing | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """Offsets of the batches of a packed tensor: ``starts`` must not decrease, and what belongs to a batch must be in the buffer, whose size is the
    bound tensor's; where that is not known (a bare address), offsets must not be negative. Checked where :class:`Limits` are.

    Batch b has ``used``[b] / ``per``, rounded up, rows, at most ``rows``: row r begins ``step`` * r elements after element ``starts``[b]. ``row``:
    (extent, stride) of the dims in a row. ``tensor``: its id, whose elements have ``bits``. ``written``: no two batches may share an element.
    """

    starts: Listing
    used: Listing
    per: int
    rows: int
    step: int
    row: tuple[tuple[int, int], ...]
    tensor: int
    bits: int
    name: str
    written: bool

    @property
    def below(self) -> int:
        """Elements of a row before its first one."""
        return sum((d - 1) * -s for d, s in self.row if s < 0)

    @property
    def above(self) -> int:
        """Elements of a row after its first one."""
        return sum((d - 1) * s for d, s in self.row if s > 0)


Check = Limits | Starts | Places | Packed
"""Steps that read and compare only: nothing is launched for them."""
Step = Memset | Launch | Panels | Groups | Check


@dataclass(frozen=True)
class Recipe:
    """Kernels, the steps that run them, and the bytes of workspace they share."""

    kernels: tuple[KernelSpec, ...]
    steps: tuple[Step, ...]
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Rendered text of one kernel module; ``entry`` is the function to compile."""

    spec: KernelSpec
    text: str

    @property
    def entry(self) -> str:
        """Name of the function to compile."""
        return self.spec.name


@dataclass(frozen=True)
class Binary:
    """A compiled kernel, as it is stored: machine code plus what inspection shows. ``facts`` is JSON-like: registers, shared_bytes, spill_bytes,
    arch, ... ``texts`` holds intermediate texts such as "ptx"."""

    entry: str
    code: bytes
    facts: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
