"""Attention: one operator, `planc.attention(q, k, v, mask, causal, scale, dropout_p, site)`.

- q is [..., heads, s, d], k and v are [..., kv_heads, t, d or e]; heads is a multiple of kv_heads (query heads in order
  share a key head); the dimensions in front are equal, not broadcast.
- `mask` is None, or booleans (True: may attend) or numbers to be added, that broadcast to [..., heads, s, t]. A row
  without any allowed position gives zeros, as in torch.
- `causal`: query i sees keys 0 … i (from the top left corner, as in torch).
- `dropout_p` > 0 drops weights; then `site` is its call site, else None.
"""

from __future__ import annotations

from compiler.capture.normalize.builder import Builder, Call, handler
from compiler.ir.graph import Value


@handler("scaled_dot_product_attention.default")
def attention(b: Builder, call: Call) -> Value:
    q, k, v = call["query"], call["key"], call["value"]
    shape = call.out.shape
    rank = max(len(x.shape) for x in (q, k, v))
    q, k, v = (b.view(x, (1,) * (rank - len(x.shape)) + x.shape) for x in (q, k, v))
    front = shape[: rank - 3] if rank > 3 else ()
    heads = shape[rank - 3] if rank > 2 else 0
    if rank > 2:
        shared = k.shape[-3] == v.shape[-3] and (call["enable_gqa"] or k.shape[-3] in (1, heads))
        kept = k.shape[-3] if shared else heads
        q = b.expand(q, (*front, heads, *q.shape[-2:]))
        k, v = (b.expand(x, (*front, kept, *x.shape[-2:])) if x.shape[-3] in (1, kept) else _grouped(b, x, front, kept)
                for x in (k, v))  # fmt: skip
    scale = call["scale"] if call["scale"] is not None else q.shape[-1] ** -0.5
    p = float(call["dropout_p"])
    site = b.site() if 0 < p else None
    args = (q, k, v, call["attn_mask"], bool(call["is_causal"]), float(scale), p, site)
    return b.emit("planc.attention", args, q.dtype, shape)


def _grouped(b: Builder, x: Value, front: tuple[int, ...], heads: int) -> Value:
    """Keys (or values) of fewer heads than the others, each repeated for its group."""
    own, rest = x.shape[-3], x.shape[-2:]
    x = b.expand(x, (*front, own, *rest))
    wide = b.expand(b.view(x, (*front, own, 1, *rest)), (*front, own, heads // own, *rest))
    return b.view(wide, (*front, heads, *rest))
