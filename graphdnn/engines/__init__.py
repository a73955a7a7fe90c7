"""Engines: one kernel family each. ENGINES is the ordered list; ids are global and stable.

later.py         engines that are imported when a region of their kind is met
base.py          the contract (check_support / candidates / check / cost / lower), traffic and roofline
space.py         loop variables and loop nests that the families share
pointwise.py     0  any DAG of pointwise and movement ops over one space
reduction.py     1  reductions of one space over the same axes
matmul_simt.py   2  portable matmul; matmul_parts.py takes a region apart; matmul_cpu.py (loops: strips.py), matmul_cuda.py, matmul_sums.py lower it
conv_gemm.py     5  portable convolution, lowered like matmul_simt
conv_direct.py   6  convolution without a matrix; conv_lanes.py (CPU) and conv_thread.py (CUDA) lower narrow groups
conv_winograd.py 7  3 x 3 convolution by transformed tiles; conv_tiles.py cuts them, conv_stages.py makes the kernels
conv_fft.py      8  the same by Fourier transforms, for large filters
attention_fwd.py 9  attention, forward; attention_parts.py: sizes and addresses of a node, attention_score.py: what happens to a score,
                    attention_finish.py: the end of a row, attention_dump.py: RNG_DUMP, attention_limits.py: lengths and pages;
                    attention_cpu.py and attention_cuda.py lower it
attention_bwd.py 10 its gradient; attention_bwd_parts.py: what its kernels print, attention_bwd_cpu.py and attention_bwd_cuda.py cut the tiles
matmul_wgmma.py  3  matmul on Hopper's tensor cores; wgmma_parts.py says what it takes, wgmma_cuda.py and wgmma_sums.py lower it
moe_grouped.py   11 matmul of rows grouped by expert; moe_parts.py takes a region apart, moe_cpu.py and moe_cuda.py lower it
"""

from __future__ import annotations

from graphdnn.engines.base import Engine
from graphdnn.engines.conv_gemm import ConvImplicitGemm
from graphdnn.engines.later import AttentionBackward, AttentionForward, ConvDirect, ConvFft, ConvWinograd, MoeGrouped
from graphdnn.engines.matmul_simt import MatmulSimt
from graphdnn.engines.matmul_wgmma import MatmulWgmma
from graphdnn.engines.pointwise import Pointwise
from graphdnn.engines.reduction import Reduction
from graphdnn.engines.rows import Rows

ENGINES: tuple[Engine, ...] = (
    Pointwise(),
    Reduction(),
    Rows(),
    AttentionForward(),
    AttentionBackward(),
    MatmulWgmma(),
    MatmulSimt(),
    ConvDirect(),
    ConvWinograd(),
    ConvFft(),
    ConvImplicitGemm(),
    MoeGrouped(),
)
BUILT_IN = ENGINES
"""The table as it is here. Another one in its place is asked every time: what was built with this one says nothing of it."""

assert len({e.id for e in ENGINES}) == len({e.name for e in ENGINES}) == len(ENGINES), "two engines with one id or name"
