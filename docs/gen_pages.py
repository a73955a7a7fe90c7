"""Prints the parts of the docs that come from the code's own tables: all between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    python docs/gen_pages.py            write
    python docs/gen_pages.py --check    exit 1 if a page is not current
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import graphdnn
from graphdnn import dtypes, env
from graphdnn.engines import ENGINES
from graphdnn.opspecs.pointwise import POINTWISE
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


def formula(expr: str, names: Sequence[str]) -> str:
    """A row's expression as a reader wants it: without the casts of literals, with the method's argument names."""
    expr = re.sub(r"\bT\(([^()]*)\)", r"\1", expr)
    return re.sub(r"\b([abc])\b", lambda m: names["abc".index(m[1])] if "abc".index(m[1]) < len(names) else m[1], expr)


def pointwise() -> str:
    rows = []
    for op in POINTWISE.values():
        attrs = ", ".join(f"{name}={default}" for name, default in op.attrs)
        rows.append([code(f"{op.method}({', '.join(op.args)})"), op.mode, op.doc, code(formula(op.expr, op.args)), code(attrs)])
    return table(["Method", "Mode", "What", "Formula", "Attributes"], rows)


def reductions() -> str:
    rows = []
    for op in REDUCTION.values():
        rows.append([op.mode, op.doc, *(code(formula(text, ["a"])) for text in (op.map, op.combine, op.finalize, op.identity))])
    return table(["Mode", "What", "Each element", "Combined", "At the end", "Starts from"], rows)


def structured() -> str:
    parts = []
    for name in ("matmul", "reduction", "reshape", "transpose", "slice", "concatenate"):
        method = getattr(graphdnn.pygraph, name)
        arguments = ", ".join(str(p) for p in inspect.signature(method).parameters.values() if p.name != "self")
        arguments = re.sub(r": '?[^,=']+(\[[^]]*\])?[^,=']*'?(?= = |,|$)", "", arguments)
        parts.append(f"### {name}\n\n`{name}({arguments})`\n\n{inspect.cleandoc(method.__doc__)}")
    return "\n\n".join(parts)


def switches() -> str:
    rows = []
    for s in env.SWITCHES:
        default = "" if "default" in s.doc else str(s.default())
        rows.append([code(s.name), s.doc, s.allowed, default if default != "None" else "unset", ", ".join(code(a) for a, _ in s.aliases)])
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


def engines() -> str:
    rows = [[str(e.id), code(e.name), (inspect.getdoc(type(e) if not isinstance(e, type) else e) or "").split("\n\n")[0]] for e in ENGINES]
    return table(["Id", "Engine", "What it does"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "pointwise": pointwise,
    "reductions": reductions,
    "structured": structured,
    "switches": switches,
    "api names": api_names,
    "data types": data_types,
    "engines": engines,
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
