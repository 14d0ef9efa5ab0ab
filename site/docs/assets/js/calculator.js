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
      while (size >= 1000 && unit < 5) {
        size /= 1024;
        unit++;
      }
      const digits = size >= 100 || unit === 0 ? 0 : size >= 10 ? 1 : 2;
      return `${Number(size.toFixed(digits))} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
    },
  };
  (window.flashtri = window.flashtri || {}).footprint = footprint;

  const form = document.getElementById("footprint");
  const result = Object.fromEntries([...document.querySelectorAll("[data-cost]")].map((node) => [node.dataset.cost, node]));
  const problem = form.querySelector(".ft-problem");
  const number = new Intl.NumberFormat("en");
  const field = (name) => form.elements[name];
  const LIMITS = { batch: 1 << 20, heads: 1 << 16, seqlen: 1 << 27, headDim: 256, memory: 100000 };

  function read() {
    const values = {};
    let wrong = "";
    for (const [name, limit] of Object.entries(LIMITS)) {
      const value = Number(field(name).value);
      const whole = name === "memory" || Number.isInteger(value);
      const fine = field(name).value.trim() !== "" && value > 0 && value <= limit && whole;
      field(name).setAttribute("aria-invalid", String(!fine));
      if (!fine) wrong = wrong || `${field(name).dataset.label}: a ${name === "memory" ? "number" : "whole number"} from 1 to ${number.format(limit)}, please.`;
      values[name] = value;
    }
    problem.textContent = wrong;
    return wrong ? null : { ...values, dtype: field("dtype").value, memory: values.memory * 2 ** 30 };
  }
  function update() {
    const s = read();
    if (!s) return;
    const score = footprint.scoreMatrix(s), ours = footprint.kernel(s), ordinary = footprint.tensors(s) + score;
    result.score.textContent = footprint.human(score);
    result.kernel.textContent = footprint.human(ours);
    const ratio = score / ours;
    result.ratio.textContent = `${ratio >= 100 ? number.format(Math.round(ratio)) : ratio.toPrecision(2)} ×`;
    const limit = footprint.ordinaryLimit(s.memory, s);
    result.limit.textContent = limit >= 1 ? `N = ${number.format(limit)}` : "does not fit at all";
    result.ourlimit.textContent = number.format(footprint.kernelLimit(s.memory, s));
    const bar = (name, bytes) => result[name].style.setProperty("--x", Math.min(1, bytes / Math.max(ordinary, ours, s.memory)));
    bar("bar-ordinary", ordinary);
    bar("bar-kernel", ours);
    bar("mark-ordinary", s.memory);
    bar("mark-kernel", s.memory);
    result.fits.textContent = ordinary > s.memory ? `More than the ${field("memory").value} GiB of this GPU.` : `Fits into ${field("memory").value} GiB, for one layer and without a backward pass.`;
  }
  form.addEventListener("input", (event) => {
    if (event.target === field("slider")) field("seqlen").value = Math.round(2 ** Number(field("slider").value));
    else if (event.target === field("seqlen") && Number(field("seqlen").value) > 0) field("slider").value = Math.log2(Number(field("seqlen").value));
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
})();
