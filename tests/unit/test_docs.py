"""The Python of the pages runs as it is written, page by page from the first block to the last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md"] + [
    f"docs/{name}.md"
    for name in (
        "getting_started", "executing", "dynamic_shapes", "ahead_of_time", "autotuning", "cuda_graphs_and_pipelines", "fusion", "attention",
        "coming_from_cudnn",
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHDNN_TUNING_DB", str(tmp_path / "tuning.db"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        if block.startswith(">>> "):
            assert eval(block.splitlines()[0][4:], names) is not None
        else:
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert blocks
