# Printed by graphdnn/frontend/stubgen.py; do not edit.
from graphdnn._enum import ApiEnum

class reduction_mode(ApiEnum):
    """What a reduction calculates."""

    NOT_SET = 0
    ADD = 1
    MUL = 2
    MIN = 3
    MAX = 4
    AMAX = 5
    AVG = 6
    NORM1 = 7
    NORM2 = 8
    MUL_NO_ZEROS = 9
