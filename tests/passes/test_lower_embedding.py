"""Options of embedding that a plan cannot keep are refused."""

from __future__ import annotations

import pytest

from compiler.passes.lower_embedding import LowerEmbedding
from compiler.passes.lower_support import LoweringError
from tests.passes.lowered import ops, read

GRAPH = """
    graph g {{
      input %table : float32[16, 4] {{}}  # kind=param differentiable
      input %tokens : int64[8] {{}}  # kind=batch
      %x : float32[8, 4] = {call}
      output x = %x
    }}
    """


def test_a_plain_table_stays():
    graph = LowerEmbedding()(read(GRAPH.format(call="aten.embedding.default(%table, %tokens, 0, False, False)")))
    assert ops(graph) == ["%x : float32[8, 4] = aten.embedding.default"]
    assert graph.nodes[0].args[2] == 0


@pytest.mark.parametrize(
    "call, why",
    [
        ("aten.embedding.default(%table, %tokens, -1, False, True)", "sparse"),
        ("aten.embedding.default(%table, %tokens, -1, True, False)", "frequencies"),
        ("aten.embedding_renorm.default(%table, %tokens, 1.0, 2.0)", "max_norm"),
    ],
)
def test_what_a_plan_cannot_keep_is_refused(call: str, why: str):
    with pytest.raises(LoweringError, match=why) as caught:
        LowerEmbedding()(read(GRAPH.format(call=call)))
    assert caught.value.help and caught.value.node.op.startswith("aten.embedding")
