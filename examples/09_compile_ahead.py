"""One plan file for two kinds of GPU and for this CPU, built on a machine that need have no GPU, and run in a process that cannot import numba.

    pip install "graphdnn[cu13]" && python examples/09_compile_ahead.py [plan file]

On a machine with a GPU of compute capability 8.x or 9.0, ``graphdnn run FILE`` takes the plan for that GPU from the same file.
"""

import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import graphdnn
from graphdnn import data_type

ROWS, K, COLUMNS = 48, 96, 80
A, B, BIAS, Y = 1, 2, 3, 4


def build(file: Path) -> None:
    """y = gelu(a @ b + bias), compiled for three architectures. What compiles has numba; no driver is asked."""
    f32 = data_type.FLOAT
    g = graphdnn.pygraph(io_data_type=f32, intermediate_data_type=f32, compute_data_type=f32)
    a = g.tensor(dim=(1, ROWS, K), layout="row", name="a", uid=A)
    b = g.tensor(dim=(1, K, COLUMNS), layout="row", name="b", uid=B)
    bias = g.tensor(dim=(1, 1, COLUMNS), layout="row", name="bias", uid=BIAS)
    g.gelu(g.add(g.matmul(a, b), bias)).set_output(True).set_uid(Y).set_name("y")
    file.write_bytes(graphdnn.compile_for(g, ["sm_80", "sm_90a", "cpu"]))
    print(f"built    {file.name}, {file.stat().st_size} bytes, by process 1")


def run(file: Path) -> None:
    """Load and execute. A plan for a GPU needs the driver alone, one for a CPU llvmlite; a CPU other than process 1's would compile again."""
    sys.modules["numba"] = sys.modules["numba_cuda"] = None  # type: ignore[assignment]  # "import numba" is an ImportError from here on
    g = graphdnn.pygraph(device="cpu")
    g.deserialize(file.read_bytes())
    rng = np.random.default_rng(9)
    a, b, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((1, ROWS, K), (1, K, COLUMNS), (1, 1, COLUMNS)))
    y = np.full((1, ROWS, COLUMNS), np.nan, np.float32)
    g.execute({A: a, B: b, BIAS: bias, Y: y}, np.empty(g.get_workspace_size(), np.uint8))
    z = a.astype(np.float64) @ b.astype(np.float64) + bias
    error = np.abs(y - z * 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))).max()
    assert error < 1e-4, error
    print(f"loaded   by process 2, which cannot import numba; error against float64 {error:.1e}")


def main(file: Path) -> None:
    build(file)
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, "run", str(file)], check=True)
    subprocess.run([sys.executable, "-m", "graphdnn", "inspect", str(file)], check=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(Path(sys.argv[2]))
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "plan.gdnn")
