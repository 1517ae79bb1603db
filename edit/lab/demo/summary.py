"""The results in the terminal. Owns: their layout. Must not know: how they were measured."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edit.lab.demo.report import headline, result_rows
from edit.lab.demo.results import Results

__all__ = ["results_table"]


def results_table(results: Results) -> RenderableType:
    """Headline, every number with how it came about, the first lines of the sample."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", pad_edge=False)
    table.add_column("result", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True, style="bold")
    table.add_column("how", style="dim", no_wrap=True)
    for row in result_rows(results):
        table.add_row(*row)
    parts: list[RenderableType] = [Text(headline(results), style="bold green" if results.complete else "bold yellow"), table]
    if results.sample:
        parts += [Text("\nthe outer parameters write:", style="dim"), Text("\n".join(results.sample.splitlines()[:8]))]
    return Group(*parts)
