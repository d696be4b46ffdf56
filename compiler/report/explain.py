"""What `planc explain` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from compiler.analysis.explain import Cause, Explanation, listed, totals
from compiler.dsl.units import show_size
from compiler.report.rows import many


def print_explanations(console: Console, found: Sequence[Explanation], stages: int) -> None:
    """Each communication with its reasons, the largest first, and the sum of each of the pipeline's `stages`."""
    for item in sorted(found, key=lambda item: -item.sent):
        console.print(f"[bold]{escape(headline(item, stages))}[/bold]", soft_wrap=True)
        for name, text in details(item):
            console.print(f"  {name:8}{escape(text)}", soft_wrap=True)
        console.print()
    for total in totals(found):
        where = f" of stage {total.stage}" if stages > 1 else ""
        console.print(f"{many(total.calls, 'communication')} a step, {show_size(total.sent)} sent by a rank{where}")


def headline(item: Explanation, stages: int) -> str:
    flow = item.flows[0]
    times = f"{item.calls} x " if item.calls > 1 else ""
    where = f"stage {item.stage}: " if stages > 1 else ""
    return f"{where}{flow.kind} over {', '.join(flow.axes)}: {times}{show_size(item.full)}, {show_size(item.sent)} sent"


def details(item: Explanation) -> list[tuple[str, str]]:
    """(what, text) for each line below the headline."""
    flow, story = item.flows[0], item.story
    targets = list(dict.fromkeys(flow.target for flow in item.flows if flow.target))
    lines = [("in", f"{flow.op} {listed(targets)}".strip())]
    if story.origin.module or story.origin.source:
        code = f": {story.origin.code}" if story.origin.code else ""
        lines.append(("of", f"{story.origin.module}  {story.origin.source}{code}".strip()))
    if story.value:
        lines.append(("value", story.value + (f" → {story.after}" if story.after else "")))
    lines += [("step" if k == 0 else "", text) for k, text in enumerate(story.path) if len(story.path) > 1]
    lines += [("because" if k == 0 else "", text) for k, text in enumerate(story.reasons)]
    lines += [("plan" if k == 0 else "", cause_text(cause)) for k, cause in enumerate(item.causes)]
    return lines


def cause_text(cause: Cause) -> str:
    """`row "layers.*.attn.wo"  x.plan:24`."""
    return f"{cause.text}  {cause.span.file}:{cause.span.line}"


def explanations_json(found: Sequence[Explanation]) -> dict[str, Any]:
    """The same for machines."""
    return {"totals": [asdict(total) for total in totals(found)], "communications": [item_json(item) for item in found]}


def item_json(item: Explanation) -> dict[str, Any]:
    return {
        "stage": item.stage,
        "kind": item.flows[0].kind,
        "axes": list(item.flows[0].axes),
        "purpose": item.flows[0].purpose,
        "bytes": item.full,
        "calls": item.calls,
        "sent": item.sent,
        "instruction": item.flows[0].op,
        "targets": list(dict.fromkeys(flow.target for flow in item.flows if flow.target)),
        "module": item.story.origin.module,
        "source": item.story.origin.source,
        "value": item.story.value,
        "after": item.story.after,
        "path": list(item.story.path),
        "because": list(item.story.reasons),
        "plan": [{"text": c.text, "file": c.span.file, "line": c.span.line} for c in item.causes],
    }
