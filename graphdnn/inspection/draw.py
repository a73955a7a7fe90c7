"""Pictures of a graph: SVG, PNG, DOT or Mermaid. Fusion groups are coloured, virtual tensors dashed, dims and data types stand on the arrows.

DOT and Mermaid are text; SVG is laid out here, so it always works. PNG needs a renderer: resvg-py (the ``viz`` extra), cairosvg, or graphviz's
``dot``.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from xml.sax.saxutils import escape

from graphdnn.errors import BuildError, ValidationError, explain
from graphdnn.inspection.picture import LINE, MARGIN, Arrow, Box, Picture, colour, layout, picture
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Partition
from graphdnn.plans import container

FORMATS = ("svg", "png", "dot", "mermaid")
_SUFFIXES = {".svg": "svg", ".png": "png", ".dot": "dot", ".gv": "dot", ".mmd": "mermaid", ".mermaid": "mermaid"}
_FONT = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12"'


def draw(
    graph: OperationGraph,
    partition: Partition | None = None,
    path: str | PathLike[str] | None = None,
    format: str | None = None,
    engines: Sequence[str] = (),
) -> str | bytes:
    """The picture as text (bytes for PNG), also written to ``path`` if there is one.

    ``format``: "svg", "png", "dot" or "mermaid"; default by the suffix of ``path``, else "svg". ``engines``: name of the engine of each region.
    Raises ValidationError for an unknown format, BuildError for PNG without a renderer, SerializationError for a file that cannot be written.
    """
    kind = (format or _SUFFIXES.get(Path(path).suffix.lower() if path is not None else ".svg") or str(path)).lower()
    if kind not in FORMATS:
        raise ValidationError(
            explain("unknown picture format", expected=f"{', '.join(FORMATS)}, or a file name with such a suffix", found=repr(kind))
        )
    p = picture(graph, partition, engines)
    text: str | bytes = _mermaid(p) if kind == "mermaid" else _dot(p) if kind == "dot" else _svg(layout(p))
    if kind == "png":
        text = _png(str(text), p)
    if path is not None:
        container.write(Path(path), text if isinstance(text, bytes) else text.encode())
    return text


# ---------------------------------------------------------------------------------------------------------------------------------------- DOT
def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _dot(p: Picture) -> str:
    lines = [
        f"digraph {_quote(p.title)} {{",
        '  node [fontname="monospace" fontsize=11 style=filled fillcolor=white]',
        '  edge [fontname="monospace" fontsize=9]',
    ]
    for g, text in enumerate(p.groups):
        lines += [f"  subgraph cluster_r{g} {{", f"    label={_quote(text)} style=filled color={_quote(colour(g))}"]
        lines += [f"    {_dot_box(b)}" for b in p.boxes.values() if b.group == g and not b.tensor]
        lines.append("  }")
    lines += [f"  {_dot_box(b)}" for b in p.boxes.values() if b.tensor or b.group < 0]
    for a in p.arrows:
        style = " style=dashed" if a.dashed else ""
        lines.append(f"  {a.start} -> {a.end} [label={_quote(a.text)}{style}]")
    return "\n".join([*lines, "}", ""])


def _dot_box(b: Box) -> str:
    return f"{b.key} [label={_quote(chr(10).join(b.lines))} shape={'ellipse' if b.tensor else 'box'}]"


# ------------------------------------------------------------------------------------------------------------------------------------ Mermaid
def _mermaid(p: Picture) -> str:
    lines = ["flowchart TD"]
    for g, text in enumerate(p.groups):
        lines.append(f"  subgraph r{g}[{_mermaid_text(text)}]")
        lines += [f"    {_mermaid_box(b)}" for b in p.boxes.values() if b.group == g and not b.tensor]
        lines += ["  end", f"  style r{g} fill:{colour(g)}"]
    lines += [f"  {_mermaid_box(b)}" for b in p.boxes.values() if b.tensor or b.group < 0]
    lines += [f"  {a.start} {'-.->' if a.dashed else '-->'}|{_mermaid_text(a.text)}| {a.end}" for a in p.arrows]
    return "\n".join([*lines, ""])


def _mermaid_text(text: str) -> str:
    return '"' + text.replace('"', "#quot;").replace("\n", "<br/>") + '"'


def _mermaid_box(b: Box) -> str:
    text = _mermaid_text("\n".join(b.lines))
    return f"{b.key}([{text}])" if b.tensor else f"{b.key}[{text}]"


# ---------------------------------------------------------------------------------------------------------------------------------------- SVG
def _svg(p: Picture) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{p.width:.0f}" height="{p.height:.0f}" viewBox="0 0 {p.width:.0f} {p.height:.0f}">',
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto-start-reverse'>"
        "<path d='M0,0 L8,4 L0,8 z' fill='#444'/></marker></defs>",
        f'<rect width="100%" height="100%" fill="white"/><g {_FONT}>',
        f'<text x="{MARGIN}" y="{MARGIN}" font-weight="bold">{escape(p.title)}</text>',
    ]
    for g, text in enumerate(p.groups):
        y = MARGIN + LINE * (g + 1)
        lines.append(f'<rect x="{MARGIN}" y="{y - 10:.0f}" width="24" height="12" fill="{colour(g)}" stroke="#888"/>')
        lines.append(f'<text x="{MARGIN + 32}" y="{y:.0f}">{escape(text)}</text>')
    lines += [_svg_arrow(p, a) for a in p.arrows]
    lines += [_svg_label(b) if b.stop else _svg_box(b) for b in p.boxes.values() if b.lines]
    return "\n".join([*lines, "</g></svg>", ""])


def _svg_box(b: Box) -> str:
    x, y, radius = b.x - b.width / 2, b.y - b.height / 2, b.height / 2 if b.tensor else 4
    fill = "#f6f6f6" if b.tensor else colour(b.group)
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{b.width:.1f}" height="{b.height:.1f}" rx="{radius:.1f}" fill="{fill}" stroke="#444"/>'
    top = b.y - LINE * (len(b.lines) - 1) / 2 + 4
    bold = [' font-weight="bold"' if i == 0 and not b.tensor else "" for i in range(len(b.lines))]
    at = f'<text x="{b.x:.1f}" text-anchor="middle"'
    text = "".join(f'{at} y="{top + LINE * i:.1f}"{bold[i]}>{escape(t)}</text>' for i, t in enumerate(b.lines))
    return f"<g><title>{escape(' '.join(b.lines))}</title>{shape}{text}</g>"


def _svg_label(b: Box) -> str:
    halo = 'stroke="white" stroke-width="4" paint-order="stroke"'
    return f'<text x="{b.x:.1f}" y="{b.y + 4:.1f}" text-anchor="middle" font-size="10" {halo}>{escape(b.lines[0])}</text>'


def _path(p: Picture, a: Arrow) -> list[tuple[float, float]]:
    start, end = p.boxes[a.start], p.boxes[a.end]
    stops = [(p.boxes[s].x, p.boxes[s].y) for s in a.stops]
    return [(start.x, start.y + start.height / 2), *stops, (end.x, end.y - end.height / 2)]


def _svg_arrow(p: Picture, a: Arrow) -> str:
    points = _path(p, a)
    d = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        bend = (y1 - y0) / 2
        d += f" C{x0:.1f},{y0 + bend:.1f} {x1:.1f},{y1 - bend:.1f} {x1:.1f},{y1:.1f}"
    dash = ' stroke-dasharray="5,4"' if a.dashed else ""
    return f'<path d="{d}" fill="none" stroke="{"#c0504d" if a.stored else "#444"}"{dash} marker-end="url(#head)"/>'


# ---------------------------------------------------------------------------------------------------------------------------------------- PNG
def _png(svg: str, p: Picture) -> bytes:
    if find_spec("resvg_py"):
        return bytes(import_module("resvg_py").svg_to_bytes(svg_string=svg))
    if find_spec("cairosvg"):
        return bytes(import_module("cairosvg").svg2png(bytestring=svg.encode()))
    tool = shutil.which("dot")
    if tool is None:
        raise BuildError(
            explain(
                "a PNG picture needs a renderer",
                expected="package resvg-py or cairosvg, or graphviz's dot on PATH",
                found="none of them",
                fix="pip install 'graphdnn[viz]', or draw an SVG, which needs nothing",
            )
        )
    done = subprocess.run([tool, "-Tpng"], input=_dot(p).encode(), capture_output=True, check=False)
    if done.returncode or not done.stdout:
        raise BuildError(explain("graphviz's dot failed", found=done.stderr.decode(errors="replace").strip()[:500], fix="draw an SVG"))
    return done.stdout
