// Typesets what arithmatex marked up; KaTeX ships with the site and adds MathML for screen readers.
"use strict";
for (const node of document.querySelectorAll(".arithmatex")) {
  const display = node.tagName === "DIV";
  const source = node.textContent.trim().slice(2, -2); // \( \) or \[ \]
  katex.render(source, node, { displayMode: display, throwOnError: true });
}
