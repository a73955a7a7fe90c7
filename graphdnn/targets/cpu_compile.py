"""From rendered kernel text to object code: numba types and lowers the text, LLVM optimizes it for this CPU.

This is ``numba.cfunc`` without its wrapper. Ours has a stable symbol and takes one block of 8-byte argument slots, so a call costs the same for any
number of parameters; it claims chunks of items from a counter that threads share; and it returns numba's status instead of printing it, so the object
refers to no Python API and loads without numba.
"""

from __future__ import annotations

import linecache
import re
from itertools import combinations
from typing import Any

from graphdnn.codegen.spec import DescriptorParam, PointerParam, Source
from graphdnn.errors import BuildError, explain
from graphdnn.targets.base import paused_collector
from graphdnn.targets.cpu_object import ObjectCode, host_cpu, host_key

CHECKED_PAIRS = 8
"""LLVM tests at most so many pointer pairs for overlap before a vector loop; beyond that it would leave the loop scalar."""

_VECTOR = re.compile(r"<\d+ x (?:float|double|i8|i16|i32|i64)>")


def compile_object(source: Source, namespace: dict[str, Any]) -> tuple[ObjectCode, str]:
    """Object code of ``source`` executed in ``namespace`` (the CPU intrinsics), and its optimized LLVM text. Raises BuildError."""
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.errors import NumbaError

    filename = f"<graphdnn {source.entry}>"
    # Tracebacks and numba's messages read the lines from here; kept only for kernels that failed.
    linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    try:
        exec(compile(source.text, filename, "exec"), namespace)
        with global_compiler_lock, paused_collector():
            module, native = _lower(namespace[source.entry], source)
            _add_entry(module, native, source)
            image, text = _optimize(module, slp=not str(source.spec.fields.get("calc", "")).startswith("int"))
    except (NumbaError, SyntaxError, KeyError, NameError, NotImplementedError) as error:
        raise _failed("numba cannot compile the generated kernel", source, error, "report it with the text of plan.source") from error
    except (AttributeError, ImportError) as error:
        raise _failed("this version of numba lacks what the CPU target needs", source, error, "install numba 0.62 or newer") from error
    linecache.cache.pop(filename, None)  # another thread may have compiled the same kernel
    symbols = _external(module, source)
    return ObjectCode(source.entry, symbols, host_key(), image), text


def _failed(rule: str, source: Source, error: Exception, fix: str) -> BuildError:
    return BuildError(explain(rule, node=source.entry, found=f"{type(error).__name__}: {error}", fix=fix))


def _lower(function: Any, source: Source) -> tuple[Any, str]:
    """(LLVM module, name of numba's native function) of a Python function; not yet optimized. Holds numba's compiler lock."""
    import numba.core.types
    from numba.core.compiler import Flags, compile_extra
    from numba.core.registry import cpu_target

    types: Any = numba.core.types
    arguments = [types.int64, types.int64]
    for param in source.spec.params:
        assert not isinstance(param, DescriptorParam), f"{source.entry}: a CPU kernel has no TMA descriptor"
        arguments.append(types.CPointer(getattr(types, param.storage)) if isinstance(param, PointerParam) else getattr(types, param.type))
    flags = Flags()
    cpu_target.options.parse_as_flags(flags, {"nopython": True, "error_model": "numpy"})
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    result = compile_extra(cpu_target.typing_context, cpu_target.target_context, function, tuple(arguments), types.void, flags, {})
    module = result.library._final_module
    for library in result.library._linking_libraries:
        module.link_in(library._get_module_for_linking(), preserve=True)
    return module, result.fndesc.llvm_func_name


_ENTRY = """
{declare}
define private i32 @items(i64 %lo, i64 %hi, ptr %block) {{
  %ret = alloca ptr
  %exc = alloca ptr
  {load}
}}
define i32 @{entry}(i64 %lo, i64 %hi, ptr %block, i64 %chunk, ptr %counter) {{
  %alone = icmp eq ptr %counter, null
  br i1 %alone, label %all, label %claim
all:
  %sa = call i32 @items(i64 %lo, i64 %hi, ptr %block) noinline
  ret i32 %sa
claim:
  %ticket = atomicrmw add ptr %counter, i64 1 monotonic
  %skip = mul i64 %ticket, %chunk
  %start = add i64 %lo, %skip
  %more = icmp slt i64 %start, %hi
  br i1 %more, label %run, label %out
run:
  %next = add i64 %start, %chunk
  %within = icmp slt i64 %next, %hi
  %end = select i1 %within, i64 %next, i64 %hi
  %sc = call i32 @items(i64 %start, i64 %end, ptr %block) noinline
  %good = icmp eq i32 %sc, 0
  br i1 %good, label %claim, label %bad
bad:
  ret i32 %sc
out:
  ret i32 0
}}
"""


def _add_entry(module: Any, native: str, source: Source) -> None:
    """Add the entry of type ``cpu_object.PROTOTYPE``, which reads the parameters from the block and calls the native function on chunks.

    A kernel with more pointer pairs than LLVM tests gets a second body whose pointers are declared not to alias, taken where no written pointer
    equals another: overlap that is not identity was refused when the buffers were bound.
    """
    import llvmlite.binding as llvm

    types = [str(argument.type) for argument in module.get_function(native).arguments]
    pairs = [
        (i, j)
        for (i, a), (j, b) in combinations(enumerate(source.spec.params), 2)
        if isinstance(a, PointerParam) and isinstance(b, PointerParam) and (a.written or b.written)
    ]
    load = [f"%s{i} = getelementptr i64, ptr %block, i64 {i}\n  %a{i} = load {kind}, ptr %s{i}" for i, kind in enumerate(types[4:])]
    actual = "".join(f", {kind} %a{i}" for i, kind in enumerate(types[4:]))
    call = f"call i32 @{{}}({types[0]} %ret, {types[1]} %exc, i64 %lo, i64 %hi{actual})"
    names = [native]
    if len(pairs) > CHECKED_PAIRS:
        names.append(f"{native}.disjoint")
        module.link_in(_disjoint_body(module, native))
        load += [f"%e{n} = icmp eq ptr %a{i}, %a{j}" for n, (i, j) in enumerate(pairs)]
        load += [f"%o{n} = or i1 %{f'o{n - 1}' if n > 1 else 'e0'}, %e{n}" for n in range(1, len(pairs))]
        load += [f"br i1 %o{len(pairs) - 1}, label %shared, label %disjoint"]
        load += ["\ndisjoint:", f"%sd = {call.format(names[1])}", "ret i32 %sd", "\nshared:"]
    load += [f"%st = {call.format(native)}", "ret i32 %st"]
    declare = "\n".join(f"declare i32 @{name}({', '.join(types)})" for name in names)
    entry = llvm.parse_assembly(_ENTRY.format(declare=declare, load="\n  ".join(load), entry=source.entry))
    entry.triple, entry.data_layout = module.triple, module.data_layout
    module.link_in(entry)
    for name in names:
        module.get_function(name).linkage = "private"
    module.verify()


def _disjoint_body(module: Any, native: str) -> Any:
    """A module with a copy of the native function, named ``<native>.disjoint``, whose pointers are all ``noalias``."""
    import llvmlite.binding as llvm

    text = str(module)
    quoted = re.escape(native)
    head = re.search(rf"^define [^\n]*@{quoted}\(.*$", text, re.MULTILINE)
    assert head is not None, f"no definition of {native} in its own module"
    end = text.index("\n}", head.end())
    definition = re.sub(r"\bptr (?=(?:[a-z]+(?:\([a-z]+\))? )*%arg\.)", "ptr noalias ", head.group()) + text[head.end() : end]
    copy = text[: head.start()] + definition.replace(f"@{native}(", f"@{native}.disjoint(", 1) + text[end:]
    other = llvm.parse_assembly(copy)
    for function in other.functions:
        if not function.is_declaration and function.name != f"{native}.disjoint":
            function.linkage = "linkonce_odr"
    return other


def _optimize(module: Any, slp: bool) -> tuple[bytes, str]:
    """Run LLVM's -O3 for this CPU; object code and optimized text. ``slp``: with the SLP vectorizer, which in LLVM 20 fails an assertion (and so ends
    the process) on sums of many integer products that were unrolled over a few elements; such kernels gain nothing from it."""
    import llvmlite.binding as llvm

    triple, name, features = host_cpu()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Large code model and static relocation, as numba's own JIT: code and data of one object may lie anywhere.
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=name, features=features, opt=3, reloc="static" if triple.startswith("x86") else "default", codemodel="jitdefault", jit=True
    )
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.loop_interleaving = options.loop_unrolling = True
    options.slp_vectorization = slp
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module), str(module)


def _external(module: Any, source: Source) -> tuple[str, ...]:
    """Names of the functions that the object calls outside. Raises BuildError for an address of this process baked into the code."""
    bound = [variable.name for variable in module.global_variables if variable.name.startswith("numba.dynamic.globals")]
    if bound:
        rule = "a generated kernel refers to an object of this process"
        raise BuildError(explain(rule, node=source.entry, expected="only functions of libm", found=bound[0]))
    return tuple(sorted(f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")))


def is_vectorized(text: str) -> bool:
    """Whether optimized LLVM text has vector instructions."""
    return _VECTOR.search(text) is not None
