"""Models that cannot be captured. A docstring says the code and pieces of the text that the diagnostic must hold,
separated by " | "; a line marked HERE is the one that the diagnostic must point at.

All take x: float32[6, 4] and y: float32[6, 4], unless `INPUTS` says otherwise.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


# -- what happens depends on values ---------------------------------------------------------------------------------


class BranchOnMean(Base):
    """E122 | an `if`, `while`, `and`, `or`, `not` or `assert` looks at a tensor's value | torch.where | opaque"""

    def forward(self, x, y):
        if x.mean() > 0:  # HERE
            return F.mse_loss(self.a(x), y)
        return F.mse_loss(self.b(x), y)


class BranchInside(nn.Module):
    """E122 | (in `layers.1`) | opaque "layers.1" """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), self.Part()])

    class Part(nn.Module):
        def forward(self, x):
            return x if x.max() < 1 else x / 2  # HERE

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class While(Base):
    """E122 | looks at a tensor's value"""

    def forward(self, x, y):
        while x.norm() > 1:  # HERE
            x = self.a(x)
        return F.mse_loss(x, y)


class Assertion(Base):
    """E122 | assert"""

    def forward(self, x, y):
        h = self.a(x)
        assert not torch.isnan(h).any()  # HERE
        return F.mse_loss(h, y)


class Item(Base):
    """E122 | `.item()` reads a tensor's value | return the tensor itself"""

    def forward(self, x, y):
        loss = F.mse_loss(self.a(x), y)
        return {"loss": loss, "value": loss.item()}  # HERE


class ToList(Base):
    """E122 | reads a tensor's value"""

    def forward(self, x, y):
        parts = x[:, 0].tolist()  # HERE
        return F.mse_loss(self.a(x) * parts[0], y)


class Int(Base):
    """E122 | `int(…)`"""

    def forward(self, x, y):
        n = int(x.sum())  # HERE
        return F.mse_loss(self.a(x) * n, y)


class Float(Base):
    """E122 | `float(…)`"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x) * float(y.max()), y)  # HERE


class Range(Base):
    """E122 | used as an index or a size"""

    def forward(self, x, y):
        for _ in range(x.argmax()):  # HERE
            x = self.a(x)
        return F.mse_loss(x, y)


class Numpy(Base):
    """E122 | `.numpy()`"""

    def forward(self, x, y):
        weights = x.detach().numpy().mean()  # HERE
        return F.mse_loss(self.a(x) * weights, y)


class Nonzero(Base):
    """E122 | the size of a result depends on values | mask"""

    def forward(self, x, y):
        rows = (x[:, 0] > 0).nonzero()  # HERE
        return F.mse_loss(self.a(x)[rows], y[rows])


class BooleanIndex(Base):
    """E122 | the size of a result depends on values"""

    def forward(self, x, y):
        h = self.a(x)
        return (h[h > 0] ** 2).mean()  # HERE


class Unique(Base):
    """E122 | the size of a result depends on values"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x), y) * torch.unique(y).numel()  # HERE


class SliceByTensor(Base):
    """E122"""

    def forward(self, x, y):
        n = (x[:, 0] > 0).sum()
        return F.mse_loss(self.a(x)[:n], y[:n])  # HERE


# -- control-flow operators -------------------------------------------------------------------------------------------


class Cond(Base):
    """E123 | torch.cond | torch.where"""

    def forward(self, x, y):
        h = torch.cond(x.mean() > 0, self.a, self.b, (x,))  # HERE
        return F.mse_loss(h, y)


# -- randomness ---------------------------------------------------------------------------------------------------------


class Rand(Base):
    """E121 | `rand` draws random numbers | dropout"""

    def forward(self, x, y):
        noise = torch.rand(6, 4)  # HERE
        return F.mse_loss(self.a(x) + noise, y)


class RandnLike(Base):
    """E121 | `randn_like` draws random numbers"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x + torch.randn_like(x)), y)  # HERE


class RandInt(Base):
    """E121 | `randint`"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x[torch.randint(0, 6, (6,))]), y)  # HERE


class RandPerm(Base):
    """E121 | `randperm`"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x[torch.randperm(6)]), y)  # HERE


class Bernoulli(Base):
    """E121 | `bernoulli`"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x) * torch.bernoulli(torch.full((6, 1), 0.5)), y)  # HERE


class NormalInPlace(Base):
    """E121 | `normal`"""

    def forward(self, x, y):
        noise = torch.empty(6, 4).normal_()  # HERE
        return F.mse_loss(self.a(x) + noise, y)


class AlphaDropout(Base):
    """E121 | alpha_dropout"""

    def forward(self, x, y):
        return F.mse_loss(F.alpha_dropout(self.a(x), 0.3, training=True), y)  # HERE


class RReLU(Base):
    """E121 | rrelu"""

    def forward(self, x, y):
        return F.mse_loss(F.rrelu(self.a(x), training=True), y)  # HERE


class Multinomial(Base):
    """E121 | `multinomial`"""

    def forward(self, x, y):
        chosen = torch.multinomial(x.softmax(-1), 2)  # HERE
        return F.mse_loss(self.a(x).gather(1, chosen), y[:, :2])


class GumbelSoftmax(Base):
    """E121 | `exponential`"""

    def forward(self, x, y):
        return F.mse_loss(F.gumbel_softmax(self.a(x)), y)  # HERE


class PythonRandom(Base):
    """E121 | random numbers of Python's or numpy's | dropout"""

    def forward(self, x, y):
        h = self.a(x)
        if random.random() < 0.5:
            h = h + self.b(x)
        return F.mse_loss(h, y)


class NumpyRandom(Base):
    """E121 | random numbers of Python's or numpy's"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x) * float(np.random.rand()), y)


class DropoutInsideRecurrent(Base):
    """E121 | the dropout between the layers of `gru` | stack single layers"""

    def __init__(self):
        super().__init__()
        self.m = nn.GRU(4, 4, 2, dropout=0.5)

    def forward(self, x, y):
        return F.mse_loss(self.m(x[None])[0][0], y)  # HERE


# -- gradients by hand ------------------------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class CustomFunction(Base):
    """E126 | the autograd function `Straight` has a backward of its own | detach | opaque"""

    def forward(self, x, y):
        return F.mse_loss(Straight.apply(self.a(x)), y)  # HERE


class TensorHook(Base):
    """E126 | a hook changes gradients"""

    def forward(self, x, y):
        h = self.a(x)
        h.register_hook(lambda gradient: gradient * 2)  # HERE
        return F.mse_loss(h, y)


class ModuleHook(Base):
    """E126 | a module has backward hooks"""

    def __init__(self):
        super().__init__()
        self.a.register_full_backward_hook(lambda module, inputs, outputs: None)

    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)  # HERE


class ParameterHook(Base):
    """E126 | a hook is registered on the gradient of `a.weight`"""

    def __init__(self):
        super().__init__()
        self.a.weight.register_hook(lambda gradient: gradient / 2)

    def forward(self, x, y):
        return F.mse_loss(self.a(x), y)


class InnerGradient(Base):
    """E126 | torch.autograd.grad"""

    def forward(self, x, y):
        x = x.clone().requires_grad_(True)
        h = self.a(x)
        (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)  # HERE
        return F.mse_loss(h, y) + g.pow(2).mean()


class InnerBackward(Base):
    """E126 | the forward calls `backward`"""

    def forward(self, x, y):
        loss = F.mse_loss(self.a(x), y)
        loss.backward()  # HERE
        return loss


class BehindTheBack(Base):
    """E126 | `mul_` changes a tensor that has a gradient without autograd's knowledge"""

    def forward(self, x, y):
        h = self.a(x)
        with torch.no_grad():
            h.mul_(2)  # HERE
        return F.mse_loss(h, y)


# -- parameters changed by the forward --------------------------------------------------------------------------------


class Clamped(Base):
    """E124 | `clamp_` changes a parameter | optimizer"""

    def forward(self, x, y):
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)  # HERE
        return F.mse_loss(self.a(x), y)


class ClampedData(Base):
    """E124 | the forward changes the parameter `a.weight`"""

    def forward(self, x, y):
        self.a.weight.data.clamp_(-0.1, 0.1)
        return F.mse_loss(self.a(x), y)


class Assigned(Base):
    """E124 | an assignment to `.data` changes a tensor"""

    def forward(self, x, y):
        self.a.weight.data = self.a.weight.data * 0.9  # HERE
        return F.mse_loss(self.a(x), y)


class Replaced(Base):
    """E124 | the forward replaces the parameter `a.weight`"""

    def forward(self, x, y):
        self.a.weight = nn.Parameter(self.a.weight.detach() * 0.9)
        return F.mse_loss(self.a(x) + self.b(x), y)


class GrowingBuffer(Base):
    """E120 | gives the buffer `seen` another shape"""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 4))

    def forward(self, x, y):
        self.seen = torch.cat([self.seen, x])
        return F.mse_loss(self.a(x), y)


class BufferOfAnotherDtype(Base):
    """E120 | gives the buffer `seen` another dtype: float32 instead of int64"""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, y):
        self.seen = self.seen * 0.9 + 1
        return F.mse_loss(self.a(x), y)


class TiedBuffers(Base):
    """E120 | assigns to the buffer `one`, which is the same tensor as another one"""

    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.zeros(4))
        self.register_buffer("other", self.one)

    def forward(self, x, y):
        self.one = self.one + x.mean(0)
        return F.mse_loss(self.a(x) * self.other, y)


class MeanInTable(Base):
    """E120 | uses a tensor that an earlier call has left: it keeps `table` | self.register_buffer"""

    def __init__(self):
        super().__init__()
        self.table = {}

    def forward(self, x, y):
        h = self.a(x)
        mean = 0.9 * self.table.get("mean", 0) + h.detach().mean(0)  # HERE
        self.table["mean"] = mean
        return F.mse_loss(h - mean, y)


class Warmup(Base):
    """E120 | does not do the same in every call: it keeps `calls`"""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, y):
        self.calls += 1
        return F.mse_loss(self.a(x) * min(1.0, self.calls / 10), y)  # HERE


class FirstBatch(Base):
    """E120 | does not do the same in every call: it keeps `ready`"""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.ready = False

    def forward(self, x, y):
        if not self.ready:
            self.mean.copy_(x.mean(0))  # HERE
            self.ready = True
        return F.mse_loss(self.a(x) - self.mean, y)


class MaxNorm(nn.Module):
    """E124 | table.weight"""

    INPUTS = {"x": ("int64", (6,)), "y": ("float32", (6, 4))}

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, max_norm=1.0)

    def forward(self, x, y):
        return F.mse_loss(self.table(x), y)


# -- tensors that have no name -----------------------------------------------------------------------------------------


class TensorsInList(Base):
    """E127 | neither a parameter nor a buffer | register_buffer"""

    def __init__(self):
        super().__init__()
        self.scales = [torch.ones(4), torch.full((4,), 2.0)]

    def forward(self, x, y):
        return F.mse_loss(self.a(x) * self.scales[1], y)  # HERE


class ModulesInList(Base):
    """E127 | nn.ModuleList"""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)  # HERE
        return F.mse_loss(self.a(x), y)


# -- complex numbers, devices --------------------------------------------------------------------------------------------


class ComplexRotary(Base):
    """E125 | complex | real"""

    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.arange(2.0)))

    def forward(self, x, y):
        z = torch.view_as_complex(self.a(x).unflatten(-1, (2, 2))) * self.turn
        return F.mse_loss(torch.view_as_real(z).flatten(1), y)


class Fourier(Base):
    """E125 | complex"""

    def forward(self, x, y):
        spectrum = torch.fft.fft(self.a(x))  # HERE
        return F.mse_loss(spectrum.real, y)


class OnCuda(Base):
    """E1 | device"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x.cuda()), y)  # HERE


class BuiltOnMeta(Base):
    """E110 | on the device `meta`"""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, device="meta")

    def forward(self, x, y):
        return F.mse_loss(self.a(x), y)


# -- no loss -------------------------------------------------------------------------------------------------------------


class NoScalar(Base):
    """E104 | the loss is not a single number | float32[6, 4] | loss "module:function" """

    def forward(self, x, y):
        return self.a(x)


class NoLossKey(Base):
    """E104 | there is no loss | a dict with logits: float32[6, 4]"""

    def forward(self, x, y):
        return {"logits": self.a(x)}


class ReturnsNone(Base):
    """E104 | there is no loss | returned None"""

    def forward(self, x, y):
        F.mse_loss(self.a(x), y)


class ReturnsFloat(Base):
    """E104 | returned 3.0"""

    def forward(self, x, y):
        return 3.0


class LossIsNone(Base):
    """E104 | there is no loss"""

    def forward(self, x, y=None, labels=None):
        h = self.a(x)
        return {"loss": None if labels is None else F.mse_loss(h, labels), "logits": h}


class IntegerLoss(Base):
    """E104 | not a floating-point number | int64[]"""

    def forward(self, x, y):
        return (self.a(x) > y).sum()


class EmptyTuple(Base):
    """E104 | there is no loss"""

    def forward(self, x, y):
        return ()


# -- nothing learns ---------------------------------------------------------------------------------------------------


class NoParameters(nn.Module):
    """E105 | it has no parameters"""

    def forward(self, x, y):
        return F.mse_loss(x, y)


class AllFrozen(Base):
    """E105 | all its 4 parameters are frozen"""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x, y):
        return F.mse_loss(self.a(x), y)


class LossWithoutGradient(Base):
    """E105 | does not depend on any parameter | no_grad"""

    @torch.no_grad()
    def forward(self, x, y):
        return F.mse_loss(self.a(x), y)


class LossOfInputs(Base):
    """E105 | does not depend on any parameter"""

    def forward(self, x, y):
        self.a(x)
        return F.mse_loss(x, y)


# -- the model's own failures ----------------------------------------------------------------------------------------


class WrongWidth(Base):
    """E110 | same reduction dim | another width | x: float32[6, 4]"""

    def __init__(self):
        super().__init__()
        self.c = nn.Linear(5, 4)

    def forward(self, x, y):
        return F.mse_loss(self.c(x), y)  # HERE


class WrongView(Base):
    """E110 | shape"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x).view(5, 5), y)  # HERE


class WrongBroadcast(Base):
    """E110 | broadcast | sizes"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x) + torch.ones(3), y)  # HERE


class WrongDtype(Base):
    """E110 | `linear` gets operands of different dtypes: float64, float32"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x.double()), y)  # HERE


class FloatIndices(nn.Module):
    """E110 | indices"""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, x, y):
        return F.mse_loss(self.table(x[:, 0]), y)  # HERE


class PositionsBeyondTheTable(nn.Module):
    """E110 | `embedding` looks up row 5 of a table of 5 rows | make the table longer"""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, x, y):
        positions = torch.arange(x.shape[0])
        return F.mse_loss(x + self.table(positions.unsqueeze(-1))[:, 0], y)  # HERE


class OwnError(Base):
    """E110 | ValueError: the width must be 8"""

    def forward(self, x, y):
        if x.shape[1] != 8:
            raise ValueError("the width must be 8")  # HERE
        return F.mse_loss(self.a(x), y)


class Attribute(Base):
    """E110 | AttributeError"""

    def forward(self, x, y):
        return F.mse_loss(self.missing(x), y)  # HERE


class NoForward(Base):
    """E1 | forward"""


class Recursion(Base):
    """E110 | RecursionError"""

    def forward(self, x, y):
        return self.forward(x, y)  # HERE


# -- arguments -----------------------------------------------------------------------------------------------------------


class OtherNames(Base):
    """E103 | has no argument `x` | has no argument `y` | it takes `tokens`, `labels`"""

    def forward(self, tokens, labels):
        return F.mse_loss(self.a(tokens), labels)


class NeedsMore(Base):
    """E103 | needs `mask` | input mask"""

    def forward(self, x, y, mask):
        return F.mse_loss(self.a(x) * mask, y)


class OneLess(Base):
    """E103 | has no argument `y`"""

    def forward(self, x):
        return self.a(x).sum()


class SwallowsNames(Base):
    """E104 | forward has no argument named `y` | did you mean `ys`?"""

    def forward(self, x, ys=None, **more):
        h = self.a(x)
        return {"logits": h} if ys is None else {"loss": F.mse_loss(h, ys)}


class NameClash(Base):
    """E103 | `y` is both an input and a tensor that the model holds"""

    def __init__(self):
        super().__init__()
        self.y = nn.Parameter(torch.ones(4))

    def forward(self, x, y):
        return F.mse_loss(self.a(x) * self.y, y)


# -- others --------------------------------------------------------------------------------------------------------------


class BitsOfFloats(Base):
    """E120 | reading the bits"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x), y) + (x.view(torch.int32) & 1).sum()  # HERE


class MaskOfDropout(Base):
    """E121 | the mask of a dropout is used by itself"""

    def forward(self, x, y):
        h, mask = torch.native_dropout(self.a(x), 0.5, True)  # HERE
        return F.mse_loss(h * mask, y)


class Sparse(Base):
    """E120 | sparse"""

    def forward(self, x, y):
        return F.mse_loss(self.a(x.to_sparse().to_dense()), y)  # HERE


class ItemInsideVmap(Base):
    """E122 | `.item()`"""

    def forward(self, x, y):
        h = torch.vmap(lambda row: self.a(row) * row[0].item())(x)  # HERE
        return F.mse_loss(h, y)
