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
const digitsFor = (v, step) =>
  Math.min(Math.max(3, Math.floor(Math.log10(Math.abs(v) / step) + 1e-9) + 2), 15);
// The label of a mark.
function tick(v, step) {
  if (v === 0) return "0";
  const a = Math.abs(v);
  const digits = digitsFor(v, step);
  if (a >= 1e6) return `${Number((v / 1e6).toPrecision(digits))}M`;
  if (a >= 1e4) return `${Number((v / 1e3).toPrecision(digits))}k`;
  if (a < 1e-3) return Number(v.toPrecision(digits)).toExponential();
  return v.toLocaleString("en", { maximumSignificantDigits: digits });
}
const escapeHtml = (s) => s.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
// As in Python: a name may break after a separator, so that it need not inside a word.
const breakable = (s) => escapeHtml(s).replace(/(\w[._/:])(?=[A-Za-z])/g, "$1<wbr>");

// Distance of the marks of a linear axis: 1, 2 or 5 times a power of ten, of counts a whole one.
function tickStep(low, high, count, isWhole = false) {
  const raw = Math.max((high - low) / count || 1, isWhole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
}

// Its marks.
function ticks(low, high, step) {
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9) || 0; k * step <= high + step * 1e-9; k++)
    found.push(k * step + 0);
  return found;
}

function decades(low, high) {
  const found = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e++) found.push(e);
  const every = Math.ceil(found.length / 6);
  return found.filter((e) => e % every === 0);
}

// Maps values to pixels. A log axis works on exponents and drops values that have none; marks of
// counts, `isWhole`, are whole numbers.
function axis(values, scale, isWhole = false) {
  const log = scale === "log" && values.some((v) => v > 0);
  const of = log ? (v) => (v > 0 ? Math.log10(v) : null) : (v) => v;
  const mapped = values.map(of).filter((v) => v !== null && v !== undefined);
  let low = Math.min(...mapped);
  let high = Math.max(...mapped);
  if (!mapped.length) [low, high] = [0, 1];
  if (log) [low, high] = [Math.floor(low), Math.max(Math.ceil(high), Math.floor(low) + 1)];
  else if (scale !== "linear") low = Math.min(low, 0);
  // Differences of single-precision rounding are none to look at.
  if (high - low <= 2e-6 * Math.max(Math.abs(low), Math.abs(high)))
    [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const step = tickStep(low, high, 4, isWhole);
  if (!log) {
    low = scale !== "linear" && low >= 0 ? 0 : Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
  }
  const label = log
    ? (e) => (Math.abs(e) < 3 ? String(Number((10 ** e).toPrecision(1))) : `1e${e}`)
    : scale === "share"
      ? (v) => `${v === 0 ? 0 : Number((100 * v).toPrecision(digitsFor(v, step)))}%`
      : (v) => tick(v, step);
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
  const filter = (list, reduce) =>
    list.map((v, i) => {
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
  let from = steps.findIndex((s) => s >= ZOOM[0]);
  let to = steps.findIndex((s) => s > ZOOM[1]);
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
  return points
    .map((p) => {
      if (p === null) return ((pen = "M"), "");
      const part = `${pen}${p[0].toFixed(1)} ${p[1].toFixed(1)}`;
      pen = "L";
      return part;
    })
    .join("");
}

// An SVG element as text; numbers are rounded to a hundredth of a pixel.
function svg(name, attributes, content = "") {
  const text = (value) => (typeof value === "number" ? Math.round(100 * value) / 100 : value);
  const shown = Object.entries(attributes).map(([key, value]) => `${key}="${text(value)}"`);
  return `<${name} ${shown.join(" ")}>${content}</${name}>`;
}

// A picture that is drawn to the pixel; where its place has another size, as on paper, it is scaled.
function picture(plot, content) {
  const viewBox = `0 0 ${plot.clientWidth} ${plot.clientHeight}`;
  return svg("svg", { viewBox, preserveAspectRatio: "xMinYMid meet" }, content);
}

// Lines and numbers at the marks of the vertical axis.
function horizontals(y, sy, left, right) {
  return y.marks
    .map((m) => [
      svg("line", { class: "grid", x1: left, x2: right, y1: sy(m), y2: sy(m) }),
      svg("text", { x: left - 8, y: sy(m), dy: 3.5, "text-anchor": "end" }, y.label(m)),
    ])
    .flat()
    .join("");
}

// Axes and their marks; `sx` and `sy` map steps and values to pixels. With `slots` each of so many
// steps, which need not be evenly apart, has a slot of equal width, and `sx` maps their positions.
function frame(plot, [first, last], y, slots = null) {
  const width = plot.clientWidth;
  const widest = Math.max(...y.marks.map((m) => y.label(m).length));
  const left = Math.max(PAD.left, 12 + 6.5 * widest);
  const right = width - PAD.right;
  const bottom = plot.clientHeight - PAD.bottom;
  const slot = slots ? (right - left) / slots.length : 0;
  const span = last - first;
  const sx = slots
    ? (i) => left + (i + 0.5) * slot
    : (s) => (span ? left + ((s - first) / span) * (right - left) : (left + right) / 2);
  const sy = (v) => bottom - ((v - y.low) / (y.high - y.low)) * (bottom - PAD.top);
  const stepAt = slots
    ? (x) => slots[Math.min(Math.max(Math.floor((x - left) / slot), 0), slots.length - 1)]
    : (x) => first + (Math.min(Math.max(x - left, 0), right - left) / (right - left || 1)) * span;
  const apart = tickStep(first, last, width < 420 ? 4 : 6);
  const named = (span ? ticks(first, last, apart) : [first]).filter((s) => Number.isInteger(s) && s >= first);
  const middle = { y: bottom + 16, "text-anchor": "middle" };
  const axes = [
    horizontals(y, sy, left, right),
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    ...named.map((s) => svg("text", { x: sx(slots ? nearest(slots, s) : s), ...middle }, tick(s, apart))),
    svg("text", { x: right, y: bottom + 29, "text-anchor": "end" }, "step"),
  ];
  return { sx, sy, slot, left, right, bottom, stepAt, axes: axes.join("") };
}

// The position of the ascending step that is nearest.
function nearest(steps, target) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < target) low = middle;
    else high = middle;
  }
  return Math.abs(steps[low] - target) <= Math.abs(steps[high] - target) ? low : high;
}

function showTip(event, html) {
  TIP.innerHTML = html;
  TIP.hidden = false;
  const box = TIP.getBoundingClientRect();
  const gap = 16;
  const toTheLeft = event.clientX + gap + box.width > innerWidth;
  const x = toTheLeft ? event.clientX - gap - box.width : event.clientX + gap;
  const y = Math.min(event.clientY + gap, innerHeight - box.height - 4);
  TIP.style.left = `${Math.max(4, x)}px`;
  TIP.style.top = `${Math.max(4, y)}px`;
}

// What a pointer moves over a chart: a line at its step, and the steps that a drag has chosen.
const marks = (f) =>
  svg("rect", { class: "chosen", y: PAD.top, height: f.bottom - PAD.top, width: 0 }) +
  svg("line", { class: "cursor", style: "display:none", y1: PAD.top, y2: f.bottom });

// Calls `describe(step)` for the step under the pointer, which returns a pixel to mark and what to
// show there, and lets a drag choose the steps to zoom to.
function interact(plot, f, describe) {
  const cursor = plot.querySelector(".cursor");
  const chosen = plot.querySelector(".chosen");
  const xOf = (event) => event.clientX - plot.getBoundingClientRect().left;
  let start = null;
  plot.onpointerdown = (event) => {
    start = xOf(event);
    plot.setPointerCapture(event.pointerId);
    plot.onpointermove(event);
  };
  plot.onpointermove = (event) => {
    const now = xOf(event);
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
    const [from, to] = [start, xOf(event)].sort((a, b) => a - b);
    const isDrag = start !== null && to - from > 5;
    start = null;
    if (isDrag) zoomTo([f.stepAt(from), f.stepAt(to)]);
  };
  plot.ondblclick = () => zoomTo(null);
  plot.onpointercancel = plot.onpointerleave = () => {
    TIP.hidden = true;
    cursor.style.display = "none";
    start = null;
    chosen.setAttribute("width", 0);
  };
}

const row = (swatch, label, value) =>
  `<div><i style="background:${swatch}"></i>${breakable(label)}<b>${value}</b></div>`;
const stepLine = (step) => `<span class="dim">step ${Math.round(step).toLocaleString("en")}</span>`;
const lastOf = (values) => values.reduce((held, v) => (v === null ? held : v), null);

function drawLegend(figure, entries) {
  const entry = ([ink, label, value]) =>
    `<span><i style="background:${ink}"></i>${breakable(label)}<b>${value}</b></span>`;
  figure.querySelector(".legend").innerHTML = entries.map(entry).join("");
}

// A line of a chart as it is drawn: its points in the zoom, and with `band` those of two edges.
// One that was measured at some steps only keeps all, to be drawn up to the borders.
function lineInZoom(line, number, band, most) {
  const steps = DATA.steps[line.run];
  const [from, to] = visible(steps);
  const cut = (values) =>
    line.sparse ? { steps, values } : thin(steps.slice(from, to), values.slice(from, to), most);
  return {
    ...cut(line.values),
    sparse: line.sparse,
    edges: band ? band.map((edge) => cut(edge).values) : [],
    label: SEVERAL ? DATA.names[line.run] : line.label,
    ink: color(SEVERAL ? line.run : number),
    last: lastOf(line.values),
  };
}

// A curve through the points `[x, y]` or null; a noisy one stands back behind its smooth course.
function curve(line, at) {
  const stroke = { fill: "none", stroke: line.ink, "stroke-linejoin": "round" };
  const points = line.values.map(at);
  if (line.sparse || line.values.filter((v) => v !== null).length < 2) {
    const held = points.filter((p) => p !== null);
    const dot = { r: 3, fill: "var(--card)", stroke: line.ink, "stroke-width": 1.6 };
    const dots = held.map(([cx, cy]) => svg("circle", { cx, cy, ...dot }));
    return svg("path", { d: path(held), ...stroke, "stroke-width": 1.6 }) + dots.join("");
  }
  if (!isNoisy(line.values)) return svg("path", { d: path(points), ...stroke, "stroke-width": 1.7 });
  return (
    svg("path", { d: path(points), ...stroke, "stroke-width": 1, opacity: 0.32 }) +
    svg("path", { d: path(smooth(line.values).map(at)), ...stroke, "stroke-width": 1.9 })
  );
}

function area(line, at) {
  const [low, high] = line.edges.map((edge) => edge.map(at).filter((p) => p !== null));
  return svg("path", { d: `${path(high.concat(low.reverse()))}Z`, fill: line.ink, opacity: 0.13 });
}

function drawCurves(figure, chart) {
  const plot = figure.querySelector(".plot");
  const format = chart.scale === "share" ? percent : number;
  const most = Math.max(plot.clientWidth / 1.5, 60);
  const lines = chart.lines
    .map((line, k) => lineInZoom(line, k, k === 0 ? chart.band : null, most))
    .filter((line) => line.steps.length);
  const steps = lines.flatMap((line) => [line.steps[0], line.steps[line.steps.length - 1]]);
  const span = ZOOM ?? [Math.min(...steps), Math.max(...steps)];
  const isInside = (line, i) => !line.sparse || (line.steps[i] >= span[0] && line.steps[i] <= span[1]);
  const heights = lines.flatMap((line) =>
    [line.values, ...line.edges].flatMap((list) => list.filter((v, i) => v !== null && isInside(line, i))),
  );
  const y = axis(heights, chart.scale);
  const f = frame(plot, span, y);
  const drawn = lines.map((line) => {
    const at = (v, i) => (v === null || y.of(v) === null ? null : [f.sx(line.steps[i]), f.sy(y.of(v))]);
    return (line.edges.length ? area(line, at) : "") + curve(line, at);
  });
  const id = `clip-${figure.dataset.section}-${figure.dataset.chart}`;
  const inside = { x: f.left - 4, width: f.right - f.left + 8, y: 0, height: f.bottom + 4 };
  const clip = svg("clipPath", { id }, svg("rect", inside));
  const clipped = svg("g", { "clip-path": `url(#${id})` }, drawn.join(""));
  plot.innerHTML = picture(plot, f.axes + clip + clipped + marks(f));
  drawLegend(
    figure,
    lines.map((line) => [line.ink, line.label, format(line.last)]),
  );
  const told = lines.map((line) => {
    const held = line.steps.map((step, i) => ({ line, step, i })).filter(({ i }) => line.values[i] !== null);
    return { held, steps: held.map(({ step }) => step) };
  });
  interact(plot, f, (target) => {
    const found = told
      .filter(({ held }) => held.length)
      .map(({ held, steps }) => held[nearest(steps, target)]);
    if (!found.length) return [f.sx(target), stepLine(target)];
    const closest = found.reduce((a, b) => (Math.abs(b.step - target) < Math.abs(a.step - target) ? b : a));
    const rows = found
      .filter(({ step }) => step === closest.step)
      .map(({ line, i }) => {
        const edges = line.edges.map((edge) => number(edge[i])).join(" to ");
        const own = row(line.ink, line.label, format(line.values[i]));
        return own + (edges ? row("transparent", "p05 to p95", edges) : "");
      });
    return [f.sx(closest.step), stepLine(closest.step) + rows.join("")];
  });
}

// Steps of a chart that has its own, and its lists of values, in the zoom.
function zoomed(chart, lists) {
  const kept = chart.steps
    .map((s, i) => [s, i])
    .filter(([s]) => ZOOM === null || (s >= ZOOM[0] && s <= ZOOM[1]));
  if (!kept.length) kept.push([chart.steps[nearest(chart.steps, ZOOM[0])], nearest(chart.steps, ZOOM[0])]);
  return [kept.map(([s]) => s), lists.map((list) => kept.map(([, i]) => list[i]))];
}

function drawBars(figure, chart) {
  const plot = figure.querySelector(".plot");
  const inks = chart.lines.map((line, k) => (line.rest ? "var(--rest)" : color(k)));
  const [steps, values] = zoomed(
    chart,
    chart.lines.map((line) => line.values),
  );
  const sums = steps.map((_, i) => values.reduce((sum, list) => sum + (list[i] ?? 0), 0));
  const f = frame(plot, [steps[0], steps[steps.length - 1]], axis(sums, "zero"), steps);
  const width = Math.max(f.slot - (f.slot > 5 ? 2 : f.slot > 2.5 ? 1 : 0), 0.8);
  const bars = steps.map((_, i) => {
    let base = 0;
    return values
      .map((list, k) => {
        const from = base;
        base += list[i] ?? 0;
        const height = f.sy(from) - f.sy(base);
        return height > 0
          ? svg("rect", { x: f.sx(i) - width / 2, width, y: f.sy(base), height, fill: inks[k] })
          : "";
      })
      .join("");
  });
  plot.innerHTML = picture(plot, f.axes + bars.join("") + marks(f));
  drawLegend(
    figure,
    chart.lines.map((line, k) => [inks[k], line.label, percent(line.share)]),
  );
  interact(plot, f, (target) => {
    const i = nearest(steps, target);
    const rows = values.map((list, k) =>
      list[i] ? row(inks[k], chart.lines[k].label, `${number(list[i])} s`) : "",
    );
    const whole = row("transparent", "whole step", `${number(sums[i])} s`);
    return [f.sx(i), stepLine(steps[i]) + rows.reverse().join("") + whole];
  });
}

function drawColumns(figure, chart) {
  const plot = figure.querySelector(".plot");
  const { low, high } = chart;
  const [steps, [shares]] = zoomed(chart, [chart.shares]);
  const binWidth = (high - low) / shares[0].length;
  const edge = (bin) => low + bin * binWidth;
  const marked = axis([low, high], "linear", chart.whole);
  const y = { ...marked, low, high, marks: marked.marks.filter((m) => m >= low && m <= high) };
  const f = frame(plot, [steps[0], steps[steps.length - 1]], y, steps);
  const size = { width: f.slot + 0.3, height: f.sy(low) - f.sy(edge(1)) + 0.3, fill: "var(--c0)" };
  const cells = shares.flatMap((column, i) =>
    column.map((share, bin) => {
      if (share === 0) return "";
      return svg("rect", {
        x: f.sx(i) - f.slot / 2,
        y: f.sy(edge(bin + 1)),
        ...size,
        opacity: 0.08 + 0.92 * Math.sqrt(share),
      });
    }),
  );
  plot.innerHTML = picture(plot, f.axes + cells.join("") + marks(f));
  interact(plot, f, (target) => {
    const i = nearest(steps, target);
    const held = shares[i].map((share, bin) => ({ share, bin })).filter(({ share }) => share > 0);
    const most = held
      .sort((a, b) => b.share - a.share)
      .slice(0, 6)
      .sort((a, b) => b.bin - a.bin);
    const rows = most.map(({ share, bin }) =>
      row("transparent", `${number(edge(bin))} to ${number(edge(bin + 1))}`, percent(share)),
    );
    return [f.sx(i), stepLine(steps[i]) + rows.join("")];
  });
}

// What devices did over time: a lane each, a colour a state, under the numbers of the steps. It is
// not zoomed with the others, whose steps it has not all.
const LANE = 20;
function drawLanes(figure, chart) {
  const plot = figure.querySelector(".plot");
  const top = PAD.top + 14;
  plot.style.height = `${top + LANE * chart.lanes.length + PAD.bottom}px`;
  const inks = chart.states.map((state, k) =>
    state === "wait" ? "var(--rest)" : state === "asleep" ? "var(--asleep)" : color(k),
  );
  const widest = Math.max(...chart.lanes.map(({ name }) => name.length));
  const [left, right] = [14 + 6.2 * widest, plot.clientWidth - 44];
  const bottom = top + LANE * chart.lanes.length;
  const end = Math.max(...chart.steps.map(([, , to]) => to)) || 1;
  const sx = (s) => left + (s / end) * (right - left);
  const apart = tickStep(0, end, plot.clientWidth < 420 ? 3 : 6);
  const lanes = chart.lanes.map(({ name, use, spans }, k) => {
    const y = top + LANE * k;
    const text = { y: y + LANE / 2, dy: 3.5 };
    const rects = spans.map(([state, from, to]) =>
      svg("rect", { x: sx(from), width: Math.max(sx(to) - sx(from), 0.4), y: y + 2, height: LANE - 4, fill: inks[state] }),
    );
    return [
      svg("text", { x: left - 8, "text-anchor": "end", ...text }, escapeHtml(name)),
      svg("rect", { x: left, width: right - left, y: y + 2, height: LANE - 4, class: "lane" }),
      ...rects,
      svg("text", { x: right + 6, ...text }, `${Math.round(100 * use)}%`),
    ].join("");
  });
  const steps = chart.steps.map(([step, from, to], k) => {
    const room = (sx(to) - sx(from) - 6) / 6.2;
    const text = [k ? "" : `step ${step}`, `${step}`].find((t) => t && t.length < room) ?? "";
    const line = { class: "edge", x1: sx(from), x2: sx(from), y1: top - 14, y2: bottom };
    const label = { x: sx(from) + 4, y: top - 5 };
    return svg("line", line) + svg("text", label, text);
  });
  const axes = [
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    ...ticks(0, end, apart).map((s) =>
      svg("text", { x: sx(s), y: bottom + 16, "text-anchor": "middle" }, tick(s, apart)),
    ),
  ];
  plot.innerHTML = picture(plot, axes.join("") + lanes.join("") + steps.join(""));
  const seen = chart.states.map((_, state) =>
    chart.lanes.some(({ spans }) => spans.some(([held]) => held === state)),
  );
  drawLegend(
    figure,
    chart.states.flatMap((state, k) => (seen[k] ? [[inks[k], state, ""]] : [])),
  );
  plot.onpointermove = (event) => {
    const box = plot.getBoundingClientRect();
    const lane = chart.lanes[Math.floor((event.clientY - box.top - top) / LANE)];
    const at = ((event.clientX - box.left - left) / (right - left)) * end;
    if (!lane || at < 0 || at > end) return void (TIP.hidden = true);
    const step = chart.steps.findLast(([, from]) => from <= at) ?? chart.steps[0];
    const held = lane.spans.findLast(([, from, to]) => from <= at && at <= to);
    const told = held
      ? row(inks[held[0]], chart.states[held[0]], `${number(held[2] - held[1])} s`)
      : row("transparent", "nothing", "");
    showTip(event, stepLine(step[0]) + row("transparent", lane.name, percent(lane.use)) + told);
  };
  plot.onpointerleave = () => (TIP.hidden = true);
}

const DRAW = { curves: drawCurves, bars: drawBars, columns: drawColumns, lanes: drawLanes };

// A plot that is narrower than its axes, as in a hidden part of the page or in a window of no size,
// is drawn once it has room: the window then tells of its new size.
const LEAST_WIDTH = 150;
const hasRoom = (plot) => plot.clientWidth >= LEAST_WIDTH;

function draw(figure) {
  if (!hasRoom(figure.querySelector(".plot"))) return;
  const chart = DATA.sections[figure.dataset.section].charts[figure.dataset.chart];
  DRAW[chart.kind](figure, chart);
}

// Charts are drawn when they come near the screen; those that were are drawn again after a change.
const DRAWN = new Set();
function redraw() {
  for (const figure of DRAWN) draw(figure);
}
function drawAll() {
  for (const figure of document.querySelectorAll("[data-chart]")) {
    DRAWN.add(figure);
    draw(figure);
  }
}

function zoomTo(steps) {
  ZOOM = steps !== null && Math.ceil(steps[0]) >= Math.floor(steps[1]) ? ZOOM : steps;
  const note = document.getElementById("zoom");
  note.hidden = ZOOM === null;
  if (ZOOM !== null)
    note.firstElementChild.textContent = `steps ${Math.ceil(ZOOM[0]).toLocaleString("en")} to ${Math.floor(ZOOM[1]).toLocaleString("en")}`;
  redraw();
}

function startCharts() {
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries)
        if (entry.isIntersecting && !DRAWN.has(entry.target)) {
          DRAWN.add(entry.target);
          draw(entry.target);
        }
    },
    { rootMargin: "300px" },
  );
  for (const figure of document.querySelectorAll("[data-chart]")) seen.observe(figure);
  let pending = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(redraw);
  });
  addEventListener("beforeprint", drawAll);
  document.getElementById("zoom").onclick = () => zoomTo(null);
}
