"""Op methods of attention on 8-bit floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, explain
from graphdnn.frontend.attention_call import Call
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.enums import diagonal_alignment
from graphdnn.frontend.tensor import tensor as Tensor

if TYPE_CHECKING:
    from graphdnn.frontend.attention_ops import ScoreMod

_MODE = "FP8_E4M3"


class AttentionFp8Ops(Declarations):
    """With one scale a tensor (``descale_x``, ``scale_x``: tensors of one element; x is ``descale_x`` times what is stored, a result is stored times
    its scale), or with MXFP8 scales (FP8_E8M0, one for 32 elements). Arguments that sdpa has mean the same here. Dims and strides of O, of the
    gradients and of every Amax are set on the results."""

    def sdpa_fp8(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        descale_q: Tensor,
        descale_k: Tensor,
        descale_v: Tensor,
        descale_s: Tensor,
        scale_s: Tensor,
        scale_o: Tensor,
        is_inference: Any = None,
        attn_scale: Any = None,
        bias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        dropout: Any = None,
        rng_dump: Tensor | None = None,
        paged_attention_k_table: Tensor | None = None,
        paged_attention_v_table: Tensor | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
        fn: ScoreMod | None = None,
        generate_stats: bool | None = None,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        sink_token: Tensor | None = None,
    ) -> list[Tensor | None]:
        """sdpa on fp8: [O, Stats, Amax_S, Amax_O], Stats None unless ``generate_stats``. ``fn`` is sdpa's score_mod.

        Amax_S is the largest weight of a softmax, Amax_O the largest |O| before ``scale_o``. Weights are not rounded to fp8: ``descale_s`` and
        ``scale_s`` count by their product."""
        call = Call(self, "SDPA_FP8_FWD", name)
        call.tensors(Q=("q", q), K=("k", k), V=("v", v), Descale_Q=("descale_q", descale_q), Descale_K=("descale_k", descale_k))
        call.tensors(Descale_V=("descale_v", descale_v), Descale_S=("descale_s", descale_s), Scale_S=("scale_s", scale_s))
        call.tensors(Scale_O=("scale_o", scale_o))
        call.scale(attn_scale)
        call.options(Bias=("bias", bias), SINK_TOKEN=("sink_token", sink_token))
        call.padding(use_alibi_mask, use_padding_mask, seq_len_q, seq_len_kv)
        call.bounds((use_causal_mask, use_causal_mask_bottom_right), diagonal_alignment, (sliding_window, left_bound), right_bound)
        call.dropout(dropout)
        call.options(Page_table_K=("paged_attention_k_table", paged_attention_k_table))
        call.options(Page_table_V=("paged_attention_v_table", paged_attention_v_table))
        call.integer("max_seq_len_kv", paged_attention_max_seq_len_kv)
        call.scores(fn)
        statistics = call.statistics(generate_stats, is_inference)
        call.attrs |= {"mma_core_mode": _MODE, "implementation": "UNIFIED", "is_mxfp8": False, "unfuse_fma": False}
        call.results(Max=("score_max", score_max), Sum_exp=("score_sum_exp", score_sum_exp), RNG_DUMP=("rng_dump", rng_dump))
        o, *rest = call.add(("O", *(("Stats",) if statistics else ()), "Amax_S", "Amax_O"), compute_data_type)
        return [o, *rest] if statistics else [o, None, *rest]

    def sdpa_fp8_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        descale_q: Tensor,
        descale_k: Tensor,
        descale_v: Tensor,
        descale_o: Tensor,
        descale_dO: Tensor,
        descale_s: Tensor,
        descale_dP: Tensor,
        scale_s: Tensor,
        scale_dQ: Tensor,
        scale_dK: Tensor,
        scale_dV: Tensor,
        scale_dP: Tensor,
        attn_scale: Any = None,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_deterministic_algorithm: bool = False,
        dropout: Any = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
        sink_token: Tensor | None = None,
        dSink_token: Tensor | None = None,
    ) -> list[Tensor]:
        """Gradients of sdpa_fp8: [dQ, dK, dV, Amax_dQ, Amax_dK, Amax_dV, Amax_dP].

        Amax_dP is the largest magnitude of the gradient of the scores before ``attn_scale``, which is not rounded to fp8: ``descale_dP`` and
        ``scale_dP`` count by their product."""
        call = Call(self, "SDPA_FP8_BWD", name)
        call.tensors(Q=("q", q), K=("k", k), V=("v", v), O=("o", o), dO=("dO", dO), Stats=("stats", stats))
        call.tensors(Descale_Q=("descale_q", descale_q), Descale_K=("descale_k", descale_k), Descale_V=("descale_v", descale_v))
        call.tensors(Descale_O=("descale_o", descale_o), Descale_dO=("descale_dO", descale_dO), Descale_S=("descale_s", descale_s))
        call.tensors(Descale_dP=("descale_dP", descale_dP), Scale_S=("scale_s", scale_s), Scale_dQ=("scale_dQ", scale_dQ))
        call.tensors(Scale_dK=("scale_dK", scale_dK), Scale_dV=("scale_dV", scale_dV), Scale_dP=("scale_dP", scale_dP))
        call.gradient((attn_scale, dropout), (use_padding_mask, seq_len_q, seq_len_kv), use_deterministic_algorithm, (sink_token, dSink_token))
        call.bounds((use_causal_mask, use_causal_mask_bottom_right), diagonal_alignment, (None, left_bound), right_bound)
        call.attrs |= {"is_mxfp8": False}
        return call.add(("dQ", "dK", "dV", "Amax_dQ", "Amax_dK", "Amax_dV", "Amax_dP"), compute_data_type)

    def sdpa_mxfp8(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        descale_q: Tensor,
        descale_k: Tensor,
        descale_v: Tensor,
        attn_scale: Any = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
        generate_stats: Any = None,
        sink_token: Tensor | None = None,
        unfuse_fma: bool = False,
    ) -> list[Tensor | None]:
        """sdpa on MXFP8: [O, Stats, Amax_O], Stats None unless ``generate_stats``, which is required. Q and K have a scale for every 32 elements of a
        row, V for every 32 rows; rows and scales in plain order or F8_128x4."""
        call = Call(self, "SDPA_MXFP8_FWD", name)
        if generate_stats is None:
            raise KindError(explain("argument 'generate_stats' is required", node=call.node, expected="True or False", found=None))
        call.tensors(Q=("q", q), K=("k", k), V=("v", v))
        call.tensors(Descale_Q=("descale_q", descale_q), Descale_K=("descale_k", descale_k), Descale_V=("descale_v", descale_v))
        call.scale(attn_scale)
        call.options(SINK_TOKEN=("sink_token", sink_token))
        causal = (use_causal_mask, use_causal_mask_bottom_right)
        call.bounds(causal, diagonal_alignment, (None, diagonal_band_left_bound), diagonal_band_right_bound)
        statistics = call.statistics(generate_stats, None)
        call.attrs |= {"alibi_mask": False, "padding_mask": False, "dropout_probability": None, "mma_core_mode": _MODE}
        call.attrs |= {"implementation": "UNIFIED", "is_mxfp8": True, "unfuse_fma": bool(unfuse_fma)}
        o, *rest = call.add(("O", *(("Stats",) if statistics else ()), "Amax_O"), compute_data_type)
        return [o, *rest] if statistics else [o, None, *rest]

    def sdpa_mxfp8_backward(
        self,
        q: Tensor,
        q_T: Tensor,
        k: Tensor,
        k_T: Tensor,
        v: Tensor,
        o_f16: Tensor,
        dO_f16: Tensor,
        dO: Tensor,
        dO_T: Tensor,
        stats: Tensor,
        descale_q: Tensor,
        descale_q_T: Tensor,
        descale_k: Tensor,
        descale_k_T: Tensor,
        descale_v: Tensor,
        descale_dO: Tensor,
        descale_dO_T: Tensor,
        attn_scale: Any = None,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_deterministic_algorithm: bool = False,
        dropout: Any = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
        sink_token: Tensor | None = None,
        dSink_token: Tensor | None = None,
    ) -> list[Tensor]:
        """Gradients of sdpa_mxfp8: [dQ, dK, dV, Amax_dQ, Amax_dK, Amax_dV].

        ``q``, ``k``, ``v`` and ``dO`` have a scale for every 32 elements of a row; ``q_T``, ``k_T`` and ``dO_T``, of the same dims, are the same
        values quantized along the other axis, with a scale for every 32 rows. Scores and dP are made of the first, dV of ``dO_T``, dK of ``q_T``, dQ
        of ``k_T``; the row sums of dO * O of ``dO_f16`` and ``o_f16``."""
        call = Call(self, "SDPA_MXFP8_BWD", name)
        call.tensors(Q=("q", q), Q_T=("q_T", q_T), K=("k", k), K_T=("k_T", k_T), V=("v", v), O=("o_f16", o_f16), dO_f16=("dO_f16", dO_f16))
        call.tensors(dO=("dO", dO), dO_T=("dO_T", dO_T), Stats=("stats", stats), Descale_Q=("descale_q", descale_q))
        call.tensors(Descale_Q_T=("descale_q_T", descale_q_T), Descale_K=("descale_k", descale_k), Descale_K_T=("descale_k_T", descale_k_T))
        call.tensors(Descale_V=("descale_v", descale_v), Descale_dO=("descale_dO", descale_dO), Descale_dO_T=("descale_dO_T", descale_dO_T))
        call.gradient((attn_scale, dropout), (use_padding_mask, seq_len_q, seq_len_kv), use_deterministic_algorithm, (sink_token, dSink_token))
        call.bounds((use_causal_mask, use_causal_mask_bottom_right), diagonal_alignment, (None, left_bound), right_bound)
        call.attrs |= {"is_mxfp8": True}
        return call.add(("dQ", "dK", "dV", "Amax_dQ", "Amax_dK", "Amax_dV"), compute_data_type)
