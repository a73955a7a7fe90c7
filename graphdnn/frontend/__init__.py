"""The public API: what users call. Thin: it collects declarations, and every step is a call into the layer that owns it.

enums.py            enums of the API (data_type lives in graphdnn.dtypes)
tensor.py           class tensor: a TensorDecl with setters and getters
arrays.py           what is known of a framework array: dims, strides, data type, where it lives
pointwise_ops.py    pointwise methods, generated from the rows of opspecs.pointwise (pointwise_ops.pyi is their printed form)
structured_ops.py   matmul, reduction, reshape, transpose, slice, concatenate
pygraph.py          class pygraph: tensors, nodes, the five steps
planning.py         class pygraph, second half: plan lists, notes, knobs, execute, serialize
copies.py           pickle and deepcopy of graphs, and the variant of a graph with other shapes
handle.py           handles, streams, versions
properties.py       device-property and kernel-cache objects
wrapper.py          class Graph: build on exit of a ``with``, call by names
decorators.py       graph, jit, graph_cache
stubgen.py          prints the .pyi files
"""
