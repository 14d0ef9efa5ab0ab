// The home page's grid: a causal forward pass, from the same exported schedule as the visualiser.
"use strict";
(() => {
  const root = document.getElementById("hero");
  const { programs, edges, rows, cols } = JSON.parse(root.querySelector("script").textContent);
  const grid = new flashtri.TileGrid(root.querySelector("canvas"), "q");
  grid.labels = false;
  grid.picked = -1;
  const list = flashtri.programsOf(programs, edges);
  const restart = () => {
    grid.load(list, rows, cols, 4);
    grid.picked = -1;
  };
  restart();
  for (let i = 0; i < 17; i++) grid.step();
  const button = root.querySelector("button");
  let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches, last = 0, pause = 0;
  const frame = (now) => {
    if (!playing) return;
    if (now - last > 150) {
      last = now;
      if (grid.step().length === 0 && ++pause > 8) {
        pause = 0;
        restart();
      }
      grid.draw();
    }
    requestAnimationFrame(frame);
  };
  const show = () => {
    button.textContent = playing ? "Pause" : "Play";
    grid.draw();
    if (playing) requestAnimationFrame(frame);
  };
  button.addEventListener("click", () => {
    playing = !playing;
    show();
  });
  new MutationObserver(() => grid.draw()).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  show();
})();
