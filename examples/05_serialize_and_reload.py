"""A plan built by one process, saved to a file and executed by another, which compiles nothing.

    python examples/05_serialize_and_reload.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import graphdnn
from graphdnn import data_type, heur_mode

X_UID, SHIFT_UID, Y_UID = 1, 2, 3
SHAPE = (3, 5, 70)


def save(file: Path) -> None:
    """Build y = swish(x) + shift and write the plan."""
    g = graphdnn.pygraph(io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT, device="cpu")
    x = g.tensor(dim=SHAPE, layout="row", name="x", uid=X_UID)
    shift = g.tensor(dim=(1, 5, 1), layout="row", name="shift", uid=SHIFT_UID)
    g.add(g.swish(x), shift).set_uid(Y_UID).set_output(True)
    g.build([heur_mode.A])
    file.write_bytes(bytes(g.serialize()))
    print(f"saved    {file.name}, {file.stat().st_size} bytes, by process 1")


def load(file: Path) -> None:
    """Execute the plan of a file. Only uids address its tensors: the tensor objects stayed in the other process."""
    start = time.perf_counter()
    g = graphdnn.pygraph(device="cpu")
    g.deserialize(file.read_bytes())
    seconds = time.perf_counter() - start
    rng = np.random.default_rng(5)
    x, shift = rng.standard_normal(SHAPE, dtype=np.float32), rng.standard_normal((1, 5, 1), dtype=np.float32)
    y = np.full(SHAPE, np.nan, np.float32)
    g.execute({X_UID: x, SHIFT_UID: shift, Y_UID: y}, np.empty(g.get_workspace_size(), np.uint8))
    wide = x.astype(np.float64)
    error = np.abs(y - (wide / (1 + np.exp(-wide)) + shift)).max()
    assert error < 1e-6, error
    numba = "imported" if "numba" in sys.modules else "not imported"
    print(f"loaded   in {seconds:.3f} s by process 2, numba {numba}, error against float64 {error:.1e}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        load(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "swish.plan"
            save(path)
            sys.stdout.flush()
            subprocess.run([sys.executable, __file__, str(path)], check=True)
