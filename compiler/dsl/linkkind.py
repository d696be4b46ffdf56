"""The kind of `intra` and `inter`: a link between devices."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.dsl import syntax
from compiler.dsl.kinds import Kind, Rate
from compiler.dsl.names import Environment, Problem
from compiler.dsl.strings import Link, parse_link


@dataclass(frozen=True)
class LinkKind(Kind):
    """`"nvlink 900GB/s"`, `"ib 400Gb/s 5us"`, or only a bandwidth `900GB/s`."""

    def describe(self) -> str:
        return 'a link such as "nvlink 900GB/s"'

    def accepts(self, node: syntax.Value) -> bool:
        return isinstance(node, syntax.String) or Rate().accepts(node)

    def convert(self, node: syntax.Value, names: Environment) -> Link:
        if isinstance(node, syntax.String):
            link = parse_link(node.text)
            if isinstance(link, Link):
                return link
            raise Problem("E046", link, node.span)
        if not self.accepts(node):
            raise self.mismatch(node)
        return Link("", float(Rate().convert(node, names)))
