"""An application that logs everything can still compile."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
logging.basicConfig(level=logging.DEBUG, filename={sink!r})
import graphdnn
g = graphdnn.pygraph(device="sm_80", io_data_type=graphdnn.data_type.FLOAT)
x = g.tensor(dim=(64,), stride=(1,))
g.relu(x).set_output(True)
g.build([graphdnn.heur_mode.A])
print(len(g.plan.kernels))
"""


def test_debug_logging_does_not_break_compilation(tmp_path):
    sink = tmp_path / "log.txt"
    env = {"GRAPHDNN_CACHE": "0", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(sink=str(sink))], capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
    assert "phismap" not in sink.read_text()
