// A table wider than its page scrolls; the keyboard must be able to reach and scroll it too.
"use strict";
(() => {
  const mark = () => {
    for (const node of document.querySelectorAll(".md-typeset__scrollwrap")) {
      const wide = node.scrollWidth > node.clientWidth;
      if (!wide) {
        node.removeAttribute("tabindex");
        continue;
      }
      node.tabIndex = 0;
      node.setAttribute("role", "region");
      node.setAttribute("aria-label", "Table, scrolls sideways");
    }
  };
  window.document$.subscribe(() => requestAnimationFrame(mark));
  addEventListener("resize", mark);
})();
