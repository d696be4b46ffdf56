"""From statements to the plan: every option gets its value, its default, or a diagnostic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.diagnostics import Diagnostics, Span, closest, did_you_mean
from compiler.dsl import plan, syntax
from compiler.dsl.convert import Converter
from compiler.dsl.dtypes import INPUT_DTYPE
from compiler.dsl.files import Program
from compiler.dsl.kinds import Anything, Whole
from compiler.dsl.names import Environment, Problem
from compiler.dsl.options import options_of
from compiler.dsl.policy import convert_policy
from compiler.dsl.schema import MANY, REQUIRED, STATEMENTS, StatementKind
from compiler.dsl.strings import wrong_factory
from runtime.mesh import TIME

MAX_DIM = 2**40
MAX_AXIS = 2**20


class Checker:
    """Turns the statements of one program into the parts of a `Plan`."""

    def __init__(self, program: Program, diagnostics: Diagnostics):
        self.program = program
        self.diagnostics = diagnostics
        self.definitions = {
            s.name.name: s for s in program.statements if isinstance(s, syntax.Definition)
        }
        broken = [s.word for s in program.written if isinstance(s, syntax.Broken)]
        values = {i.name.name: i.value for s in self._all("mesh") for i in s.items}
        values |= {name: d.value for name, d in self.definitions.items()}
        self.names = Environment(values, diagnostics, program.incomplete, broken)
        self.convert = Converter(self.names, diagnostics)
        self.axes = [item.name.name for s in self._all("mesh") for item in s.items]

    # --- the parts -----------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """The fields of `Plan` that the statements fill."""
        self._required()
        fields: dict[str, Any] = {"names": self._names(), "inputs": self._inputs()}
        for kind in STATEMENTS.values():
            if kind.form in _BUILDERS:
                specs = [self._spec(s) for s in self._combined(kind)]
                fields[kind.field] = _fill(kind, [s for s in specs if s is not None])
        for statement in self.program.duplicates:  # only for the mistakes inside them
            if isinstance(statement, syntax.Input):
                self._input(statement)
            elif isinstance(statement, syntax.Statement):
                self._spec(statement)
        self._unused_names()
        return fields

    def _spec(self, statement: syntax.Statement) -> Any:
        """What a statement means."""
        return _BUILDERS[STATEMENTS[statement.word.name].form](self, statement)

    def _combined(self, kind: StatementKind) -> list[syntax.Statement]:
        """The statements of one kind; those that merge, as one."""
        found = self._all(kind.word)
        if not kind.merges or not found:
            return found
        items = tuple(item for s in found for item in s.items)
        return [syntax.Statement(found[0].word, found[0].span, items=items)]

    def _required(self) -> None:
        have = {s.word.name for s in self.program.statements if isinstance(s, syntax.Statement)}
        have |= {"input" for s in self.program.statements if isinstance(s, syntax.Input)}
        for word in REQUIRED:
            if word not in have and not self.program.broken(word) and not self.program.incomplete:
                self.diagnostics.error(
                    "E031",
                    f"the plan has no `{word}`",
                    self._file_end(),
                    help=f"add a line: {STATEMENTS[word].usage}",
                )

    def _file_end(self) -> Span:
        file, text = next(iter(self.program.sources.items()))
        lines = text.rstrip("\n").split("\n")
        column = len(lines[-1]) + 1
        return Span(file, len(lines), column, len(lines), column + 1)

    def _names(self) -> dict[str, int | float]:
        values = {name: self.names.number(name) for name in self.definitions}
        return {name: value for name, value in values.items() if value is not None}

    def _unused_names(self) -> None:
        used = {
            name.name
            for statement in self.program.written
            for value in syntax.values_in(statement)
            for name in syntax.names_in(value)
        }
        for name, definition in self.definitions.items():
            if name not in used and not name.startswith("_"):
                self.diagnostics.warning(
                    "W001", f"nothing uses the name `{name}`", definition.name.span
                )

    def _factory(self, statement: syntax.Statement) -> Any:
        cls = STATEMENTS[statement.word.name].spec
        wrong = wrong_factory(statement.subject.text)
        if wrong:
            self.diagnostics.error("E046", wrong, statement.subject.span)
        options = self.convert.options(statement, {}, free=Anything())
        return cls(
            factory=statement.subject.text,
            factory_span=statement.subject.span,
            options=options.values,
            given=options.given,
            span=statement.span,
        )

    def _inputs(self) -> tuple[plan.InputSpec, ...]:
        inputs = [s for s in self.program.statements if isinstance(s, syntax.Input)]
        return tuple(spec for s in inputs if (spec := self._input(s)))

    def _input(self, statement: syntax.Input) -> plan.InputSpec | None:
        dtype = self.convert.value(INPUT_DTYPE, statement.dtype)
        dims = [self.convert.value(Whole(1, MAX_DIM), d) for d in statement.dims]
        batch_dim = self._batch_dim(statement)
        if dtype is None or None in dims:
            return None
        named = [d.name if isinstance(d, syntax.Name) else None for d in statement.dims]
        return plan.InputSpec(
            name=statement.name.name,
            dtype=dtype,
            shape=tuple(dims),
            dim_names=tuple(n if n in self.definitions else None for n in named),
            batch_dim=batch_dim,
            span=statement.span,
        )

    def _batch_dim(self, statement: syntax.Input) -> int | None:
        words = [w.name for w in statement.trait]
        rank = len(statement.dims)
        if words == ["shared"] and statement.batch_dim is None:
            return None
        if words == ["batch", "dim"] and statement.batch_dim is not None:
            dim = self.convert.value(Whole(0), statement.batch_dim)
            if dim is not None and dim >= rank:
                self.diagnostics.error(
                    "E047",
                    f"`{statement.name.name}` has {rank} dimension{'s' * (rank != 1)}, "
                    f"there is no dimension {dim}",
                    statement.batch_dim.span,
                    help="dimensions count from 0",
                )
            return dim
        if words:
            unknown = [w for w in statement.trait if w.name not in ("shared", "batch", "dim")]
            wrong = (*unknown, statement.trait[0])[0]
            self.diagnostics.error(
                "E020",
                f"unexpected `{wrong.name}` after the shape",
                wrong.span,
                label="expected `shared` or `batch dim 1`",
                help=did_you_mean(wrong.name, ("shared", "batch")),
            )
        elif rank == 0:
            self.diagnostics.error(
                "E047",
                f"the scalar `{statement.name.name}` has no batch dimension",
                statement.span,
                help="write `shared` behind it if every rank gets the same value",
            )
        return 0

    def _pairs(self, statement: syntax.Statement) -> Any:
        kind = STATEMENTS[statement.word.name]
        return self._mesh(statement) if kind.free_options else self._section(statement)

    def _mesh(self, statement: syntax.Statement) -> tuple[plan.MeshAxis, ...]:
        axes: dict[str, plan.MeshAxis] = {}
        for item in statement.items:
            size = self.convert.value(Whole(1, MAX_AXIS), item.value)
            if item.name.name in axes:
                first = axes[item.name.name].span
                self.convert.twice(f"the axis `{item.name.name}`", item.name.span, first)
            if item.name.name == TIME:
                self.diagnostics.error(
                    "E022", f"`{TIME}` cannot be the name of an axis", item.name.span, label="micro-batches go over this axis"
                )
            axes[item.name.name] = plan.MeshAxis(
                name=item.name.name, size=size or 1, span=item.name.span
            )
        return tuple(axes.values())

    def _strategy(self, statement: syntax.Statement) -> Any:
        kind = STATEMENTS[statement.word.name]
        self._check_axes(statement, kind.axes)
        return self.convert.build(
            kind.spec,
            statement,
            axes=tuple(a.name for a in statement.axes),
            axes_span=statement.axes[0].span.to(statement.axes[-1].span),
        )

    def _check_axes(self, statement: syntax.Statement, count: tuple[int, int]) -> None:
        low, high = count
        known = self.axes
        seen: dict[str, Span] = {}
        for axis in statement.axes:
            if axis.name in seen:
                self.convert.twice(f"the axis `{axis.name}`", axis.span, seen[axis.name])
            seen[axis.name] = axis.span
            lost = self.program.broken("mesh") or self.program.incomplete
            if axis.name not in known and not lost:
                self.diagnostics.error(
                    "E060",
                    f"the mesh has no axis `{axis.name}`",
                    axis.span,
                    label="unknown axis",
                    help=did_you_mean(axis.name, known)
                    or f"add it to the mesh: mesh {axis.name}=2",
                )
        if not low <= len(statement.axes) <= high:
            most = "one axis" if high == 1 else f"at most {high} axes"
            self.diagnostics.error(
                "E062",
                f"`{statement.word.name}` goes over {most}",
                statement.axes[high].span,
            )

    def _section(self, statement: syntax.Statement) -> Any:
        return self.convert.build(STATEMENTS[statement.word.name].spec, statement)

    def _optimizer(self, statement: syntax.Statement) -> plan.OptimizerSpec | None:
        name = statement.subject
        if name.name not in plan.OPTIMIZERS:
            self.diagnostics.error(
                "E044",
                f"there is no optimizer `{name.name}`",
                name.span,
                label="unknown optimizer",
                help=did_you_mean(name.name, plan.OPTIMIZERS),
            )
        meant = closest(name.name, plan.OPTIMIZERS) or name.name
        if meant not in plan.OPTIMIZERS:
            return None
        own = plan.OPTIMIZERS[meant]
        found = self.convert.options(
            statement, options_of(own) | options_of(plan.OptimizerSpec), plan.OptimizerSpec
        )
        torch_options = own(**{k: v for k, v in found.values.items() if k in options_of(own)})
        rest = {k: v for k, v in found.values.items() if k not in options_of(own)}
        return plan.OptimizerSpec(
            name=meant,
            options={k: getattr(torch_options, k) for k in options_of(own)},
            given=found.given,
            span=statement.span,
            **rest,
        )

    def _recompute(self, statement: syntax.Statement) -> plan.RecomputeRule | None:
        patterns = self.convert.patterns(statement.patterns)
        try:
            policy, limit = convert_policy(statement.value, self.names)
        except Problem as problem:
            problem.report(self.diagnostics)
            return None
        return plan.RecomputeRule(
            patterns=patterns, policy=policy, limit=limit, span=statement.span
        )

    def _choice(self, statement: syntax.Statement) -> Any:
        return self.convert.value(STATEMENTS[statement.word.name].choice, statement.value)

    def _pattern_list(self, statement: syntax.Statement) -> tuple[plan.Pattern, ...]:
        return self.convert.patterns(statement.patterns)

    # --- help ---

    def _all(self, word: str) -> list[syntax.Statement]:
        return [
            s
            for s in self.program.statements
            if isinstance(s, syntax.Statement) and s.word.name == word
        ]


_BUILDERS: dict[str, Callable[[Checker, syntax.Statement], Any]] = {
    "FACTORY": Checker._factory,
    "OPTIMIZER": Checker._optimizer,
    "STRATEGY": Checker._strategy,
    "SECTION": Checker._section,
    "PAIRS": Checker._pairs,
    "PATTERNS": Checker._pattern_list,
    "RULE": Checker._recompute,
    "CHOICE": Checker._choice,
}


def _fill(kind: StatementKind, specs: list[Any]) -> Any:
    """The value of the plan's field for a kind of statement."""
    if kind.form == "PATTERNS":
        return tuple(pattern for patterns in specs for pattern in patterns)
    if kind.times == MANY:
        return tuple(specs)
    return specs[0] if specs else kind.absent()
