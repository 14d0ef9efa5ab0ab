// The tile visualiser: controls, the numbers of one program, and the live comparison with ordinary attention.
"use strict";

(async () => {
  const root = document.getElementById("visualiser");
  const find = (selector) => root.querySelector(selector);
  const all = (selector) => [...root.querySelectorAll(selector)];
  const HEAD_DIM = 8;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const data = await (await fetch(root.dataset.tiles)).json();

  const control = Object.fromEntries(all("[data-control]").map((node) => [node.dataset.control, node]));
  const out = Object.fromEntries(all("[data-out]").map((node) => [node.dataset.out, node]));
  const put = (name, text) => out[name].textContent !== text && (out[name].textContent = text);
  const fixed = (x, digits = 4) => (Number.isFinite(x) ? (x < 0 ? "−" : " ") + Math.abs(x).toFixed(digits) : x < 0 ? "−∞" : "∞");
  const count = (n, one) => `${n} ${one}${Number(n) === 1 ? "" : "s"}`;
  const small = (x) => (x === 0 ? "0" : x.toExponential(1).replace("-", "−"));

  let pass = "forward";
  let playing = false;
  let head, machine;
  let rows = [], tracked = [], worst = 0, compared = 0;

  const pick = (kernel) => (block) => follow(kernel, block);
  const grids = {
    forward: new flashtri.TileGrid(find("#grid-forward"), "q", pick("forward")),
    dkdv: new flashtri.TileGrid(find("#grid-dkdv"), "k", pick("dkdv")),
    dq: new flashtri.TileGrid(find("#grid-dq"), "q", pick("dq")),
  };
  const active = () => (pass === "forward" ? [grids.forward] : [grids.dkdv, grids.dq]);
  let followed = "forward";

  const config = () => {
    const [blockM, blockN] = control.blocks.value.split("x").map(Number);
    const tiles = data.tiles[Number(control.tiles.value)];
    const n = tiles * Math.min(blockM, blockN);
    return { mask: control.mask.value, blockM, blockN, tiles, n, rows: n / blockM, cols: n / blockN, sms: Number(control.sms.value), key: `${control.mask.value}/${blockM}x${blockN}/${tiles}` };
  };

  function reset() {
    const c = config();
    const mask = data.masks[c.mask];
    head = new flashtri.Head(c.n, HEAD_DIM, mask.window);
    const byRow = flashtri.programsOf(data.rows[c.key], mask.kv_edges);
    const byColumn = flashtri.programsOf(data.columns[c.key], mask.q_edges);
    grids.forward.load(byRow, c.rows, c.cols, c.sms);
    grids.dq.load(byRow, c.rows, c.cols, c.sms);
    grids.dkdv.load(byColumn, c.rows, c.cols, c.sms);
    restart();
    put("shape", `${c.n} × ${c.n} scores, ${c.rows} × ${c.cols} tiles of ${c.blockM} × ${c.blockN}`);
    put("tiles", String(c.tiles));
    fillTable(byRow, byColumn, c);
  }

  function restart() {
    const c = config();
    put("sms", String(c.sms));
    for (const grid of Object.values(grids)) grid.load(grid.machine.programs, c.rows, c.cols, c.sms);
    // the middle row of each query block stands for the block's rows
    rows = Array.from({ length: c.rows }, (_, b) => new flashtri.ForwardRow(head, b * c.blockM + (c.blockM >> 1)));
    worst = compared = 0;
    if (pass === "forward") followed = "forward";
    else if (followed === "forward") followed = "dkdv";
    fillPicker();
    startGradient();
    paint();
  }

  function startGradient() {
    const c = config();
    const dkdv = followed === "dkdv";
    const block = grids[followed].picked;
    const size = dkdv ? c.blockN : c.blockM;
    const row = block * size + (size >> 1);
    tracked = dkdv ? new flashtri.KeyGradient(head, row) : new flashtri.QueryGradient(head, row);
    tracked.tilesSeen = 0;
    if (pass === "forward") return;
    // the program may already have computed some of its tiles
    const grid = grids[followed];
    for (const tile of grid.byBlock[block].tiles) {
      if (grid.state[grid.cell(grid.byBlock[block], tile)] >= 2) advanceGradient(tile);
    }
  }

  function advanceGradient(tile) {
    const c = config();
    const other = followed === "dkdv" ? c.blockM : c.blockN;
    tracked.step(tile.at * other, (tile.at + 1) * other);
    tracked.tilesSeen++;
  }

  function step() {
    const c = config();
    let busy = false;
    for (const grid of active()) {
      const work = grid.step();
      busy = busy || work.length > 0;
      for (const { program, tile, last } of work) {
        if (grid === grids.forward) {
          rows[program.block].step(tile.at * c.blockN, (tile.at + 1) * c.blockN);
          if (last) {
            worst = Math.max(worst, rows[program.block].error());
            compared++;
          }
        } else if (grid === grids[followed] && program.block === grid.picked) advanceGradient(tile);
      }
    }
    if (!busy) stop();
    return busy;
  }

  function follow(kernel, block) {
    followed = kernel;
    grids[kernel].picked = block;
    fillPicker();
    startGradient();
    paint();
    announce();
  }

  function fillPicker() {
    const kernels = pass === "forward" ? { forward: "query block" } : { dkdv: "dK/dV, key block", dq: "dQ, query block" };
    const options = Object.entries(kernels).flatMap(([kernel, label]) =>
      Array.from({ length: grids[kernel].count }, (_, b) => `<option value="${kernel} ${b}">${label} ${b}</option>`));
    if (control.follow.dataset.shape !== `${pass} ${options.length}`) {
      control.follow.innerHTML = options.join("");
      control.follow.dataset.shape = `${pass} ${options.length}`;
    }
    control.follow.value = `${followed} ${grids[followed].picked}`;
  }

  const bars = (values, scale) =>
    [...values].map((x) => `<i style="--x:${Math.max(-1, Math.min(1, x / scale)).toFixed(3)}"></i>`).join("");

  function paint() {
    for (const grid of active()) grid.draw();
    const grid = grids[followed];
    const program = grid.byBlock[grid.picked];
    const sm = grid.residents().get(grid.picked);
    const computed = program.tiles.filter((tile) => grid.state[grid.cell(program, tile)] >= 2).length;
    const onChip = program.tiles.find((tile) => grid.state[grid.cell(program, tile)] === 2);
    const where = sm !== undefined ? `resident on SM ${sm}` : computed ? "finished" : "waiting for an SM";
    const what = followed === "dkdv" ? "Key block" : "Query block";
    put("program", `${what} ${grid.picked}`);
    put("where", `${where}, tile ${computed} of ${program.tiles.length}${onChip ? (onChip.masked ? ", this one with the mask" : ", this one without a mask") : ""}`);
    if (pass === "forward") {
      const row = rows[grid.picked];
      put("row", `row ${row.i}, ${count(row.keys, "key")} folded in`);
      put("m", fixed(row.m / Math.sqrt(HEAD_DIM)));
      put("l", fixed(row.l));
      put("alpha", row.keys ? fixed(row.alpha) : "");
      put("acc", [...row.acc.slice(0, 4)].map((x) => fixed(x, 3)).join("  "));
      const done = computed === program.tiles.length && computed > 0;
      const { o, lse } = row.finalize();
      put("o", done ? [...o.slice(0, 4)].map((x) => fixed(x, 3)).join("  ") : "after the last tile: acc / l");
      put("lse", done ? fixed(lse) : "after the last tile: m + log l");
      put("rowerror", done ? small(row.error()) : "");
      out.bars.innerHTML = bars(row.acc, 4 + row.l / 8);
      put("worst", compared ? small(worst) : "–");
      put("compared", `${compared} of ${rows.length} rows finished`);
    } else {
      const { names, sums, i } = tracked;
      put("grow", `row ${i} of ${followed === "dkdv" ? "K and V" : "Q"}, ${count(tracked.tilesSeen, "tile")} added up`);
      all("[data-grad]").forEach((node, which) => {
        node.hidden = which >= names.length;
        if (node.hidden) return;
        node.querySelector("dt").textContent = names[which];
        node.querySelector("dd").textContent = [...sums[which].slice(0, 4)].map((x) => fixed(x, 3)).join("  ");
      });
    }
    const totals = active().map((each) => each.totals());
    const sum = (name) => totals.reduce((a, t) => a + t[name], 0);
    for (const name of ["now", "done", "waiting", "skipped", "masked"]) put(`n-${name}`, String(sum(name)));
    put("stepcount", String(active()[0].machine.steps));
    for (const each of active()) {
      const t = each.totals();
      each.canvas.setAttribute("aria-label", `${each.canvas.dataset.name}: ${count(t.now, "tile")} on chip, ${t.done} computed and discarded, ${t.waiting} not reached, ${t.skipped} skipped by the mask. Following block ${each.picked}.`);
    }
    find("#play").textContent = playing ? "Pause" : "Play";
    find("#play").setAttribute("aria-pressed", String(playing));
  }

  function announce() {
    put("live", `Step ${active()[0].machine.steps}. ${count(out["n-now"].textContent, "tile")} on chip, ${out["n-done"].textContent} discarded, ${out["n-waiting"].textContent} to go. ${out.program.textContent}: ${out.where.textContent}.`);
  }

  let last = 0, owed = 0;
  function frame(now) {
    if (!playing) return;
    owed = Math.min(owed + ((now - last) / 1000) * Number(control.speed.value), 8);
    last = now;
    let changed = false;
    while (owed >= 1 && playing) {
      owed -= 1;
      step();
      changed = true;
    }
    if (changed) paint();
    if (playing) requestAnimationFrame(frame);
  }
  function play() {
    if (active().every((grid) => grid.finished)) restart();
    playing = true;
    last = performance.now();
    owed = 1;
    requestAnimationFrame(frame);
    paint();
  }
  function stop() {
    playing = false;
    paint();
    announce();
  }
  const toggle = () => (playing ? stop() : play());
  const single = () => {
    playing = false;
    if (active().every((grid) => grid.finished)) restart();
    step();
    paint();
    announce();
  };

  function fillTable(byRow, byColumn, c) {
    const line = (kernel, program, span) => {
      const masked = program.tiles.filter((tile) => tile.masked).length;
      return `<tr><td>${kernel}</td><td>${program.block}</td><td>${program.tiles.length - masked}</td><td>${masked}</td><td>${span - program.tiles.length}</td></tr>`;
    };
    find("#schedule tbody").innerHTML = byRow.map((p) => line("forward, dQ: queries", p, c.cols)).join("") + byColumn.map((p) => line("dK/dV: keys", p, c.rows)).join("");
  }

  find("#play").addEventListener("click", toggle);
  find("#step").addEventListener("click", single);
  find("#reset").addEventListener("click", () => {
    playing = false;
    restart();
    announce();
  });
  for (const name of ["mask", "blocks", "tiles"]) control[name].addEventListener("input", () => { reset(); announce(); });
  control.sms.addEventListener("input", restart);
  control.speed.addEventListener("input", () => put("speed", control.speed.value));
  control.follow.addEventListener("input", () => {
    const [kernel, block] = control.follow.value.split(" ");
    follow(kernel, Number(block));
  });

  const tabs = all("[role=tab]");
  function select(tab, focus) {
    for (const each of tabs) {
      each.setAttribute("aria-selected", String(each === tab));
      each.tabIndex = each === tab ? 0 : -1;
      for (const panel of all(`[data-pass="${each.dataset.tab}"]`)) panel.hidden = each !== tab;
    }
    pass = tab.dataset.tab;
    playing = false;
    if (focus) tab.focus();
    restart();
  }
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) {
        event.preventDefault();
        select(tabs[(at + by + tabs.length) % tabs.length], true);
      }
    });
  });

  for (const [kernel, grid] of Object.entries(grids)) {
    grid.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key] || (grid.axis === "k" && { ArrowRight: 1, ArrowLeft: -1 }[event.key]);
      if (by) follow(kernel, Math.max(0, Math.min(grid.count - 1, (followed === kernel ? grid.picked : 0) + by)));
      else if (event.key === " ") toggle();
      else if (event.key === "ArrowRight" || event.key === ".") single();
      else if (event.key === "Home") { playing = false; restart(); }
      else return;
      event.preventDefault();
      event.stopPropagation(); // the theme reads "." as "next page"
    });
  }
  new MutationObserver(() => active().forEach((grid) => grid.draw())).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  if (calm.matches) control.speed.value = control.speed.min;

  put("speed", control.speed.value);
  grids.forward.picked = 11;
  grids.dkdv.picked = 1;
  grids.dq.picked = 13;
  reset();
  for (let i = 0; i < 20; i++) step(); // far enough that a few rows are finished and can be compared
  paint();
  root.dataset.ready = "true";
  Object.assign(flashtri, { visualiser: { grids, step, paint, config, get worst() { return worst; } } });
})();
