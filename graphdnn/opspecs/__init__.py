"""What an op means, independent of any target: ports, attributes, shape rule, checks, NumPy reference.

::

    registry.py    SPECS: JSON tag -> OpSpec, of the modules listed there, imported on first use; spec(tag)
      pointwise.py   the table of pointwise modes (expression in the common dialect, reference beside it) and the POINTWISE op
      reduction.py   the table of reduction modes and the REDUCTION op
      matmul.py      MATMUL
      conv.py        CONV_FPROP, CONV_DGRAD, CONV_WGRAD
      norm.py        LAYER_NORM, RMS_NORM, ADA_LAYER_NORM, INSTANCE_NORM, GROUP_NORM and their gradients; norm_shapes.py: their shapes
      batchnorm.py   BATCHNORM, BATCHNORM_INFERENCE, DBN, GENSTATS, BN_FINALIZE, DBN_WEIGHT
      attention_fp8.py, attention_mxfp8.py   the same on 8-bit floats, expanded
      attention.py   SDPA, SDPA_BWD; attention_rules.py: shapes and types; attention_reference.py: the formulas; attention_bounds.py: their error
                     bounds; attention_parts.py: what these share; score_steps.py: the steps of a score_mod; score_grad.py:
                     their derivatives
      softmax.py     SOFTMAX, LOG_SOFTMAX, LOGSUMEXP and their gradients
      movement.py    RESHAPE, TRANSPOSE, SLICE, CONCATENATE; window.py: WINDOW, which only expansions make
      resample.py    RESAMPLE, RESAMPLE_BPROP; sampling.py: their attributes; resample_steps.py: what they expand to
    shapes.py      rules that ops share: broadcasting, filling in dims and strides, strides that overlap
    evaluate.py    walks an expression of the common dialect over any algebra (arrays, error intervals)
    spans.py       the algebra of error intervals: what float or integer arithmetic of a compute type may give
    folds.py       error intervals of reductions and matrix products
    rounding.py    values <-> data types <-> memory, by the numerics contract
    formula.py     references as functions of arrays by port
    expansion.py   what composite ops are written with
    scalars.py     NumPy functions that NumPy lacks: erf, integer power, rounded integer division
    spec.py        OpSpec, the record that every op fills in

Adding an op: a module with a tuple ``SPECS`` of OpSpecs, and its name and their tags in ``registry.MODULES``.
"""
