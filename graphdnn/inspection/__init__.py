"""Looking at a graph and its plan: explain.py (kernels, traffic, operations, choices, reasons), draw.py (pictures)."""
