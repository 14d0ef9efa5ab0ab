// A table or drawing wider than its page scrolls; the keyboard must be able to reach and scroll it too.
"use strict";
(() => {
  const mark = () => {
    for (const node of document.querySelectorAll(".md-typeset__scrollwrap, .ft-drawing")) {
      const wide = node.scrollWidth > node.clientWidth;
      if (!wide) {
        node.removeAttribute("tabindex");
        continue;
      }
      node.tabIndex = 0;
      node.setAttribute("role", "region");
      node.setAttribute("aria-label", node.matches(".ft-drawing") ? "Figure, scrolls sideways" : "Table, scrolls sideways");
    }
  };
  window.document$.subscribe(() => requestAnimationFrame(mark));
  addEventListener("resize", mark);
})();
