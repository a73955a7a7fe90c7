"""What the benchmarks share: torch, the rounds in which contenders take turns, the check of a result, the file of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from graphdnn.errors import ExecutionError, ValidationError, explain
from graphdnn.plans import container

T = TypeVar("T")
ROUNDS = 10
"""Timed rounds unless asked for another number."""


def import_torch() -> Any:
    """The module torch; ExecutionError where it is not installed."""
    try:
        import torch
    except ImportError:
        raise ExecutionError(explain("the benchmark needs torch", expected="package torch", found="none", fix="pip install torch")) from None
    return torch


def versions(device: str, torch: Any) -> str:
    """One line: device, versions of torch and Python."""
    return f"{device}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def expect(output: Path | None, least: int = 1, **numbers: int) -> None:
    """ValidationError, before anything is measured, for a number below ``least`` and for results that would lie in no folder."""
    for name, number in numbers.items():
        if number < least:
            raise ValidationError(explain(f"{name} is too small", expected=f"at least {least}", found=number))
    if output is not None and not output.absolute().parent.is_dir():
        raise ValidationError(explain("the results cannot be written", expected="a file in a folder that exists", found=str(output)))


def take_turns(timers: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """What each timer returned in each round. Every round goes through all of them; a first round warms up and does not count."""
    times: list[list[T]] = [[] for _ in timers]
    for number in range(rounds + 1):
        for found, timer in zip(times, timers, strict=True):
            seconds = timer()
            if number:
                found.append(seconds)
    return times


def error(found: Any, expected: Any) -> float:
    """Norm of the difference of two torch tensors over the norm of ``expected``, in its type; NaN where either has one."""
    return float((found.to(expected.dtype) - expected).norm() / expected.norm())


def write(path: Path, device: str, torch: Any, results: Sequence[Any]) -> None:
    """The results (dataclasses) as a JSON file. SerializationError where it cannot be written."""
    text = {"device": device, "torch": torch.__version__, "results": [asdict(r) for r in results]}
    container.write(path, json.dumps(text, indent=1).encode())
