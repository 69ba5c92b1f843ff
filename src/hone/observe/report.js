// Draws the charts of the page from the JSON beside it: lines, bands, stacked bars, hover values.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
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
const escape = (s) => s.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

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

function path(points) {
  let pen = "M";
  return points.map((p) => {
    if (p === null) return (pen = "M", "");
    const part = `${pen}${p[0].toFixed(1)} ${p[1].toFixed(1)}`;
    pen = "L";
    return part;
  }).join("");
}

function frame(plot, steps, y, centred) {
  const width = plot.clientWidth, height = plot.clientHeight;
  const labels = y.marks.map(y.label), left = Math.max(PAD.left, 12 + 6.5 * Math.max(...labels.map((l) => l.length)));
  const right = width - PAD.right, bottom = height - PAD.bottom;
  const first = steps[0], last = steps[steps.length - 1];
  const slot = (right - left) / (centred ? steps.length : Math.max(last - first, 1));
  const sx = centred ? (i) => left + (i + 0.5) * slot
    : (i) => (steps.length === 1 ? (left + right) / 2 : left + (steps[i] - first) * slot);
  const sy = (v) => bottom - ((v - y.low) / (y.high - y.low)) * (bottom - PAD.top);
  let svg = "";
  y.marks.forEach((m, k) => {
    const at = sy(m).toFixed(1);
    svg += `<line class="grid" x1="${left}" x2="${right}" y1="${at}" y2="${at}"/>`;
    svg += `<text x="${left - 8}" y="${at}" dy="3.5" text-anchor="end">${labels[k]}</text>`;
  });
  svg += `<line class="axis" x1="${left}" x2="${right}" y1="${bottom}" y2="${bottom}"/>`;
  const apart = tickStep(first, last, width < 420 ? 4 : 6);
  const named = steps.length < 2 ? steps : ticks(first, last, apart);
  for (const s of named) {
    if (!Number.isInteger(s) || s < first) continue;
    const i = centred ? nearest(steps, s) : null;
    const at = (centred ? sx(i) : steps.length === 1 ? sx(0) : left + (s - first) * slot).toFixed(1);
    svg += `<text x="${at}" y="${bottom + 16}" text-anchor="middle">${tick(s, apart)}</text>`;
  }
  svg += `<text x="${right}" y="${bottom + 29}" text-anchor="end">step</text>`;
  return { sx, sy, svg, slot, bottom, right };
}

function nearest(steps, target) {
  let best = 0;
  steps.forEach((s, i) => { if (Math.abs(s - target) < Math.abs(steps[best] - target)) best = i; });
  return best;
}

function showTip(event, html) {
  TIP.innerHTML = html;
  TIP.hidden = false;
  const box = TIP.getBoundingClientRect(), gap = 16;
  const x = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
  TIP.style.left = `${Math.max(4, x)}px`;
  TIP.style.top = `${Math.max(4, Math.min(event.clientY + gap, innerHeight - box.height - 4))}px`;
}

// Calls `describe(i)` for the point under the pointer and marks it with a line.
function hover(plot, f, steps, describe) {
  const cursor = plot.querySelector(".cursor");
  plot.onpointermove = plot.onpointerdown = (event) => {
    const x = event.clientX - plot.getBoundingClientRect().left;
    let best = 0;
    steps.forEach((_, i) => { if (Math.abs(f.sx(i) - x) < Math.abs(f.sx(best) - x)) best = i; });
    cursor.setAttribute("x1", f.sx(best));
    cursor.setAttribute("x2", f.sx(best));
    cursor.style.display = "";
    showTip(event, `<span class="dim">step ${steps[best].toLocaleString("en")}</span>${describe(best)}`);
  };
  plot.onpointerleave = () => { TIP.hidden = true; cursor.style.display = "none"; };
}

const row = (swatch, label, value) => `<div><i style="background:${swatch}"></i>${escape(label)}<b>${value}</b></div>`;
const cursorLine = (f) => `<line class="cursor" style="display:none" y1="${PAD.top}" y2="${f.bottom}"/>`;
const lastOf = (values) => values.reduce((held, v) => (v === null ? held : v), null);

function drawLines(figure, chart) {
  const plot = figure.querySelector(".plot"), format = chart.scale === "share" ? percent : number;
  const every = chart.lines.flatMap((l) => l.values).concat(...(chart.band ?? [])).filter((v) => v !== null);
  const y = axis(every, chart.scale), f = frame(plot, chart.steps, y, false);
  const at = (v, i) => (v === null || y.of(v) === null ? null : [f.sx(i), f.sy(y.of(v))]);
  let svg = f.svg;
  if (chart.band) {
    const [low, high] = chart.band.map((edge) => edge.map(at).filter((p) => p !== null));
    svg += `<path d="${path(high.concat(low.reverse()))}Z" fill="${color(0)}" opacity="0.13"/>`;
  }
  chart.lines.forEach((line, k) => {
    const dense = line.values.filter((v) => v !== null).length;
    const points = line.values.map(at), ink = color(k);
    if (line.sparse || dense < 2) {
      const held = points.filter((p) => p !== null);
      svg += `<path d="${path(held)}" fill="none" stroke="${ink}" stroke-width="1.6"/>`;
      for (const p of held) svg += `<circle cx="${p[0].toFixed(1)}" cy="${p[1].toFixed(1)}" r="3" fill="var(--card)" stroke="${ink}" stroke-width="1.6"/>`;
    } else {
      const noisy = isNoisy(line.values);
      svg += `<path d="${path(points)}" fill="none" stroke="${ink}" stroke-width="${noisy ? 1 : 1.7}" opacity="${noisy ? 0.32 : 1}" stroke-linejoin="round"/>`;
      if (noisy) svg += `<path d="${path(smooth(line.values).map(at))}" fill="none" stroke="${ink}" stroke-width="1.9" stroke-linejoin="round"/>`;
    }
  });
  plot.innerHTML = `<svg>${svg}${cursorLine(f)}</svg>`;
  figure.querySelector(".legend").innerHTML = chart.lines.map((l, k) =>
    `<span><i style="background:${color(k)}"></i>${escape(l.label)}<b>${format(lastOf(l.values))}</b></span>`).join("");
  hover(plot, f, chart.steps, (i) =>
    chart.lines.map((l, k) => (l.values[i] === null ? "" : row(color(k), l.label, format(l.values[i])))).join("")
    + (chart.band ? row("transparent", "p05 to p95", `${number(chart.band[0][i])} to ${number(chart.band[1][i])}`) : ""));
}

function drawPhases(figure, chart) {
  const plot = figure.querySelector(".plot");
  const ink = (k) => (chart.lines[k].rest ? "var(--rest)" : color(k));
  const sums = chart.steps.map((_, i) => chart.lines.reduce((sum, l) => sum + (l.values[i] ?? 0), 0));
  const y = axis(sums, "zero"), f = frame(plot, chart.steps, y, true);
  const wide = Math.max(f.slot - (f.slot > 5 ? 2 : f.slot > 2.5 ? 1 : 0), 0.8);
  let svg = f.svg;
  chart.steps.forEach((_, i) => {
    let base = 0;
    chart.lines.forEach((l, k) => {
      const v = l.values[i] ?? 0;
      if (v > 0) svg += `<rect x="${(f.sx(i) - wide / 2).toFixed(2)}" width="${wide.toFixed(2)}" y="${f.sy(base + v).toFixed(2)}" height="${(f.sy(base) - f.sy(base + v)).toFixed(2)}" fill="${ink(k)}"/>`;
      base += v;
    });
  });
  plot.innerHTML = `<svg>${svg}${cursorLine(f)}</svg>`;
  figure.querySelector(".legend").innerHTML = chart.lines.map((l, k) =>
    `<span><i style="background:${ink(k)}"></i>${escape(l.label)}<b>${percent(l.share)}</b></span>`).join("");
  hover(plot, f, chart.steps, (i) =>
    chart.lines.map((l, k) => (l.values[i] ? row(ink(k), l.label, `${number(l.values[i])} s`) : "")).reverse().join("")
    + row("transparent", "whole step", `${number(sums[i])} s`));
}

function drawAll() {
  for (const figure of document.querySelectorAll("[data-chart]"))
    drawLines(figure, DATA.sections[figure.dataset.section].charts[figure.dataset.chart]);
  const phases = document.querySelector("[data-phases]");
  if (phases) drawPhases(phases, DATA.phases);
}

let pending = 0;
addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(drawAll); });
addEventListener("beforeprint", drawAll);
drawAll();

function tokenTip(event) {
  const token = event.target.closest?.("[data-t]");
  if (!token) return;
  const [id, logprob, version] = token.dataset.t.split(" ");
  const chance = logprob === "none" ? "" : `<div>probability<b>${percent(Math.exp(Number(logprob)))}</b></div>`;
  showTip(event, `<div>token<b>${id}</b></div><div>log-prob<b>${logprob}</b></div>${chance}<div>weight version<b>${version}</b></div>`);
  token.onpointerleave = () => { TIP.hidden = true; };
}
document.addEventListener("pointerover", tokenTip);
document.addEventListener("pointerdown", tokenTip);
