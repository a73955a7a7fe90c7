"""Forms of kernels (codegen/parametric.py) as JSON values and back: the part of a kernel cache that lets graphs of other sizes share its kernels."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from graphdnn.codegen.parametric import Form, Forms
from graphdnn.plans import codec


def dump(forms: Forms) -> dict[str, Any]:
    """All forms and the shapes seen, with a checksum: a kernel is printed from a form, so damage must not go unseen."""
    content = {
        "forms": {key: codec.encode(form) for key, form in forms.forms.items()},
        "shapes": {digest: [key, list(numbers)] for digest, (key, numbers) in forms.shapes.items() if key in forms.forms},
    }
    return content | {"sha256": _digest(content)}


def load(stored: Any) -> Forms:
    """What :func:`dump` wrote. ValueError, TypeError, KeyError or SerializationError for anything else."""
    content = {"forms": stored["forms"], "shapes": stored["shapes"]}
    if stored["sha256"] != _digest(content):
        raise ValueError("the checksum of the forms does not fit")
    forms = {str(key): codec.decode(Form, value, "form") for key, value in content["forms"].items()}
    return Forms(forms, {str(d): (str(key), tuple(map(str, numbers))) for d, (key, numbers) in content["shapes"].items()})


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
