"""One HTML file that needs nothing else: tables and pictures to read, interactive where scripts run.

Its Content-Security-Policy allows what is inside of the file alone, so that no browser loads anything from a network.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from hf_offload.reports.charts import Chart, interactive, svg
from hf_offload.settings.text_files import write_whole

if TYPE_CHECKING:
    import rich.table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
:root { color-scheme: light dark; --line: rgba(128, 128, 128, 0.35); }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1120px; padding: 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p { max-width: 75ch; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 1rem; }
dt { font-size: 0.85rem; opacity: 0.75; } dd { font-size: 1.25rem; margin: 0; }
figure { margin: 1rem 0 2rem; } figcaption { font-size: 0.9rem; max-width: 75ch; opacity: 0.85; }
figure svg { height: auto; width: 100%; } .narrow, .live .static { display: none; }
@media (max-width: 640px) { .narrow { display: block; } .wide { display: none; } }
.table { margin-top: 1rem; overflow-x: auto; } .note { font-size: 0.9rem; margin: 0.5rem 0 2rem; opacity: 0.85; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; min-width: 50%; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.75rem 0.3rem 0; text-align: right; vertical-align: top; }
td { white-space: nowrap; }
@media (min-width: 641px) { td.text { white-space: normal; } }
th:first-child, .text { text-align: left; } tbody th { font-weight: normal; overflow-wrap: anywhere; min-width: 7.5rem; }
"""
_SCRIPT = """
const ink = () => ({"font.color": getComputedStyle(document.body).color});
for (const figure of document.querySelectorAll("figure")) {
  const {data, layout} = JSON.parse(figure.querySelector("script").textContent);
  layout.font.color = ink()["font.color"];
  figure.classList.add("live");
  Plotly.newPlot(figure.querySelector(".interactive"), data, layout, {responsive: true, displaylogo: false})
    .catch(error => { figure.classList.remove("live"); console.error(error); });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const place of document.querySelectorAll(".interactive")) Plotly.relayout(place, ink());
});
"""


@dataclasses.dataclass(frozen=True)
class Table:
    """``columns`` are names with units; the first one names the rows, and those in ``text`` hold words."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text: Sequence[str] = ()


Block = str | Table | Chart
"""A paragraph, a table or a figure."""


def from_rich(table: "rich.table.Table") -> Table:
    """A table of the command line for a page."""
    from rich.text import Text

    columns = [Text.from_markup(str(column.header)).plain for column in table.columns]
    cells = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns]
    words = [name for name, column in zip(columns, table.columns, strict=True) if column.justify == "left"]
    caption = Text.from_markup(str(table.caption)).plain if table.caption else ""
    return Table(columns, list(zip(*cells, strict=True)), caption, words)


def write_page(path: Path, title: str, facts: Mapping[str, str], sections: Mapping[str, Sequence[Block]]) -> None:
    """Write the page: ``facts`` are figures by their names, ``sections`` their content by heading; empty ones are left out.

    The file is complete or not there. Raises :class:`~hf_offload.errors.OffloadError` without the libraries it needs.
    """
    text = "".join(_page(title, facts, {heading: blocks for heading, blocks in sections.items() if blocks}))
    write_whole(path, text.encode(errors="backslashreplace").decode())  # a name may hold bytes that are not text


def _page(title: str, facts: Mapping[str, str], sections: Mapping[str, Sequence[Block]]) -> Iterator[str]:
    from plotly.offline import get_plotlyjs

    yield (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
    )
    if facts:
        items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
        yield f"<dl>{''.join(items)}</dl>\n"
    numbers = itertools.count(1)
    for heading, blocks in sections.items():
        yield f"<section>\n<h2>{escape(heading)}</h2>\n"
        for block in blocks:
            if isinstance(block, Table):
                yield _table(block)
            elif isinstance(block, Chart):
                yield _figure(block, next(numbers))
            else:
                yield f"<p>{escape(block)}</p>\n"
        yield "</section>\n"
    if next(numbers) > 1:
        yield f"<script>{get_plotlyjs()}</script>\n<script>{_SCRIPT}</script>\n"
    yield "</body>\n</html>\n"


def _table(table: Table) -> str:
    def row(cells: Iterable[str], head: bool = False) -> str:
        found: list[str] = []
        for column, cell in zip(table.columns, cells, strict=True):
            tag = "th" if head or not found else "td"
            scope = ' scope="col"' if head else ' scope="row"' if tag == "th" else ""
            kind = ' class="text"' if column in table.text else ""
            found.append(f"<{tag}{scope}{kind}>{escape(cell)}</{tag}>")
        return f"<tr>{''.join(found)}</tr>\n"

    body = "".join(row(cells) for cells in table.rows)
    return (
        f'<div class="table"><table>\n<thead>\n{row(table.columns, head=True)}</thead>\n<tbody>\n{body}</tbody>\n'
        f'</table></div>\n<p class="note">{escape(table.caption)}</p>\n'
    )


def _figure(chart: Chart, number: int) -> str:
    pictures = "".join(svg(chart, narrow=narrow, prefix=f"f{number}{'n' * narrow}") for narrow in (False, True))
    return (
        f'<figure>\n<div class="static" role="img" aria-label="{escape(chart.title)}">{pictures}</div>\n'
        f'<div class="interactive"></div>\n<script type="application/json">{interactive(chart)}</script>\n'
        f"<figcaption><b>{escape(chart.title)}.</b> {escape(chart.caption)}</figcaption>\n</figure>\n"
    )
