"""What can go wrong in a capture, as diagnostics that point into the plan and into the model's source."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable, Sequence

from compiler.capture.origins import is_installed, is_own, is_torch
from compiler.capture.request import CaptureRequest
from compiler.diagnostics import Diagnostic, Label, PlanError, Span, declare_codes
from compiler.ir.graph import Origin
from runtime.factory import FactoryError

declare_codes(
    {
        "E100": "The model, or the loss, cannot be found or imported.",
        "E101": "The options do not fit the model's factory.",
        "E102": "The model's factory failed, or gave no module.",
        "E103": "The inputs do not fit the arguments of the model's forward, or of the loss.",
        "E104": "What the model returns holds no loss.",
        "E105": "Nothing in the model learns.",
        "E106": "A pattern that fits nothing in the model.",
        "E110": "The model fails on inputs of the plan's shapes and dtypes.",
        "E120": "The model does something that cannot be captured.",
        "E121": "The model draws random numbers in a way that no plan can reproduce.",
        "E122": "What the model does depends on the values in a tensor.",
        "E123": "The model uses a control-flow operator.",
        "E124": "The model's forward changes a parameter.",
        "E125": "The model computes with complex numbers.",
        "E126": "The model handles gradients by hand.",
        "E127": "The model holds a tensor that has no name.",
        "E128": "An opaque module cannot be run as it is.",
    }
)


class Unsupported(Exception):
    """The model does something that planc cannot compile. `origin` says where."""

    def __init__(self, what: str, origin: Origin, code: str = "E120", help: str = ""):
        self.what, self.origin, self.code, self.help = what, origin, code, help
        super().__init__(f"{what} ({origin.source})")


class OutputError(Exception):
    """What forward returned holds no loss. `returned` describes it, `names` are the names in it."""

    def __init__(self, what: str, returned: str, names: Sequence[str] = ()):
        self.what, self.returned, self.names = what, returned, tuple(names)
        super().__init__(f"{what}: {returned}")


OPAQUE = 'or let the module run as it is, without being captured: opaque "{module}"'
BUFFERS = (
    "parameters are read in {dtype}, buffers in their own dtype: convert what is made of a buffer (`.to(x.dtype)`), or "
    "let each operation choose its dtype: precision {{ autocast = on }}"
)
FIXED = "a plan is one fixed program: every rank does the same work for every batch"
HELP: dict[str, tuple[str, ...]] = {
    "E110": ("convert one of them: `x.to(weight.dtype)`; check the dtypes of the plan's inputs",),
    "E120": (OPAQUE,),
    "E121": (
        "use `torch.nn.functional.dropout` (for a random mask: of a tensor of ones): its draws are the same under every plan",
        OPAQUE,
    ),
    "E122": (
        "compute both sides and choose with `torch.where(condition, a, b)`, or multiply by a mask; "
        "to report a value, return the tensor itself",
        OPAQUE,
    ),
    "E123": ("compute both sides and choose with `torch.where(condition, a, b)`", OPAQUE),
    "E124": ("change parameters after the optimizer's step, or hold what changes in a buffer",),
    "E125": ("compute with the real and the imaginary part (or with sine and cosine) as two real tensors", OPAQUE),
    "E126": ("write it with operators that autograd knows, `detach` included", OPAQUE),
    "E127": ('give it a name: self.register_buffer("name", tensor), or nn.ParameterList and nn.ModuleList',),
}
NOTES = {
    "E122": (FIXED,),
    "E123": (FIXED,),
    "E126": ("the compiled program differentiates the operators that it sees; anything else would be forgotten",),
    "E127": ("it would not follow the model to its device, nor be initialised or saved with it",),
}
ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"mat1 and mat2|size mismatch|shapes cannot be multiplied|same reduction dim|size of tensor a",
        "a layer gets another width than it was built for: print the shapes before this line",
    ),
    (
        r"CUDA|cuda|same device|NVIDIA|Torch not compiled",
        "leave devices out of the model (`device=…`, `.cuda()`, `.to(device)`): the plan and the runtime choose them",
    ),
    (
        r"dtype|scalar type|Long|Expected tensor for argument",
        "check the dtypes of the plan's inputs against what the layers take (indices and labels are int64)",
    ),
    (
        r"shape '.*' is invalid|must match the size|broadcast|expanded size",
        "two sizes do not go together: check those of the plan's inputs",
    ),
)


def errors(found: Sequence[Diagnostic], request: CaptureRequest) -> PlanError:
    return PlanError(list(found), request.sources)


def error(
    request: CaptureRequest, code: str, message: str, label: str = "", span: Span | None = None,
    notes: Sequence[str] = (), help: Sequence[str] = (), place: tuple[str, int] | None = None,
) -> PlanError:  # fmt: skip
    """One diagnostic at `span` (by default the model's factory in the plan), with the model's line beside it."""
    related = (Label(line_span(*place), "here"),) if place is not None else ()
    where = span or request.span
    diagnostic = Diagnostic("error", code, message, where, label, tuple(notes), tuple(filter(None, help)), related)
    return errors([diagnostic], request)


def line_span(file: str, line: int) -> Span:
    """The text of a whole line."""
    text = linecache.getline(file, line).rstrip()
    start = len(text) - len(text.lstrip()) + 1
    return Span(file, line, start, line, max(len(text), start) + 1)


def place_of(origin: Origin) -> tuple[str, int] | None:
    file, _, line = origin.source.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else None


# -- kinds of failures -------------------------------------------------------------------------------------------------


def factory_failure(failure: FactoryError, request: CaptureRequest, span: Span | None) -> PlanError:
    code = {"path": "E100", "options": "E101", "call": "E102"}[failure.kind]
    span = request.option_spans.get(failure.option, span) if span is request.span else span
    return error(
        request, code, failure.what, failure.why if len(failure.why) < 60 else "", span,
        notes=(failure.why,) if len(failure.why) >= 60 else (), help=(failure.suggestion,), place=failure.place,
    )  # fmt: skip


def unsupported(failure: Unsupported, request: CaptureRequest) -> PlanError:
    origin = failure.origin
    module = origin.module or "path.of.the.module"
    inside = f" (in `{origin.module}`)" if origin.module else ""
    help = tuple(text.format(module=module) for text in HELP.get(failure.code, ()))
    if failure.code == "E110" and failure.help:
        help = ()  # what is said of products of two dtypes
    elif failure.code == "E110" and request.compute is not None:
        help = (BUFFERS.format(dtype=request.compute), *help)
    return error(
        request, failure.code, failure.what + inside, "in this model", notes=NOTES.get(failure.code, ()),
        help=(failure.help, *help), place=place_of(origin),
    )  # fmt: skip


def no_loss(failure: OutputError, request: CaptureRequest, hints: Sequence[str]) -> PlanError:
    by = "the `loss` function" if request.loss else "the model"
    help = list(hints)
    if "logits" in failure.returned or request.loss is None:
        help.append('return the loss, or {"loss": loss, …}, or name a function that computes it: loss "module:function"')
    return error(
        request, "E104", failure.what, "this model", request.loss_span if request.loss else None,
        notes=(f"{by} returned {failure.returned}",), help=help,
    )  # fmt: skip


def trace_failure(failure: BaseException, request: CaptureRequest, eager: Callable[[], BaseException | None]) -> PlanError:
    """For anything that export raises. `eager` runs the model without tracing: does it fail by itself?"""
    for link in chain(failure):
        if isinstance(link, Unsupported):
            return unsupported(link, request)
        if isinstance(link, OutputError):
            raise link
        if isinstance(link, PlanError):
            return link
    own = eager()
    if own is not None:
        return model_failure(own, request)
    place = innermost(failure)
    operator = control_flow(failure)
    if operator:
        return unsupported(Unsupported(f"`{operator}`", origin_at(place), "E123"), request)
    kind, text = type(failure).__name__, first_line(failure)
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"):
        return unsupported(Unsupported("what comes next depends on a tensor's values", origin_at(place), "E122"), request)
    if "vmap" in text:
        what = f"this call of `torch.vmap` cannot be traced: {text}"
        help = "write it with broadcasting: `a[:, None] <= b[None, :]`"
        return unsupported(Unsupported(what, origin_at(place), "E120", help), request)
    return unsupported(Unsupported(f"tracing failed: {kind}: {text}", origin_at(place)), request)


def model_failure(failure: BaseException, request: CaptureRequest) -> PlanError:
    """The model's own failure, which it would have in eager PyTorch too."""
    text = first_line(failure)
    help = next((advice for pattern, advice in ADVICE if re.search(pattern, text)), "")
    shapes = ", ".join(f"{spec.name}: {spec.dtype}{list(spec.shape)}" for spec in request.inputs)
    return error(
        request, "E110", f"the model fails on these inputs: {type(failure).__name__}: {text}", "this model",
        notes=(f"it was called with {shapes}",), help=(help,), place=innermost(failure),
    )  # fmt: skip


# -- reading exceptions ------------------------------------------------------------------------------------------------


def chain(failure: BaseException) -> list[BaseException]:
    """An exception, what caused it, and so on."""
    found: list[BaseException] = []
    link: BaseException | None = failure
    while link is not None and link not in found:
        found.append(link)
        link = link.__cause__ or link.__context__
    return found


def innermost(failure: BaseException) -> tuple[str, int] | None:
    """(file, line) of the innermost frame in the user's code, else in a library that is not torch."""
    frames = []
    for link in reversed(chain(failure)):
        found = [frame for frame in traceback.extract_tb(link.__traceback__) if frame.lineno]
        inside = [k for k, frame in enumerate(found) if is_own(frame.filename)]
        frames += found[inside[0] :] if inside else found  # what is further out called us
    for wanted in (lambda file: not is_installed(file), lambda file: not is_torch(file) and not is_own(file)):
        for frame in reversed(frames):
            if wanted(frame.filename):
                return frame.filename, frame.lineno or 0
    return None


def control_flow(failure: BaseException) -> str:
    """The control-flow operator in whose tracing it failed, or ""."""
    for frame in traceback.extract_tb(failure.__traceback__):
        if "_higher_order_ops" in frame.filename and frame.name in ("cond", "while_loop", "scan", "associative_scan", "map"):
            return f"torch.{frame.name}"
    return ""


def first_line(failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if lines else ""


def origin_at(place: tuple[str, int] | None) -> Origin:
    return Origin("", f"{place[0]}:{place[1]}") if place is not None else Origin()
