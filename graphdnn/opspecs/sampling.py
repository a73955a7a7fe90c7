"""The attributes of RESAMPLE: how positions of the output lie over the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn.ir.tensor import Dims

POOLING = ("MAXPOOL", "AVGPOOL_INCLUDE_PADDING", "AVGPOOL_EXCLUDE_PADDING")
INTERPOLATION = ("NEAREST", "BILINEAR")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The attributes of a node, an entry for each spatial dim."""

    mode: str
    window: Dims
    ratio: tuple[tuple[int, int], ...]
    pre: Dims
    post: Dims

    @property
    def pools(self) -> bool:
        """Whether a window of given size slides by whole elements."""
        return self.mode in POOLING

    def outputs(self, image: Sequence[int]) -> Dims:
        """Output extents of an image."""
        if not self.pools:
            return tuple(n * den // num for n, (num, den) in zip(image, self.ratio, strict=True))
        parts = zip(image, self.window, self.ratio, self.pre, self.post, strict=True)
        return tuple((n + pre + post - w) // step + 1 for n, w, (step, _), pre, post in parts)


def sampling(attrs: Mapping[str, Any]) -> Sampling:
    """The attributes of a node that has passed infer."""
    window, pre, post = (tuple(attrs.get(a) or ()) for a in ("window", "pre_padding", "post_padding"))
    return Sampling(attrs["mode"], window, tuple((n, d) for n, d in attrs["ratio"]), pre, post)
