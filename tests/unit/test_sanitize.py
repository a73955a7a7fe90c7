"""What tests/gpu/sanitize.py reads from the logs of compute-sanitizer."""

from __future__ import annotations

from pathlib import Path

from tests.gpu import sanitize

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at add_relu_12ab(float *, float *)+0x1a0
=========     by thread (3,0,0) in block (0,0,0)
=========     Access to 0x7f0240 is out of bounds
=========     and is 65 bytes after the nearest allocation at 0x7f0000 of size 512 bytes
=========
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuFoo.
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sum_9(float *)+0x300
=========     and Read access at sum_9(float *)+0xb0 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_messages_and_summaries(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(MEMCHECK)
    found = sanitize.read_log(path)
    assert found.total == 2
    assert [text for text, _ in found.heads] == [
        "Invalid __global__ write of size 4 bytes at add_relu_12ab(float *, float *)+0x1a0",
        'Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuFoo.',
    ]
    assert MEMCHECK[found.heads[0][1] :].startswith("========= Invalid")
    path.write_text(RACECHECK)
    found = sanitize.read_log(path)
    assert found.total == 1 and len(found.heads) == 1
    assert (
        sanitize.alike(found.heads[0][0]) == "Error: Race reported between Write access at sum_9(float *)+0x.. and Read access at sum_9(float *)+0x.."
    )


def test_a_log_that_was_cut_off_has_no_summary(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(MEMCHECK[: MEMCHECK.index("========= ERROR SUMMARY")])
    found = sanitize.read_log(path)
    assert found.total is None and len(found.heads) == 2
    assert sanitize.read_log(tmp_path / "none").total is None
