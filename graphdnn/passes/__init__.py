"""Passes: each is one function over the graph, verbs from what the user declared to regions that become kernels.

::

    declarations (NodeDecl, TensorDecl)
      infer.py         fill in data types, dims and strides; errors of shape           validate()
      check.py         rules that need the resolved data types; compute types          build_operation_graph()
      canonicalize.py  frozen OperationGraph: uids, topological order, live nodes      build_operation_graph()
    OperationGraph
      regions.py       maximal regions, and where the graph is cut                     create_execution_plans()
      collapse.py      the smallest loop nest of a region                              lowering

Passes know ops only through ``opspecs`` and no target.
"""
