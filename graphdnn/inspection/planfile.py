"""What is in a plan file: versions, devices, graph, engines and knobs, launch recipe, kernels with their resources, and on request their texts.

Reads only: no driver is asked but for the line that says which plan would be loaded here, nothing is linked, loaded or executed, and no compiler
is needed (machine code as text needs cuobjdump).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn import device as devices
from graphdnn.codegen.spec import Arg, Buffer, Constant, Groups, Launch, Memset, Packed, Panels, Places, Recipe, Step, TensorMap
from graphdnn.errors import GraphError, SerializationError, explain
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor
from graphdnn.plans import bundle, codec, pieces, pipeline_file, serialize
from graphdnn.plans.cache import Kernel
from graphdnn.plans.plan import ExecutionPlan

TEXTS = {"source": "generated Python", "ptx": "PTX (CUDA)", "llvm": "LLVM text (CPU)", "sass": "machine code as text (CUDA; needs cuobjdump)"}
"""Texts of kernels that can be asked for."""


@dataclass(frozen=True)
class Contents:
    """The report: ``print`` it, or take ``data`` (JSON values)."""

    data: dict[str, Any]

    def __str__(self) -> str:
        d = self.data
        head = f"{d['bytes']} bytes, sha256 {d['sha256']}"
        if "stages" in d:
            lines = [f"{head}, pipeline '{d['pipeline']}' of {_count(len(d['stages']), 'stage')}"]
            for number, row in enumerate(d["stages"]):
                names = ", ".join(f"{uid} is {buffer}" for uid, buffer in row["names"].items())
                lines += ["", f"stage {number}: {names}", str(Contents(row["file"]))]
            return "\n".join(lines)
        lines = [f"{head}, {_count(len(d['plans']), 'plan')}; {d['here']}"]
        lines += _graph_lines(d["graph"])
        for plan in d["plans"]:
            lines += _plan_lines(plan)
        return "\n".join(lines)


def inspect(data: bytes, texts: Sequence[str] = ()) -> Contents:
    """All that a plan file holds, or the file of a pipeline: the same for each of its stages. ``texts``: those of TEXTS that each kernel should have.
    SerializationError for what is no whole file of this version; BuildError where machine code should be shown and there is no cuobjdump."""
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    try:
        if data[: len(pipeline_file.MAGIC)] == pipeline_file.MAGIC:
            name, stages, keep = pipeline_file.parts(data, serialize.running(None))
            rows = [{"names": names, "file": inspect(file, texts).data} for names, file in stages]
            return Contents(facts | {"pipeline": name, "keep": keep, "stages": rows})
        plans = [(len(part), *serialize.read(part)) for part in serialize.parts(data)]
        shown = [_plan(size, plan, versions, texts) for size, plan, versions in plans]
        return Contents(facts | {"here": _here(data), "graph": _graph(plans[0][1].graph), "plans": shown})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:  # sealed, but not by us
        raise SerializationError(explain("the stored plan is malformed", found=f"{type(error).__name__}: {str(error)[:100]}")) from error


def _here(data: bytes) -> str:
    """Which plan would be loaded by a graph that says nothing of a device."""
    try:
        here = devices.current_default()
        plan, _ = serialize.read(bundle.pick(data, here)[0] if serialize.is_bundle(data) else data)
        reason = pieces.unfit(plan.device.kind, plan.device.arch, max((k.shared_bytes for k in plan.kernels), default=0), here)
    except GraphError as error:
        return f"none of them is loaded here: {error}"
    place = f"{here.text} ({here.name})"
    return f"not loaded on {place}: {reason}" if reason else f"on {place} the one for {plan.device.arch} is loaded"


# ------------------------------------------------------------------------------------------------------------------------------------------ data
def _graph(graph: OperationGraph) -> dict[str, Any]:
    names = [t.name for t in graph.tensors]
    return {
        "name": graph.name,
        "tensors": [_tensor(graph, i, t) for i, t in enumerate(graph.tensors)],
        "nodes": [
            {
                "op": n.op,
                "name": n.name,
                "inputs": {p: names[t] for p, t in n.inputs},
                "outputs": {p: names[t] for p, t in n.outputs},
                "attrs": codec.encode(dict(n.attrs)),
                "compute": n.compute.name,
            }
            for n in graph.nodes
        ],
    }


def _tensor(graph: OperationGraph, i: int, t: Tensor) -> dict[str, Any]:
    role = "virtual" if t.virtual else "constant" if t.constant else "by value" if t.by_value else "output" if i in graph.outputs else "input"
    facts = {"uid": t.uid, "name": t.name, "role": role, "dtype": t.dtype.name, "dim": list(t.dim), "stride": list(t.stride)}
    return facts | ({"value": t.value} if t.value is not None else {"alignment": t.alignment})


def _plan(size: int, plan: ExecutionPlan, versions: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    nodes, kernels = plan.graph.nodes, plan.kernels
    return {
        "device": {"kind": plan.device.kind, "arch": plan.device.arch, "name": plan.device.name, "sm_count": plan.device.sm_count},
        "versions": versions,
        "bytes": size,
        "name": plan.name,
        "estimate_s": plan.cost,
        "numeric_notes": list(plan.numeric_notes),
        "workspace_bytes": plan.workspace_bytes,
        "regions": [
            {
                "engine": c.name,
                "engine_id": c.engine,
                "kernel_cfg": c.index,
                "knobs": c.knobs,
                "nodes": [nodes[n].label for n in r.nodes],
                "kernels": [kernels[k].name for k in owned],
            }
            for r, c, owned in zip(plan.partition.regions, plan.choices, plan.region_kernels, strict=True)
        ],
        "steps": [{"text": step_text(plan.graph, plan.recipe, s)} | codec.encode(s) for s in plan.recipe.steps],
        "kernels": [_kernel(k) | _texts(k, plan.device.kind, texts) for k in kernels],
    }


def _kernel(k: Kernel) -> dict[str, Any]:
    params = [{"name": p.name, "is": type(p).__name__.removesuffix("Param").lower()} for p in k.spec.params]
    facts = {"name": k.name, "template": k.spec.template, "block": k.spec.block, "cluster": k.spec.cluster, "params": params, "key": k.key}
    return facts | {"code_bytes": len(k.binary.code), "source_bytes": len(k.source.encode())} | k.binary.facts


def _texts(k: Kernel, kind: str, wanted: Sequence[str]) -> dict[str, str]:
    """Of the texts that are wanted those that a kernel of this kind of device has."""
    found = {"source": k.source} | k.binary.texts
    if "sass" in wanted and kind == "cuda":
        from graphdnn.targets import cuda_toolchain

        found["sass"] = cuda_toolchain.disassemble(k.binary.code)
    return {t: found[t] for t in wanted if t in found}


# ------------------------------------------------------------------------------------------------------------------------------------------ text
def step_text(graph: OperationGraph, recipe: Recipe, step: Step) -> str:
    """One line for a step of a recipe."""
    if isinstance(step, Memset):
        return f"memset {_arg(graph, step.buffer)}, {step.nbytes} bytes of {step.value}"
    if isinstance(step, Launch):
        return _launch(graph, recipe, step)
    if isinstance(step, Panels | Groups):
        a, b = (f"{_arg(graph, m.buffer)} {'x'.join(map(str, m.shape))}" for m in (step.a, step.b))
        around = [x for x in (step.pack_a, step.pack_b, step.epilogue) if x is not None]
        return f"BLAS {a} @ {b}, {step.rows} rows a panel; " + "; ".join(_launch(graph, recipe, x) for x in around)
    read = step.starts if isinstance(step, Packed) else step.index if isinstance(step, Places) else step.values
    return f"check {type(step).__name__.lower()} of {read.name}"


def _launch(graph: OperationGraph, recipe: Recipe, step: Launch) -> str:
    spec = recipe.kernels[step.kernel]
    size = f"{step.grid} blocks of {spec.block} threads, {spec.shared_bytes} bytes shared" if spec.block else f"{step.grid} items"
    return f"launch {spec.name}({', '.join(_arg(graph, a) for a in step.args)}), {size}"


def _arg(graph: OperationGraph, arg: Arg) -> str:
    if isinstance(arg, Constant):
        return f"{arg.value}"
    if isinstance(arg, TensorMap):
        return f"map of {_arg(graph, arg.buffer)} in boxes of {'x'.join(map(str, arg.box))}"
    if isinstance(arg, Buffer):
        base = "workspace" if arg.kind == "workspace" else graph.tensors[arg.index].name
        return f"{base}+{arg.offset}" if arg.offset or arg.kind == "workspace" else base
    return f"value of {graph.tensors[arg.index].name}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _graph_lines(graph: dict[str, Any]) -> list[str]:
    lines = [f"graph '{graph['name']}'"]
    for t in graph["tensors"]:
        value = f" = {t['value']}" if "value" in t else ""
        lines.append(f"  {t['role']:8} {t['uid']:>4} {t['name']} {t['dtype']} {t['dim']} strides {t['stride']}{value}")
    for n in graph["nodes"]:
        mode = f".{n['attrs']['mode']}" if isinstance(n["attrs"].get("mode"), str) else ""
        lines.append(f"  {n['op']}{mode} '{n['name']}': {', '.join(n['inputs'].values())} -> {', '.join(n['outputs'].values())}, in {n['compute']}")
    return lines


def _plan_lines(plan: dict[str, Any]) -> list[str]:
    device, versions = plan["device"], plan["versions"]
    lines = [
        "",
        f"plan {plan['name']} for {device['arch']} ({device['name']}), {plan['bytes']} bytes, workspace {plan['workspace_bytes']} bytes",
        f"  graphdnn {versions['graphdnn']}, Python {versions['python']}, {versions['toolchain']}",
    ]
    lines += [f"  notes: {', '.join(plan['numeric_notes'])}"] if plan["numeric_notes"] else []
    for i, r in enumerate(plan["regions"]):
        lines.append(f"  region {i}: {', '.join(r['nodes'])}: engine {r['engine_id']} {r['engine']}, {r['knobs']}")
    lines += [f"  step {i}: {s['text']}" for i, s in enumerate(plan["steps"])]
    for k in plan["kernels"]:
        facts = f"{k['code_bytes']} bytes of code, {k['source_bytes']} of source"
        if "registers" in k:
            facts = f"{k['registers']} registers, {k['shared_bytes']} bytes shared, {k['spill_bytes']} spilled, {facts}"
        lines.append(f"  kernel {k['name']}: {facts}")
        for which in TEXTS:
            lines += [f"  {which} of {k['name']}:", k[which].rstrip()] if which in k else []
    return lines
