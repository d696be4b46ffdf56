"""Small, idiomatic PyTorch models. They know nothing of planc or of devices: that is what the plans are for.

Conventions they share:

- keyword arguments set every size, so a plan can write `model "…:Llama" { layers = 8, dim = 512, … }`;
- `forward` takes the batch by name and returns the loss, or a dict with `loss` and metrics beside it;
- they build on the meta device, and each module's `reset_parameters` initialises the parameters that it owns itself
  (not those of its children), so calling it on every module in any order initialises the model;
- buffers follow from the configuration alone and are computed in the constructor.
"""
