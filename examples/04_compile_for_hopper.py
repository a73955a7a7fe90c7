"""Compile for a Hopper GPU on a machine that has none: generated source, PTX, registers, machine code, and a plan in a file.

    pip install "graphdnn[cu13]" && python examples/04_compile_for_hopper.py [plan file]
"""

import re
import sys
import tempfile
from pathlib import Path

import graphdnn
from graphdnn import data_type, heur_mode


def main(file: Path) -> None:
    g = graphdnn.pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT, device="sm_90")
    x = g.tensor(dim=(4096, 4096), layout="row", name="x")
    residual = g.tensor(dim=(4096, 4096), layout="row", name="residual")
    g.relu(g.add(x, residual, name="add"), name="relu").set_output(True).set_name("y")
    g.build([heur_mode.A])

    plan = g.plan
    print(plan.source)
    for kernel in plan.kernels:
        print(f"{kernel.name}: {kernel.registers} registers, {kernel.shared_bytes} bytes of shared memory, {kernel.spill_bytes} bytes spilled")
    target = re.search(r"\.target (\w+)", plan.ptx)
    loads = re.findall(r"ld\.global\S*", plan.ptx)
    print(f"PTX: target {target and target[1]}, {len(plan.ptx.splitlines())} lines, loads: {sorted(set(loads))}")
    # one line an instruction: /*0010*/ @!P0 LDG.E.128 ...
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", plan.sass, re.MULTILINE)
    local, double = (sum(o in names for o in opcodes) for names in (("LDL", "STL"), ("DADD", "DMUL", "DFMA")))
    print(f"SASS: {len(opcodes)} instructions, {local} on local memory, {double} in double precision")

    file.write_bytes(bytes(g.serialize()))
    print(f"plan: {file}, {file.stat().st_size} bytes; a process with a Hopper GPU loads it with deserialize() and needs no compiler for it")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch) / "add_relu.plan")
