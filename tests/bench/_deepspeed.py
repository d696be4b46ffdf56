"""DeepSpeed's side of the ZeRO bench: on the CPU, over the same gloo processes, with torch's fused AdamW."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

from runtime.program import Program
from runtime.transport import Transport
from tests.bench._paired import eager_model
from tests.bench._zero import OPTIMIZER, Step, low_precision, over_ranks, zero_stage

# DeepSpeed calls torch's collectives by names that torch 2.13 warns of.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
deepspeed.utils.logger.setLevel(logging.ERROR)
# Compiled when DeepSpeed starts, for an all-reduce that only inference calls.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed_side(program: Program, transport: Transport) -> tuple[Step, Callable[[], int]]:
    """Sums and gathers go by pieces of the program's largest bucket, in the dtype of the computation. Stage 3 frees
    parameters behind their use, as planc and FSDP2 do, however soon they are used again.

    Off is what DeepSpeed does by default and the other sides do not: clipping gradients to a norm of 1, and computing
    that norm in any case (stage 3 cannot do without). So is copying gradients into one buffer, which is slower here.
    """
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model, stage, low = eager_model(program), zero_stage(program), low_precision(program)
    piece = max(bucket.numel for bucket in program.buckets)
    config = {
        "train_micro_batch_size_per_gpu": program.batch // dist.get_world_size(),
        "bf16": {"enabled": low},
        "communication_data_type": "bf16" if low else "fp32",
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": piece,
            "allgather_bucket_size": piece,
            "compute_grad_norm": stage == 3,
            "contiguous_gradients": False,
            "stage3_prefetch_bucket_size": piece,
            "stage3_max_reuse_distance": 0,
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(part: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = engine(**part)
        engine.backward(loss)
        engine.step()
        return loss

    return over_ranks(step)
