// Table and charts of the benchmark page, from data/results.json. Draws nothing that is not a row there.
"use strict";
(async () => {
  const root = document.getElementById("bench");
  const { runs, rows, skipped } = await (await fetch(root.dataset.results)).json();
  const empty = document.getElementById("bench-empty");
  if (empty) empty.hidden = rows.length > 0;
  root.hidden = rows.length === 0;
  if (!rows.length) return;

  const byId = Object.fromEntries(runs.map((run) => [run.id, run]));
  for (const row of rows) row.gpu = byId[row.run].environment.gpu;
  const OPS = { fwd: "forward", bwd: "backward", fwd_bwd: "forward and backward", step: "training step" };
  const select = Object.fromEntries([...root.querySelectorAll("[data-filter]")].map((node) => [node.dataset.filter, node]));
  const ALL = "";
  const label = (name, value) => (name === "op" ? OPS[value] || value : name === "d" ? `D = ${value}` : String(value));
  for (const [name, node] of Object.entries(select)) {
    const values = [...new Set(rows.map((row) => row[name]))].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(b)));
    const offer = name === "gpu" ? values : name === "impl" ? [ALL, ...values.filter((v) => !v.startsWith("flashtri"))] : [ALL, ...values];
    node.replaceChildren(...offer.map((value) => new Option(value === ALL ? (name === "impl" ? "every peer" : "all") : label(name, value), value)));
    node.addEventListener("input", show);
  }
  const prefer = (name, value) => [...select[name].options].some((o) => o.value === String(value)) && (select[name].value = value);
  prefer("d", 128);
  prefer("mask", "causal");
  prefer("op", "fwd");

  const svg = (tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const COLOURS = ["--ft-link", "--ft-amber-ink", "--ft-good", "--md-code-hl-keyword-color", "--md-code-hl-special-color", "--ft-soft", "--tile-edge", "--md-code-hl-constant-color"];
  const DASHES = ["", "5 3", "2 2", "8 3 2 3", "1 3", "10 4", "4 1", "6 2 1 2"];
  const names = [...new Set(rows.map((row) => row.impl))].sort((a, b) => b.startsWith("flashtri") - a.startsWith("flashtri") || a.localeCompare(b));
  const style = (impl) => {
    const at = names.indexOf(impl);
    return { stroke: `var(${COLOURS[at % COLOURS.length]})`, "stroke-dasharray": DASHES[at % DASHES.length], "stroke-width": impl.startsWith("flashtri") ? 2.6 : 1.6, fill: "none" };
  };
  const tokens = (n) => (n >= 1024 && n % 1024 === 0 ? `${n / 1024}k` : String(n));
  const size = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toPrecision(3)} GiB` : `${(bytes / 2 ** 20).toPrecision(3)} MiB`);

  /** One line chart over N: points [{impl, n, y, note}], logarithmic in N and, if asked, in y. */
  function chart(title, points, format, logY) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    if (!points.length) return null;
    const W = 400, H = 240, left = 58, right = 112, top = 14, bottom = 26;
    const ns = [...new Set(points.map((p) => p.n))].sort((a, b) => a - b);
    const ys = points.map((p) => p.y).filter((y) => y > 0);
    const low = logY ? Math.log(Math.min(...ys)) : 0, high = logY ? Math.log(Math.max(...ys)) : Math.max(...ys) * 1.05;
    const x = (n) => (ns.length < 2 ? (left + W - right) / 2 : left + ((W - left - right) * Math.log(n / ns[0])) / Math.log(ns[ns.length - 1] / ns[0]));
    const y = (v) => H - bottom - ((H - top - bottom) * ((logY ? Math.log(v) : v) - low)) / (high - low || 1);
    const node = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}. The same figures are in the table below.` });
    const powers = Array.from({ length: 26 }, (_, t) => 4 ** t).filter((v) => v >= Math.exp(low) * 0.99 && v <= Math.exp(high) * 1.01);
    for (const value of logY ? powers : [0, 1, 2, 3, 4].map((t) => (high * t) / 4)) {
      node.append(svg("line", { x1: left, x2: W - right, y1: y(value), y2: y(value), class: "thin" }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    ns.forEach((n, i) => (ns.length < 8 || i % 2 === 0) && node.append(svg("text", { x: x(n), y: H - 8, "text-anchor": "middle" }, tokens(n))));
    let labels = [];
    for (const impl of names) {
      const mine = points.filter((p) => p.impl === impl).sort((a, b) => a.n - b.n);
      const drawn = mine.filter((p) => p.y > 0);
      if (!drawn.length) continue;
      node.append(svg("polyline", { points: drawn.map((p) => `${x(p.n).toFixed(1)},${y(p.y).toFixed(1)}`).join(" "), ...style(impl) }));
      for (const p of drawn) node.append(svg("circle", { cx: x(p.n), cy: y(p.y), r: 2.4, fill: style(impl).stroke }));
      const last = drawn[drawn.length - 1];
      const out = mine.find((p) => p.note);
      labels.push({ at: y(last.y), text: impl, note: out && `${out.note} at ${tokens(out.n)}`, fill: style(impl).stroke });
    }
    labels.sort((a, b) => a.at - b.at).forEach((item, i, list) => {
      if (i) item.at = Math.max(item.at, list[i - 1].at + (list[i - 1].note ? 24 : 12));
      const style = `fill:${item.fill};font-size:10px`;
      node.append(svg("text", { x: W - right + 8, y: item.at + 4, style }, item.text));
      if (item.note) node.append(svg("text", { x: W - right + 8, y: item.at + 16, style }, item.note));
    });
    figure.append(node, caption);
    return figure;
  }

  /** Error bars: for the output and each gradient one bar per implementation. */
  function errors(title, list) {
    if (!list.length) return null;
    const tensors = ["out", "dq", "dk", "dv"], W = 400, step = 15, left = 58, right = 112;
    const H = tensors.length * (list.length * step + 14) + 4;
    const most = Math.max(...list.flatMap((r) => tensors.map((t) => r[t])));
    const node = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}. The same figures are in the table below.` });
    tensors.forEach((tensor, t) => {
      const top = t * (list.length * step + 14) + 4;
      node.append(svg("text", { x: left - 8, y: top + 11, "text-anchor": "end" }, tensor === "out" ? "O" : `d${tensor[1].toUpperCase()}`));
      list.forEach((r, i) => {
        const width = ((W - left - right) * r[tensor]) / most;
        node.append(svg("rect", { x: left, y: top + i * step, width, height: step - 4, fill: style(r.impl).stroke }));
        node.append(svg("text", { x: left + width + 6, y: top + i * step + 9, style: "font-size:10px" }, `${r.impl} ${r[tensor].toExponential(1)}`));
      });
    });
    const figure = document.createElement("figure");
    figure.append(node, Object.assign(document.createElement("figcaption"), { textContent: title }));
    return figure;
  }

  function show() {
    const want = Object.fromEntries(Object.entries(select).map(([name, node]) => [name, node.value]));
    const fits = (row, but = []) =>
      Object.entries(want).every(([name, value]) => value === ALL || but.includes(name) || (name === "impl" ? row.impl === value || row.impl.startsWith("flashtri") : String(row[name]) === value));
    const shown = rows.filter((row) => fits(row, row.metric === "time" ? [] : ["op"]));
    document.getElementById("bench-count").textContent = `${shown.length} of ${rows.length} rows`;

    const grid = shown.filter((row) => row.metric === "time" && row.suite === "grid");
    const one = (row) => (want.d === ALL || want.mask === ALL || want.op === ALL ? null : row);
    const charts = [
      chart(`TFLOP/s over N, ${label("op", want.op)}`, grid.filter(one).map((r) => ({ impl: r.impl, n: r.n, y: r.tflops })), (v) => v.toFixed(0)),
      chart("Share of the measured limit", grid.filter(one).filter((r) => r.limit).map((r) => ({ impl: r.impl, n: r.n, y: r.limit })), (v) => `${(100 * v).toFixed(0)} %`),
      chart("Memory above inputs, output and gradients", shown.filter((r) => r.metric === "memory").map((r) => ({ impl: r.impl, n: r.n, y: r.bytes, note: r.oom ? "out of memory" : "" })), size, true),
      errors("Root mean square error against fp64, normal inputs", shown.filter((r) => r.metric === "error" && r.inputs === "normal").filter(one)),
    ];
    const area = document.getElementById("bench-charts");
    area.replaceChildren(...charts.filter(Boolean));
    if (!charts[0] && rows.some((r) => r.suite === "grid")) {
      const hint = document.createElement("p");
      hint.textContent = "Choose one head dimension, one mask and one pass for the charts over N.";
      area.prepend(hint);
    }

    const head = ["case", "pass", "implementation", "format", "result", "share of limit"];
    document.querySelector("#bench-table thead").innerHTML = `<tr>${head.map((h) => `<th scope="col">${h}</th>`).join("")}</tr>`;
    const result = (r) =>
      r.metric === "time" ? `${r.tflops ? `${r.tflops} TFLOP/s, ` : ""}${r.ms} ms`
      : r.metric === "memory" ? (r.oom ? `out of memory under ${size(r.cap)}` : size(r.bytes))
      : r.metric === "host" ? `${r.us} µs of host time per call`
      : r.metric === "first_call" ? `first call ${r.cold} s, with warm caches ${r.warm} s`
      : `RMSE out ${r.out}, dQ ${r.dq}, dK ${r.dk}, dV ${r.dv} (${r.inputs} inputs)`;
    const body = shown.map((r) => {
      const line = document.createElement("tr");
      for (const text of [r.case, OPS[r.op] || r.op, r.impl, r.dtype, result(r), r.limit ? `${(100 * r.limit).toFixed(0)} %` : ""]) line.append(Object.assign(document.createElement("td"), { textContent: text }));
      return line;
    });
    document.querySelector("#bench-table tbody").replaceChildren(...body);

    const used = runs.filter((run) => shown.some((row) => row.run === run.id));
    document.getElementById("bench-runs").replaceChildren(...used.map((run) => {
      const e = run.environment, c = run.ceilings;
      const text = [
        `${e.gpu}${e.sm ? `, compute capability ${e.sm}` : ""}, driver ${e.driver}`, `PyTorch ${e.torch}, Triton ${e.triton}, CUDA ${e.cuda}, cuDNN ${e.cudnn}`,
        `peers: ${Object.entries(e.peers).map(([k, v]) => `${k} ${v}`).join(", ") || "those of PyTorch"}`, `commit ${run.commit}, ${run.started_at}`, `statistic: ${run.protocol.statistic}; order: ${run.protocol.order}`,
        c ? `ceilings: copy ${c.copy_tb_s} TB/s, ${Object.entries(c.matmul_tflops).map(([k, v]) => `${k} ${v} TFLOP/s`).join(", ")}` : "ceilings: not measured", `command: ${run.command}`,
      ];
      const list = document.createElement("ul");
      list.append(...text.map((t) => Object.assign(document.createElement("li"), { textContent: t })));
      return list;
    }));
  }
  document.getElementById("bench-skipped").replaceChildren(...skipped.map((s) =>
    Object.assign(document.createElement("li"), { textContent: `${s.case}, ${OPS[s.op] || s.op}, ${s.impl}: ${s.reason}` })));
  document.getElementById("bench-skipped").parentElement.hidden = skipped.length === 0;
  show();
})();
