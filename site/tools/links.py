"""Every link, image, script and anchor of the built site leads somewhere inside it, from any sub-path."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

OUTSIDE = ("http://", "https://", "mailto:", "data:")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "__top"}
        self.links: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        for name in ("id", "name"):
            if name in values:
                self.anchors.add(values[name])
        for name in ("href", "src"):
            if name in values and values.get("rel") != "canonical":  # a name for the page, not something it loads
                self.links.append((tag, values[name]))


def broken(site: Path) -> list[str]:
    """One sentence per broken link. Links to other hosts are allowed on ``<a>`` only: everything else ships with the site."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for tag, link in page.links:
            if link.startswith(OUTSIDE):
                if tag not in ("a",):
                    found.append(f"{where}: <{tag}> loads {link} from another host")
                continue
            parts = urlsplit(link)
            if parts.path.startswith("/"):
                # the error page cannot know where it is shown, so mkdocs gives it absolute links
                if where.name != "404.html":
                    found.append(f"{where}: {link} is absolute and breaks under a sub-path")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{where}: {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where}: {link} has no such anchor")
    return found
