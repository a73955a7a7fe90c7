"""``graphdnn bench``: how long plans take beside what else computes the same. ``common``: rounds, checks, the JSON file. ``matmul``: fused matmuls
beside cuDNN and torch on a CUDA GPU. ``cpu``: a table of cases (``cpu_cases``) beside torch eager on the CPU.

Every contender computes the same thing on the same random data, its outputs are compared with arithmetic of more bits, and the contenders take turns,
round after round, because clocks move and machines are shared: the ratio of two times of one run means something, a time alone does not.
"""
