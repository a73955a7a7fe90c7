"""From an operation graph to something that runs.

candidates.py    which partitions, engines and knobs; ranked (heuristics.py); every rejection kept
planset.py       the plans of one graph: filters, custom plans, support check, build
plan.py          one plan: lowered (assemble.py), compiled, loaded, executed, looked into
variant_pack.py  a user's buffers (buffers.py, overlap.py) and numbers (scalars.py), checked, as addresses
cache.py         compiled kernels, in memory and on disk (disk.py)
serialize.py     a built plan as bytes (codec.py: dataclasses as JSON, strictly)
"""
