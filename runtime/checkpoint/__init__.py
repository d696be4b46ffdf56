"""Checkpoints by logical parameter and index range, and weights as safetensors.

What one plan saved another loads, whatever its ranks, buckets or cuts. `Session.save` and `Session.restore` are the
entry; the parts: `pieces` (which rectangles a rank holds), `storage` (torch.distributed.checkpoint's format), `folder`
(complete or not there), `rank` (a session's tensors by name), `weights` (safetensors).
"""

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.folder import RunState, checkpoints, latest, prune, read_state, step_path
from runtime.checkpoint.weights import InitialWeights, SafetensorsFiles, export_safetensors

__all__ = [
    "CheckpointError",
    "InitialWeights",
    "RunState",
    "SafetensorsFiles",
    "checkpoints",
    "export_safetensors",
    "latest",
    "prune",
    "read_state",
    "step_path",
]
