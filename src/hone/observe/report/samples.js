// The browser of samples: filters and sorts by the index of all samples, and opens the compressed
// chunks of texts only of the groups that are shown, or that are searched.
"use strict";
const PER_PAGE = 25;

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// What does not depend on a page: from here to `start` everything can be run without one.

function sampleRange(index, group) {
  const first = index.groups.first;
  return [first[group], group + 1 < first.length ? first[group + 1] : index.reward.length];
}

// A value of a sample: its reward, or what one reward function gave.
const scoreOf = (index, name) => (name === "" ? index.reward : index.parts[name]);

// Samples that a filter lets through, 1 for each: `show` is all, failed or truncated, `found` what
// a text search has found or null; `run` and `split` are numbers or null, `from` and `to` steps or
// null, `low` and `high` limits of the score `by`, or null.
function matching(index, filter) {
  const { run, split, step } = index.groups, num = index.reward.length, mask = new Uint8Array(num);
  const score = scoreOf(index, filter.by ?? ""), truncated = ["length", "max_turns"].map((name) => index.stops.indexOf(name));
  for (let group = 0; group < step.length; group++) {
    if (filter.run !== null && run[group] !== filter.run) continue;
    if (filter.split !== null && split[group] !== filter.split) continue;
    if (filter.from !== null && step[group] < filter.from) continue;
    if (filter.to !== null && step[group] > filter.to) continue;
    const [first, end] = sampleRange(index, group);
    for (let i = first; i < end; i++) {
      if (filter.show === "failed" && !index.failure[i]) continue;
      if (filter.show === "truncated" && !truncated.includes(index.stop[i])) continue;
      if (filter.low !== null && !(score[i] !== null && score[i] >= filter.low)) continue;
      if (filter.high !== null && !(score[i] !== null && score[i] <= filter.high)) continue;
      if (filter.found !== null && !filter.found.has(i)) continue;
      mask[i] = 1;
    }
  }
  return mask;
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

// Groups with a sample in the mask, in an order: newest, oldest, best, worst, spread, longest. A
// group counts as good as the best of its samples in the mask, and as bad as the worst.
function ordered(index, mask, order, by = "") {
  const score = scoreOf(index, by), found = [];
  for (let group = 0; group < index.groups.step.length; group++) {
    const [first, end] = sampleRange(index, group), scores = [];
    let any = false, longest = 0;
    for (let i = first; i < end; i++) {
      if (!mask[i]) continue;
      any = true;
      longest = Math.max(longest, index.tokens[i]);
      if (score[i] !== null && score[i] !== undefined) scores.push(score[i]);
    }
    if (!any) continue;
    const best = scores.length ? Math.max(...scores) : null, worst = scores.length ? Math.min(...scores) : null;
    const keys = { newest: index.groups.step[group], oldest: -index.groups.step[group], best, worst: worst === null ? null : -worst, spread: scores.length ? best - worst : null, longest };
    // Where the best are equal, the better mean, and so on; what has no score comes last.
    const second = { best: mean(scores), worst: scores.length ? -mean(scores) : null };
    found.push([group, keys[order], second[order] ?? 0]);
  }
  const last = (v) => (v === null ? -Infinity : v);
  found.sort((a, b) => { const x = last(a[1]), y = last(b[1]); return x === y ? b[2] - a[2] || a[0] - b[0] : y > x ? 1 : -1; });
  return found.map(([group]) => group);
}

// Counts of values in bins of equal width: {low, high, counts}; null without values.
function bins(values, count = 30) {
  if (!values.length) return null;
  let low = Infinity, high = -Infinity;
  for (const v of values) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const counts = new Array(count).fill(0);
  for (const v of values) counts[Math.min(Math.floor(((v - low) / (high - low)) * count), count - 1)]++;
  return { low, high, counts };
}

const textOf = (sample) => sample.text ?? (sample.pieces ?? (sample.parts ?? []).map(([text]) => text)).join("");

// Samples of a chunk, whose groups begin at `group`, that hold the words in prompt, text, answer, id
// or failure; a hit in the prompt or answer is one of all samples of its group.
function searched(index, chunk, group, words) {
  const wanted = words.toLowerCase(), has = (text) => String(text ?? "").toLowerCase().includes(wanted), found = [];
  chunk.forEach((held, offset) => {
    const [first] = sampleRange(index, group + offset), all = has(held.prompt) || has(held.answer) || has(held.prompt_id);
    held.samples.forEach((sample, i) => { if (all || has(textOf(sample)) || has(sample.id) || has(sample.detail)) found.push(first + i); });
  });
  return found;
}

// Spans of a text by who wrote it, token by token where those are known.
function completionHtml(sample) {
  if (sample.pieces) {
    const { pieces, ids, logprobs, versions, mask } = sample, many = Array.isArray(versions);
    return pieces.map((piece, i) => {
      const logprob = logprobs[i] ?? null, own = mask === 1 || mask[i];
      const shade = !own ? "env" : logprob === null ? "t9" : `t${logprob < 0 ? Math.min(Math.round(-logprob), 8) : 0}`;
      return `<i class="${shade}" data-t="${ids[i]} ${logprob === null ? "none" : logprob.toFixed(3)} ${many ? versions[i] : versions} ${own ? 1 : 0}">${escapeHtml(piece)}</i>`;
    }).join("");
  }
  if (sample.parts) return sample.parts.map(([text, own]) => (own ? escapeHtml(text) : `<i class="env">${escapeHtml(text)}</i>`)).join("");
  return sample.text === undefined ? `<span class="dim">Its text is not in this page.</span>` : escapeHtml(sample.text);
}

const signed = (v) => (!v ? number(v) : `${v >= 0 ? "+" : "−"}${number(Math.abs(v))}`);

// A card for each sample of a group, side by side, with the same lines in all.
function groupHtml(index, group, held, mask) {
  const [first, end] = sampleRange(index, group), cards = [];
  const functions = index.functions.filter((name) => { for (let i = first; i < end; i++) if ((index.parts[name][i] ?? null) !== null) return true; return false; });
  const trained = index.advantage.slice(first, end).some((v) => v !== null);
  for (let i = first; i < end; i++) {
    const sample = held.samples[i - first], failure = index.failures[index.failure[i]];
    const lines = [...(trained ? [["advantage", signed(index.advantage[i])]] : []), ...functions.map((name) => [name, number(index.parts[name][i])]),
      ["tokens", number(index.tokens[i])], ["end", index.stops[index.stop[i]]]];
    cards.push(`<article class="card${mask[i] ? "" : " other"}">
      <p class="score">${failure ? `<b class="bad">${escapeHtml(failure)}</b>` : `<b>${index.reward[i] === null ? "" : number(index.reward[i])}</b>`}<span class="dim">${escapeHtml(sample.id)}</span></p>
      <dl>${lines.map(([name, value]) => `<div><dt>${escapeHtml(name)}</dt><dd>${escapeHtml(String(value))}</dd></div>`).join("")}</dl>
      ${sample.detail ? `<p class="detail bad">${escapeHtml(sample.detail)}</p>` : ""}
      <div class="text">${completionHtml(sample)}</div></article>`);
  }
  const answer = held.answer === null || held.answer === undefined ? "" : `<p class="answer"><span class="dim">answer</span> ${escapeHtml(String(held.answer))}</p>`;
  return `<div class="text prompt">${escapeHtml(held.prompt.trim()) || '<span class="dim">Its texts are not in this page.</span>'}</div>${answer}<div class="cards">${cards.join("")}</div>`;
}

// The page's part: controls, the list, the histograms.
async function start() {
  const area = document.getElementById("samples");
  if (!area) return;
  const $ = (name) => area.querySelector(`[name=${name}]`), list = area.querySelector(".groups"), count = area.querySelector(".count"), more = area.querySelector(".more");
  if (typeof DecompressionStream === "undefined") {
    count.textContent = "This browser cannot open the compressed samples of the page; those of 2023 and later can.";
    return;
  }
  const index = await unpack(document.getElementById("index").textContent);
  const chunks = [...document.querySelectorAll("script.chunk")], opened = new Map();
  const open = (chunk) => { if (!opened.has(chunk)) opened.set(chunk, unpack(chunks[chunk].textContent)); return opened.get(chunk); };
  const firstGroup = index.groups.chunk.reduce((found, chunk, group) => { found[chunk] ??= group; return found; }, []);
  const textOfGroup = async (group) => { const chunk = index.groups.chunk[group]; return (await open(chunk))[group - firstGroup[chunk]]; };

  const options = (select, names, all) => {
    select.insertAdjacentHTML("beforeend", `${all === null ? "" : `<option value="">${all}</option>`}${names.map((name, i) => `<option value="${i}">${escapeHtml(name)}</option>`).join("")}`);
    select.closest("label").hidden = names.length < 2;
  };
  options($("run"), index.runs, "all runs");
  options($("split"), index.splits, "all");
  $("by").innerHTML = `<option value="">reward</option>${index.functions.map((name) => `<option>${escapeHtml(name)}</option>`).join("")}`;
  $("by").closest("label").hidden = index.functions.length < 2;
  const hasSteps = new Set(index.groups.step).size > 1;
  for (const name of ["from", "to"]) $(name).closest("label").hidden = !hasSteps;
  const orders = { newest: "newest first", oldest: "oldest first", best: "best first", worst: "worst first", spread: "widest spread first", longest: "longest first" };
  const hasScores = index.reward.some((v) => v !== null) || index.failure.some((kind) => kind);
  area.querySelector(".spread").hidden = !hasScores;
  const offered = (name) => (["newest", "oldest"].includes(name) ? hasSteps : name === "longest" || hasScores);
  $("order").innerHTML = Object.entries(orders).filter(([name]) => offered(name))
    .map(([name, text]) => `<option value="${name}">${text}</option>`).join("");
  if (!hasSteps) $("order").insertAdjacentHTML("afterbegin", `<option value="oldest">as sampled</option>`);
  $("order").selectedIndex = 0;

  const numberIn = (name) => ($(name).value === "" ? null : Number($(name).value));
  let limits = { low: null, high: null }, found = null, mask, groups = [], drawn = 0, search = 0;

  function apply() {
    const filter = { show: $("show").value, by: $("by").value, run: numberIn("run"), split: numberIn("split"), from: numberIn("from"), to: numberIn("to"), found, ...limits };
    mask = matching(index, filter);
    groups = ordered(index, mask, $("order").value, $("by").value);
    const num = mask.reduce((a, b) => a + b, 0), all = index.reward.length;
    count.textContent = `${num.toLocaleString("en")} of ${all.toLocaleString("en")} samples, in ${groups.length.toLocaleString("en")} ${groups.length === 1 ? "group" : "groups"}`;
    area.querySelector(".limits").hidden = limits.low === null;
    list.replaceChildren();
    drawn = 0;
    drawMore();
    drawSpread();
  }

  function drawMore() {
    for (const group of groups.slice(drawn, drawn + PER_PAGE)) list.append(groupElement(group, drawn === 0 && group === groups[0]));
    drawn = Math.min(drawn + PER_PAGE, groups.length);
    more.hidden = drawn >= groups.length;
  }

  function groupElement(group, isOpen) {
    const [first, end] = sampleRange(index, group), details = document.createElement("details"), score = scoreOf(index, $("by").value);
    const held = [];
    for (let i = first; i < end; i++) held.push([score[i], mask[i], index.failure[i]]);
    const rewards = held.map(([v]) => v).filter((v) => v !== null && v !== undefined);
    const labels = [index.runs.length > 1 ? index.runs[index.groups.run[group]] : "", index.splits.length > 1 ? index.splits[index.groups.split[group]] : "", hasSteps ? `step ${index.groups.step[group]}` : ""].filter(Boolean);
    const strip = held.slice(0, 64).map(([v, shown, failed]) => `<i class="${failed ? "failed" : ""}${shown ? "" : " other"}">${failed ? "×" : number(v)}</i>`).join("");
    details.className = "group";
    details.innerHTML = `<summary><span class="where">${escapeHtml(labels.join(" · ")) || `#${group}`}</span>${hasScores ? `<span class="mean">${number(mean(rewards))}</span><span class="strip">${strip}</span>` : ""}<span class="question"></span></summary><div class="body"></div>`;
    textOfGroup(group).then((held) => {
      details.querySelector(".question").textContent = held.prompt.trim().slice(-300) || held.prompt_id;
      details.querySelector(".question").title = held.prompt_id;
    });
    details.ontoggle = async () => {
      const body = details.querySelector(".body");
      if (!details.open || body.hasChildNodes()) return;
      body.innerHTML = groupHtml(index, group, await textOfGroup(group), mask);
      highlight(body);
      const card = body.querySelector(".card:not(.other)"), cards = body.querySelector(".cards");
      if (card) cards.scrollLeft = card.offsetLeft - cards.offsetLeft;
    };
    details.open = isOpen;
    return details;
  }

  function highlight(body) {
    const words = $("search").value.trim();
    if (!words || !globalThis.CSS?.highlights) return;
    const ranges = [], texts = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
      const text = node.data.toLowerCase();
      for (let at = text.indexOf(words.toLowerCase()); at >= 0; at = text.indexOf(words.toLowerCase(), at + 1)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + words.length);
        ranges.push(range);
      }
    }
    const held = CSS.highlights.get("found") ?? new Highlight();
    for (const range of ranges) held.add(range);
    CSS.highlights.set("found", held);
  }

  async function runSearch() {
    const words = $("search").value.trim(), own = ++search;
    globalThis.CSS?.highlights?.clear();
    if (words === "") { found = null; apply(); return; }
    const hits = new Set();
    for (let chunk = 0; chunk < chunks.length; chunk++) {
      for (const i of searched(index, await open(chunk), firstGroup[chunk], words)) hits.add(i);
      if (own !== search) return; // other words were typed meanwhile
      if (chunk % 8 === 7) count.textContent = `searching, ${percent(chunk / chunks.length)}`;
    }
    found = hits;
    apply();
  }

  function drawSpread() {
    const score = scoreOf(index, $("by").value), shown = [[], []];
    mask.forEach((m, i) => { if (m) { if ((score[i] ?? null) !== null) shown[0].push(score[i]); shown[1].push(index.tokens[i]); } });
    area.querySelectorAll(".spread").forEach((figure, k) => {
      if (figure.hidden) return;
      const plot = figure.querySelector(".plot"), held = bins(shown[k]);
      plot.onclick = null;
      if (held === null) { plot.innerHTML = `<p class="dim">None of the samples shown has a ${k ? "length" : "score"}.</p>`; plot.onpointermove = null; return; }
      const y = axis(held.counts, "zero"), width = plot.clientWidth, height = plot.clientHeight, left = PAD.left, bottom = height - 22, slot = (width - left - PAD.right) / held.counts.length;
      const sy = (v) => bottom - ((v - y.low) / (y.high - y.low)) * (bottom - PAD.top), step = tickStep(held.low, held.high, 5);
      const sx = (v) => left + ((v - held.low) / (held.high - held.low)) * (width - left - PAD.right);
      plot.innerHTML = `${svgTag(plot)}${y.marks.map((m) => `<line class="grid" x1="${left}" x2="${width - PAD.right}" y1="${sy(m)}" y2="${sy(m)}"/><text x="${left - 8}" y="${sy(m)}" dy="3.5" text-anchor="end">${y.label(m)}</text>`).join("")}`
        + held.counts.map((c, bin) => (c ? `<rect x="${left + bin * slot + 0.5}" width="${Math.max(slot - 1, 1)}" y="${sy(c)}" height="${bottom - sy(c)}" fill="var(--c0)"/>` : "")).join("")
        + ticks(held.low, held.high, step).map((t) => `<text x="${sx(t)}" y="${bottom + 16}" text-anchor="middle">${tick(t, step)}</text>`).join("") + "</svg>";
      const binAt = (event) => Math.min(Math.max(Math.floor((event.clientX - plot.getBoundingClientRect().left - left) / slot), 0), held.counts.length - 1);
      const edge = (bin) => held.low + ((held.high - held.low) * bin) / held.counts.length;
      plot.onpointermove = (event) => { const bin = binAt(event); showTip(event, row("var(--c0)", `${number(edge(bin))} to ${number(edge(bin + 1))}`, held.counts[bin].toLocaleString("en"))); };
      plot.onpointerleave = () => { TIP.hidden = true; };
      // A click keeps the samples of that bar; its edges may be rounded, so a hair is added.
      if (k === 0) plot.onclick = (event) => { const bin = binAt(event), hair = 1e-9 * (held.high - held.low); limits = { low: edge(bin) - hair, high: edge(bin + 1) + (bin + 1 < held.counts.length ? -hair : hair) }; apply(); };
    });
  }

  for (const name of ["show", "by", "run", "split", "from", "to", "order"]) $(name).addEventListener("input", () => { if (name === "by") limits = { low: null, high: null }; apply(); });
  area.querySelector(".limits").onclick = () => { limits = { low: null, high: null }; apply(); };
  let typing = 0;
  $("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(runSearch, 250); });
  more.onclick = drawMore;
  new IntersectionObserver((entries) => { if (entries.some((e) => e.isIntersecting) && !more.hidden) drawMore(); }, { rootMargin: "400px" }).observe(more);
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(drawSpread); });
  apply();
}

function tokenTip(event) {
  const token = event.target.closest?.("[data-t]");
  if (!token) return;
  const [id, logprob, version, own] = token.dataset.t.split(" ");
  const chance = logprob === "none" || own === "0" ? "" : `<div>log-prob<b>${logprob}</b></div><div>probability<b>${percent(Math.exp(Number(logprob)))}</b></div>`;
  showTip(event, `<div>token<b>${id}</b></div>${own === "0" ? "<div>written by<b>the environment</b></div>" : `${chance}<div>weight version<b>${version}</b></div>`}`);
  token.onpointerleave = () => { TIP.hidden = true; };
}
