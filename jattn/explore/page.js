"use strict";

// The mathematics of one row, as jattn's contract has it: pure functions, which the tests run against JAX.

const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const dot = (x, y) => x.reduce((a, xi, i) => a + xi * y[i], 0);
const allFinite = (xs) => xs.every(Number.isFinite);

/** x in float16, ties to even. */
function half(x) {
  if (!Number.isFinite(x) || x === 0) return x;
  const unit = 2 ** (Math.max(Math.floor(Math.log2(Math.abs(x))), -14) - 10);
  const even = 1.5 * 2 ** 52; // adding it leaves no room for a fraction
  const out = (x / unit + even - even) * unit;
  return Math.abs(out) > 65504 ? Math.sign(x) * Infinity : out;
}

const ROUND = { float16: half, float32: Math.fround, float64: (x) => x };
const LARGEST = { float16: "65504", float32: "3.4e+38", float64: "1.8e+308" };

/** Every step of one query over all keys. `visible` is a list of booleans, `dtype` that of logits and weights. */
function attendRow(query, keys, values, visible, scale, empty, dtype) {
  const round = ROUND[dtype];
  const scaled = query.map((x) => round(x * scale));
  const good = allFinite(query);
  const raw = keys.map((key) => (good && allFinite(key) ? round(dot(scaled, key)) : NaN));
  const masked = raw.map((x, j) => (visible[j] ? x : -Infinity));
  const alive = visible.some(Boolean);
  const largest = Math.max(...masked);
  // What is visible and has no finite largest logit is NaN, never a guess.
  const peak = !alive ? 0 : Number.isFinite(largest) ? largest : NaN;
  const shifted = masked.map((x, j) => (visible[j] ? round(x - peak) : -Infinity));
  const exp = shifted.map((x, j) => (visible[j] ? round(Math.exp(x)) : 0));
  const total = round(sum(exp));
  const mean = !alive && empty === "mean";
  const refused = !alive && empty === "raise";
  const weights = exp.map((e) => (mean ? 1 / keys.length : refused ? NaN : alive ? round(e / total) : 0));
  // What is hidden is not read: a NaN there would be one here, times 0 too.
  const weighted = values.map((value, j) => Array.from(value, (v) => (visible[j] || mean ? weights[j] * v : 0)));
  let out = Array.from(values[0], (_, d) => round(sum(weighted.map((row) => row[d]))));
  const sound = allFinite(weights) && values.every((value, j) => !visible[j] || allFinite(value));
  if (alive && !sound) out = out.map(() => NaN);
  const moment = sum(exp.map((e, j) => (e > 0 ? e * shifted[j] : 0)));
  let entropy = alive ? Math.log(total) - moment / total : mean ? Math.log(keys.length) : 0;
  let lse = alive ? peak + Math.log(total) : -Infinity;
  if (alive && !sound) entropy = lse = NaN;
  if (refused) out = out.map(() => NaN);
  const effective = Math.exp(entropy);
  return { raw, masked, peak, shifted, exp, total, weights, weighted, out, lse, entropy, effective, alive, refused };
}

/** Softmax with every step rounded to `dtype`: exp(x) / sum, or with the largest subtracted first. */
function softmaxIn(scores, dtype, stable) {
  const round = ROUND[dtype];
  const rounded = scores.map(round);
  const peak = stable ? Math.max(...rounded) : 0;
  const exp = rounded.map((x) => round(Math.exp(round(x - peak))));
  const total = exp.reduce((a, b) => round(a + b), 0);
  return { exp, total, weights: exp.map((e) => round(e / total)) };
}

/** A number as text, "!" where it is not finite, unless that is expected. */
function number(x, expected = false) {
  if (!Number.isFinite(x)) return (Number.isNaN(x) ? "NaN" : x > 0 ? "inf" : "-inf") + (expected ? "" : "!");
  const size = Math.abs(x);
  return x === 0 || (size >= 1e-3 && size < 1e6) ? x.toFixed(4) : x.toExponential(2);
}

if (typeof module !== "undefined") module.exports = { attendRow, softmaxIn, half, number };

// The page: a state, and what draws it.

function start() {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const { T, S, N, K, H, D, L, tokens, keyTokens } = data;
  const SHOWN = 3;

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const floats = (text, dtype = data.dtype) =>
    new (dtype === "float64" ? Float64Array : Float32Array)(bytes(text).buffer);
  const query = floats(data.query);
  const key = floats(data.key);
  const value = floats(data.value);
  const basis = floats(data.basis, "float64");
  const given = floats(data.scale, "float64")[0];
  const masks = data.masks.map((text) => {
    const packed = bytes(text);
    return (i, j) => ((packed[(i * S + j) >> 3] >> (7 - ((i * S + j) & 7))) & 1) === 1;
  });
  // Of an array (L, n, heads, size): the n rows of one head, as plain arrays of numbers.
  const head = (flat, layer, n, heads, h, size) =>
    Array.from({ length: n }, (_, i) => {
      const at = ((layer * n + i) * heads + h) * size;
      return Array.from(flat.subarray(at, at + size));
    });

  const first = () => ({
    layer: 0, head: 0, query: data.first.query, key: null, mask: "given", window: 2, off: new Set(),
    empty: data.empty, factor: 0, move: [0, 0],
  });
  let state = first();
  let one; // what is chosen: one head
  let bound = 1; // of the plane
  let rows = [];
  let failed = false; // some row is empty, and the policy is to raise

  function choose(change) {
    state = { ...state, ...change, move: [0, 0] };
    const group = Math.floor(state.head / (N / K));
    const start = (state.layer * K + group) * 2;
    one = {
      queries: head(query, state.layer, T, N, state.head, H),
      keys: head(key, state.layer, S, K, group, H),
      values: head(value, state.layer, S, K, group, D),
      axes: [0, 1].map((a) => Array.from(basis.subarray((start + a) * H, (start + a + 1) * H))),
      mask: masks[data.mask[state.layer][state.head]],
    };
    const places = [...one.keys, one.queries[state.query]].flatMap(place).filter(Number.isFinite);
    bound = 1.2 * Math.max(...places.map(Math.abs)) || 1;
    draw();
  }

  const place = (x) => one.axes.map((axis) => dot(x, axis));
  const visible = (i, j) =>
    !state.off.has(j) &&
    { given: () => one.mask(i, j), none: () => true, causal: () => j <= i, window: () => j <= i && i - j <= state.window }[
      state.mask
    ]();
  const scale = () => given * 2 ** state.factor;

  function moved(i) {
    const q = one.queries[i];
    if (i !== state.query || state.move.every((m) => m === 0)) return q;
    return q.map((x, h) => x + state.move[0] * one.axes[0][h] + state.move[1] * one.axes[1][h]);
  }

  function moveTo(axis, to) {
    const here = place(one.queries[state.query])[axis];
    state.move[axis] = Math.min(Math.max(to, -bound), bound) - here;
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const short = (text) => (text.length > 12 ? text.slice(0, 11) + "…" : text);
  const named = (i, names) => (names[i] === String(i) ? `${i}` : `${i} ${names[i]}`);
  const some = (xs) => xs.slice(0, SHOWN).map((x) => number(x)).join("  ");
  const of = (n) => (n > SHOWN ? ` (${SHOWN} of ${n})` : "");

  function draw(all = true) {
    const row = (_, i) =>
      attendRow(moved(i), one.keys, one.values, keyTokens.map((_, j) => visible(i, j)), scale(), state.empty, data.dtype);
    if (all) rows = one.queries.map(row);
    else rows[state.query] = row(null, state.query);
    failed = rows.some((row) => row.refused);
    $("error").hidden = !failed;
    drawMatrix();
    drawPlane($("plane"), one.keys, one.axes, moved(state.query), "query", bound);
    if (D === 2) {
      const far = 1.2 * Math.max(...one.values.flat().filter(Number.isFinite).map(Math.abs)) || 1;
      drawPlane($("value-plane"), one.values, [[1, 0], [0, 1]], failed ? [NaN] : rows[state.query].out, "output", far);
    }
    drawTable();
    drawPrecision();
    drawControls();
  }

  // The matrix in its canvas: the sides of a cell and of the labels.
  const cell = Math.max(6, Math.min(26, Math.floor(560 / Math.max(T, S))));
  const side = Math.min(100, 16 + 7 * Math.max(...[...tokens, ...keyTokens].map((t) => short(t).length), 6));

  function drawMatrix() {
    const canvas = $("matrix");
    const [width, height, ratio] = [side + S * cell + 2, side + T * cell + 2, window.devicePixelRatio || 1];
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    const [ink, faint, accent, mark] = ["ink", "faint", "accent", "mark"].map(colour);
    c.font = `${Math.max(9, Math.min(12, cell))}px system-ui, sans-serif`;
    c.textBaseline = "middle";
    c.textAlign = "right";
    c.fillStyle = ink;
    c.fillText("key →", side - 6, side - 22);
    c.fillText("query ↓", side - 6, side - 9);
    const every = Math.ceil(11 / cell); // no label on another
    tokens.forEach((token, i) => {
      if (i % every && i !== state.query) return;
      c.fillStyle = i === state.query ? accent : ink;
      c.fillText(short(token), side - 6, side + (i + 0.5) * cell);
    });
    keyTokens.forEach((token, j) => {
      if (j % every && j !== state.key) return;
      c.save();
      c.translate(side + (j + 0.5) * cell, side - 6);
      c.rotate(-Math.PI / 2);
      c.fillStyle = j === state.key ? accent : ink;
      c.textAlign = "left";
      c.fillText(short(token), 0, 0);
      c.restore();
    });
    rows.forEach((row, i) =>
      row.weights.forEach((weight, j) => {
        const [x, y] = [side + j * cell, side + i * cell];
        c.strokeStyle = faint;
        c.lineWidth = 0.5;
        if (cell > 9) c.strokeRect(x, y, cell, cell);
        if (failed) return;
        if (Number.isNaN(weight)) {
          c.fillStyle = mark;
          c.textAlign = "center";
          c.fillText("!", x + cell / 2, y + cell / 2);
        } else if (!visible(i, j) && weight === 0) {
          c.beginPath(); // hidden, told apart without colour
          c.moveTo(x, y + cell);
          c.lineTo(x + cell, y);
          c.stroke();
        } else {
          c.globalAlpha = weight;
          c.fillStyle = accent;
          c.fillRect(x, y, cell, cell);
          c.globalAlpha = 1;
        }
      }));
    c.strokeStyle = ink;
    c.lineWidth = 2;
    c.strokeRect(side, side + state.query * cell, S * cell, cell);
    if (state.key !== null) c.strokeRect(side + state.key * cell, side + state.query * cell, cell, cell);
  }

  const SVG = "http://www.w3.org/2000/svg";
  function svg(name, attributes, text = "") {
    const out = document.createElementNS(SVG, name);
    for (const [k, v] of Object.entries(attributes)) out.setAttribute(k, v);
    out.textContent = text;
    return out;
  }

  /** Points, larger with more weight, and an arrow. */
  function drawPlane(picture, points, axes, arrow, name, far) {
    const weights = rows[state.query].weights;
    const along = (x) => axes.map((axis) => dot(x, axis));
    const [x, y] = [(p) => 150 + (140 * p[0]) / far, (p) => 150 - (140 * p[1]) / far];
    const parts = [svg("line", { x1: 0, y1: 150, x2: 300, y2: 150, class: "axis" }),
      svg("line", { x1: 150, y1: 0, x2: 150, y2: 300, class: "axis" })];
    const heaviest = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 10);
    points.forEach((point, j) => {
      const p = along(point);
      if (!allFinite(p)) return;
      const seen = visible(state.query, j);
      const weight = failed || !Number.isFinite(weights[j]) ? 0 : weights[j];
      const r = 3 + 9 * Math.sqrt(weight);
      const circle = svg("circle", { cx: x(p), cy: y(p), r, class: seen ? "key" : "hidden" });
      circle.append(svg("title", {}, `${named(j, keyTokens)}: weight ${number(weights[j])}`));
      parts.push(circle);
      if (points.length <= 10 || heaviest.includes(j)) {
        parts.push(svg("text", { x: x(p) + r + 2, y: y(p) + 4 }, short(keyTokens[j])));
      }
    });
    const p = along(arrow);
    if (allFinite(p)) {
      parts.push(svg("line", { x1: 150, y1: 150, x2: x(p), y2: y(p), class: "arrow" }));
      parts.push(svg("rect", { x: x(p) - 7, y: y(p) - 7, width: 14, height: 14, class: "handle" }));
      parts.push(svg("text", { x: x(p) + 10, y: y(p) - 9, class: "name" }, name));
    }
    picture.replaceChildren(...parts);
  }

  const body = $("row").tBodies[0];
  const cells = keyTokens.map((token, j) => {
    const line = body.insertRow();
    const name = document.createElement("th");
    name.scope = "row";
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: true });
    box.setAttribute("aria-label", `key ${named(j, keyTokens)} may be seen`);
    box.addEventListener("change", () => {
      state.off[box.checked ? "delete" : "add"](j);
      draw();
    });
    label.append(box, ` ${named(j, keyTokens)}`);
    name.append(label);
    line.append(name);
    line.addEventListener("mouseenter", () => { state.key = j; drawMatrix(); });
    return { line, box, numbers: Array.from({ length: 7 }, () => line.insertCell()) };
  });

  function drawTable() {
    const row = rows[state.query];
    $("row-title").textContent = `Query ${named(state.query, tokens)}, key by key`;
    const blank = (text) => (failed ? "–" : text);
    cells.forEach(({ line, box, numbers }, j) => {
      const seen = visible(state.query, j);
      const texts = [number(row.raw[j]), number(row.masked[j], !seen), blank(number(row.shifted[j], !seen)),
        blank(number(row.exp[j])), blank(number(row.weights[j])), some(one.values[j]), blank(some(row.weighted[j]))];
      texts.forEach((text, k) => { numbers[k].textContent = text; });
      const bar = failed || !Number.isFinite(row.weights[j]) ? 0 : 100 * row.weights[j];
      numbers[4].style.backgroundSize = `${bar}% 100%`;
      line.className = seen ? "" : "unseen";
      box.checked = !state.off.has(j);
    });
    const sums = { total: number(row.total), weights: number(sum(row.weights)), out: some(row.out) };
    for (const [name, text] of Object.entries(sums)) $(`sum-${name}`).textContent = blank(text);
    const seen = cells.filter((_, j) => visible(state.query, j)).length;
    const best = row.weights.indexOf(Math.max(...row.weights));
    const told = failed ? [] : [
      row.weights[best] > 0 ? `Most weight: ${named(best, keyTokens)}, ${number(row.weights[best])}.` : "",
      `Entropy ${number(row.entropy)} nats, that of ${number(row.effective)} equal weights.`,
      `lse ${number(row.lse, !row.alive)} nats.`];
    const policy = row.alive ? "" : {
      zero: "It may attend to nothing: zeros.",
      mean: "It may attend to nothing: the mean of all values, as in jax.nn, flax and equinox, never in jattn.",
    }[state.empty];
    $("status").textContent = [`${seen} of ${S} keys visible.`, policy, ...told].filter(Boolean).join(" ");
  }

  function drawPrecision() {
    const scores = rows[state.query].masked;
    const best = Math.max(0, scores.indexOf(Math.max(...scores)));
    const lines = Object.keys(ROUND).map((dtype) => {
      const [naive, stable] = [false, true].map((how) => softmaxIn(scores, dtype, how));
      const broken = Number.isFinite(naive.weights[best]) ? "" :
        naive.exp.includes(Infinity) ? "overflow" : naive.total === 0 ? "0 / 0" : "";
      return [dtype, LARGEST[dtype], number(naive.exp[best]), number(naive.total),
        number(naive.weights[best]) + (broken && ` ${broken}`), number(stable.exp[best]), number(stable.total),
        number(stable.weights[best])];
    });
    $("no-score").hidden = rows[state.query].alive;
    $("best").textContent = named(best, keyTokens);
    const body = $("precision").tBodies[0];
    body.replaceChildren();
    for (const texts of lines) {
      const line = body.insertRow();
      for (const text of texts) {
        const cell = line.insertCell();
        cell.textContent = text;
        cell.className = text.includes("!") ? "bad" : "";
      }
    }
  }

  const sliders = [$("move-0"), $("move-1")];

  function drawControls() {
    for (const name of ["layer", "head", "query", "mask", "empty", "window"]) $(name).value = state[name];
    $("factor").value = state.factor;
    $("window-label").hidden = state.mask !== "window";
    const factor = 2 ** state.factor;
    $("scale").textContent = `${number(scale())} = ${number(given)} × ${factor >= 1 ? factor.toFixed(2) : `1/${(1 / factor).toFixed(2)}`}`;
    const here = place(moved(state.query));
    sliders.forEach((slider, axis) => {
      [slider.min, slider.max] = [-bound, bound];
      slider.disabled = !Number.isFinite(here[axis]) || one.axes[axis].every((x) => x === 0);
      slider.value = here[axis];
      $(`at-${axis}`).textContent = number(here[axis]);
    });
  }

  const option = (text, value) => Object.assign(document.createElement("option"), { textContent: text, value });
  const group = (h) => (N === K ? "" : ` (key head ${Math.floor(h / (N / K))})`);
  $("layer").append(...Array.from({ length: L }, (_, i) => option(String(i), i)));
  $("head").append(...Array.from({ length: N }, (_, i) => option(`${i}${group(i)}`, i)));
  $("query").append(...tokens.map((_, i) => option(named(i, tokens), i)));
  $("layer").parentNode.hidden = L === 1;
  $("head").parentNode.hidden = N === 1;
  for (const name of ["layer", "head", "query"]) {
    $(name).addEventListener("change", (event) => choose({ [name]: Number(event.target.value) }));
  }
  for (const name of ["mask", "empty"]) {
    $(name).addEventListener("change", (event) => { state[name] = event.target.value; draw(); });
  }
  for (const name of ["factor", "window"]) {
    $(name).addEventListener("input", (event) => { state[name] = Number(event.target.value); draw(); });
  }
  $("reset").addEventListener("click", () => choose(first()));
  sliders.forEach((slider, axis) => slider.addEventListener("input", () => { moveTo(axis, Number(slider.value)); draw(false); }));

  const matrix = $("matrix");
  matrix.addEventListener("pointerdown", (event) => {
    const i = Math.floor((event.offsetY - side) / cell);
    const j = Math.floor((event.offsetX - side) / cell);
    if (i >= 0 && i < T) choose({ query: i, key: j >= 0 && j < S ? j : null });
  });
  matrix.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [i, j] = [state.query + step[0], (state.key ?? -1) + step[1]];
    if (step[0] && i >= 0 && i < T) choose({ query: i });
    if (step[1] && j >= 0 && j < S) {
      state.key = j;
      drawMatrix();
    }
  });

  const plane = $("plane");
  const drag = (event) => {
    const box = plane.getBoundingClientRect();
    const at = [event.clientX - box.left, event.clientY - box.top].map((p, a) => (300 * p) / [box.width, box.height][a]);
    moveTo(0, ((at[0] - 150) / 140) * bound);
    if (one.axes[1].some((x) => x !== 0)) moveTo(1, ((150 - at[1]) / 140) * bound);
    draw(false);
  };
  plane.addEventListener("pointerdown", (event) => {
    if (!allFinite(place(one.queries[state.query]))) return;
    plane.setPointerCapture(event.pointerId);
    event.preventDefault();
    drag(event);
  });
  plane.addEventListener("pointermove", (event) => plane.hasPointerCapture(event.pointerId) && drag(event));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  $("values").hidden = D !== 2;
  $("value-head").textContent = `value${of(D)}`;
  $("weighted-head").textContent = `weight·value${of(D)}`;
  $("many-features").hidden = H <= 2;
  $("others").textContent = H - 2;
  $("notes").textContent = data.notes.join(" ");
  choose({});
  const theirs = floats(data.first.weights, "float64");
  const apart = rows.flatMap(({ weights }, i) =>
    weights.map((w, j) => (Object.is(w, theirs[i * S + j]) ? 0 : Math.abs(w - theirs[i * S + j]))));
  $("apart").textContent = Math.max(...apart).toExponential(1);
  $("version").textContent = data.version;
  $("plain").hidden = true;
  $("live").hidden = false;
}

if (typeof document !== "undefined") start();
