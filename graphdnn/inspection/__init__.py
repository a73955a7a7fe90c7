"""Looking at a graph and its plan: explain.py (kernels, traffic, operations, choices, reasons), draw.py (pictures; picture.py lays them
out), check.py (a plan on random inputs against the reference)."""
