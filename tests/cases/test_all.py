"""Every case has tests that say its id: ``test_<id>_...`` in this folder."""

from __future__ import annotations

import re
from pathlib import Path

CASES = """L1 L3 L4 L6 L7 L10 L11 L13 L14 L15 N1 N3 N4 N6 N8 N10 N11 N13 N15 B2 B3 B4 U1 U2 U4 U5 U6 U7 U9 U10 U11 C1 C3 C4 C6 C8 C9 D1 D3 D6 P1 P2 P3
P4 I1 I2 I3 I4""".split()


def test_every_case_has_a_test():
    text = "\n".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_*.py"))
    named = {n for name in re.findall(r"^def test_((?:[A-Z]\d+_)+)", text, re.MULTILINE) for n in name.strip("_").split("_")}
    assert set(CASES) == named
