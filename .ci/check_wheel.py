"""Fails unless the wheel given as argument holds every module and template of the checkout, the compiled part, and nothing else of it."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
expected = {p.relative_to(root).as_posix() for p in (root / "graphdnn").rglob("*") if p.suffix in {".py", ".pyi"} or p.name == "py.typed"}
templates = root / "codegen_templates"
expected |= {f"graphdnn/codegen_templates/{p.relative_to(templates).as_posix()}" for p in templates.rglob("*") if p.suffix in {".j2", ".md", ".py"}}
if shutil.which("cc"):  # without a C compiler the package is Python alone
    expected.add("graphdnn/_native.abi3.so")
found = {n for n in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in n}
if expected != found:
    sys.exit(f"wheel differs from the checkout: missing {sorted(expected - found)}, unexpected {sorted(found - expected)}")
print(f"wheel holds {len(found)} files, {sum(n.endswith('.j2') for n in found)} templates")
