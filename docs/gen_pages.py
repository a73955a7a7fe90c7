"""Prints the parts of the docs that come from the code's own tables: all between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    python docs/gen_pages.py            write
    python docs/gen_pages.py --check    exit 1 if a page is not current
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path

import from_tests

import graphdnn
from graphdnn import dtypes, env
from graphdnn.engines import ENGINES
from graphdnn.intrinsics import elementary
from graphdnn.opspecs.pointwise import POINTWISE, Param
from graphdnn.opspecs.reduction import REDUCTION

DOCS = Path(__file__).resolve().parent

# Every operation method of the cuDNN Frontend's pygraph (API level 9.22).
CUDNN_OPS = (
    "matmul conv_fprop conv_dgrad conv_wgrad reduction genstats reshape transpose slice concatenate "
    "add sub mul div add_square mod pow max min bias scale binary_select gen_index logical_and logical_or logical_not "
    "cmp_eq cmp_neq cmp_gt cmp_ge cmp_lt cmp_le "
    "relu leaky_relu elu gelu gelu_approx_tanh sigmoid softplus swish tanh "
    "relu_backward leaky_relu_backward elu_backward gelu_backward gelu_approx_tanh_backward "
    "sigmoid_backward softplus_backward swish_backward tanh_backward "
    "identity abs neg sqrt rsqrt reciprocal exp log ceil floor sin cos tan erf "
    "layernorm layernorm_backward rmsnorm rmsnorm_backward adalayernorm adalayernorm_backward instancenorm instancenorm_backward "
    "batchnorm batchnorm_backward batchnorm_inference "
    "sdpa sdpa_backward sdpa_fp8 sdpa_fp8_backward sdpa_mxfp8 sdpa_mxfp8_backward "
    "scaled_dot_product_flash_attention scaled_dot_product_flash_attention_backward "
    "block_scale_quantize block_scale_dequantize moe_grouped_matmul moe_grouped_matmul_bwd"
).split()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def formula(expr: str) -> str:
    """A row's expression as a reader wants it: without the casts of literals and attributes."""
    return code(re.sub(r"\bT\(([^()]*)\)", r"\1", expr))


def call(method: str, args: Sequence[str], params: Sequence[Param]) -> str:
    return code(f"{method}({', '.join([*args, *(p.keyword if p.required else p.keyword + '=None' for p in params)])})")


def pointwise() -> str:
    rows = []
    for op in POINTWISE.values():
        methods = [call(op.method, op.args, op.params), *(call(a.method, a.args, a.params) for a in op.aliases)]
        attrs = ", ".join(f"{name} = {default}" for name, default in op.attrs.items())
        rows.append(["<br>".join(methods), op.mode, op.doc, formula(op.expr), attrs, "FLOAT" if op.domain == "float" else ""])
    return table(["Method", "Mode", "What", "Formula", "Attributes", "On integers"], rows)


def reductions() -> str:
    rows = []
    for op in REDUCTION.values():
        rows.append([op.mode, op.doc, *(formula(text) for text in (op.map, op.combine, op.finalize, op.identity))])
    return table(["Mode", "What", "Of each element `a`", "Combined", "At the end", "Starts from"], rows)


def parameter(p: inspect.Parameter) -> str:
    if p.default is inspect.Parameter.empty:
        return p.name
    return f"{p.name}={p.default if isinstance(p.default, Enum) else repr(p.default)}"


STRUCTURED = ("matmul", "reduction", "reshape", "transpose", "slice", "concatenate")
NORMALIZATION = (
    "layernorm layernorm_backward rmsnorm rmsnorm_backward adalayernorm adalayernorm_backward instancenorm instancenorm_backward "
    "groupnorm groupnorm_backward batchnorm batchnorm_backward batchnorm_inference genstats bn_finalize dbn_weight"
).split()
CONVOLUTION = ("conv_fprop", "conv_dgrad", "conv_wgrad")
RESAMPLING = ("resample", "resample_backward")
SOFTMAX = ("softmax", "log_softmax", "logsumexp", "softmax_backward", "log_softmax_backward", "logsumexp_backward")

GROUPED = ("moe_grouped_matmul", "moe_grouped_matmul_bwd")
RANDOM = ("rng",)
ATTENTION = ("sdpa", "sdpa_backward", "sdpa_fp8", "sdpa_fp8_backward", "sdpa_mxfp8", "sdpa_mxfp8_backward")
BLOCK_SCALING = ("block_scale_quantize", "block_scale_dequantize")


def methods(names: Iterable[str]) -> str:
    """Signature and docstring of methods of a graph."""
    parts = []
    for name in names:
        method = getattr(graphdnn.pygraph, name)
        arguments = ", ".join(parameter(p) for p in inspect.signature(method).parameters.values() if p.name != "self")
        parts.append(f"### {name}\n\n`{name}({arguments})`\n\n{inspect.cleandoc(method.__doc__)}".replace("``", "`"))
    return "\n\n".join(parts)


def switches() -> str:
    rows = []
    for s in env.SWITCHES:
        value = "in the text" if "default" in s.doc else s.default()
        default = str(int(value) if isinstance(value, bool) else "not set" if value is None else value)
        rows.append([code(s.name), s.doc, s.allowed.replace("<", "&lt;"), default, ", ".join(code(a) for a, _ in s.aliases)])
    return table(["Variable", "What", "Values", "Default", "Also read"], rows)


def api_names() -> str:
    rows = [[code(name), "yes" if hasattr(graphdnn.pygraph, name) else "not yet"] for name in CUDNN_OPS]
    there = [name for name, answer in rows if answer == "yes"]
    missing = [name for name, answer in rows if answer != "yes"]
    text = f"**There** ({len(there)}): {', '.join(there)}."
    return text + (f"\n\n**Not yet** ({len(missing)}): {', '.join(missing)}." if missing else "")


def data_types() -> str:
    rows = []
    for dtype in dtypes.storable():
        row = dtypes.info(dtype)
        rows.append([dtype.name, str(row.bits), row.numpy, row.torch or "", dtypes.compute_carrier(dtype).name])
    return table(["Type", "Bits", "NumPy / ml_dtypes", "torch", "Calculated in"], rows)


def accuracy() -> str:
    cells = re.findall(r"(\w+(?:, \w+)*) +([\d.]+) +([\d.]+)", elementary.__doc__.split("function")[-1])
    return table(["Function", "CPU", "CUDA"], [[code(name), cpu, cuda] for name, cpu, cuda in cells])


def engines() -> str:
    rows = []
    for engine in ENGINES:
        about = inspect.cleandoc(inspect.getmodule(type(getattr(engine, "real", engine))).__doc__).split("\n\n")[0]
        rows.append([str(engine.id), code(engine.name), about.split(": ", 1)[-1]])
    return table(["Id", "Engine", "What it does"], rows)


def error_sample() -> str:
    g = graphdnn.pygraph(io_data_type="float32", device="cpu")
    a, b = g.tensor(dim=(2, 1, 16, 16), layout="row", name="x"), g.tensor(dim=(2, 1, 16, 256), layout="row", name="skip")
    g.add(a, b, name="residual").set_output(True)
    try:
        g.validate()
    except graphdnn.ValidationError as error:
        return f"```text\n{type(error).__name__}: {error}\n```"
    raise AssertionError("the sample must fail")


def explain_sample() -> str:
    """What docs/fusion.md's first program prints, without what changes with every cost model: times, knobs, other candidates."""
    page = (DOCS / "fusion.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(program.replace("print(report)", ""), names)
    kept = []
    for line in str(names["report"]).splitlines():
        if line.startswith("other candidates"):
            break
        if not re.match(r"  (time |r\d: )", line) and not re.match(r"  - (?!'|matmul_)", line):
            kept.append(line)
    return "```text\n" + "\n".join(kept).rstrip() + "\n```"


DIFFERENCES = ("Operation", "Input", "The real library", "graphdnn")
PARTS: dict[str, Callable[[], str]] = {
    "pointwise": pointwise,
    "reductions": reductions,
    "structured": lambda: methods(STRUCTURED),
    "convolution": lambda: methods(CONVOLUTION),
    "resampling": lambda: methods(RESAMPLING),
    "normalization": lambda: methods(NORMALIZATION),
    "softmax": lambda: methods(SOFTMAX),
    "grouped": lambda: methods(GROUPED),
    "random": lambda: methods(RANDOM),
    "attention": lambda: methods(ATTENTION),
    "block scaling": lambda: methods(BLOCK_SCALING),
    "switches": switches,
    "error sample": error_sample,
    "explain sample": explain_sample,
    "api names": api_names,
    "data types": data_types,
    "accuracy": accuracy,
    "engines": engines,
    "targets": lambda: table(["Operations", "Data types", *from_tests.DEVICES], from_tests.op_rows()),
    "runs here": lambda: table(DIFFERENCES, from_tests.differences("runs here")),
    "our errors": lambda: table(DIFFERENCES, from_tests.differences("our error")),
}


def current(text: str) -> str:
    """``text`` of a page with every generated part printed anew. A name without a printer is a KeyError."""
    return re.sub(
        r"(<!-- begin ([\w ]+) -->\n).*?(<!-- end \2 -->)", lambda m: f"{m[1]}{PARTS[m[2]]()}\n{m[3]}", text, flags=re.DOTALL
    )


def main(check: bool) -> int:
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = current(old)
        if new != old:
            stale.append(page.name)
            if not check:
                page.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'not current (run python docs/gen_pages.py)' if check else 'written'}: {', '.join(stale)}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
