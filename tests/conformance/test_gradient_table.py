"""Every backward op and mode has a test against central differences in float64 and, where torch has the op, one against torch."""

from __future__ import annotations

import importlib

import pytest

from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.registry import MODULES

HERE = "tests.conformance."
NORMS = {
    "LAYER_NORM": "layernorm",
    "RMS_NORM": "rmsnorm",
    "ADA_LAYER_NORM": "adalayernorm",
    "INSTANCE_NORM": "instancenorm",
    "GROUP_NORM": "groupnorm",
}
BOTH = {f"{tag}_BPROP": ("test_norm_gradients", "test_gradients", "OPS", name) for tag, name in NORMS.items()}
BOTH |= {
    "DBN": ("test_norm_gradients", "test_gradients", "OPS", "batchnorm"),
    "DBN_WEIGHT": ("test_norm_gradients", "test_gradients", "OPS", "batchnorm by parts"),
    "SOFTMAX_BPROP": ("test_norm_gradients", "test_gradients", "OPS", "softmax"),
    "LOG_SOFTMAX_BPROP": ("test_norm_gradients", "test_gradients", "OPS", "log_softmax"),
    "LOGSUMEXP_BPROP": ("test_norm_gradients", "test_gradient_of_logsumexp", "", ""),
    "CONV_DGRAD": ("test_gradients", "test_convolution", "CONVOLUTIONS", "strided, dilated, two groups"),
    "CONV_WGRAD": ("test_gradients", "test_convolution", "CONVOLUTIONS", "strided, dilated, two groups"),
    "MOE_GROUPED_MATMUL_BWD": ("test_gradients", "test_grouped_matmul", "", ""),
}
"""Tag -> module, test, the table that it goes through and the row there: one test against both."""
DIFFERENCES = BOTH | {
    "RESAMPLE_BPROP": ("test_resample", "test_gradients_against_central_differences", "CASES", "bilinear, larger"),
    "SDPA_BWD": ("test_attention_gradients", "test_central_differences", "CASES", "groups, band, bias, sink"),
    "SDPA_FP8_BWD": ("test_attention_gradients8", "test_one_scale_a_tensor", "", ""),
    "SDPA_MXFP8_BWD": ("test_attention_gradients8", "test_scales_of_blocks", "", ""),
}
TORCH = BOTH | {
    "RESAMPLE_BPROP": ("test_resample", "test_against_torch", "", ""),
    "SDPA_BWD": ("test_attention_gradients", "test_torch_autograd", "TORCH", "groups, band, bias, sink"),
}
NOT_IN_TORCH = {"SDPA_FP8_BWD", "SDPA_MXFP8_BWD"}
"""Scales of 8-bit floats around attention: the attention inside is SDPA_BWD, and torch differentiates no product of 8-bit floats."""
ENDS = ("_BPROP", "_BWD", "_DGRAD", "_WGRAD")
BACKWARD = {tag for tags in MODULES.values() for tag in tags.split() if tag.endswith(ENDS) or tag.startswith("DBN")}


def test_every_backward_op_has_both():
    assert BACKWARD == set(DIFFERENCES)
    assert BACKWARD - NOT_IN_TORCH == set(TORCH)


@pytest.mark.parametrize("table", [DIFFERENCES, TORCH], ids=["differences", "torch"])
def test_the_tests_are_there(table):
    """A row names a test that exists, and a row of what it goes through."""
    for tag, (module, test, rows, row) in table.items():
        found = importlib.import_module(HERE + module)
        assert callable(getattr(found, test)), tag
        assert not rows or row in getattr(found, rows), tag


def test_every_backward_mode_has_both():
    """test_activation compares with torch and with differences; its table is made of the methods of the modes."""
    found = importlib.import_module(f"{HERE}test_gradients")
    modes = {name: row for name, row in POINTWISE.items() if name.endswith("_BWD")}
    assert modes
    assert {row.method for row in modes.values()} <= set(found.BACKWARD)
    assert {m.removesuffix("_backward") for m in found.BACKWARD} == set(found.TORCH)
