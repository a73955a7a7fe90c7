"""The version of graphdnn; the one place that states it."""

from __future__ import annotations

__version__ = "0.1.0"
