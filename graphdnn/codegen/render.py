"""Renders a KernelSpec with its template. Templates are holes only: StrictUndefined, no arithmetic; every line they print is finished."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphdnn.codegen.spec import KernelSpec, Source

if TYPE_CHECKING:
    import jinja2


@functools.cache
def template_folder() -> Path:
    """Where the templates are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "codegen_templates", package.parent / "codegen_templates"):
        if (folder / "README.md").is_file() or (folder / "cpu").is_dir():
            return folder
    raise FileNotFoundError(f"codegen_templates is neither in {package} nor beside it: the installation is incomplete; reinstall graphdnn")


@functools.cache
def digest() -> str:
    """SHA-256 of every template: part of the cache key."""
    total = hashlib.sha256()
    for path in sorted(template_folder().rglob("*.j2")):
        total.update(path.relative_to(template_folder()).as_posix().encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _at(lines: Sequence[str], column: int) -> str:
    """Filter: ``lines`` one below the other at ``column``; an empty list leaves ``pass``-free nothing."""
    return "\n".join(" " * column + line for line in lines)


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    env.filters["at"] = _at
    return env


def render(spec: KernelSpec) -> Source:
    """The text of one kernel module."""
    own = {
        "name": spec.name,
        "params": [p.name for p in spec.params],
        "block": spec.block,
        "shared_bytes": spec.shared_bytes,
        "cluster": spec.cluster,
        "offsets": {p.name: p.offset for p in spec.shared},
        "registers": {r.name: r.registers for r in spec.roles},
    }
    text = _environment().get_template(spec.template).render(own | spec.fields)
    taken = _assigned(text) & {p.name for p in spec.params}
    if taken:
        raise ValueError(f"template {spec.template} assigns {sorted(taken)}, which are parameters of '{spec.name}'")
    lines = (line.rstrip() for line in text.splitlines())
    return Source(spec, "\n".join(line for line in lines if line) + "\n")


def _assigned(text: str) -> set[str]:
    """Plain names that ``text`` assigns, adds to, or loops over."""
    return set(re.findall(r"(?m)^\s*(?:for )?(\w+) (?:[-+*/|&^]?=|in) ", text))
