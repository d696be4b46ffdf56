"""The same communication, whatever the transport: what it must return is known, and backends must agree."""

from __future__ import annotations

import torch

from runtime.transport import Transport

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def values(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers that no dtype rounds, different on each rank."""
    numbers = (torch.arange(n) * 3 + rank * 5) % 7
    return (numbers % 2 == 0) if dtype is torch.bool else numbers.to(dtype)


def operations(dtype: torch.dtype) -> list[str]:
    if dtype is torch.bool:
        return ["and", "or", "max", "min"]
    return ["sum", "max", "min"] + (["avg"] if dtype.is_floating_point else [])


def exercise(transport: Transport) -> dict[str, list[float]]:
    """Every kind of call, for each dtype, on the whole world and on a part of it."""
    everyone = tuple(range(transport.size))
    transport.prepare([everyone, (0, 1)])
    results: dict[str, list[float]] = {}
    for group in (everyone, (0, 1)):
        if transport.rank not in group:
            continue
        for dtype in DTYPES:
            _collectives(transport, group, dtype, results)
    for dtype in DTYPES:
        _ring(transport, dtype, results)
    _overlap(transport, everyone, results)
    transport.barrier(label="end")
    gathered = [transport.gather_objects({"rank": transport.rank, "round": k}) for k in range(3)]
    results["objects"] = [entry["rank"] + 10 * entry["round"] for part in gathered for entry in part]
    return results


def _collectives(
    transport: Transport, group: tuple[int, ...], dtype: torch.dtype, results: dict[str, list[float]]
) -> None:
    n, rank = len(group), transport.rank
    name = f"{dtype} {group}"

    def keep(kind: str, tensor: torch.Tensor) -> None:
        results[f"{kind} {name}"] = tensor.double().tolist()

    for op in operations(dtype):
        tensor = values(rank, 6, dtype)
        transport.all_reduce(tensor, group, op)
        keep(f"all_reduce {op}", tensor)
        source, out = values(rank, 2 * n, dtype), torch.zeros(2, dtype=dtype)
        transport.reduce_scatter(out, source, group, op)
        assert torch.equal(source, values(rank, 2 * n, dtype)), "reduce_scatter must keep its input"
        keep(f"reduce_scatter {op}", out)
        mine = source.view(n, 2)[group.index(rank)]
        transport.reduce_scatter(mine, source, group, op)
        keep(f"reduce_scatter {op} in place", mine)
    out = torch.zeros(3 * n, 2, dtype=dtype)
    transport.all_gather(out, values(rank, 6, dtype).view(3, 2), group)
    keep("all_gather", out)
    out = torch.zeros(2 * n, dtype=dtype)
    mine = out.view(n, 2)[group.index(rank)]
    mine.copy_(values(rank, 2, dtype))
    transport.all_gather(out, mine, group)
    keep("all_gather in place", out)
    out = torch.zeros(2 * n, dtype=dtype)
    transport.all_to_all(out, values(rank, 2 * n, dtype), group)
    keep("all_to_all", out)
    tensor = values(rank, 4, dtype)
    transport.broadcast(tensor, group, group[-1])
    keep("broadcast", tensor)


def _ring(transport: Transport, dtype: torch.dtype, results: dict[str, list[float]]) -> None:
    """All ranks first start to send, then receive: no backend may block in the start."""
    up, down = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    received = [torch.zeros(3, dtype=dtype) for _ in range(2)]
    works = [transport.send(values(transport.rank + k, 3, dtype), up, tag=k, wait=False) for k in range(2)]
    works += [transport.recv(buffer, down, tag=k, wait=False) for k, buffer in enumerate(received)]
    for work in reversed(works):
        work.wait()
        work.wait()
    results[f"ring {dtype}"] = torch.cat(received).double().tolist()


def _overlap(transport: Transport, group: tuple[int, ...], results: dict[str, list[float]]) -> None:
    """Many collectives in flight, waited for in another order."""
    n = len(group)
    tensors = [values(transport.rank + k, 2 * n, torch.float64) for k in range(6)]
    outs = [torch.zeros(2, dtype=torch.float64) for _ in tensors]
    wholes = [torch.zeros(2 * n * n, dtype=torch.float64) for _ in tensors]
    works = []
    for tensor, out, whole in zip(tensors, outs, wholes, strict=True):
        works.append(transport.reduce_scatter(out, tensor, group, wait=False, label="scatter"))
        works.append(transport.all_gather(whole, tensor, group, wait=False, label="gather"))
    for work in reversed(works):
        work.wait()
    results["overlap"] = torch.cat(outs + wholes).tolist()
