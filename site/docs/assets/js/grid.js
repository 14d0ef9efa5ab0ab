// Draws one grid of tiles on a canvas: what exists now, what was discarded, what the mask skips, who runs where.
"use strict";

const NEVER = 0, WAITING = 1, NOW = 2, DONE = 3;

/** A grid of rows x cols tiles. `axis` is what a program owns: "q" (a row of tiles) or "k" (a column). */
class TileGrid {
  constructor(canvas, axis, onPick) {
    Object.assign(this, { canvas, axis, context: canvas.getContext("2d"), picked: 0, labels: true });
    if (onPick) {
      canvas.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect();
        const { x0, y0, w, h } = this.offset;
        const block = Math.floor(axis === "q" ? (event.clientY - box.top - y0) / h : (event.clientX - box.left - x0) / w);
        if (block >= 0 && block < this.count) onPick(block);
      });
    }
    new ResizeObserver(() => this.draw()).observe(canvas);
  }
  load(programs, rows, cols, sms) {
    Object.assign(this, { rows, cols, count: this.axis === "q" ? rows : cols });
    this.machine = new flashtri.Machine(programs, sms);
    this.state = new Uint8Array(rows * cols);
    this.masked = new Uint8Array(rows * cols);
    this.byBlock = [];
    for (const program of programs) {
      this.byBlock[program.block] = program;
      for (const tile of program.tiles) {
        this.state[this.cell(program, tile)] = WAITING;
        this.masked[this.cell(program, tile)] = tile.masked;
      }
    }
    this.picked = Math.min(this.picked, this.count - 1);
    this.draw();
  }
  cell(program, tile) {
    return this.axis === "q" ? program.block * this.cols + tile.at : tile.at * this.cols + program.block;
  }
  step() {
    for (let c = 0; c < this.state.length; c++) if (this.state[c] === NOW) this.state[c] = DONE;
    const work = this.machine.step();
    for (const { program, tile } of work) this.state[this.cell(program, tile)] = NOW;
    return work;
  }
  get finished() {
    return !this.state.includes(WAITING) && !this.state.includes(NOW);
  }
  totals() {
    const count = (kind) => this.state.reduce((sum, x) => sum + (x === kind), 0);
    return { now: count(NOW), done: count(DONE), waiting: count(WAITING), skipped: count(NEVER), masked: this.masked.reduce((a, b) => a + b, 0) };
  }
  /** block -> number of the processor it is resident on */
  residents() {
    const map = new Map();
    this.machine.slots.forEach((slot, sm) => slot && slot.done <= slot.program.tiles.length && map.set(slot.program.block, sm));
    return map;
  }
  /** The scheme's colours, read from the style sheet once per scheme. */
  colours() {
    const scheme = document.body.dataset.mdColorScheme;
    if (this.scheme !== scheme) {
      this.scheme = scheme;
      const style = getComputedStyle(this.canvas);
      const names = { now: "now", waiting: "waiting", done: "done", edge: "edge", skip: "skip", sm: "sm", smText: "sm-text", text: "text", pick: "pick" };
      this.paint = Object.fromEntries(Object.entries(names).map(([key, name]) => [key, style.getPropertyValue(`--tile-${name}`).trim()]));
    }
    return this.paint;
  }
  draw() {
    if (!this.state) return;
    const { canvas, context: g, rows, cols } = this;
    const size = (this.size = canvas.clientWidth);
    if (!size) return;
    const ratio = Math.min(window.devicePixelRatio || 1, 3);
    const gutter = this.labels ? Math.max(26, Math.min(38, size * 0.075)) : 0;
    const alongQ = this.axis === "q", height = alongQ ? size - gutter : size + gutter;
    if (canvas.width !== Math.round(size * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(size * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const paint = this.colours();
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, size, height);
    const x0 = alongQ ? gutter : 0, y0 = alongQ ? 0 : gutter;
    const w = (size - x0) / cols, h = (height - y0) / rows;
    const gap = Math.max(0.5, Math.min(2, Math.min(w, h) * 0.09));
    this.offset = { x0, y0, w, h };
    // one path per kind of tile: a thousand separate paths would not fit into a frame
    const dot = Math.max(1.4, Math.min(w, h) * 0.12), outline = new Path2D();
    const lines = { plain: new Path2D(), now: new Path2D() };
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < cols; c++) {
        const index = r * cols + c, kind = this.state[index];
        const x = x0 + c * w + gap / 2, y = y0 + r * h + gap / 2, tw = w - gap, th = h - gap;
        if (kind === NEVER) {
          g.fillStyle = paint.skip;
          g.fillRect(x + (tw - dot) / 2, y + (th - dot) / 2, dot, dot);
        } else if (kind === NOW) {
          g.fillStyle = paint.now;
          g.fillRect(x - gap / 2, y - gap / 2, w, h);
        } else if (kind === WAITING) {
          g.fillStyle = paint.waiting;
          g.fillRect(x, y, tw, th);
        } else {
          outline.rect(x + 0.5, y + 0.5, tw - 1, th - 1);
        }
        if (this.masked[index] && kind !== NEVER) {
          const path = kind === NOW ? lines.now : lines.plain;
          path.moveTo(x + 1, y + 1);
          path.lineTo(x + tw - 1, y + th - 1);
        }
      }
    }
    g.lineWidth = 1;
    g.strokeStyle = paint.done;
    g.stroke(outline);
    g.lineWidth = Math.max(1, Math.min(2, Math.min(w, h) * 0.1));
    g.strokeStyle = paint.edge;
    g.stroke(lines.plain);
    g.strokeStyle = paint.smText;
    g.stroke(lines.now);
    if (this.labels) this.drawGutter(g, paint, x0, y0, w, h, gutter);
  }
  drawGutter(g, paint, x0, y0, w, h, gutter) {
    const alongQ = this.axis === "q", step = alongQ ? h : w;
    const residents = this.residents(), font = Math.max(8, Math.min(12, step * 0.62, gutter * 0.4));
    g.font = `600 ${font}px "JetBrains Mono", monospace`;
    g.textAlign = "center";
    g.textBaseline = "middle";
    const every = Math.ceil(11 / step); // labels that would touch are left out
    for (let b = 0; b < this.count; b++) {
      const start = (alongQ ? y0 : x0) + b * step;
      const box = alongQ ? [1, start + 0.5, gutter - 5, step - 1] : [start + 0.5, 1, step - 1, gutter - 5];
      if (residents.has(b)) {
        g.fillStyle = paint.sm;
        g.fillRect(...box);
      }
      if (residents.has(b) || b % every === 0) {
        g.fillStyle = residents.has(b) ? paint.smText : paint.text;
        const text = residents.has(b) && step >= 9 && alongQ ? `SM${residents.get(b)}` : b; // columns are too narrow for it
        if (!residents.has(b) || step >= 9) g.fillText(text, box[0] + box[2] / 2, box[1] + box[3] / 2 + 0.5);
      }
      if (b === this.picked) {
        g.strokeStyle = paint.pick;
        g.lineWidth = 2;
        if (alongQ) g.strokeRect(1, start + 1, this.size - 2, step - 2);
        else g.strokeRect(start + 1, 1, step - 2, y0 + h * this.rows - 2);
      }
    }
  }
}

flashtri.TileGrid = TileGrid;
