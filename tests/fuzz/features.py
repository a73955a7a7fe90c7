"""What random graphs must contain: for every family the kinds of its ops, options and sizes, so that none goes missing unseen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphdnn.opspecs.reduction import REDUCTION
from tests.attention_cases import SCORE_MODS
from tests.fuzz.anchors import family
from tests.fuzz.attention import LAYOUTS, LENGTHS
from tests.fuzz.program import Op

NORMS = ("layernorm", "rmsnorm", "adalayernorm", "instancenorm", "groupnorm")
POOLS = ("MAXPOOL", "AVGPOOL_INCLUDE_PADDING", "AVGPOOL_EXCLUDE_PADDING", "BILINEAR", "NEAREST")
CONVOLUTIONS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
OPERANDS = ("FLOAT", "HALF", "BFLOAT16", "DOUBLE", "FP8_E4M3", "FP8_E5M2", "INT8", "UINT8", "INT32")
BLOCK_TYPES = ("FP8_E4M3", "FP8_E5M2", "FP4_E2M1", "INT8")
OPTIONS = ("bias", "use_padding_mask", "q padded to nothing", "kv padded to nothing", "sink_token", "score_mod", "use_alibi_mask")
OPTIONS += ("dropout by mask", "dropout by seed", "rng_dump", "groups of heads", "one head of k", "packed q", "packed kv", "TOP_LEFT", "BOTTOM_RIGHT")
OPTIONS += ("diagonal_band_left_bound", "diagonal_band_right_bound", *(f"layout {n}" for n in (*LAYOUTS, "any")))
FORWARD = ("paged_attention_k_table", "paged_attention_v_table", "block_mask", "generate_stats", "packed stats", "score_max", "score_sum_exp")
FEATURES: dict[str, tuple[str, ...]] = {
    "attention": (
        "sdpa",
        "sdpa_backward",
        *(f"{side} {n}" for side in ("s_q", "s_kv") for n in LENGTHS),
        *OPTIONS,
        *FORWARD,
        "dBias",
        "dSink_token",
    ),
    "attention gradient": OPTIONS,
    "score_mod": tuple(SCORE_MODS),
    "convolution": tuple(
        f"{method} {kind}"
        for method in CONVOLUTIONS
        for kind in ("1-D", "2-D", "3-D", "groups", "depthwise", "strided", "dilated", "uneven padding", "negative padding", "CONVOLUTION")
    ),
    "normalization": (
        *(f"{n} {phase}" for n in NORMS for phase in ("TRAINING", "INFERENCE")),
        *("batchnorm", "batchnorm running", "batchnorm_inference"),
    ),
    "normalization backward": (*(f"{n}_backward" for n in (*NORMS, "batchnorm")), "rmsnorm_backward has_dbias"),
    "statistics": ("genstats", "bn_finalize", "dbn_weight"),
    "softmax": tuple(f"{n}{way}" for n in ("softmax", "log_softmax", "logsumexp") for way in ("", "_backward")),
    "resampling": (*(f"{method} {m}" for method in ("resample", "resample_backward") for m in POOLS), "resample generate_index"),
    "grouped matmul": (*(f"moe_grouped_matmul {m}" for m in ("NONE", "GATHER", "SCATTER")), "moe_grouped_matmul_bwd"),
    "block scaling": tuple(f"{way} {t}" for way in ("block_scale_quantize", "block_scale_dequantize") for t in BLOCK_TYPES),
    "random numbers": (*(f"rng {d}" for d in ("BERNOULLI", "UNIFORM", "NORMAL")), "rng seed"),
    "matmul": (*(f"matmul {t} x {t}" for t in OPERANDS), "matmul mixed"),
    "reduction": tuple(f"reduction {m}" for m in REDUCTION),
}
"""Family -> features that its ops must show, some of them in every run of a few thousand graphs."""


def features(ops: Sequence[Op]) -> Iterator[str]:
    """ "family: feature" of every op and of each of its settings, as often as they occur."""
    for op in ops:
        named = family(op.method)
        said = set(_said(op))
        if named == "attention":
            yield from (f"{named}: {x}" for x in sorted(said | {op.method}))
            yield from (f"attention gradient: {x}" for x in sorted(said) if op.method == "sdpa_backward")
            yield from (f"score_mod: {x}" for x in sorted(said & {*SCORE_MODS}))
        else:
            yield from (f"{named}: {x}" for x in (op.method, *(f"{op.method} {x}" for x in sorted(said))))


def _said(op: Op) -> Iterator[str]:
    """Tags; names of the tensors given and of the arguments that are set; words among their values."""
    yield from op.tags
    yield from (k.partition(".")[0] for k in op.tensors)
    yield from (m.argument for m in op.made)
    for k, v in op.kwargs.items():
        if v is not None and v is not False:
            yield k
        if isinstance(v, str):
            yield v


def table(counts: dict[str, int]) -> str:
    """Lines, one a family, of how often each of FEATURES was drawn."""
    return "\n".join(f"{f}: " + ", ".join(f"{n} {counts.get(f'{f}: {n}', 0)}" for n in names) for f, names in FEATURES.items())


def thin(counts: dict[str, int], least: int) -> list[str]:
    """Those of FEATURES that were drawn fewer than ``least`` times."""
    every = (f"{f}: {n}" for f, names in FEATURES.items() for n in names)
    return [n for n in every if counts.get(n, 0) < least]
