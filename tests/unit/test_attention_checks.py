"""What attention's op specs check of a node however it was made: through the methods, or read from text that may be damaged."""

from __future__ import annotations

import pytest

from graphdnn.errors import ValidationError
from tests.unit.test_attention_errors import Built, fp8


def test_a_node_without_a_name_is_called_by_its_op():
    with pytest.raises(ValidationError, match="node 'sdpa'.*lengths"):
        Built().forward(use_padding_mask=True)
    assert {n.name.split(".")[0] for n in fp8()._opgraph.nodes} == {"sdpa_fp8_fwd"}
