"""Names and arithmetic: the value of an expression.

A name may be used above or below its definition; definitions are evaluated in the order of
their dependencies, so neither a long chain of names nor a circle needs recursion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compiler.diagnostics import Diagnostics, Label, Span, did_you_mean
from compiler.dsl import syntax
from compiler.dsl.units import NOUNS, UNITS, Quantity, scaled, settled

LARGEST = 2**63 - 1
WORDS = {"on": True, "true": True, "off": False, "false": False, "none": None}


class Problem(Exception):
    """Why a value is not acceptable. `silent` if the cause has been reported before."""

    def __init__(
        self,
        code: str,
        message: str,
        span: Span,
        *,
        label: str = "",
        help: Iterable[str] = (),
        related: Iterable[Label] = (),
        silent: bool = False,
    ):
        super().__init__(message)
        self.code, self.message, self.span, self.silent = code, message, span, silent
        self.more = {"label": label, "help": tuple(help), "related": tuple(related)}

    def report(self, diagnostics: Diagnostics) -> None:
        """Record this problem as an error."""
        if not self.silent:
            diagnostics.error(self.code, self.message, self.span, **self.more)


class Environment:
    """The defined names with their values, and the evaluation of expressions over them."""

    def __init__(
        self,
        definitions: Mapping[str, syntax.Value],
        diagnostics: Diagnostics,
        tolerant: bool = False,
        broken: Iterable[str] = (),
    ):
        self._definitions = dict(definitions)
        self._broken = set(broken)
        self._tolerant = tolerant  # a file is missing: an unknown name may be defined there
        self._values: dict[str, Quantity] = {}
        self._evaluate_all(diagnostics)

    def number(self, name: str) -> int | float | None:
        """The value of a defined name, in base units."""
        quantity = self._values.get(name)
        return None if quantity is None else quantity.value

    def evaluate(self, node: syntax.Value) -> Quantity:
        """The number that an expression stands for; raises `Problem`."""
        match node:
            case syntax.Number():
                return _literal(node)
            case syntax.Name():
                return self._lookup(node)
            case syntax.Unary():
                quantity = self.evaluate(node.operand)
                sign = -1 if node.operator == "-" else 1
                return Quantity(sign * quantity.value, quantity.dimension)
            case syntax.Binary():
                return _combine(node, self.evaluate(node.left), self.evaluate(node.right))
        raise Problem("E040", f"expected a number, found {describe(node)}", node.span)

    def _lookup(self, node: syntax.Name) -> Quantity:
        if node.name in self._values:
            return self._values[node.name]
        known = node.name in self._definitions or node.name in self._broken
        silent = known or self._tolerant
        if node.name in WORDS:
            raise Problem("E040", f"expected a number, found `{node.name}`", node.span)
        raise Problem(
            "E050",
            f"the name `{node.name}` is not defined",
            node.span,
            label="undefined",
            help=did_you_mean(node.name, self._definitions)
            or (f"define it with `{node.name} = …`, or put text in double quotes",),
            silent=silent,
        )

    def _evaluate_all(self, diagnostics: Diagnostics) -> None:
        """Evaluate every definition after those that it uses; report circles."""
        state: dict[str, str] = {}
        for start in self._definitions:
            path: list[str] = []
            todo = [(start, False)]
            while todo:
                name, done = todo.pop()
                if done:
                    path.pop()
                    if state[name] != "circle":
                        self._evaluate_one(name, diagnostics)
                    state[name] = "done"
                elif name not in state:
                    state[name] = "open"
                    path.append(name)
                    todo.append((name, True))
                    uses = syntax.names_in(self._definitions[name])
                    for used in {u.name: u for u in uses if u.name in self._definitions}.values():
                        if state.get(used.name) in ("open", "circle") and used.name in path:
                            circle = path[path.index(used.name) :]
                            self._report_circle(circle, used, diagnostics)
                            state.update(dict.fromkeys(circle, "circle"))
                        else:
                            todo.append((used.name, False))

    def _evaluate_one(self, name: str, diagnostics: Diagnostics) -> None:
        try:
            self._values[name] = self.evaluate(self._definitions[name])
        except Problem as problem:
            problem.report(diagnostics)

    def _report_circle(
        self, circle: list[str], used: syntax.Name, diagnostics: Diagnostics
    ) -> None:
        shown = " → ".join(f"`{n}`" for n in (*circle, circle[0]))
        message = f"`{used.name}` is defined by itself"
        if len(circle) > 1:
            message += f": {shown}"
        related = [Label(self._definitions[n].span, f"`{n}`") for n in circle[:-1]]
        diagnostics.error("E051", message, used.span, label="used here", related=related)


def describe(node: syntax.Value) -> str:
    """What kind of value was written, in words."""
    match node:
        case syntax.String():
            return "a string"
        case syntax.Number():
            return f"`{node.raw}`"
        case syntax.Name():
            return f"`{node.name}`"
        case syntax.ListValue():
            return "a list"
        case syntax.TupleValue():
            return "a tuple"
        case syntax.Call():
            return f"`{node.function.name}(…)`"
    return "an expression"


def _literal(node: syntax.Number) -> Quantity:
    if node.value is None or abs(node.value) > 1e60 or (
        isinstance(node.value, int) and node.value > LARGEST
    ):
        large = "_" not in node.raw or len(node.raw) > 30
        raise Problem(
            "E013",
            f"this number is {'too large' if large else 'malformed'}",
            node.span,
            help=() if large else ("underscores stand between two digits: `10_000`",),
        )
    if node.unit is None:
        return Quantity(node.value)
    unit = UNITS.get(node.unit)
    if unit is None:
        help = did_you_mean(node.unit, UNITS)
        if node.unit in ("k", "K", "M", "G"):
            help = ("write the number in full: `32_000`",)
        raise Problem("E042", f"there is no unit `{node.unit}`", node.span, help=help)
    return scaled(node.value, unit)


def _combine(node: syntax.Binary, left: Quantity, right: Quantity) -> Quantity:
    """Arithmetic on two quantities; their dimensions must go together."""
    a, b, op = left.value, right.value, node.operator
    dimension = _dimension(node, left, right)
    try:
        match op:
            case "+":
                result = a + b
            case "-":
                result = a - b
            case "*":
                result = a * b
            case "/":
                result = a / b
            case "//":
                result = a // b
            case "%":
                result = a % b
            case _:
                result = _power(node, a, b)
    except ZeroDivisionError:
        raise Problem("E045", "division by zero", node.span, label="this has no value") from None
    except OverflowError:
        raise Problem("E045", "the result is too large", node.span) from None
    if isinstance(result, complex) or result != result:
        raise Problem("E045", "this has no real value", node.span)
    if abs(result) > (LARGEST if isinstance(result, int) else 1e300):
        raise Problem("E045", "the result is too large", node.span)
    return Quantity(settled(result, dimension) if dimension else result, dimension)


def _power(node: syntax.Binary, a: int | float, b: int | float) -> int | float:
    """`a ** b`, without computing a number of a million digits first."""
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and b > 64:
        raise Problem("E045", "the result is too large", node.span)
    return a**b


def _dimension(node: syntax.Binary, left: Quantity, right: Quantity) -> str:
    """The dimension of a result, or a `Problem` where there is none."""
    a, b = left.dimension, right.dimension
    if node.operator in ("+", "-", "%") and a == b:
        return a
    if node.operator == "*" and "" in (a, b):
        return a or b
    if node.operator in ("/", "//") and (a == b or not b):
        return "" if a == b else a
    if node.operator == "**" and not a and not b:
        return ""
    raise Problem(
        "E041",
        f"`{node.operator}` does not go between {NOUNS[a]} and {NOUNS[b]}",
        node.span,
    )
