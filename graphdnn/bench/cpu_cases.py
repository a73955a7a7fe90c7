"""The cases of ``graphdnn bench cpu``: each declares a graph on random torch tensors and says what torch eager computes from the same tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Peer = Callable[..., Any]
"""Torch's way to the same results, of the case's data in the order of declaration, in their type or in float64: a tensor or a tuple of them."""


class Setting:
    """A graph in the making, its data (torch tensors) and its results in order."""

    def __init__(self, torch: Any, seed: int = 1) -> None:
        """An empty graph for the CPU; data come from ``seed``."""
        import graphdnn

        self.fe: Any = graphdnn
        self.torch = torch
        self.generator = torch.Generator().manual_seed(seed)
        fp32 = graphdnn.data_type.FLOAT
        self.graph: Any = graphdnn.pygraph(io_data_type=fp32, intermediate_data_type=fp32, compute_data_type=fp32, device="cpu")
        self.data: list[tuple[Any, Any]] = []
        self.results: list[Any] = []

    def given(self, value: Any) -> Any:
        """The graph tensor of ``value``, with its dims, strides and type."""
        made = self.graph.tensor_like(value, name=f"t{len(self.data)}")
        made.set_is_pass_by_value(False)
        self.data.append((made, value))
        return made

    def random(self, *dim: int, dtype: str = "float32", nhwc: bool = False) -> Any:
        """Normally distributed."""
        value = self.torch.randn(*dim, generator=self.generator).to(getattr(self.torch, dtype))
        return self.given(value.contiguous(memory_format=self.torch.channels_last) if nhwc else value)

    def image(self, *dim: int, nhwc: bool) -> Any:
        """An empty torch tensor."""
        return self.torch.empty(dim, memory_format=self.torch.channels_last if nhwc else self.torch.contiguous_format)

    def value(self, made: Any) -> Any:
        """The data of a graph tensor."""
        return next(v for t, v in self.data if t is made)

    def result(self, made: Any, dtype: str = "float32", like: Any = None) -> None:
        """Mark the next result; ``like``: a torch tensor whose dims and strides it gets; those that are inferred have channels last."""
        if like is not None:
            made.set_dim(list(like.shape)).set_stride(list(like.stride()))
        kind = {"float32": "FLOAT", "bfloat16": "BFLOAT16", "float16": "HALF"}[dtype]
        self.results.append(made.set_output(True).set_data_type(self.fe.data_type[kind]))


@dataclass(frozen=True)
class Case:
    """``declare(setting, **sizes)`` declares the graph and returns the peer; ``small``: sizes of tests."""

    name: str
    title: str
    declare: Callable[..., Peer]
    sizes: dict[str, Any]
    small: dict[str, Any]


def _add_relu(s: Setting, m: int, n: int, dtype: str) -> Peer:
    x, y = s.random(m, n, dtype=dtype), s.random(m, n, dtype=dtype)
    s.result(s.graph.relu(s.graph.add(x, y)), dtype)
    return lambda x, y: s.torch.relu(x + y)


def _layernorm(s: Setting, m: int, n: int) -> Peer:
    x, scale, bias = s.random(m, n), s.random(1, n), s.random(1, n)
    s.result(s.graph.layernorm(s.fe.norm_forward_phase.INFERENCE, x, scale, bias, 1e-5)[0])
    return lambda x, scale, bias: s.torch.nn.functional.layer_norm(x, (n,), scale[0], bias[0], 1e-5)


def _rmsnorm(s: Setting, m: int, n: int) -> Peer:
    x, scale = s.random(m, n), s.random(1, n)
    s.result(s.graph.rmsnorm(s.fe.norm_forward_phase.INFERENCE, x, scale, epsilon=1e-5)[0])
    return lambda x, scale: s.torch.nn.functional.rms_norm(x, (n,), scale[0], 1e-5)


def _softmax(s: Setting, m: int, n: int) -> Peer:
    s.result(s.graph.softmax(s.random(m, n), -1))
    return lambda x: s.torch.softmax(x, -1)


def _channels(s: Setting, c: int) -> tuple[Any, Any]:
    return s.random(1, c, 1, 1), s.random(1, c, 1, 1)


def _groupnorm(s: Setting, n: int, c: int, h: int, groups: int) -> Peer:
    x, (scale, bias) = s.random(n, c, h, h), _channels(s, c)
    s.result(s.graph.groupnorm(s.fe.norm_forward_phase.INFERENCE, x, scale, bias, 1e-5, groups)[0], like=s.value(x))
    return lambda x, scale, bias: s.torch.nn.functional.group_norm(x, groups, scale.flatten(), bias.flatten(), 1e-5)


def _batchnorm(s: Setting, n: int, c: int, h: int) -> Peer:
    x, (scale, bias) = s.random(n, c, h, h), _channels(s, c)
    for t, like in zip(s.graph.batchnorm(x, scale, bias, None, None, 1e-5, None), (x, scale, scale), strict=False):
        s.result(t, like=s.value(like))
    return lambda x, scale, bias: s.torch.native_batch_norm(x, scale.flatten(), bias.flatten(), None, None, True, 0.1, 1e-5)


def _batchnorm_backward(s: Setting, n: int, c: int, h: int) -> Peer:
    dy, x, scale = s.random(n, c, h, h), s.random(n, c, h, h), s.random(1, c, 1, 1)
    variance, mean = s.torch.var_mean(s.value(x), (0, 2, 3), correction=0, keepdim=True)
    made = s.graph.batchnorm_backward(dy, x, scale, s.given(mean), s.given(s.torch.rsqrt(variance + 1e-5)))
    for t, like in zip(made, (x, scale, scale), strict=True):
        s.result(t, like=s.value(like))

    def peer(dy: Any, x: Any, scale: Any, mean: Any, inverse: Any) -> Any:
        given = (scale.flatten(), None, None, mean.flatten(), inverse.flatten())
        return s.torch.ops.aten.native_batch_norm_backward(dy, x, *given, True, 1e-5, [True, True, True])

    return peer


def _conv(s: Setting, n: int, c: int, h: int, k: int, nhwc: bool) -> Peer:
    x, w, bias = s.random(n, c, h, h, nhwc=nhwc), s.random(k, c, 3, 3, nhwc=nhwc), s.random(1, k, 1, 1)
    y = s.graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    s.result(s.graph.relu(s.graph.bias(input=y, bias=bias)), like=s.image(n, k, h, h, nhwc=nhwc))
    return lambda x, w, bias: s.torch.relu(s.torch.conv2d(x, w, bias.flatten(), padding=1))


def _depthwise(s: Setting, n: int, c: int, h: int, nhwc: bool) -> Peer:
    x, w = s.random(n, c, h, h, nhwc=nhwc), s.random(c, 1, 3, 3)
    s.result(s.graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), like=s.value(x))
    return lambda x, w: s.torch.conv2d(x, w, padding=1, groups=c)


def _depthwise_dgrad(s: Setting, n: int, c: int, h: int, nhwc: bool) -> Peer:
    dy, w = s.random(n, c, h, h, nhwc=nhwc), s.random(c, 1, 3, 3)
    s.result(s.graph.conv_dgrad(dy, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), like=s.value(dy))

    def peer(dy: Any, w: Any) -> Any:
        wanted = [True, False, False]
        return s.torch.ops.aten.convolution_backward(dy, dy, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], c, wanted)[0]

    return peer


def _matmul(s: Setting, m: int, n: int, k: int) -> Peer:
    s.result(s.graph.matmul(s.random(1, m, k), s.random(1, k, n)))
    return lambda a, b: s.torch.matmul(a, b)


def _fused_matmul(s: Setting, m: int, n: int, k: int) -> Peer:
    a, b, bias = s.random(1, m, k), s.random(1, k, n), s.random(1, 1, n)
    y = s.graph.mul(s.graph.matmul(a, b), 0.125)
    s.result(s.graph.gelu(s.graph.bias(input=y, bias=bias)))
    return lambda a, b, bias: s.torch.nn.functional.gelu(s.torch.matmul(a, b) * 0.125 + bias)


def _moe(s: Setting, tokens: int, experts: int, n: int, k: int) -> Peer:
    token, weight = s.random(1, tokens, k), s.random(experts, k, n)
    first = [tokens * e * (e + 1) // (experts * (experts + 1)) for e in range(experts)]  # groups of unequal size
    offsets = s.given(s.torch.tensor(first, dtype=s.torch.int32).reshape(experts, 1, 1))
    s.result(s.graph.moe_grouped_matmul(token, weight, offsets))
    bounds = [*first, tokens]

    def peer(token: Any, weight: Any, offsets: Any) -> Any:
        made = s.torch.empty(1, tokens, n, dtype=token.dtype)
        for e in range(experts):
            s.torch.mm(token[0, bounds[e] : bounds[e + 1]], weight[e], out=made[0, bounds[e] : bounds[e + 1]])
        return made

    return peer


def _attention(s: Setting, b: int, h: int, length: int, d: int, causal: bool) -> Peer:
    q, k, v = (s.random(b, h, length, d) for _ in range(3))
    s.result(s.graph.sdpa(q, k, v, attn_scale=1 / math.sqrt(d), use_causal_mask=causal, generate_stats=False)[0], like=s.value(q))
    return lambda q, k, v: s.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _attention_backward(s: Setting, b: int, h: int, length: int, d: int, causal: bool) -> Peer:
    aten = s.torch.ops.aten
    q, k, v, grad = (s.random(b, h, length, d) for _ in range(4))
    output, stats = aten._scaled_dot_product_flash_attention_for_cpu(s.value(q), s.value(k), s.value(v), 0.0, causal)
    o, rows = s.given(output), s.given(stats.contiguous().unsqueeze(-1))
    for t in s.graph.sdpa_backward(q, k, v, o, grad, rows, attn_scale=1 / math.sqrt(d), use_causal_mask=causal):
        s.result(t, like=s.value(q))

    def peer(q: Any, k: Any, v: Any, grad: Any, o: Any, rows: Any) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, o, rows.squeeze(-1), 0.0, causal)

    return peer


def _named(name: str, title: str, declare: Callable[..., Peer], sizes: Sequence[tuple[str, int, int]], **options: Any) -> Case:
    """A case whose sizes are rows of (name, size, size of tests)."""
    large, small = ({r[0]: r[at] for r in sizes} for at in (1, 2))
    return Case(name, title, declare, large | options, small | options)


_ELEMENTS = (("m", 4096, 5), ("n", 4096, 37))
_ROWS = (("m", 4096, 5), ("n", 4096, 300))
_MATRIX = (("m", 2048, 70), ("n", 2048, 50), ("k", 2048, 40))
_IMAGES = (("n", 32, 2), ("c", 64, 6), ("h", 56, 9))
_CONV = (("n", 8, 2), ("c", 64, 5), ("h", 56, 9), ("k", 64, 7))
_DEPTHWISE = (("n", 8, 2), ("c", 128, 19), ("h", 56, 9))
_TOKENS = (("tokens", 2048, 45), ("experts", 8, 3), ("n", 1024, 33), ("k", 512, 17))
_HEADS = (("b", 2, 2), ("h", 8, 3), ("length", 1024, 70), ("d", 64, 16))

CASES: tuple[Case, ...] = (
    _named("add_relu", "add + relu fp32, 16 M", _add_relu, _ELEMENTS, dtype="float32"),
    _named("add_relu_bf16", "add + relu bf16, 16 M", _add_relu, _ELEMENTS, dtype="bfloat16"),
    _named("add_relu_half", "add + relu half, 16 M", _add_relu, _ELEMENTS, dtype="float16"),
    _named("layernorm", "layernorm fp32, 4096 x 4096", _layernorm, _ROWS),
    _named("rmsnorm", "rmsnorm fp32, 4096 x 4096", _rmsnorm, _ROWS),
    _named("softmax", "softmax fp32, 4096 x 4096", _softmax, _ROWS),
    _named("groupnorm", "groupnorm fp32, N32 C64 56x56, 8 groups", _groupnorm, (*_IMAGES, ("groups", 8, 2))),
    _named("batchnorm", "batchnorm in training fp32, N32 C64 56x56", _batchnorm, _IMAGES),
    _named("batchnorm_backward", "batchnorm backward fp32, N32 C64 56x56", _batchnorm_backward, _IMAGES),
    _named("matmul", "matmul fp32, 2048^3", _matmul, _MATRIX),
    _named("fused_matmul", "matmul + scale + bias + GELU fp32, 2048^3", _fused_matmul, _MATRIX),
    _named("moe", "grouped matmul fp32, 2048 tokens, 8 experts, 512 to 1024", _moe, _TOKENS),
    _named("conv_nchw", "conv 3x3 + bias + relu fp32, N8 C64 56x56 K64, NCHW", _conv, _CONV, nhwc=False),
    _named("conv_nhwc", "conv 3x3 + bias + relu fp32, N8 C64 56x56 K64, NHWC", _conv, _CONV, nhwc=True),
    _named("depthwise_nchw", "depthwise 3x3 fp32, N8 C128 56x56, NCHW", _depthwise, _DEPTHWISE, nhwc=False),
    _named("depthwise_nhwc", "depthwise 3x3 fp32, N8 C128 56x56, NHWC", _depthwise, _DEPTHWISE, nhwc=True),
    _named("depthwise_dgrad_nchw", "depthwise 3x3 dgrad fp32, N8 C128 56x56, NCHW", _depthwise_dgrad, _DEPTHWISE, nhwc=False),
    _named("depthwise_dgrad_nhwc", "depthwise 3x3 dgrad fp32, N8 C128 56x56, NHWC", _depthwise_dgrad, _DEPTHWISE, nhwc=True),
    _named("attention", "attention fp32, 2 x 8 heads x 1024 x 64, causal", _attention, _HEADS, causal=True),
    _named("attention_backward", "attention backward fp32, 2 x 8 heads x 1024 x 64, causal", _attention_backward, _HEADS, causal=True),
)
