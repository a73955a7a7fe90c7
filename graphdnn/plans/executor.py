"""A plan with buffers bound to it: what can be checked and laid out once is, so that a call only launches."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graphdnn.errors import ExecutionError, GraphError, KindError, ValidationError, explain
from graphdnn.plans import streams, variant_pack
from graphdnn.targets.base import Prepared

if TYPE_CHECKING:
    from graphdnn.plans.plan import ExecutionPlan


class Executor:
    """Runs a built plan again and again on the buffers that it was given, or on raw addresses. Made by ``plan.bind`` and ``graph.bind``.

    It has launch arguments of its own and keeps the arrays of its pack and its workspace alive. One thread at a time may use it: a second one gets
    an ExecutionError, never a call with mixed values. Threads have an executor each; they may share the plan.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        pack: variant_pack.Pack,
        workspace: Any = None,
        stream: Any = None,
        check: Callable[[variant_pack.Pack], object] | None = None,
    ) -> None:
        """Check and bind ``pack`` as ``execute`` does. ``stream``: a CUstream as int, or a stream object, which is kept alive; None: the current
        one of the arrays' framework. ``check``: raises for what must not be bound besides."""
        self._own, self._check = plan, check
        self._stream = streams.current(pack, plan.device) if stream is None else streams.address(stream)
        self._stream_object = stream
        self._busy = threading.Lock()
        self._given: dict[int, Any] = {}
        self._plan: ExecutionPlan | None = None
        self._prepared: Prepared
        self._enqueue: Callable[[int], None]
        self._moved = False
        self._bind(pack, workspace)

    # -- running --------------------------------------------------------------------------------------------------------------------------
    def __call__(self, stream: Any = None) -> None:
        """Run on the bound buffers, on the stream of ``bind`` or on ``stream`` (a CUstream as int, or a stream object). A CPU plan has finished
        on return.

        ExecutionError for what the driver reports, and for a call while another thread is in one.
        """
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            if self._moved:
                self._lay_out(self._given, self._workspace)
            self._enqueue(self._stream if stream is None else streams.address(stream))
        finally:
            self._busy.release()

    def run(self, addresses: Sequence[int], stream: Any = None) -> None:
        """Run on raw addresses, one for each of ``uids``, this once; by-value numbers and the workspace are the bound ones.

        The caller vouches for the addresses: device, size, data type, alignment and overlap are not looked at, and nothing is kept alive.
        ValidationError for a wrong count or a null address, KindError for what is no address.
        """
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            try:
                if len(addresses) != self._count or None in addresses or 0 in addresses:
                    self._refuse(addresses)
                self._moved = True
                self._prepared.move(addresses)
            except (TypeError, ValueError, OverflowError, struct.error) as cause:
                if isinstance(cause, GraphError):
                    raise
                rule, found = "addresses are integers of 64 bits", repr(addresses)[:80]
                raise KindError(explain(rule, expected=f"a sequence of {self._count} of them", found=found)) from cause
            self._enqueue(self._stream if stream is None else streams.address(stream))
        finally:
            self._busy.release()

    def update(self, pack: variant_pack.Pack, workspace: Any = None) -> Executor:
        """Change the buffers (and by-value numbers) that ``pack`` has, and the workspace if one is given; the others stay. Returns the executor.

        Checked as in ``bind``: ValidationError or KindError for what does not fit, and then nothing has changed.
        """
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            self._bind(pack, self._workspace if workspace is None else workspace)
        finally:
            self._busy.release()
        return self

    @property
    def uids(self) -> tuple[int, ...]:
        """Uids of the tensors whose addresses ``run`` takes, in its order. By-value tensors are not among them."""
        return self._uids

    @property
    def plan(self) -> ExecutionPlan:
        """The plan that runs: the one that was bound, or its like for buffers that are less aligned or on another GPU than it was built for."""
        assert self._plan is not None, "set by the first bind"
        return self._plan

    @property
    def stream(self) -> int:
        """The stream that calls go to if they name none."""
        return self._stream

    def __repr__(self) -> str:
        return f"<graphdnn executor of plan {self._own.name} on {self.plan.device.text}: uids {list(self._uids)}, stream {self._stream:#x}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Bound addresses mean nothing in another process: KindError."""
        raise KindError(explain("an executor cannot be pickled or copied", expected="a plan or a graph", fix="bind the pack again where it will run"))

    # -- binding --------------------------------------------------------------------------------------------------------------------------
    def _bind(self, pack: variant_pack.Pack, workspace: Any) -> None:
        """Take over the buffers of ``pack`` by uid, so that it does not matter which of a tensor's keys is used."""
        variant_pack.expect_mapping(pack)
        binder = self._own.load()[0]
        uids = {at: uid for uid, at in binder.by_uid.items()}
        named = {binder.position(key): value for key, value in pack.items()}
        given = self._given | {uids[at]: value for at, value in named.items() if at >= 0}
        if self._check is not None:
            self._check(given)
        self._lay_out(given, workspace)
        self._given, self._workspace = given, workspace

    def _lay_out(self, given: dict[int, Any], workspace: Any) -> None:
        plan, (addresses, numbers, at) = self._own.placed(given, workspace, self._stream)
        binder, executable = plan.load()
        pointers = dict(zip(binder.ids, addresses, strict=True))
        rooms = binder.rooms(given) if binder.packed else None
        if plan is self._plan:
            self._moved = True  # should the next line fail, the next call lays out what is held
            self._prepared.update(pointers, numbers, at, rooms)
        else:
            self._prepared = executable.prepare(pointers, numbers, at, rooms)
            self._enqueue = self._prepared.runner
            self._plan = plan
            self._uids = tuple(s.tensor.uid for s in binder.slots)
            self._count = len(self._uids)
            self._empty = frozenset(i for i, s in enumerate(binder.slots) if not s.nbytes)
        self._moved = False

    def _refuse(self, addresses: Sequence[int]) -> None:
        """Raise for a wrong count or a null address; a tensor without elements has no address."""
        if len(addresses) != self._count:
            expected = f"{self._count}, for uids {list(self._uids)}"
            raise ValidationError(explain("wrong number of addresses", expected=expected, found=len(addresses), fix="see executor.uids"))
        for i, address in enumerate(addresses):
            if not address and (address is None or i not in self._empty):
                raise ValidationError(explain(f"the buffer for uid {self._uids[i]} is a null pointer", expected="an address", found=address))


def _in_use() -> ExecutionError:
    rule, expected = "an executor was called while another call of it was under way", "one thread at a time"
    return ExecutionError(explain(rule, expected=expected, found="a second caller", fix="bind an executor for every thread; they may share the plan"))
