// The footprint calculator. Its numbers are those of tools/footprint.py; a test compares them.
"use strict";
(() => {
  const BYTES = { fp16: 2, bf16: 2, fp32: 4 };
  const footprint = {
    scoreMatrix: (s) => s.batch * s.heads * s.seqlen ** 2 * BYTES[s.dtype],
    tensors: (s) => 4 * s.batch * s.heads * s.seqlen * s.headDim * BYTES[s.dtype],
    kernel: (s) => footprint.tensors(s) + 4 * s.batch * s.heads * s.seqlen,
    ordinaryLimit(memory, s) {
      const unit = s.batch * s.heads * BYTES[s.dtype];
      const fits = (n) => n >= 0 && unit * (n * n + 4 * n * s.headDim) <= memory;
      let n = Math.floor(Math.sqrt(memory / unit + 4 * s.headDim ** 2)) - 2 * s.headDim;
      while (n > 0 && !fits(n)) n--; // the square root was rounded
      while (fits(n + 1)) n++;
      return Math.max(0, n);
    },
    kernelLimit: (memory, s) => Math.floor(memory / (s.batch * s.heads * (4 * s.headDim * BYTES[s.dtype] + 4))),
    human(count) {
      let size = count, unit = 0;
      while (size >= 1000 && unit < 8) {
        size /= 1024;
        unit++;
      }
      const digits = size >= 100 || unit === 0 ? 0 : size >= 10 ? 1 : 2;
      return `${Number(size.toFixed(digits))} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"][unit]}`;
    },
  };
  (window.flashtri = window.flashtri || {}).footprint = footprint;

  const form = document.getElementById("footprint");
  const result = Object.fromEntries([...document.querySelectorAll("[data-cost]")].map((node) => [node.dataset.cost, node]));
  const problem = form.querySelector(".ft-problem");
  const number = new Intl.NumberFormat("en"), twoDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
  const field = (name) => form.elements[name];
  const LIMITS = { seqlen: 2 ** 27, batch: 2 ** 16, heads: 2 ** 12, headDim: 256, memory: 100000 };
  // 8192, 8 192, 8,192 or 1e5. In a number that may have decimals a comma could mean either thing: it is asked about.
  const GROUPED = /^\d{1,3}([, _'\u00a0\u2009\u202f]\d{3})+$/, PLAIN = /^\d*\.?\d+(e\+?\d{1,3})?$/i;
  const parse = (text, whole) => (whole && GROUPED.test(text) ? Number(text.replace(/\D/g, "")) : PLAIN.test(text) ? Number(text) : NaN);

  function read() {
    const values = {};
    let wrong = "";
    for (const [name, limit] of Object.entries(LIMITS)) {
      const text = field(name).value.trim(), whole = name !== "memory";
      const value = parse(text, whole);
      const fine = value > 0 && value <= limit && (!whole || Number.isInteger(value));
      field(name).setAttribute("aria-invalid", String(!fine));
      const asked = whole ? `a whole number from 1 to ${number.format(limit)}` : `a number above 0, up to ${number.format(limit)}, with a point before decimals`;
      if (!fine) wrong = wrong || `${field(name).dataset.label} has to be ${asked}${text ? `, not “${text.length > 24 ? `${text.slice(0, 24)}…` : text}”` : ""}.`;
      values[name] = value;
    }
    problem.textContent = wrong;
    return wrong ? null : { ...values, dtype: field("dtype").value, memory: values.memory * 2 ** 30 };
  }
  function update(moved) {
    const s = read();
    if (!s) {
      // no answer is left standing beside a question that was not understood
      for (const node of Object.values(result)) {
        if (node.style.getPropertyValue("--x")) node.style.setProperty("--x", 0);
        else node.textContent = node.matches("small") ? "" : "–";
      }
      return;
    }
    if (moved !== field("slider")) field("slider").value = Math.log2(s.seqlen);
    field("slider").setAttribute("aria-valuetext", `${number.format(s.seqlen)} tokens`);
    const score = footprint.scoreMatrix(s), ours = footprint.kernel(s), ordinary = footprint.tensors(s) + score;
    result.score.textContent = footprint.human(score);
    result.kernel.textContent = footprint.human(ours);
    const ratio = score / ours;
    result.ratio.textContent = `${ratio >= 100 ? number.format(Math.round(ratio)) : twoDigits.format(ratio)} ×`;
    const limit = footprint.ordinaryLimit(s.memory, s);
    result.limit.textContent = limit >= 1 ? `N = ${number.format(limit)}` : "does not fit at all";
    result.ourlimit.textContent = number.format(footprint.kernelLimit(s.memory, s));
    const bar = (name, bytes) => result[name].style.setProperty("--x", Math.min(1, bytes / Math.max(ordinary, ours, s.memory)));
    bar("bar-ordinary", ordinary);
    bar("bar-kernel", ours);
    bar("mark-ordinary", s.memory);
    bar("mark-kernel", s.memory);
    const gib = `${field("memory").value.trim()} GiB`;
    result.fits.textContent = ordinary > s.memory ? `With Q, K, V and O more than the ${gib} of this GPU.` : `With Q, K, V and O it fits into ${gib}, for one layer and without a backward pass.`;
  }
  form.addEventListener("input", (event) => {
    if (event.target === field("slider")) field("seqlen").value = Math.round(2 ** Number(field("slider").value));
    update(event.target);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
})();
