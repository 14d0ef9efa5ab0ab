// The arithmetic behind the tile visualiser, without a page: numbers for one head, the tiled softmax, and who runs where.
// Which tiles a program visits, and in which order programs start, comes from data/tiles.json, never from here.
"use strict";

const flashtri = (window.flashtri = window.flashtri || {});
const LOG2E = Math.log2(Math.E);
const f32 = Math.fround;

/** Normal random numbers from a seed, so that every reader follows the same rows. */
function normals(count, seed) {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return Float32Array.from({ length: count }, () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
}

/** One head of attention: n tokens, d numbers each, and the window (left, right) that a query sees, -1 = open. */
class Head {
  constructor(n, d, window) {
    Object.assign(this, { n, d, left: window[0], right: window[1], unitLog2: LOG2E / Math.sqrt(d) });
    [this.q, this.k, this.v, this.dO] = [1, 2, 3, 4].map((seed) => normals(n * d, seed));
    this.rows = new Map();
  }
  sees(i, j) {
    return (this.left < 0 || j >= i - this.left) && (this.right < 0 || j <= i + this.right);
  }
  dot(a, i, b, j) {
    let sum = 0;
    for (let c = 0; c < this.d; c++) sum += a[i * this.d + c] * b[j * this.d + c];
    return sum;
  }
  /** Ordinary attention of row i in double precision, the whole row of scores at once: what every tile must add up to. */
  plain(i) {
    if (this.rows.has(i)) return this.rows.get(i);
    const { n, d } = this, s = new Float64Array(n), o = new Float64Array(d);
    let m = -Infinity, l = 0, delta = 0;
    for (let j = 0; j < n; j++) {
      s[j] = this.sees(i, j) ? this.dot(this.q, i, this.k, j) / Math.sqrt(d) : -Infinity;
      if (s[j] > m) m = s[j];
    }
    for (let j = 0; j < n; j++) {
      if (s[j] === -Infinity) continue;
      const p = Math.exp(s[j] - m);
      l += p;
      for (let c = 0; c < d; c++) o[c] += p * this.v[j * d + c];
    }
    for (let c = 0; c < d; c++) {
      o[c] /= l;
      delta += o[c] * this.dO[i * d + c];
    }
    const row = { o, lse: m + Math.log(l), delta };
    this.rows.set(i, row);
    return row;
  }
  /** P and dS of one score, rebuilt from the log-sum-exp of its row. */
  pds(i, j) {
    if (!this.sees(i, j)) return [0, 0];
    const { lse, delta } = this.plain(i);
    const p = Math.exp(this.dot(this.q, i, this.k, j) / Math.sqrt(this.d) - lse);
    return [p, p * (this.dot(this.dO, i, this.v, j) - delta)];
  }
}

/** The forward state of one query row, in single precision and base 2, updated tile by tile as the kernel does. */
class ForwardRow {
  constructor(head, i) {
    Object.assign(this, { head, i, m: -Infinity, l: 0, acc: new Float32Array(head.d), alpha: 1, keys: 0 });
  }
  step(j0, j1) {
    const { head, i } = this;
    const s = [];
    for (let j = j0; j < j1; j++) s.push(head.sees(i, j) ? f32(head.dot(head.q, i, head.k, j)) : -Infinity);
    const mNew = Math.max(this.m, ...s);
    const pivot = mNew === -Infinity ? 0 : f32(mNew * head.unitLog2);
    this.alpha = f32(2 ** (this.m * head.unitLog2 - pivot));
    const p = s.map((x) => f32(2 ** (x * head.unitLog2 - pivot)));
    this.l = f32(this.l * this.alpha + p.reduce((a, b) => f32(a + b), 0));
    for (let c = 0; c < head.d; c++) {
      let sum = f32(this.acc[c] * this.alpha);
      p.forEach((x, t) => (sum = f32(sum + f32(x * head.v[(j0 + t) * head.d + c]))));
      this.acc[c] = sum;
    }
    this.m = mNew;
    this.keys += s.filter((x) => x !== -Infinity).length;
  }
  finalize() {
    const safe = this.l === 0 ? 1 : this.l;
    return { o: this.acc.map((x) => x / safe), lse: f32((f32(this.m * this.head.unitLog2) + Math.log2(safe)) / LOG2E) };
  }
  /** Largest difference from ordinary attention, once every tile of the row is in. */
  error() {
    const plain = this.head.plain(this.i);
    return this.finalize().o.reduce((worst, x, c) => Math.max(worst, Math.abs(x - plain.o[c])), 0);
  }
}

/** The dQ kernel's state of one query row: one sum, nothing to rescale. */
class QueryGradient {
  constructor(head, i) {
    Object.assign(this, { head, i, sums: [new Float32Array(head.d)], names: ["dQ"] });
  }
  step(j0, j1) {
    const { head, i } = this;
    for (let j = j0; j < j1; j++) {
      const ds = head.pds(i, j)[1];
      for (let c = 0; c < head.d; c++) this.sums[0][c] += (ds * head.k[j * head.d + c]) / Math.sqrt(head.d);
    }
  }
}

/** The dK/dV kernel's state of one key row. */
class KeyGradient {
  constructor(head, j) {
    Object.assign(this, { head, i: j, sums: [new Float32Array(head.d), new Float32Array(head.d)], names: ["dK", "dV"] });
  }
  step(i0, i1) {
    const { head } = this;
    for (let i = i0; i < i1; i++) {
      const [p, ds] = head.pds(i, this.i);
      for (let c = 0; c < head.d; c++) {
        this.sums[0][c] += (ds * head.q[i * head.d + c]) / Math.sqrt(head.d);
        this.sums[1][c] += p * head.dO[i * head.d + c];
      }
    }
  }
}

/** Programs of one grid from an exported list of [tile, lo, full_lo, full_hi, hi]; edges say which ends carry the mask. */
function programsOf(list, edges) {
  return list.map(([block, lo, fullLo, fullHi, hi]) => {
    const tiles = [];
    for (let at = edges[0] ? lo : fullLo; at < hi; at++) {
      tiles.push({ at, masked: (at < fullLo && edges[0]) || (at >= fullHi && edges[1]) });
    }
    return { block, tiles };
  });
}

/** Programs on a machine with `sms` processors: each takes the next program in launch order when it is free. */
class Machine {
  constructor(programs, sms) {
    this.programs = programs;
    this.resize(sms);
  }
  resize(sms) {
    this.slots = Array.from({ length: sms }, () => null);
    this.next = 0;
    this.steps = 0;
    this.fill();
  }
  fill() {
    this.slots = this.slots.map((slot) => slot || (this.next < this.programs.length ? { program: this.programs[this.next++], done: 0 } : null));
  }
  /** One tile on every busy processor. Returns what was computed: [{program, tile, last}], empty when all is done. */
  step() {
    this.slots = this.slots.map((slot) => (slot && slot.done < slot.program.tiles.length ? slot : null));
    this.fill();
    const work = [];
    for (const slot of this.slots) {
      if (!slot || slot.done >= slot.program.tiles.length) continue;
      const tile = slot.program.tiles[slot.done++];
      work.push({ program: slot.program, tile, last: slot.done === slot.program.tiles.length });
    }
    if (work.length) this.steps++;
    return work;
  }
}

Object.assign(flashtri, { Head, ForwardRow, QueryGradient, KeyGradient, Machine, programsOf });
