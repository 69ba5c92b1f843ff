// Draws the charts of the page from the JSON beside it: curves, bands, stacked bars, histograms by
// step. Dragging over a chart zooms all of them to those steps; a double click shows all again.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const SEVERAL = (DATA.names ?? []).length > 1;
const TIP = document.getElementById("tip");
const PAD = { left: 46, right: 10, top: 12, bottom: 32 };
const color = (i) => `var(--c${i % 8})`;

const number = (v) => {
  if (v === null || v === undefined) return "–";
  const a = Math.abs(v);
  if (a >= 1000) return v.toLocaleString("en", { maximumFractionDigits: 0 });
  if (a !== 0 && a < 1e-3) return v.toExponential(2);
  return String(Number(v.toPrecision(a < 1 ? 3 : 4)));
};
const percent = (v) => (v === null ? "–" : `${Number((100 * v).toPrecision(3))} %`);
// Significant digits that tell the marks of an axis, which lie `step` apart, from each other.
const digitsFor = (v, step) => Math.min(Math.max(3, Math.floor(Math.log10(Math.abs(v) / step) + 1e-9) + 2), 15);
// The label of a mark.
function tick(v, step) {
  if (v === 0) return "0";
  const a = Math.abs(v), digits = digitsFor(v, step);
  if (a >= 1e6) return `${Number((v / 1e6).toPrecision(digits))}M`;
  if (a >= 1e4) return `${Number((v / 1e3).toPrecision(digits))}k`;
  if (a < 1e-3) return Number(v.toPrecision(digits)).toExponential();
  return v.toLocaleString("en", { maximumSignificantDigits: digits });
}
const escapeHtml = (s) => s.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

// Distance of the marks of a linear axis: 1, 2 or 5 times a power of ten.
function tickStep(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
}

// Its marks.
function ticks(low, high, step) {
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9) || 0; k * step <= high + step * 1e-9; k++) found.push(k * step + 0);
  return found;
}

function decades(low, high) {
  const found = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e++) found.push(e);
  const every = Math.ceil(found.length / 6);
  return found.filter((e) => e % every === 0);
}

// Maps values to pixels. A log axis works on exponents and drops values that have none.
function axis(values, scale) {
  const log = scale === "log" && values.some((v) => v > 0);
  const of = log ? (v) => (v > 0 ? Math.log10(v) : null) : (v) => v;
  const mapped = values.map(of).filter((v) => v !== null && v !== undefined);
  let low = Math.min(...mapped), high = Math.max(...mapped);
  if (!mapped.length) [low, high] = [0, 1];
  if (log) [low, high] = [Math.floor(low), Math.max(Math.ceil(high), Math.floor(low) + 1)];
  else if (scale !== "linear") low = Math.min(low, 0);
  if (high - low <= 1e-9 * Math.abs(high)) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const step = tickStep(low, high, 4);
  if (!log) {
    low = scale !== "linear" && low >= 0 ? 0 : Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
  }
  const label = log ? (e) => (Math.abs(e) < 3 ? String(Number((10 ** e).toPrecision(1))) : `1e${e}`)
    : scale === "share" ? (v) => `${v === 0 ? 0 : Number((100 * v).toPrecision(digitsFor(v, step)))}%` : (v) => tick(v, step);
  return { of, low, high, marks: log ? decades(low, high) : ticks(low, high, step), label };
}

// Total variation far above the range: the eye needs help to see the course of the curve.
function isNoisy(values) {
  const held = values.filter((v) => v !== null);
  const travel = held.slice(1).reduce((sum, v, i) => sum + Math.abs(v - held[i]), 0);
  return held.length > 40 && travel > 4 * (Math.max(...held) - Math.min(...held));
}

// Running median, then running mean, both centred: no lag, and a spike stays out of its neighbours.
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 50));
  const filter = (list, reduce) => list.map((v, i) => {
    const near = list.slice(Math.max(0, i - reach), i + reach + 1).filter((w) => w !== null);
    return v === null || !near.length ? null : reduce(near);
  });
  const median = (list) => list.sort((a, b) => a - b)[list.length >> 1];
  return filter(filter(values, median), (list) => list.reduce((a, b) => a + b) / list.length);
}

// Positions [from, to) of the ascending steps that lie in the zoom, with a neighbour on either side.
let ZOOM = null;
function visible(steps) {
  if (ZOOM === null) return [0, steps.length];
  let from = steps.findIndex((s) => s >= ZOOM[0]), to = steps.findIndex((s) => s > ZOOM[1]);
  if (from < 0) from = steps.length;
  if (to < 0) to = steps.length;
  return [Math.max(from - 1, 0), Math.min(to + 1, steps.length)];
}

// At most `count` points of a curve: means of neighbours, at the last of their steps.
function thin(steps, values, count) {
  const width = Math.ceil(steps.length / count);
  if (width <= 1) return { steps, values };
  const found = { steps: [], values: [] };
  for (let cut = 0; cut < steps.length; cut += width) {
    const held = values.slice(cut, cut + width).filter((v) => v !== null);
    found.steps.push(steps[Math.min(cut + width, steps.length) - 1]);
    found.values.push(held.length ? held.reduce((a, b) => a + b) / held.length : null);
  }
  return found;
}

function path(points) {
  let pen = "M";
  return points.map((p) => {
    if (p === null) return (pen = "M", "");
    const part = `${pen}${p[0].toFixed(1)} ${p[1].toFixed(1)}`;
    pen = "L";
    return part;
  }).join("");
}

// Axes and their marks; `sx` and `sy` map steps and values to pixels. With `slots` each of so many
// steps, which need not be evenly apart, has a slot of equal width, and `sx` maps their positions.
function frame(plot, [first, last], y, slots = null) {
  const width = plot.clientWidth, height = plot.clientHeight;
  const labels = y.marks.map(y.label), left = Math.max(PAD.left, 12 + 6.5 * Math.max(...labels.map((l) => l.length)));
  const right = width - PAD.right, bottom = height - PAD.bottom;
  const slot = slots ? (right - left) / slots.length : 0, span = last - first;
  const sx = slots ? (i) => left + (i + 0.5) * slot : (s) => (span ? left + ((s - first) / span) * (right - left) : (left + right) / 2);
  const sy = (v) => bottom - ((v - y.low) / (y.high - y.low)) * (bottom - PAD.top);
  let svg = "";
  y.marks.forEach((m, k) => {
    const at = sy(m).toFixed(1);
    svg += `<line class="grid" x1="${left}" x2="${right}" y1="${at}" y2="${at}"/>`;
    svg += `<text x="${left - 8}" y="${at}" dy="3.5" text-anchor="end">${labels[k]}</text>`;
  });
  svg += `<line class="axis" x1="${left}" x2="${right}" y1="${bottom}" y2="${bottom}"/>`;
  const apart = tickStep(first, last, width < 420 ? 4 : 6);
  for (const s of span ? ticks(first, last, apart) : [first]) {
    if (!Number.isInteger(s) || s < first) continue;
    const at = sx(slots ? nearest(slots, s) : s).toFixed(1);
    svg += `<text x="${at}" y="${bottom + 16}" text-anchor="middle">${tick(s, apart)}</text>`;
  }
  svg += `<text x="${right}" y="${bottom + 29}" text-anchor="end">step</text>`;
  const stepAt = slots ? (x) => slots[Math.min(Math.max(Math.floor((x - left) / slot), 0), slots.length - 1)]
    : (x) => first + (Math.min(Math.max(x - left, 0), right - left) / (right - left || 1)) * span;
  return { sx, sy, svg, slot, left, right, bottom, stepAt };
}

function nearest(steps, target) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < target) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - target) <= Math.abs(steps[high] - target) ? low : high;
}

function showTip(event, html) {
  TIP.innerHTML = html;
  TIP.hidden = false;
  const box = TIP.getBoundingClientRect(), gap = 16;
  const x = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
  TIP.style.left = `${Math.max(4, x)}px`;
  TIP.style.top = `${Math.max(4, Math.min(event.clientY + gap, innerHeight - box.height - 4))}px`;
}

// Calls `describe(step)` for the step under the pointer, which returns a pixel to mark and what to
// show there, and lets a drag choose the steps to zoom to.
function interact(plot, f, describe) {
  const cursor = plot.querySelector(".cursor"), chosen = plot.querySelector(".chosen");
  let start = null;
  const x = (event) => event.clientX - plot.getBoundingClientRect().left;
  plot.onpointerdown = (event) => { start = x(event); plot.setPointerCapture(event.pointerId); plot.onpointermove(event); };
  plot.onpointermove = (event) => {
    const now = x(event);
    if (start !== null && Math.abs(now - start) > 5) {
      chosen.setAttribute("x", Math.max(Math.min(start, now), f.left));
      chosen.setAttribute("width", Math.min(Math.abs(now - start), f.right - f.left));
    }
    const [at, html] = describe(f.stepAt(now));
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.style.display = "";
    showTip(event, html);
  };
  plot.onpointerup = (event) => {
    const from = start, to = x(event);
    start = null;
    if (from !== null && Math.abs(to - from) > 5) zoomTo([f.stepAt(Math.min(from, to)), f.stepAt(Math.max(from, to))]);
  };
  plot.ondblclick = () => zoomTo(null);
  plot.onpointercancel = plot.onpointerleave = () => { TIP.hidden = true; cursor.style.display = "none"; start = null; chosen.setAttribute("width", 0); };
}

const row = (swatch, label, value) => `<div><i style="background:${swatch}"></i>${escapeHtml(label)}<b>${value}</b></div>`;
// Drawn to the pixel; where the place has another size, as on paper, it is scaled.
const svgTag = (plot) => `<svg viewBox="0 0 ${plot.clientWidth} ${plot.clientHeight}" preserveAspectRatio="xMinYMid meet">`;
const marks = (f) => `<rect class="chosen" y="${PAD.top}" height="${f.bottom - PAD.top}" width="0"/><line class="cursor" style="display:none" y1="${PAD.top}" y2="${f.bottom}"/>`;
const stepLine = (step) => `<span class="dim">step ${Math.round(step).toLocaleString("en")}</span>`;
const lastOf = (values) => values.reduce((held, v) => (v === null ? held : v), null);
const range = (lists) => [Math.min(...lists.map((l) => l[0])), Math.max(...lists.map((l) => l[l.length - 1]))];

function drawCurves(figure, chart) {
  const plot = figure.querySelector(".plot"), format = chart.scale === "share" ? percent : number;
  const most = Math.max(plot.clientWidth / 1.5, 60);
  const lines = chart.lines.map((line, k) => {
    const steps = DATA.steps[line.run], [from, to] = visible(steps);
    const cut = (values) => (line.sparse ? { steps, values } : thin(steps.slice(from, to), values.slice(from, to), most));
    return { ...line, ...cut(line.values), all: line.values, edges: k === 0 && chart.band ? chart.band.map((edge) => cut(edge).values) : null,
      label: SEVERAL ? DATA.names[line.run] : line.label, ink: color(SEVERAL ? line.run : k) };
  });
  const shown = lines.filter((l) => l.steps.length), span = ZOOM ?? range(shown.map((l) => l.steps));
  const inside = (l) => (v, i) => v !== null && (!l.sparse || (l.steps[i] >= span[0] && l.steps[i] <= span[1]));
  const every = shown.flatMap((l) => [l.values, ...(l.edges ?? [])].flatMap((values) => values.filter(inside(l))));
  const y = axis(every, chart.scale), f = frame(plot, span, y);
  const clip = `clip-${figure.dataset.section}-${figure.dataset.chart}`;
  let drawn = "";
  for (const line of shown) {
    const at = (v, i) => (v === null || y.of(v) === null ? null : [f.sx(line.steps[i]), f.sy(y.of(v))]);
    if (line.edges) {
      const [low, high] = line.edges.map((edge) => edge.map(at).filter((p) => p !== null));
      drawn += `<path d="${path(high.concat(low.reverse()))}Z" fill="${line.ink}" opacity="0.13"/>`;
    }
    const points = line.values.map(at);
    if (line.sparse || line.values.filter((v) => v !== null).length < 2) {
      const held = points.filter((p) => p !== null);
      drawn += `<path d="${path(held)}" fill="none" stroke="${line.ink}" stroke-width="1.6"/>`;
      for (const p of held) drawn += `<circle cx="${p[0].toFixed(1)}" cy="${p[1].toFixed(1)}" r="3" fill="var(--card)" stroke="${line.ink}" stroke-width="1.6"/>`;
    } else {
      const noisy = isNoisy(line.values);
      drawn += `<path d="${path(points)}" fill="none" stroke="${line.ink}" stroke-width="${noisy ? 1 : 1.7}" opacity="${noisy ? 0.32 : 1}" stroke-linejoin="round"/>`;
      if (noisy) drawn += `<path d="${path(smooth(line.values).map(at))}" fill="none" stroke="${line.ink}" stroke-width="1.9" stroke-linejoin="round"/>`;
    }
  }
  plot.innerHTML = `${svgTag(plot)}${f.svg}<clipPath id="${clip}"><rect x="${f.left - 4}" width="${f.right - f.left + 8}" y="0" height="${f.bottom + 4}"/></clipPath><g clip-path="url(#${clip})">${drawn}</g>${marks(f)}</svg>`;
  figure.querySelector(".legend").innerHTML = lines.map((l) =>
    `<span><i style="background:${l.ink}"></i>${escapeHtml(l.label)}<b>${format(lastOf(l.all))}</b></span>`).join("");
  interact(plot, f, (target) => {
    const found = shown.map((l) => {
      const held = l.steps.map((s, i) => [s, i]).filter(([, i]) => l.values[i] !== null);
      const i = held.length ? held[nearest(held.map(([s]) => s), target)][1] : 0;
      return { ...l, i, step: l.steps[i] };
    });
    const close = Math.min(...found.map((l) => Math.abs(l.step - target)));
    const near = found.filter((l) => Math.abs(l.step - target) <= close + 1e-9);
    const step = near[0].step;
    return [f.sx(step), stepLine(step) + near.map((l) => (l.values[l.i] === null ? "" : row(l.ink, l.label, format(l.values[l.i])))
      + (l.edges ? row("transparent", "p05 to p95", `${number(l.edges[0][l.i])} to ${number(l.edges[1][l.i])}`) : "")).join("")];
  });
}

// Steps of a chart that has its own, and its lists of values, in the zoom.
function zoomed(chart, lists) {
  let [from, to] = visible(chart.steps);
  if (ZOOM !== null && to - from > 2) [from, to] = [chart.steps[from] < ZOOM[0] ? from + 1 : from, chart.steps[to - 1] > ZOOM[1] ? to - 1 : to];
  return [chart.steps.slice(from, to), lists.map((list) => list.slice(from, to))];
}

function drawBars(figure, chart) {
  const plot = figure.querySelector(".plot");
  const ink = (k) => (chart.lines[k].rest ? "var(--rest)" : color(k));
  const [steps, values] = zoomed(chart, chart.lines.map((l) => l.values));
  const sums = steps.map((_, i) => values.reduce((sum, list) => sum + (list[i] ?? 0), 0));
  const y = axis(sums, "zero"), f = frame(plot, [steps[0], steps[steps.length - 1]], y, steps);
  const wide = Math.max(f.slot - (f.slot > 5 ? 2 : f.slot > 2.5 ? 1 : 0), 0.8);
  let svg = f.svg;
  steps.forEach((_, i) => {
    let base = 0;
    values.forEach((list, k) => {
      const v = list[i] ?? 0;
      if (v > 0) svg += `<rect x="${(f.sx(i) - wide / 2).toFixed(2)}" width="${wide.toFixed(2)}" y="${f.sy(base + v).toFixed(2)}" height="${(f.sy(base) - f.sy(base + v)).toFixed(2)}" fill="${ink(k)}"/>`;
      base += v;
    });
  });
  plot.innerHTML = `${svgTag(plot)}${svg}${marks(f)}</svg>`;
  figure.querySelector(".legend").innerHTML = chart.lines.map((l, k) =>
    `<span><i style="background:${ink(k)}"></i>${escapeHtml(l.label)}<b>${percent(l.share)}</b></span>`).join("");
  interact(plot, f, (target) => {
    const i = nearest(steps, target);
    return [f.sx(i), stepLine(steps[i])
      + values.map((list, k) => (list[i] ? row(ink(k), chart.lines[k].label, `${number(list[i])} s`) : "")).reverse().join("")
      + row("transparent", "whole step", `${number(sums[i])} s`)];
  });
}

function drawColumns(figure, chart) {
  const plot = figure.querySelector(".plot"), [steps, [shares]] = zoomed(chart, [chart.shares]);
  const bins = shares[0].length, width = (chart.high - chart.low) / bins;
  const y = axis([chart.low, chart.high], "linear");
  [y.low, y.high] = [chart.low, chart.high];
  y.marks = y.marks.filter((m) => m >= y.low && m <= y.high);
  const f = frame(plot, [steps[0], steps[steps.length - 1]], y, steps);
  let cells = "";
  shares.forEach((column, i) => column.forEach((share, bin) => {
    if (share > 0) cells += `<rect x="${(f.sx(i) - f.slot / 2).toFixed(2)}" width="${(f.slot + 0.3).toFixed(2)}" y="${f.sy(chart.low + (bin + 1) * width).toFixed(2)}" height="${(f.sy(0) - f.sy(width) + 0.3).toFixed(2)}" fill="var(--c0)" opacity="${(0.08 + 0.92 * Math.sqrt(share)).toFixed(3)}"/>`;
  }));
  plot.innerHTML = `${svgTag(plot)}${f.svg}${cells}${marks(f)}</svg>`;
  interact(plot, f, (target) => {
    const i = nearest(steps, target), most = shares[i].map((share, bin) => [share, bin]).filter(([share]) => share > 0).sort((a, b) => b[0] - a[0]).slice(0, 6);
    return [f.sx(i), stepLine(steps[i]) + most.sort((a, b) => b[1] - a[1]).map(([share, bin]) =>
      row("transparent", `${number(chart.low + bin * width)} to ${number(chart.low + (bin + 1) * width)}`, percent(share))).join("")];
  });
}

const DRAW = { curves: drawCurves, bars: drawBars, columns: drawColumns };

function draw(figure) {
  const chart = DATA.sections[figure.dataset.section].charts[figure.dataset.chart];
  DRAW[chart.kind](figure, chart);
}

// Charts are drawn when they come near the screen; those that were are drawn again after a change.
const DRAWN = new Set();
function redraw() { for (const figure of DRAWN) draw(figure); }
function drawAll() { for (const figure of document.querySelectorAll("[data-chart]")) { DRAWN.add(figure); draw(figure); } }

function zoomTo(steps) {
  ZOOM = steps !== null && Math.ceil(steps[0]) >= Math.floor(steps[1]) ? ZOOM : steps;
  const note = document.getElementById("zoom");
  note.hidden = ZOOM === null;
  if (ZOOM !== null) note.firstElementChild.textContent = `steps ${Math.ceil(ZOOM[0]).toLocaleString("en")} to ${Math.floor(ZOOM[1]).toLocaleString("en")}`;
  redraw();
}

function startCharts() {
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !DRAWN.has(entry.target)) { DRAWN.add(entry.target); draw(entry.target); }
  }, { rootMargin: "300px" });
  for (const figure of document.querySelectorAll("[data-chart]")) seen.observe(figure);
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(redraw); });
  addEventListener("beforeprint", drawAll);
  document.getElementById("zoom").onclick = () => zoomTo(null);
}
