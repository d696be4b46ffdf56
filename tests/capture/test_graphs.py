"""How captured graphs look, printed."""

import torch
import torch.nn.functional as F
from torch import nn

from compiler.capture import capture
from compiler.ir.text import print_graph
from tests.capture.support import request_of


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Attention()])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, tokens, labels):
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer(h)
        h = self.norm(h.flatten(0, 1))
        logits = F.linear(h, self.embed.weight)
        loss = F.cross_entropy(logits, labels.view(-1))
        hits = (logits.argmax(-1) == labels.view(-1)).float().mean()
        return {"loss": loss, "hits": hits, "logits": logits}


GRAPH = """\
graph model {
  input %embed.weight : float32[16, 8]  # kind=param differentiable
  input %layers.0.qkv.weight : float32[24, 8]  # kind=param differentiable
  input %layers.0.out.weight : float32[8, 8]  # kind=param differentiable
  input %layers.0.out.bias : float32[8]  # kind=param differentiable
  input %norm.weight : float32[8]  # kind=param differentiable
  input %norm.bias : float32[8]  # kind=param differentiable
  input %norm.running_mean : float32[8]  # kind=buffer
  input %norm.running_var : float32[8]  # kind=buffer
  input %norm.num_batches_tracked : int64[]  # kind=buffer
  input %tokens : int64[2, 4]  # kind=batch
  input %labels : int64[2, 4]  # kind=batch
  %embedding : float32[2, 4, 8] = aten.embedding.default(%embed.weight, %tokens)
  %linear : float32[2, 4, 24] = aten.linear.default(%embedding, %layers.0.qkv.weight)
  %view : float32[2, 4, 3, 2, 4] = aten.view.default(%linear, [2, 4, 3, 2, 4])
  %permute : float32[3, 2, 2, 4, 4] = aten.permute.default(%view, [2, 0, 3, 1, 4])
  %select : float32[2, 2, 4, 4] = aten.select.int(%permute, 0, 0)
  %select_1 : float32[2, 2, 4, 4] = aten.select.int(%permute, 0, 1)
  %select_2 : float32[2, 2, 4, 4] = aten.select.int(%permute, 0, 2)
  %attention : float32[2, 2, 4, 4] = planc.attention(%select, %select_1, %select_2, None, True, 0.5, 0.1, 0)
  %permute_1 : float32[2, 4, 2, 4] = aten.permute.default(%attention, [0, 2, 1, 3])
  %view_1 : float32[2, 4, 8] = aten.view.default(%permute_1, [2, 4, 8])
  %linear_1 : float32[2, 4, 8] = aten.linear.default(%view_1, %layers.0.out.weight, %layers.0.out.bias)
  %dropout : float32[2, 4, 8] = planc.dropout(%linear_1, 0.2, 1)
  %add : float32[2, 4, 8] = aten.add.Tensor(%embedding, %dropout)
  %view_2 : float32[8, 8] = aten.view.default(%add, [8, 8])
  %add_1 : int64[] = aten.add.Tensor(%norm.num_batches_tracked, 1)
  %native_batch_norm_legit_functional : float32[8, 8], _, _, %native_batch_norm_legit_functional_1 : float32[8], \
%native_batch_norm_legit_functional_2 : float32[8] = aten._native_batch_norm_legit_functional.default(%view_2, \
%norm.weight, %norm.bias, %norm.running_mean, %norm.running_var, True, 0.1, 1e-05)
  %linear_2 : float32[8, 16] = aten.linear.default(%native_batch_norm_legit_functional, %embed.weight)
  %view_3 : int64[8] = aten.view.default(%labels, [8])
  %cross_entropy_loss : float32[] = aten.cross_entropy_loss.default(%linear_2, %view_3)
  %argmax : int64[8] = aten.argmax.default(%linear_2, 1)
  %view_4 : int64[8] = aten.view.default(%labels, [8])
  %eq : bool[8] = aten.eq.Tensor(%argmax, %view_4)
  %cast : float32[8] = planc.cast(%eq, 'torch.float32')
  %mean : float32[] = aten.mean.default(%cast)
  output loss = %cross_entropy_loss
  output metric:hits = %mean
  output buffer:norm.running_mean = %native_batch_norm_legit_functional_1
  output buffer:norm.running_var = %native_batch_norm_legit_functional_2
  output buffer:norm.num_batches_tracked = %add_1
}
"""


def captured():
    batch = {name: torch.zeros(2, 4, dtype=torch.long) for name in ("tokens", "labels")}
    return capture(request_of("tests.capture.test_graphs:Model", batch))


def test_graph():
    found = captured()
    assert print_graph(found.graph, origins=False) == GRAPH
    assert found.notes == ["the model's output `logits` (float32[8, 16]) is not used: only scalars are kept"]
    assert found.lists == {"layers": ["layers.0"]}
    assert found.modules["layers.0"] == "Attention"


def test_origins():
    """Each node knows its module and the line of the model that it comes from."""
    nodes = {node.outputs[0].name: node for node in captured().graph.nodes}
    origins = {name: nodes[name].origin for name in ("linear", "attention", "add", "cross_entropy_loss")}
    assert {name: origin.module for name, origin in origins.items()} == {
        "linear": "layers.0.qkv", "attention": "layers.0", "add": "", "cross_entropy_loss": "",
    }  # fmt: skip
    assert all(origin.source.startswith("tests/capture/test_graphs.py:") for origin in origins.values())
    assert origins["attention"].code.startswith("mixed = F.scaled_dot_product_attention(")
    assert origins["linear"].code.startswith("q, k, v = self.qkv(x)")
