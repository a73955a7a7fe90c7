"""One plan and many threads on the CPU; tests/gpu/test_executing.py does the same with streams."""

from __future__ import annotations

import pytest

from tests import hammer


@pytest.mark.parametrize("kind", ["pointwise", "total"])
def test_threads_share_a_plan(kind: str) -> None:
    assert not hammer.hammer(hammer.built(kind, "cpu"), kind, ["cpu"] * 4, 40)


def test_one_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor of one call of 40 is wrong; those behind it are right again."""
    g = hammer.built("pointwise", "cpu")
    thread, right, count = hammer.Thread(g, "pointwise", "cpu", 0, 40), g.plan.execute, iter(range(40))
    monkeypatch.setattr(g.plan, "execute", lambda pack, *more: right(pack | ({hammer.FACTOR: 9.0} if next(count) == 7 else {}), *more))
    thread.run()
    assert "wrong at least once" in thread.wrong


def test_a_call_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    g = hammer.built("pointwise", "cpu")
    thread, right, count = hammer.Thread(g, "pointwise", "cpu", 0, 40), g.plan.execute, iter(range(40))
    monkeypatch.setattr(g.plan, "execute", lambda *given: right(*given) if next(count) != 3 else None)
    thread.run()
    assert "wrong at least once" in thread.wrong
