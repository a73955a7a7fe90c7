"""I1 I2 I3 I4: import without torch, editable install, readable reprs, one name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import site
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import numpy as np

import graphdnn
from tests.helpers import built

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
PROGRAM = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "cupy", "cuda", "numba_cuda"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Refuse())
import numpy as np, graphdnn
F = graphdnn.data_type.FLOAT
g = graphdnn.pygraph(device="cpu", io_data_type=F, compute_data_type=F)
a, b = g.tensor(dim=[2, 3], stride=[3, 1]), g.tensor(dim=[3, 4], stride=[4, 1])
y = g.relu(g.matmul(a, b)).set_output(True)
g.build([graphdnn.heur_mode.A])
x, w, out = np.ones((2, 3), np.float32), np.full((3, 4), 2, np.float32), np.zeros((2, 4), np.float32)
g.execute({a: x, b: w, y: out}, np.empty(g.get_workspace_size(), np.uint8))
assert (out == 6).all(), out
print(graphdnn.__file__)
"""


def test_I1_runs_without_torch_or_cuda(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=CLEAN | {"GRAPHDNN_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _build_options() -> list[str]:
    """Build with this environment's setuptools if it is new enough; else pip fetches one."""
    version = importlib.metadata.version("setuptools") if importlib.util.find_spec("setuptools") else "0"
    return ["--no-build-isolation", "--no-index"] if int(version.split(".")[0]) >= 77 else []


def test_I2_editable_install_imports_and_runs(tmp_path):
    """A new venv that sees this one's packages, an editable install of a copy of the checkout, and a run from elsewhere."""
    copy = tmp_path / "checkout"
    ignore = shutil.ignore_patterns(".git", "*.egg-info", "__pycache__", ".*_cache", "build", "dist", "site")
    shutil.copytree(ROOT, copy, ignore=ignore)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    purelib = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv), "platbase": str(venv)}))
    (purelib / "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    python = str(venv / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", *_build_options(), "-e", str(copy)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = CLEAN | {"GRAPHDNN_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([python, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(copy)), "the copy is what was imported"


def test_I3_handle_and_plan_have_a_repr():
    handle = graphdnn.create_handle()
    assert isinstance(handle, int) and handle
    assert "handle" in repr(handle).lower() and "cpu" in repr(handle)
    assert int(repr(handle) != str(int(handle)))
    graphdnn.destroy_handle(handle)
    g = graphdnn.pygraph(device="cpu", io_data_type=np.float32, compute_data_type="float32")
    g.relu(g.tensor(dim=[3], stride=[1])).set_output(True)
    built(g)
    text = repr(g.plan)
    assert text not in ("", "None") and "eng" in text and "cpu" in text


def test_I4_install_name_is_import_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == graphdnn.__name__ == "graphdnn"
