"""From an operation graph's region to kernel text.

access.py    which element of which input a movement op's output element is
tape.py      single-assignment programs, built back from the values a kernel needs
dialect.py   spelling: literals, conversions, index expressions
body.py      prints tapes and collects a kernel's parameters
spec.py      KernelSpec and the launch recipe: all that templates and targets see
recipes.py   recipes with buffers and kernel numbers changed
render.py    KernelSpec + template -> Source
"""
