"""Data only: tensors, nodes, the operation graph and its JSON form. Knows no op's meaning and no target.

tensor.py   TensorDecl (mutable, while the user builds) and Tensor (frozen)
node.py     NodeDecl and Node
layout.py   stride orders, packed strides
opgraph.py  OperationGraph: topological order, producers, canonical key
"""
