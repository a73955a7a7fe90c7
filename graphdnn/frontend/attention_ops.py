"""Op methods of attention: scaled dot product attention and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphdnn.dtypes import data_type
from graphdnn.frontend.attention_call import Call, implementation_name
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.enums import attention_implementation, diagonal_alignment
from graphdnn.frontend.tensor import tensor as Tensor

if TYPE_CHECKING:
    from graphdnn.frontend.pygraph import pygraph

ScoreMod = Callable[["pygraph", Tensor], Tensor]


class AttentionOps(Declarations):
    """Q is [b, h_q, s_q, d], K [b, h_k, s_kv, d], V [b, h_v, s_kv, d_v], with any strides; h_k and h_v divide h_q. ``attn_scale``: a float or a
    tensor of one element, 1 if not given. Masks: ``docs/attention.md``. Dims and strides of O, and of dQ, dK and dV, are set on the results."""

    # ------------------------------------------------------------------------------------------------------------------------- the calls
    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_inference: Any = None,
        attn_scale: Any = None,
        bias: Tensor | None = None,
        block_mask: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Any = None,
        rng_dump: Tensor | None = None,
        paged_attention_k_table: Tensor | None = None,
        paged_attention_v_table: Tensor | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
        score_mod: ScoreMod | None = None,
        generate_stats: bool | None = None,
        implementation: attention_implementation = attention_implementation.AUTO,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        sink_token: Tensor | None = None,
        unfuse_fma: bool = False,
    ) -> list[Tensor | None]:
        """O = softmax(attn_scale * Q K^T + bias, masked) V: [O, Stats], Stats (the log-sum-exp of every row) None unless ``generate_stats``.

        Exactly one of ``generate_stats`` and ``is_inference`` (its opposite) is given. ``dropout``: (probability, seed, offset), whose mask
        ``rng_dump`` receives, or (mask, scale). ``score_max``, ``score_sum_exp``, ``rng_dump``: tensors of the caller's to write to.
        ``score_mod(graph, score)`` returns the score modified by pointwise ops. ``implementation`` and ``unfuse_fma`` are recorded and change
        nothing."""
        call = Call(self, "SDPA", name)
        call.tensors(Q=("q", q), K=("k", k), V=("v", v))
        call.scale(attn_scale)
        call.options(Bias=("bias", bias), Block_mask=("block_mask", block_mask), SINK_TOKEN=("sink_token", sink_token))
        call.padding(use_alibi_mask, use_padding_mask, seq_len_q, seq_len_kv)
        left = (sliding_window_length, diagonal_band_left_bound)
        call.bounds((use_causal_mask, use_causal_mask_bottom_right), diagonal_alignment, left, diagonal_band_right_bound)
        call.dropout(dropout)
        call.options(Page_table_K=("paged_attention_k_table", paged_attention_k_table))
        call.options(Page_table_V=("paged_attention_v_table", paged_attention_v_table))
        call.integer("max_seq_len_kv", paged_attention_max_seq_len_kv)
        call.scores(score_mod)
        statistics = call.statistics(generate_stats, is_inference)
        call.attrs |= {"implementation": implementation_name(call.node, implementation), "unfuse_fma": bool(unfuse_fma)}
        call.attrs |= {"mma_core_mode": "HALF", "is_mxfp8": False}
        call.results(Max=("score_max", score_max), Sum_exp=("score_sum_exp", score_sum_exp), RNG_DUMP=("rng_dump", rng_dump))
        made = call.add(("O", "Stats") if statistics else ("O",), compute_data_type)
        return [*made, *[None] * (2 - len(made))]

    def sdpa_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        attn_scale: Any = None,
        bias: Tensor | None = None,
        dBias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Any = None,
        rng_dump: Tensor | None = None,
        use_deterministic_algorithm: bool = False,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
        score_mod: ScoreMod | None = None,
        score_mod_bprop: ScoreMod | None = None,
        sink_token: Tensor | None = None,
        dSink_token: Tensor | None = None,
    ) -> list[Tensor]:
        """Gradients of sdpa from its inputs, O, dO and Stats: [dQ, dK, dV].

        The masks are those of the forward call. ``dropout``: (probability, seed, offset) or (mask, scale, 1 / scale). ``dBias`` (summed over the
        axes where it has extent 1), ``dSink_token`` and ``rng_dump``: tensors of the caller's to write to. ``score_mod_bprop(graph, gradient)``
        turns the gradient of the modified score into that of the score; it may use tensors that ``score_mod`` has seen. Results are bitwise equal on
        every run, with ``use_deterministic_algorithm`` and without."""
        call = Call(self, "SDPA_BWD", name)
        call.tensors(Q=("q", q), K=("k", k), V=("v", v), O=("o", o), dO=("dO", dO), Stats=("stats", stats))
        call.scale(attn_scale)
        call.options(Bias=("bias", bias), SINK_TOKEN=("sink_token", sink_token))
        call.padding(use_alibi_mask, use_padding_mask, seq_len_q, seq_len_kv)
        call.integer("max_total_seq_len_q", max_total_seq_len_q)
        call.integer("max_total_seq_len_kv", max_total_seq_len_kv)
        left = (sliding_window_length, diagonal_band_left_bound)
        call.bounds((use_causal_mask, use_causal_mask_bottom_right), diagonal_alignment, left, diagonal_band_right_bound)
        call.dropout(dropout, backward=True)
        call.scores(score_mod, score_mod_bprop)
        call.attrs |= {"is_deterministic_algorithm": bool(use_deterministic_algorithm), "is_mxfp8": False}
        call.results(dBias=("dBias", dBias), RNG_DUMP=("rng_dump", rng_dump), DSINK_TOKEN=("dSink_token", dSink_token))
        return call.add(("dQ", "dK", "dV"), compute_data_type)

    scaled_dot_product_flash_attention = sdpa
    scaled_dot_product_flash_attention_backward = sdpa_backward
