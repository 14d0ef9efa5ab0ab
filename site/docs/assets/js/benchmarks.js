// Charts and table of the benchmark page, from data/results.json. Draws nothing that is not a row there.
"use strict";
(async () => {
  const root = document.getElementById("bench");
  const { runs, names, rows, skipped } = await (await fetch(root.dataset.results)).json();
  document.getElementById("bench-empty").hidden = rows.length > 0;
  for (const part of document.querySelectorAll(".ft-bench")) part.hidden = rows.length === 0;
  if (!rows.length) return;

  const OPS = { fwd: "forward", bwd: "backward", fwd_bwd: "forward and backward", step: "training step" };
  const MASKS = ["full", "causal", "window"], ALL = "", OURS = "flashtri";
  const runOf = Object.fromEntries(runs.map((run) => [run.id, run]));
  for (const row of rows) row.gpu = runOf[row.run].environment.gpu;
  const ours = (impl) => impl.startsWith(OURS);
  const make = (tag, text, properties) => Object.assign(document.createElement(tag), { textContent: text, ...properties });
  const svg = (tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const round = (value, digits = 3) => String(Number(value.toPrecision(digits)));
  const percent = (value) => `${(100 * value).toFixed(0)} %`;
  const tokens = (n) => (n >= 1024 && n % 1024 === 0 ? `${n / 1024}k` : String(n));
  const size = (bytes) => {
    let unit = 0;
    for (; bytes >= 1000 && unit < 4; unit++) bytes /= 1024;
    return `${round(bytes)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };

  // ------------------------------------------------------------------------------------------------- filters
  const select = Object.fromEntries([...root.querySelectorAll("[data-filter]")].map((node) => [node.dataset.filter, node]));
  const label = (name, value) => (name === "op" ? OPS[value] || value : name === "impl" ? names[value] : name === "d" ? `D = ${value}` : String(value));
  for (const [name, node] of Object.entries(select)) {
    let values = [...new Set(rows.map((row) => row[name]))].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(b)));
    const order = { impl: Object.keys(names).filter((impl) => !ours(impl)), op: Object.keys(OPS), mask: MASKS }[name];
    if (order) values = order.filter((value) => values.includes(value));
    const offer = name === "gpu" || name === "dtype" ? values : [ALL, ...values]; // never two GPUs or formats in one chart
    node.replaceChildren(...offer.map((value) => new Option(value !== ALL ? label(name, value) : name === "impl" ? "every peer" : "all", value)));
    if (name === "dtype") node.parentElement.hidden = values.length < 2;
    node.addEventListener("input", show);
  }
  for (const [name, value] of Object.entries({ dtype: "bf16", d: "128", mask: "causal", op: "fwd" })) {
    if ([...select[name].options].some((option) => option.value === value)) select[name].value = value;
  }

  // ------------------------------------------------------------------------------------------------- charts
  const COLOURS = ["--ft-link", "--ft-amber-ink", "--ft-good", "--md-code-hl-keyword-color", "--md-code-hl-special-color", "--ft-soft", "--tile-edge", "--md-code-hl-constant-color"];
  const DASHES = ["", "6 3", "2 3", "9 3 2 3"];
  const known = Object.keys(names);
  const colour = (impl) => `var(${COLOURS[known.indexOf(impl) % COLOURS.length]})`;
  const stroke = (impl) => ({ stroke: colour(impl), "stroke-dasharray": DASHES[known.indexOf(impl) % DASHES.length], "stroke-width": ours(impl) ? 2.8 : 1.8, fill: "none" });
  const figure = (drawing, caption) => {
    const node = document.createElement("figure");
    node.append(make("figcaption", caption), drawing);
    return node;
  };
  const canvas = (title, width, height) => svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}. The same figures are in the table below.` });

  /** Round numbers from 0 to at least `high`: steps of 1, 2, 2.5 or 5 times a power of ten. */
  function linear(high) {
    const power = 10 ** Math.floor(Math.log10(high / 4));
    const step = power * [1, 2, 2.5, 5, 10].find((s) => s * power >= high / 4);
    return Array.from({ length: Math.ceil(high / step - 1e-9) + 1 }, (_, i) => i * step);
  }
  /** Powers of two that enclose low to high, at most seven of them. */
  function powers(low, high) {
    const first = Math.floor(Math.log2(low)), last = Math.max(first + 1, Math.ceil(Math.log2(high)));
    const step = Math.ceil((last - first) / 6);
    return Array.from({ length: Math.ceil((last - first) / step) + 1 }, (_, i) => 2 ** (first + i * step));
  }

  /** Lines over N. points: [{impl, n, y, out}], `out` a length that did not fit; line: {at, text}, a ceiling. */
  function chart(title, width, points, { format, log, line, least = 0 }) {
    const outs = known.map((impl) => points.filter((p) => p.impl === impl && p.out).sort((a, b) => a.n - b.n)[0]).filter(Boolean);
    const stacked = outs.map((p, i) => outs.slice(0, i).filter((other) => other.n === p.n).length); // same length: one above the other
    const strip = outs.length ? 16 * (1 + Math.max(...stacked)) + 8 : 0; // above the plot
    const height = 260 + strip, left = 62, right = 14, top = 20 + strip, bottom = 40;
    const ys = [...points.filter((p) => p.y > 0).map((p) => p.y), ...(line ? [line.at] : [])];
    const ticks = log ? powers(Math.min(...ys), Math.max(...ys)) : linear(Math.max(least, ...ys));
    const scale = log ? Math.log2 : (v) => v;
    const from = scale(ticks[0]), to = scale(ticks[ticks.length - 1]);
    const ns = [...new Set(points.map((p) => p.n))].sort((a, b) => a - b);
    const wide = Math.log(ns[ns.length - 1] / ns[0]) || 1;
    const x = (n) => left + 8 + (ns.length < 2 ? 0.5 : Math.log(n / ns[0]) / wide) * (width - left - right - 16);
    const y = (v) => height - bottom - ((height - top - bottom) * (scale(v) - from)) / (to - from);
    const node = canvas(title, width, height);
    for (const tick of ticks) {
      node.append(svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "thin" }), svg("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
    }
    const every = Math.ceil((ns.length * 34) / (width - left - right));
    ns.forEach((n, i) => (ns.length - 1 - i) % every === 0 && node.append(svg("text", { x: x(n), y: height - bottom + 17, "text-anchor": "middle" }, tokens(n))));
    node.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "N, tokens"));
    if (line) node.append(svg("line", { x1: left, x2: width - right, y1: y(line.at), y2: y(line.at), class: "ceiling" }), svg("text", { x: left + 4, y: y(line.at) - 5 }, line.text));
    for (const impl of [...known].reverse()) {
      const drawn = points.filter((p) => p.impl === impl && p.y > 0).sort((a, b) => a.n - b.n);
      if (!drawn.length) continue;
      node.append(svg("polyline", { points: drawn.map((p) => `${x(p.n).toFixed(1)},${y(p.y).toFixed(1)}`).join(" "), ...stroke(impl) }));
      for (const p of drawn) {
        const dot = svg("circle", { cx: x(p.n), cy: y(p.y), r: 3, fill: colour(impl) });
        dot.append(svg("title", {}, `${names[impl]}, N = ${p.n}: ${format(p.y)}`));
        node.append(dot);
      }
    }
    if (outs.length) node.append(svg("text", { x: left - 8, y: 16, "text-anchor": "end" }, "OOM"));
    outs.forEach((p, i) => {
      const cross = svg("path", { d: `M${x(p.n) - 5} ${7 + 16 * stacked[i]}l10 10m0-10l-10 10`, stroke: colour(p.impl), "stroke-width": 2.4, class: "oom" });
      cross.append(svg("title", {}, `${names[p.impl]}: out of memory at ${tokens(p.n)}`));
      node.append(cross);
    });
    const ends = outs.map((p) => ` ${names[p.impl]} runs out of memory at ${tokens(p.n)}.`).join("");
    node.setAttribute("aria-label", `${title}.${ends} The same figures are in the table below.`);
    return figure(node, title);
  }

  /** For the output and each gradient one bar per implementation. */
  function bars(title, width, list) {
    const tensors = { out: "O", dq: "dQ", dk: "dK", dv: "dV" }, step = 17, left = 34, words = 190;
    const group = list.length * step + 16;
    const most = Math.max(...list.flatMap((r) => Object.keys(tensors).map((t) => r[t]))) || 1;
    const node = canvas(title, width, 4 * group);
    Object.entries(tensors).forEach(([tensor, name], t) => {
      node.append(svg("text", { x: left - 8, y: t * group + 14, "text-anchor": "end" }, name));
      list.forEach((r, i) => {
        const long = ((width - left - words) * r[tensor]) / most, top = t * group + i * step + 4;
        node.append(svg("rect", { x: left, y: top, width: long, height: step - 5, fill: colour(r.impl) }), svg("text", { x: left + long + 6, y: top + 10 }, `${r[tensor].toExponential(1)} ${names[r.impl]}`));
      });
    });
    return figure(node, title);
  }

  function charts(shown, want) {
    const area = document.getElementById("bench-charts");
    const width = Math.max(270, Math.min(600, area.clientWidth));
    const one = want.d !== ALL && want.mask !== ALL && want.op !== ALL;
    const timed = shown.filter((r) => r.metric === "time" && r.suite === "grid" && one);
    const limited = timed.filter((r) => r.limit);
    const memory = shown.filter((r) => r.metric === "memory");
    const error = shown.filter((r) => r.metric === "error" && r.inputs === "normal" && want.d !== ALL && want.mask !== ALL);
    const ceilings = limited.length && runOf[limited[0].run].ceilings;
    const rate = ceilings && ceilings.matmul_tflops[want.dtype];
    const draw = {
      time: () => chart(`Speed, ${label("op", want.op)}: TFLOP/s`, width, timed.map((r) => ({ impl: r.impl, n: r.n, y: r.tflops })), { format: (v) => round(v), line: rate && { at: rate, text: `matrix product alone: ${round(rate)}` } }),
      limit: () => chart(`Share of the nearer measured ceiling: matrix product ${round(rate)} TFLOP/s, copy ${round(ceilings.copy_tb_s)} TB/s`, width, limited.map((r) => ({ impl: r.impl, n: r.n, y: r.limit })), { format: percent, least: 1 }),
      memory: () => chart(`Memory beyond inputs, output and gradients, ${size(memory[0].cap)} given to each`, width, memory.map((r) => ({ impl: r.impl, n: r.n, y: r.bytes, out: r.oom })), { format: size, log: true }),
      error: () => bars("Root mean square error against fp64, normal inputs", width, error),
    };
    const have = { time: timed.length, limit: limited.length, memory: memory.some((r) => r.bytes > 0), error: error.length };
    const WHAT = { time: "Speed over N", limit: "Share of the ceiling", memory: "Memory, and where it runs out", error: "Error against fp64" };
    const ever = (name) => rows.some((r) => (name === "limit" ? r.limit : r.metric === name && (name !== "time" || r.suite === "grid")));
    area.replaceChildren(...Object.keys(draw).map((name) => {
      if (have[name]) return draw[name]();
      const why = !ever(name) ? "nothing was measured yet." : one ? "no row for this choice." : "choose one head dimension, one mask and one pass.";
      return make("p", `${WHAT[name]}: ${why}`, { className: "ft-none" });
    }));
    const present = known.filter((impl) => [...timed, ...memory, ...error].some((r) => r.impl === impl));
    document.getElementById("bench-key").replaceChildren(...present.map((impl) => {
      const line = svg("svg", { viewBox: "0 0 30 8", "aria-hidden": "true" }), item = document.createElement("li");
      line.append(svg("path", { d: "M0 4h30", ...stroke(impl) }), svg("circle", { cx: 15, cy: 4, r: 3, fill: colour(impl) }));
      item.append(line, names[impl]);
      return item;
    }));
  }

  // ------------------------------------------------------------------------------------------------- rows
  const result = {
    time: (r) => `${r.tflops ? `${round(r.tflops, 4)} TFLOP/s, ` : ""}${r.ms} ms`,
    memory: (r) => (r.oom ? `out of memory under ${size(r.cap)}` : size(r.bytes)),
    host: (r) => `${r.us} µs of host time per call`,
    first_call: (r) => `first call ${r.cold} s, with warm caches ${r.warm} s`,
    error: (r) => `RMSE out ${r.out}, dQ ${r.dq}, dK ${r.dk}, dV ${r.dv} (${r.inputs} inputs)`,
  };
  const CEILING = { matmul: "of matrix product", copy: "of copy" };
  function table(shown) {
    document.getElementById("bench-count").textContent = `${shown.length} of ${rows.length} rows`;
    document.querySelector("#bench-table tbody").replaceChildren(...shown.map((r) => {
      const line = document.createElement("tr");
      const cells = [r.case, names[r.impl], result[r.metric](r), r.ratio ? `${r.ratio.toFixed(2)}× as fast` : "", r.limit ? `${percent(r.limit)} ${CEILING[r.ceiling]}` : "", OPS[r.op] || r.op, r.dtype];
      line.append(...cells.map((text) => make("td", text)));
      return line;
    }));
    const used = runs.filter((run) => shown.some((row) => row.run === run.id));
    document.getElementById("bench-runs").replaceChildren(...used.map((run) => {
      const e = run.environment, c = run.ceilings, list = document.createElement("ul");
      const text = [
        `${e.gpu}${e.sm ? `, compute capability ${e.sm}` : ""}, driver ${e.driver}`,
        `PyTorch ${e.torch}, Triton ${e.triton}, CUDA ${e.cuda}, cuDNN ${e.cudnn}`,
        `peers: ${Object.entries(e.peers).map(([name, version]) => `${names[name] || name} ${version}`).join(", ") || "those of PyTorch"}`,
        `commit ${run.commit.slice(0, 12)}, ${run.started_at}`,
        `time: ${run.protocol.statistic}; order: ${run.protocol.order}`,
        c ? `ceilings, measured: matrix product ${Object.entries(c.matmul_tflops).map(([name, value]) => `${name} ${value} TFLOP/s`).join(", ")}; copy ${c.copy_tb_s} TB/s` : "ceilings: not measured",
        `command: ${run.command}`,
      ];
      list.append(...text.map((t) => make("li", t)));
      return list;
    }));
  }

  function chosen() {
    const want = Object.fromEntries(Object.entries(select).map(([name, node]) => [name, node.value]));
    const fits = (row) =>
      Object.entries(want).every(([name, value]) => {
        if (value === ALL || (name === "op" && row.metric !== "time")) return true; // other metrics have one pass only
        return name === "impl" ? row.impl === value || ours(row.impl) : String(row[name]) === value;
      });
    return [rows.filter(fits), want];
  }
  function show() {
    const [shown, want] = chosen();
    charts(shown, want);
    table(shown);
  }
  const gone = document.getElementById("bench-skipped");
  if (skipped.length) gone.querySelector("ul").replaceChildren(...skipped.map((s) => make("li", `${s.case}, ${OPS[s.op] || s.op}, ${names[s.impl]}: ${s.reason}`)));
  else gone.remove();
  addEventListener("resize", () => charts(...chosen()));
  show();
})();
