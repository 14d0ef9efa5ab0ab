// Runs before mkdocs-material's script, which fetches the search index with every page, wanted or not: a third of the home
// page's weight. Here the request waits until the search field has the focus, or the address asks to search or highlight.
"use strict";
window.XMLHttpRequest = class extends XMLHttpRequest {
  open(method, url, ...rest) {
    this.waits = url.includes("/search/search_index.json") && !/[?&][qh]=/.test(location.search);
    super.open(method, url, ...rest);
  }
  send(body) {
    if (!this.waits) super.send(body);
    else document.forms.namedItem("search").addEventListener("focusin", () => super.send(body), { once: true });
  }
};
