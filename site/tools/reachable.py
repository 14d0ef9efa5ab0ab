"""Everything that may scroll sideways takes the keyboard's focus, from the HTML on and whatever the scripts do.

An mkdocs hook. A script that measures widths is right only until a font arrives or a filter redraws a table, so nothing is
measured: each table, code block and formula is reachable always. A table with a class is also one that mkdocs-material
leaves alone, instead of wrapping it in a box of its own.
"""

from __future__ import annotations

import html
import re
from typing import Any

TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)


def region(label: str) -> str:
    """Attributes of a box that scrolls and is worth going to by name."""
    return f'class="ft-scroll" tabindex="0" role="region" aria-label="{html.escape(label)}"'


def _table(match: re.Match[str]) -> str:
    headings = [html.unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in HEADING.findall(match[1])]
    return f'<div {region("Table: " + ", ".join(headings))}><table class="ft-data">{match[1]}</table></div>'


def reachable(page: str) -> str:
    """The HTML of a page with its tables, code blocks and formulas made reachable."""
    page = TABLE.sub(_table, page)
    page = page.replace("<pre>", '<pre tabindex="0" role="group" aria-label="Code">')
    return page.replace(
        '<div class="arithmatex">', '<div class="arithmatex" tabindex="0" role="group" aria-label="Formula">'
    )


def on_page_content(html: str, **_: Any) -> str:
    """What mkdocs calls for every page."""
    return reachable(html)
