"""Plans chosen by time: ``pygraph.autotune``, benchmark mode, and the settings that bound what is chosen. ``pygraph`` inherits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphdnn import env, log
from graphdnn.errors import KindError, NotSupportedError, explain
from graphdnn.frontend.enums import heur_mode, numerical_note
from graphdnn.frontend.loaded import LoadedPlans
from graphdnn.frontend.planning import Planning
from graphdnn.frontend.tensor import as_integer, as_number

if TYPE_CHECKING:
    from graphdnn.plans.autotune import Tuned
    from graphdnn.plans.planset import PlanSet


def _flag(value: bool | None) -> bool | None:
    return None if value is None else bool(value)


class Tuning(Planning):
    """``_benchmark`` and ``_is_deterministic`` None: what the environment says when it is asked."""

    _workspace_limit: int | None = None
    _benchmark: bool | None = None
    _is_deterministic: bool | None = None

    def _set_tuning(self, benchmark: bool | None, deterministic: bool | None, workspace_limit: int | None) -> None:
        self._benchmark, self._is_deterministic = _flag(benchmark), _flag(deterministic)
        self._workspace_limit = None if workspace_limit is None else as_integer("workspace_limit", workspace_limit)

    def _deterministic(self) -> bool:
        return env.deterministic() if self._is_deterministic is None else self._is_deterministic

    def _narrowed(self, plans: PlanSet) -> PlanSet:
        if self._workspace_limit is not None:
            plans.deselect_workspace_greater_than(self._workspace_limit)
        if self._deterministic():
            plans.deselect_numeric_notes([numerical_note.NONDETERMINISTIC])
        return plans

    def _measured_choice(self, plans: PlanSet | LoadedPlans) -> bool:
        """What the tuning database knows, else what is timed now; not where nothing can be timed."""
        wanted = env.benchmark() if self._benchmark is None else self._benchmark
        if not wanted or self._deterministic() or isinstance(plans, LoadedPlans):
            return False
        from graphdnn.plans import autotune

        plans.check_support()
        if autotune.in_capture(plans):
            log.warning("benchmark mode takes the heuristic's plan: nothing is timed while a stream is being captured")
            return False
        try:
            autotune.tune(plans, None, None, autotune.Options(self._workspace_limit))
        except NotSupportedError as error:
            log.info(f"benchmark mode takes the heuristic's plan: {error}")
            return False
        return True

    def autotune(
        self,
        pack: Mapping[Any, Any] | None = None,
        workspace: Any = None,
        *,
        workspace_limit: int | None = None,
        iterations: int = 20,
        candidates: int | None = None,
        workers: int | None = None,
        timeout_s: float = 120.0,
        reuse: bool = True,
    ) -> Tuned:
        """Build the candidate plans, check what they calculate, time them in turns, choose the fastest for ``execute``; ``print`` the result.

        ``pack``: what ``execute`` takes, copied, so that nothing of it is written; None: random inputs. ``workspace``: memory to run in, which bounds
        what a plan may need; None: memory of its own. ``workspace_limit``: bytes that a plan may need. ``iterations``: rounds of the last stage;
        ``candidates``: how many plans are tried, the best guesses first (None: 32). ``workers``: processes that build plans and run them for the
        first time (None: one for each processor, 8 at most; 0: none, and a plan that crashes ends this process); a plan that takes one longer than
        ``timeout_s`` is dropped. ``reuse``: take what the tuning database knows, without timing; not what a run says that left out plans which this
        one would try (``candidates`` None takes a run of any number).

        The heuristic's plan is kept unless another one is faster by more than noise. The result goes to the tuning database. In deterministic mode
        nothing is timed. A graph with dims is tuned at their hints. Makes plans by heuristics first if there are none. NotSupportedError for the
        simulator, a described device, packed tensors without a pack, where there is no memory for the copies, and where no plan is left; BuildError
        if no plan builds; ExecutionError if none gives right results, and while a CUDA graph is captured; ValidationError, KindError for arguments.
        """
        from graphdnn.plans import autotune as tuner

        if pack is not None and not isinstance(pack, Mapping):
            raise KindError(explain("pack has the wrong type", expected="a dict of tensors, uids or names to buffers", found=type(pack).__name__))
        options = tuner.Options(
            workspace_limit=None if workspace_limit is None else as_integer("workspace_limit", workspace_limit),
            iterations=as_integer("iterations", iterations),
            candidates=None if candidates is None else as_integer("candidates", candidates),
            workers=None if workers is None else as_integer("workers", workers),
            timeout_s=as_number("timeout_s", timeout_s),
            reuse=bool(reuse),
        )
        with self._noted():
            if self._plans is None:
                if self._opgraph is None:
                    self.build_operation_graph()
                self.create_execution_plans([heur_mode.A, heur_mode.FALLBACK])
            plans = self._choosable()
            tuned = tuner.heuristic(plans) if self._deterministic() else tuner.tune(plans, pack, workspace, options)
            if self.dims:
                plans.build_at(plans.chosen_index, self._shaped)
            return tuned
