# Printed by graphdnn/frontend/stubgen.py; do not edit.
from abc import ABCMeta
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.tensor import tensor as Tensor

class PointwiseOps(Declarations, metaclass=ABCMeta):
    """Element by element, with broadcasting as in NumPy. Every method takes ``name=``, makes one node and returns its output, a new virtual tensor.
    A number may stand for any operand but the first tensor: it becomes a constant of the kernel."""

    def identity(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """a, converted to the output's data type (a = input)."""

    def add(self, a: Tensor | float, b: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """a + b."""

    def bias(self, input: Tensor | float, bias: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """a + b (a = input, b = bias)."""

    def sub(self, a: Tensor | float, b: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """a - b."""

    def mul(self, a: Tensor | float, b: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """a * b."""

    def scale(self, input: Tensor | float, scale: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """a * b (a = input, b = scale)."""

    def div(self, a: Tensor | float, b: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """a / b: true division; integers round half to even, x / 0 saturates, 0 / 0 is 0."""

    def add_square(self, a: Tensor | float, b: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """a + b * b."""

    def mod(self, input0: Tensor | float, input1: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """floor modulo (sign of the divisor); x mod 0 is NaN, 0 for integers."""

    def pow(self, input0: Tensor | float, input1: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """input0 ** input1; integers: negative exponents give 0, except of 1 and -1."""

    def max(self, input0: Tensor | float, input1: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """larger of the two; NaN wins."""

    def min(self, input0: Tensor | float, input1: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """smaller of the two; NaN wins."""

    def neg(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """-a (a = input)."""

    def abs(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """|a| (a = input)."""

    def ceil(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """smallest integer not below a (a = input)."""

    def floor(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """largest integer not above a (a = input)."""

    def sqrt(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """square root."""

    def rsqrt(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 / square root."""

    def reciprocal(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 / a (a = input)."""

    def exp(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """e ** a (a = input)."""

    def log(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """natural logarithm."""

    def sin(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """sine."""

    def cos(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """cosine."""

    def tan(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """tangent."""

    def erf(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """error function."""

    def cmp_eq(self, input: Tensor | float, comparison: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where a == b, else 0 (a = input, b = comparison)."""

    def cmp_neq(self, input: Tensor | float, comparison: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where a != b, else 0 (NaN: 1) (a = input, b = comparison)."""

    def cmp_gt(self, input: Tensor | float, comparison: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where a > b, else 0 (a = input, b = comparison)."""

    def cmp_ge(self, input: Tensor | float, comparison: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where a >= b, else 0 (a = input, b = comparison)."""

    def cmp_lt(self, input: Tensor | float, comparison: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where a < b, else 0 (a = input, b = comparison)."""

    def cmp_le(self, input: Tensor | float, comparison: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where a <= b, else 0 (a = input, b = comparison)."""

    def logical_and(self, a: Tensor | float, b: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where both are not 0, else 0."""

    def logical_or(self, a: Tensor | float, b: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where one is not 0, else 0."""

    def logical_not(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 where a is 0, else 0 (a = input)."""

    def binary_select(
        self,
        input0: Tensor | float,
        input1: Tensor | float,
        mask: Tensor | float,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """input0 where mask is not 0, else input1."""

    def gen_index(self, input: Tensor | float, axis: int, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """the logical coordinate along axis, whatever the strides."""

    def relu(
        self,
        input: Tensor | float,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """x clipped to lower..upper; below lower: lower + slope * (x - lower)."""

    def leaky_relu(self, input: Tensor | float, negative_slope: float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """x clipped to lower..upper; below lower: lower + slope * (x - lower)."""

    def tanh(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """hyperbolic tangent."""

    def sigmoid(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """1 / (1 + e ** -x)."""

    def elu(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """x, for x <= 0 alpha * (e ** x - 1)."""

    def gelu(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """x times the normal distribution function (erf form)."""

    def gelu_approx_tanh(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """GELU, tanh approximation."""

    def softplus(self, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """log(1 + e ** (beta x)) / beta, without overflow."""

    def swish(self, input: Tensor | float, swish_beta: float | None = None, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """x * sigmoid(beta * x)."""

    def relu_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """gradient of relu: dY inside the clips, slope * dY below, 0 above."""

    def leaky_relu_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        negative_slope: float,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """gradient of relu: dY inside the clips, slope * dY below, 0 above."""

    def tanh_backward(self, loss: Tensor | float, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """gradient of tanh."""

    def sigmoid_backward(self, loss: Tensor | float, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """gradient of sigmoid."""

    def elu_backward(self, loss: Tensor | float, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """gradient of elu."""

    def gelu_backward(self, loss: Tensor | float, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """gradient of gelu."""

    def gelu_approx_tanh_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """gradient of gelu_approx_tanh."""

    def softplus_backward(self, loss: Tensor | float, input: Tensor | float, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """gradient of softplus."""

    def swish_backward(
        self,
        loss: Tensor | float,
        input: Tensor | float,
        compute_data_type: Any = data_type.NOT_SET,
        swish_beta: float | None = None,
        name: str = "",
    ) -> Tensor:
        """gradient of swish."""
