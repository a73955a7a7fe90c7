"""Writes LLVM instructions through Python operators, for the CPU and CUDA forms of the intrinsics. Imports llvmlite: reached only by namespace()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
TYPES: dict[str, Any] = {"i1": I1, "i8": I8, "i16": I16, "i32": I32, "i64": I64, "f16": F16, "f32": F32, "f64": F64}


class Value:
    """An LLVM value with operators. Python numbers on either side become constants of its type. Integers are signed (``<``, ``/``, ``%``, ``>>``);
    use :meth:`lshr`, :meth:`ult`, :meth:`udiv` for unsigned ones. Comparisons of floats are ordered: false with a NaN, except ``!=``."""

    __slots__ = ("o", "v")

    def __init__(self, o: Emit, v: Any) -> None:
        self.o, self.v = o, v

    @property
    def type(self) -> Any:
        """LLVM type of the value."""
        return self.v.type

    @property
    def bits(self) -> int:
        """Width of the value."""
        return {"half": 16, "float": 32, "double": 64}.get(str(self.type)) or int(self.type.width)

    @property
    def real(self) -> bool:
        """Whether this is a float."""
        return not isinstance(self.type, ir.IntType)

    def _other(self, other: Any) -> Any:
        return other.v if isinstance(other, Value) else ir.Constant(self.type, other)

    def _op(self, on_float: str, on_int: str, other: Any, swap: bool = False) -> Value:
        pair = (self._other(other), self.v) if swap else (self.v, self._other(other))
        return Value(self.o, getattr(self.o.builder, on_float if self.real else on_int)(*pair))

    def __add__(self, other: Any) -> Value:
        return self._op("fadd", "add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return self._op("fsub", "sub", other)

    def __rsub__(self, other: Any) -> Value:
        return self._op("fsub", "sub", other, swap=True)

    def __mul__(self, other: Any) -> Value:
        return self._op("fmul", "mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return self._op("fdiv", "sdiv", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._op("fdiv", "sdiv", other, swap=True)

    def __mod__(self, other: Any) -> Value:
        return self._op("frem", "srem", other)

    def __neg__(self) -> Value:
        # fsub from -0.0 is how the LLVM of libNVVM spells fneg
        return self._op("fsub", "sub", -0.0 if self.real else 0, swap=True)

    def __and__(self, other: Any) -> Value:
        return self._op("", "and_", other)

    def __or__(self, other: Any) -> Value:
        return self._op("", "or_", other)

    def __xor__(self, other: Any) -> Value:
        return self._op("", "xor", other)

    def __lshift__(self, other: Any) -> Value:
        return self._op("", "shl", other)

    def __rshift__(self, other: Any) -> Value:
        return self._op("", "ashr", other)

    def lshr(self, other: Any) -> Value:
        """Shift right, zeros in."""
        return self._op("", "lshr", other)

    def udiv(self, other: Any) -> Value:
        """Unsigned quotient; no meaning for a divisor of 0."""
        return self._op("", "udiv", other)

    def _compare(self, op: str, other: Any) -> Value:
        b = self.o.builder
        if self.real:
            return Value(self.o, (b.fcmp_unordered if op == "!=" else b.fcmp_ordered)(op, self.v, self._other(other)))
        return Value(self.o, b.icmp_signed(op, self.v, self._other(other)))

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def eq(self, other: Any) -> Value:
        """``==`` as an i1 (the operator itself is left to Python)."""
        return self._compare("==", other)

    def ne(self, other: Any) -> Value:
        """``!=`` as an i1; true where either is NaN."""
        return self._compare("!=", other)

    def ult(self, other: Any) -> Value:
        """Unsigned less-than of integers."""
        return Value(self.o, self.o.builder.icmp_unsigned("<", self.v, self._other(other)))

    def isnan(self) -> Value:
        """i1: this float is a NaN."""
        return Value(self.o, self.o.builder.fcmp_unordered("uno", self.v, self.v))

    def as_int(self) -> Value:
        """The bits of a float as an integer of its width."""
        return Value(self.o, self.o.builder.bitcast(self.v, ir.IntType(self.bits)))

    def as_float(self) -> Value:
        """An integer's bits as the float of its width."""
        return Value(self.o, self.o.builder.bitcast(self.v, {16: F16, 32: F32, 64: F64}[self.bits]))

    def to(self, name: str, signed: bool = True) -> Value:
        """Convert to type "i32", "f64", ...: integers wrap or extend (by sign if ``signed``), floats round, float to int truncates and has no
        meaning out of range."""
        b, target = self.o.builder, TYPES[name]
        if target == self.type:
            return self
        if isinstance(target, ir.IntType):
            if self.real:
                return Value(self.o, b.fptosi(self.v, target))
            cast = b.trunc if target.width < self.bits else b.sext if signed else b.zext
            return Value(self.o, cast(self.v, target))
        if not self.real:
            return Value(self.o, (b.sitofp if signed else b.uitofp)(self.v, target))
        wider = {16: 0, 32: 1, 64: 2}
        narrowing = wider[self.bits] > ["f16", "f32", "f64"].index(name)
        return Value(self.o, (b.fptrunc if narrowing else b.fpext)(self.v, target))


class Emit:
    """What a form writes with: constants, selects, fused steps and calls into one builder for ``target`` ("cpu" or "cuda")."""

    def __init__(self, builder: Any, target: Literal["cpu", "cuda"]) -> None:
        self.builder = builder
        self.target = target

    def value(self, v: Any) -> Value:
        """Wrap an LLVM value."""
        return Value(self, v)

    def const(self, like: Value | str, number: float | int) -> Value:
        """A constant of the type of ``like``."""
        return Value(self, ir.Constant(TYPES[like] if isinstance(like, str) else like.type, number))

    def select(self, condition: Value, yes: Value | float, no: Value | float) -> Value:
        """``yes if condition else no`` without a branch; one of the two may be a number."""
        like = yes if isinstance(yes, Value) else no
        assert isinstance(like, Value), "select needs a value to take its type from"
        a, b = (x.v if isinstance(x, Value) else ir.Constant(like.type, x) for x in (yes, no))
        return Value(self, self.builder.select(condition.v, a, b))

    def mad(self, a: Value, b: Value | float, c: Value | float) -> Value:
        """a * b + c, fused where that costs nothing: always on CUDA; on a CPU if it has the instruction (llvm.fma would call libm elsewhere)."""
        x, y = a._other(b), a._other(c)
        if self.target == "cuda":
            return Value(self, self.builder.call(self._declare(f"llvm.fma.{_suffix(a)}", a.type, [a.type] * 3), [a.v, x, y]))
        product = self.builder.fmul(a.v, x, flags=("contract",))
        return Value(self, self.builder.fadd(product, y, flags=("contract",)))

    def poly(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Horner's rule; ``coefficients`` from the constant term up."""
        total = self.const(x, coefficients[-1])
        for c in reversed(coefficients[:-1]):
            total = self.mad(total, x, c)
        return total

    def llvm(self, name: str, *args: Value) -> Value:
        """A call of the LLVM intrinsic ``llvm.<name>.<type of the first argument>``, result of that type."""
        first = args[0]
        return self.call(f"llvm.{name}.{_suffix(first)}", first.type, *args)

    def abs(self, x: Value) -> Value:
        """|x| of a float (libNVVM refuses llvm.fabs)."""
        return self.math("fabs", x) if self.target == "cuda" else self.llvm("fabs", x)

    def copysign(self, magnitude: Value, sign: Value) -> Value:
        """The first with the sign of the second (libNVVM refuses llvm.copysign)."""
        return self.math("copysign", magnitude, sign) if self.target == "cuda" else self.llvm("copysign", magnitude, sign)

    def math(self, name: str, *args: Value) -> Value:
        """A call of the math library, result of the type of the arguments: libm on the CPU, libdevice on CUDA."""
        single = args[0].bits == 32
        symbol = f"{name}f" if single else name
        return self.call(f"__nv_{symbol}" if self.target == "cuda" else symbol, args[0].type, *args)

    def call(self, symbol: str, result: Any, *args: Value) -> Value:
        """A call of an external function."""
        fn = self._declare(symbol, result, [a.type for a in args])
        return Value(self, self.builder.call(fn, [a.v for a in args]))

    def ptx(self, text: str, constraints: str, result: str, *args: Value) -> Value:
        """One PTX instruction without side effects, which LLVM may move, merge and drop."""
        fn = ir.FunctionType(TYPES[result], [a.type for a in args])
        return Value(self, self.builder.call(ir.InlineAsm(fn, text, constraints, side_effect=False), [a.v for a in args]))

    def _declare(self, symbol: str, result: Any, args: list[Any]) -> Any:
        module = self.builder.module
        found = module.globals.get(symbol)
        return found if found is not None else ir.Function(module, ir.FunctionType(result, args), symbol)


def _suffix(x: Value) -> str:
    return f"{'f' if x.real else 'i'}{x.bits}"
