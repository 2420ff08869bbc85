"""A document made of a few kinds of block, written as Markdown and as one HTML page that fetches nothing.

It knows nothing of ablations. Whatever text stands in a block comes out as that text, never as markup.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ablation.charts import printable
from ablation.page import STYLE


@dataclass(frozen=True)
class Text:
    """A paragraph; `kind` is its class on the page."""

    text: str
    kind: str = "text"

    def markdown(self) -> str:
        return _plain(self.text)

    def html(self) -> str:
        unbroken = re.sub(r"\[[^\]<]{,40}\]", r'<span class="whole">\g<0></span>', _tidy(self.text))  # intervals
        return f'<p class="{self.kind}">{unbroken}</p>'


@dataclass(frozen=True)
class Code:
    """A command, as typed."""

    text: str

    def markdown(self) -> str:
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", self.text)), default=0))
        return f"{fence}\n{printable(self.text)}\n{fence}"

    def html(self) -> str:
        return f"<pre><code>{_tidy(self.text)}</code></pre>"


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    texts: list[str]

    def markdown(self) -> str:
        return "\n".join("- " + re.sub(r"^(?=[#+-])", r"\\", _plain(text)) for text in self.texts)

    def html(self) -> str:
        return f"<ul>{''.join(f'<li>{_tidy(text)}</li>' for text in self.texts)}</ul>"


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; the first cell names its row. A folded table opens at a click."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    folded: bool = False

    def markdown(self) -> str:
        sides = ["---:" if numeric else "---" for numeric in self._numeric()]
        head, *rows = ([_plain(cell) for cell in row] for row in (self.head, *self.rows))
        lines = "\n".join(f"| {' | '.join(row)} |" for row in (head, sides, *rows))
        return f"{_plain(self.caption)}:\n\n{lines}"

    def html(self) -> str:
        caption, sides = _tidy(self.caption), [' class="number"' if numeric else "" for numeric in self._numeric()]
        head = "".join(f'<th scope="col"{side}>{_tidy(cell)}</th>' for cell, side in zip(self.head, sides, strict=True))
        rows = "".join(f"<tr>{''.join(map(_cell, row, sides, range(len(row))))}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        box = f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">{table}</div>'
        if self.folded:
            return f"<details><summary>{caption}</summary>{box}</details>"
        return f'<p class="caption">{caption}</p>{box}'

    def _numeric(self) -> list[bool]:
        """Which columns hold numbers, to be aligned at the right."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.head)
        number = re.compile(r"[−+<]? ?\d|\[|–$|no |diverged")
        return [i > 0 and all(map(number.match, column)) for i, column in enumerate(columns)]


@dataclass(frozen=True)
class Figures:
    """Charts side by side where there is room, each (caption, SVG). Only on the page: in Markdown tables stand alone.

    Every caption that has a number in it repeats one of a table.
    """

    items: list[tuple[str, str]]
    kind: str = "wide"
    reading: str = ""

    def markdown(self) -> str:
        return "The charts of this part are in report.html."

    def html(self) -> str:
        each = "".join(f"<figure>{svg}<figcaption>{_tidy(said)}</figcaption></figure>" for said, svg in self.items)
        reading = Text(self.reading, "muted").html() if self.reading else ""
        return f'{reading}<div class="figures {self.kind}">{each}</div>'


Block = Text | Code | Bullets | Table | Figures


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """A title, what is said first, and sections."""

    title: str
    lead: list[Block]
    sections: list[Section]


def table(caption: str, rows: Sequence, columns: dict[str, Callable], folded: bool = False) -> Table:
    """One row of text for each of the rows, by a function for each column."""
    return Table(caption, list(columns), [[str(cell(row)) for cell in columns.values()] for row in rows], folded)


def markdown(document: Document) -> str:
    """The document as Markdown, with tables."""
    parts = [f"# {_plain(document.title)}", *(block.markdown() for block in document.lead)]
    for section in document.sections:
        parts += [f"## {section.title}", *(block.markdown() for block in section.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def html(document: Document) -> str:
    """The document as one HTML page: inline CSS and SVG, no script, nothing from elsewhere."""
    sections = "".join(
        f"<section><h2>{section.title}</h2>{''.join(block.html() for block in section.blocks)}</section>\n"
        for section in document.sections
    )
    title, lead = _tidy(document.title), "".join(block.html() for block in document.lead)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main><header><h1>{title}</h1>{lead}</header>\n{sections}</main></body></html>\n"
    )


def _plain(text: str) -> str:
    """One line of Markdown that says just this text: no markup, no link, no column of its own."""
    text = re.sub(r"([\\`*|~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", " ".join(printable(text).split()))
    text = re.sub(r"\](?=[(\[:])", r"\]", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _tidy(text: str) -> str:
    return escape(printable(text))


def _cell(text: str, side: str, column: int) -> str:
    prose = ' class="prose"' if len(text) > 24 and not side else ""
    if column == 0:
        return f'<th scope="row"{prose}>{_tidy(text)}</th>'
    return f"<td{side or prose}>{_tidy(text)}</td>"
