"""Enums of the API, with the values of the cuDNN Frontend."""

from __future__ import annotations

from graphdnn._enum import ApiEnum


class heur_mode(ApiEnum):
    """How candidate plans are found: A ranks by a roofline model, and so does B, since no measurements are kept; FALLBACK lists the engine that takes
    anything. OPENSOURCE is the same as A: every engine of graphdnn is open source."""

    A = 0
    B = 1
    FALLBACK = 2
    OPENSOURCE = 3


class build_plan_policy(ApiEnum):
    """HEURISTICS_CHOICE builds the best candidate that builds, ALL builds every candidate."""

    HEURISTICS_CHOICE = 0
    ALL = 1


class norm_forward_phase(ApiEnum):
    """TRAINING also returns the statistics."""

    NOT_SET = 0
    INFERENCE = 1
    TRAINING = 2


class behavior_note(ApiEnum):
    """What a plan does besides computing."""

    RUNTIME_COMPILATION = 1
    REQUIRES_FILTER_INT8x32_REORDER = 2
    REQUIRES_BIAS_INT8x32_REORDER = 3
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 4
    CUBLASLT_DEPENDENCY = 5


class numerical_note(ApiEnum):
    """What a plan does to the numbers."""

    TENSOR_CORE = 1
    DOWN_CONVERT_INPUTS = 2
    REDUCED_PRECISION_REDUCTION = 3
    FFT = 4
    NONDETERMINISTIC = 5
    WINOGRAD = 6
    WINOGRAD_TILE_4x4 = 7
    WINOGRAD_TILE_6x6 = 8
    WINOGRAD_TILE_13x13 = 9
    STRICT_NAN_PROP = 10


class diagonal_alignment(ApiEnum):
    """Which corner the diagonal of a mask starts at."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class attention_implementation(ApiEnum):
    """Which implementation of attention is asked for."""

    AUTO = 0
    COMPOSITE = 1
    UNIFIED = 2


class tensor_reordering(ApiEnum):
    """Special orders of the elements in memory."""

    NONE = 0
    INT8x32 = 1
    F16x16 = 2
    F8_128x4 = 3


class moe_grouped_matmul_mode(ApiEnum):
    """How the tokens of a grouped matmul are addressed."""

    NONE = 1
    GATHER = 2
    SCATTER = 3


class scalar_type(ApiEnum):
    """RUNTIME_PARAM: the value is an argument of the kernel; COMPILE_TIME_CONST: it is printed in the kernel."""

    RUNTIME_PARAM = 0
    COMPILE_TIME_CONST = 1


class reshape_mode(ApiEnum):
    """VIEW_ONLY: the result must be expressible on the input's memory order; LOGICAL: row-major order of elements, whatever the strides."""

    VIEW_ONLY = 1
    LOGICAL = 2


class convolution_mode(ApiEnum):
    """Whether the filter is flipped (CONVOLUTION) or not."""

    CONVOLUTION = 1
    CROSS_CORRELATION = 2


class knob_type(ApiEnum):
    """Names of engine knobs. Engines of graphdnn have one: KERNEL_CFG, the index into the engine's list of configurations."""

    NOT_SET = 0
    SWIZZLE = 1
    TILE_SIZE = 2
    EDGE = 3
    MULTIPLY = 4
    SPLIT_K_BUF = 5
    TILEK = 6
    STAGES = 7
    REDUCTION_MODE = 8
    SPLIT_K_SLC = 9
    IDX_MODE = 10
    SPECFILT = 11
    KERNEL_CFG = 12
    WORKSPACE = 13
    TILE_CGA_M = 14
    TILE_CGA_N = 15
    BLOCK_SIZE = 16
    OCCUPANCY = 17
    ARRAY_SIZE_PER_THREAD = 18
    SPLIT_COLS = 19
    TILE_ROWS = 20
    TILE_COLS = 21
    LOAD_SIZE = 22
    CTA_COUNT = 23
    STREAM_K = 24
    SPLIT_P_SLC = 25
    TILE_M = 26
    TILE_N = 27
    WARP_SPEC_CFG = 28
