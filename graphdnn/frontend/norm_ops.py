"""Op methods of normalization, statistics and softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, NotSupportedError, explain
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.enums import norm_forward_phase
from graphdnn.frontend.tensor import as_integer
from graphdnn.frontend.tensor import tensor as Tensor

_STATISTICS = ("MEAN", "INV_VARIANCE")
_GRADIENTS = ("DX", "DSCALE", "DBIAS")
_NEXT = ("NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")
_NUMBERS = ("EPSILON", "MOMENTUM", "ACCUM_COUNT")
_ARGUMENTS = {"X": "input", "DY": "grad", "PREV_RUNNING_MEAN": "in_running_mean", "PREV_RUNNING_VAR": "in_running_var"}
"""Port -> argument, where it is not the port in small letters."""


class NormOps(Declarations):
    """Normalizations over the elements of a sample or of a batch, their gradients, and softmax. Outputs are new virtual tensors, in a fixed list with
    None for those that a call does not have. ``epsilon`` and ``momentum``: tensors of one element, or numbers."""

    def _normalized(self, op: str, name: str, ports: dict[str, Any], outputs: Sequence[str], attrs: dict[str, Any], compute: Any) -> list[Tensor]:
        """The outputs of a node whose inputs are ``ports``."""
        n, inputs = self._node_name(op, name), {}
        for port, value in ports.items():
            take = self._operand_or_number if port in _NUMBERS else self._operand
            inputs[port] = take(n, _ARGUMENTS.get(port, port.lower()), value)
        return self._add(op, n, inputs, outputs, attrs, compute)

    def _forward(
        self, op: str, phase: Any, ports: dict[str, Any], statistics: Sequence[str], compute: Any, name: str, **attrs: Any
    ) -> list[Tensor | None]:
        if not isinstance(phase, norm_forward_phase):
            expected = "graphdnn.norm_forward_phase"
            rule = "argument 'norm_forward_phase' has the wrong type"
            raise KindError(explain(rule, node=name, expected=expected, found=repr(phase)[:80]))
        kept = statistics if phase is norm_forward_phase.TRAINING else ()
        known = None if phase is norm_forward_phase.NOT_SET else phase.name
        made = self._normalized(op, name, ports, ("Y", *kept), {"forward_phase": known} | attrs, compute)
        return [*made, *[None] * (len(statistics) - len(kept))]

    # ------------------------------------------------------------------------------------------------------------------- over a sample
    def layernorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        epsilon: Tensor | float,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias over the axes where ``scale`` (ones in front may be missing) has an extent.

        Returns [Y, MEAN, INV_VARIANCE]; in phase INFERENCE the last two are None. INV_VARIANCE is 1 / sqrt(variance + epsilon)."""
        ports = {"X": input, "SCALE": scale, "BIAS": bias, "EPSILON": epsilon}
        return self._forward("LAYER_NORM", norm_forward_phase, ports, _STATISTICS, compute_data_type, name)

    def layernorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """Gradients of layernorm, from dY and the statistics of its forward pass: [DX, DSCALE, DBIAS].

        DSCALE and DBIAS are summed to the dims set on them; where none are, these are the input's with 1 in front, or those of scale if larger."""
        ports = {"DY": grad, "X": input, "SCALE": scale, "MEAN": mean, "INV_VARIANCE": inv_variance}
        return self._normalized("LAYER_NORM_BPROP", name, ports, _GRADIENTS, {}, compute_data_type)

    def adalayernorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        epsilon: Tensor | float | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """layernorm with scale and bias of each sample: [B, 1, D] for an input [B, S, D], or [1, B, D] for [S, B, D].

        ``epsilon`` is required. Returns [Y, MEAN, INV_VARIANCE]; in phase INFERENCE the last two are None."""
        ports = {"X": input, "SCALE": scale, **_given(BIAS=bias), "EPSILON": epsilon}
        return self._forward("ADA_LAYER_NORM", norm_forward_phase, ports, _STATISTICS, compute_data_type, name)

    def adalayernorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """Gradients of adalayernorm: [DX, DSCALE, DBIAS], the last two like scale unless dims are set on them."""
        ports = {"DY": grad, "X": input, "SCALE": scale, "MEAN": mean, "INV_VARIANCE": inv_variance}
        return self._normalized("ADA_LAYER_NORM_BPROP", name, ports, _GRADIENTS, {}, compute_data_type)

    def rmsnorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        epsilon: Tensor | float | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """x / sqrt(mean(x * x) + epsilon) * scale + bias over the axes where ``scale`` (ones in front may be missing) has an extent.

        ``epsilon`` is required. Returns [Y, INV_VARIANCE]; in phase INFERENCE the last is None."""
        ports = {"X": input, "SCALE": scale, **_given(BIAS=bias), "EPSILON": epsilon}
        return self._forward("RMS_NORM", norm_forward_phase, ports, _STATISTICS[1:], compute_data_type, name)

    def rmsnorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        inv_variance: Tensor,
        has_dbias: bool,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """Gradients of rmsnorm: [DX, DSCALE, DBIAS], the last None unless ``has_dbias``. Dims as for layernorm_backward."""
        ports = {"DY": grad, "X": input, "SCALE": scale, "INV_VARIANCE": inv_variance}
        made = self._normalized("RMS_NORM_BPROP", name, ports, _GRADIENTS if has_dbias else _GRADIENTS[:2], {}, compute_data_type)
        for t, label in zip(made[1:], ("Dscale", "Dbias"), strict=False):
            t.name = f"{name}::{label}"
        return [*made, *[None] * (3 - len(made))]

    def instancenorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        epsilon: Tensor | float,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """Every channel (axis 1) of every sample (axis 0) normalized by itself; scale and bias [1, C, 1, ...].

        Returns [Y, MEAN, INV_VARIANCE], statistics [N, C, 1, ...]; in phase INFERENCE the last two are None."""
        ports = {"X": input, "SCALE": scale, "BIAS": bias, "EPSILON": epsilon}
        return self._forward("INSTANCE_NORM", norm_forward_phase, ports, _STATISTICS, compute_data_type, name)

    def instancenorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor | None = None,
        inv_variance: Tensor | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """Gradients of instancenorm: [DX, DSCALE, DBIAS], the last two [1, C, 1, ...] unless dims are set on them.

        ``inv_variance`` is required; without ``mean`` it is calculated from the input."""
        ports = {"DY": grad, "X": input, "SCALE": scale, **_given(MEAN=mean, INV_VARIANCE=inv_variance)}
        return self._normalized("INSTANCE_NORM_BPROP", name, ports, _GRADIENTS, {}, compute_data_type)

    def groupnorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        epsilon: Tensor | float,
        num_groups: int,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """Groups of neighbouring channels (axis 1) of every sample normalized together; scale and bias [1, C, 1, ...].

        Returns [Y, MEAN, INV_VARIANCE], statistics [N, num_groups, 1, ...]; in phase INFERENCE the last two are None."""
        ports = {"X": input, "SCALE": scale, "BIAS": bias, "EPSILON": epsilon}
        groups = as_integer("num_groups", num_groups)
        return self._forward("GROUP_NORM", norm_forward_phase, ports, _STATISTICS, compute_data_type, name, num_groups=groups)

    def groupnorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """Gradients of groupnorm, with the groups of its statistics: [DX, DSCALE, DBIAS], the last two [1, C, 1, ...] unless dims are set on them."""
        ports = {"DY": grad, "X": input, "SCALE": scale, "MEAN": mean, "INV_VARIANCE": inv_variance}
        return self._normalized("GROUP_NORM_BPROP", name, ports, _GRADIENTS, {}, compute_data_type)

    # -------------------------------------------------------------------------------------------------------------------- over a batch
    def batchnorm(
        self,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        in_running_mean: Tensor | None,
        in_running_var: Tensor | None,
        epsilon: Tensor | float,
        momentum: Tensor | float | None,
        peer_stats: Sequence[Tensor] = [],
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """Batch normalization in training: every channel (axis 1) normalized over the whole batch; scale, bias and statistics [1, C, 1, ...].

        Returns [Y, MEAN, INV_VARIANCE, NEXT_RUNNING_MEAN, NEXT_RUNNING_VAR]. The running statistics, (1 - momentum) * previous + momentum * those of
        this batch, with the variance of n elements times n / (n - 1), may be written over the previous ones; without them the last two are
        None and ``momentum`` is not read. ``peer_stats``, of other GPUs, must be empty: NotSupportedError."""
        running = _running(in_running_mean, in_running_var, momentum)
        ports = {"X": input, "SCALE": scale, "BIAS": bias, "EPSILON": epsilon, **running}
        outputs = ("Y", *_STATISTICS, *(_NEXT if running else ()))
        made = self._normalized("BATCHNORM", name, ports, outputs, {"peer_stats": _no_peers(name, peer_stats)}, compute_data_type)
        return [*made, *[None] * (5 - len(made))]

    def batchnorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        peer_stats: Sequence[Tensor] = [],
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """Gradients of batchnorm, from the statistics of the batch: [DX, DSCALE, DBIAS], the last two [1, C, 1, ...].

        ``peer_stats`` must be empty: NotSupportedError."""
        ports = {"DY": grad, "X": input, "SCALE": scale, "MEAN": mean, "INV_VARIANCE": inv_variance}
        return self._normalized("DBN", name, ports, _GRADIENTS, {"peer_stats": _no_peers(name, peer_stats)}, compute_data_type)

    def batchnorm_inference(
        self,
        input: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        scale: Tensor,
        bias: Tensor,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """(x - mean) * inv_variance * scale + bias with given statistics of every channel, [1, C, 1, ...]."""
        ports = {"X": input, "SCALE": scale, "BIAS": bias, "MEAN": mean, "INV_VARIANCE": inv_variance}
        return self._normalized("BATCHNORM_INFERENCE", name, ports, ("Y",), {}, compute_data_type)[0]

    def genstats(self, input: Tensor, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> list[Tensor]:
        """Sum and sum of squares of every channel (axis 1): [SUM, SQ_SUM], of dims [1, C, 1, ...]."""
        made = self._normalized("GENSTATS", name, {"X": input}, ("SUM", "SQ_SUM"), {}, compute_data_type)
        for t, label in zip(made, ("sum", "sq_sum"), strict=True):
            t.name = f"{name}_{label}_output"
        return made

    def bn_finalize(
        self,
        sum: Tensor,
        sq_sum: Tensor,
        scale: Tensor,
        bias: Tensor,
        epsilon: Tensor | float,
        accum_count: Tensor | float,
        in_running_mean: Tensor | None = None,
        in_running_var: Tensor | None = None,
        momentum: Tensor | float | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """Batch normalization from the sums of genstats over ``accum_count`` elements a channel: Y is EQ_SCALE * X + EQ_BIAS.

        Returns [EQ_SCALE, EQ_BIAS, MEAN, INV_VARIANCE, NEXT_RUNNING_MEAN, NEXT_RUNNING_VAR]; the last two are None without running statistics. The
        variance is mean(x * x) - mean(x) ** 2, not below 0: it loses digits where the mean is large beside the deviation."""
        running = _running(in_running_mean, in_running_var, momentum)
        ports = {"SUM": sum, "SQ_SUM": sq_sum, "SCALE": scale, "BIAS": bias, "EPSILON": epsilon, "ACCUM_COUNT": accum_count, **running}
        outputs = ("EQ_SCALE", "EQ_BIAS", *_STATISTICS, *(_NEXT if running else ()))
        made = self._normalized("BN_FINALIZE", name, ports, outputs, {}, compute_data_type)
        return [*made, *[None] * (6 - len(made))]

    def dbn_weight(
        self,
        grad: Tensor,
        input: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        scale: Tensor,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """batchnorm_backward up to the last step: DX is EQ_SCALE_DY * DY + EQ_SCALE_X * X + EQ_BIAS.

        Returns [DSCALE, DBIAS, EQ_BIAS, EQ_SCALE_DY, EQ_SCALE_X], each [1, C, 1, ...]."""
        ports = {"DY": grad, "X": input, "SCALE": scale, "MEAN": mean, "INV_VARIANCE": inv_variance}
        outputs = ("DSCALE", "DBIAS", "EQ_BIAS", "EQ_SCALE_DY", "EQ_SCALE_X")
        return self._normalized("DBN_WEIGHT", name, ports, outputs, {}, compute_data_type)


def _given(**ports: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {p: t for p, t in ports.items() if t is not None}


def _running(mean: Tensor | None, variance: Tensor | None, momentum: Tensor | float | None) -> dict[str, Any]:
    """Ports of the running statistics. Without these a momentum says nothing, and there are none."""
    given = _given(PREV_RUNNING_MEAN=mean, PREV_RUNNING_VAR=variance)
    return given | _given(MOMENTUM=momentum) if given else {}


def _no_peers(node: str, peer_stats: Any) -> tuple[int, ...]:
    if not isinstance(peer_stats, Sequence) or isinstance(peer_stats, str):
        rule = "argument 'peer_stats' has the wrong type"
        raise KindError(explain(rule, node=node, expected="a list of graph tensors", found=repr(peer_stats)[:80]))
    if len(peer_stats):
        rule, found = "statistics are those of one device", f"peer_stats of {len(peer_stats)} tensors"
        raise NotSupportedError(explain(rule, node=node, expected="no peer_stats", found=found, fix="reduce the sums of genstats, then bn_finalize"))
    return ()
