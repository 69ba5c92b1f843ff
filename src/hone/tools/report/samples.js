// The browser of samples: filters and sorts by the index of all samples, and opens the compressed
// chunks of texts only of the groups that are shown, or that are searched.
"use strict";
const PER_PAGE = 25;

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// What does not depend on a page: from here to `SampleBrowser` everything can be run without one.

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
  const { run, split, step } = index.groups;
  const num = index.reward.length;
  const mask = new Uint8Array(num);
  const score = scoreOf(index, filter.by ?? "");
  const truncated = ["length", "max_turns", "deadline"].map((name) => index.stops.indexOf(name));
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

// The first of the newest tenth of the steps that have samples, one of them at least.
function newestFrom(steps) {
  const held = [...new Set(steps)].sort((a, b) => a - b);
  return held[held.length - Math.max(Math.ceil(held.length / 10), 1)] ?? 0;
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

// Groups with a sample in the mask, in an order: newest, oldest, best, worst, spread, longest. A
// group counts as good as the best of its samples in the mask, and as bad as the worst.
function ordered(index, mask, order, by = "") {
  const score = scoreOf(index, by);
  const found = [];
  for (let group = 0; group < index.groups.step.length; group++) {
    const [first, end] = sampleRange(index, group);
    const scores = [];
    let any = false;
    let longest = 0;
    for (let i = first; i < end; i++) {
      if (!mask[i]) continue;
      any = true;
      longest = Math.max(longest, index.tokens[i]);
      if (score[i] !== null && score[i] !== undefined) scores.push(score[i]);
    }
    if (!any) continue;
    const best = scores.length ? Math.max(...scores) : null;
    const worst = scores.length ? Math.min(...scores) : null;
    const keys = {
      newest: index.groups.step[group],
      oldest: -index.groups.step[group],
      best,
      worst: worst === null ? null : -worst,
      spread: scores.length ? best - worst : null,
      longest,
    };
    // Where the best are equal, the better mean, and so on; what has no score comes last.
    const second = { best: mean(scores), worst: scores.length ? -mean(scores) : null };
    found.push([group, keys[order], second[order] ?? 0]);
  }
  const last = (v) => (v === null ? -Infinity : v);
  found.sort((a, b) => {
    const x = last(a[1]);
    const y = last(b[1]);
    return x === y ? b[2] - a[2] || a[0] - b[0] : y > x ? 1 : -1;
  });
  return found.map(([group]) => group);
}

// Counts of values in bins of equal width: {low, high, counts}; null without values.
function bins(values, count = 30) {
  if (!values.length) return null;
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    low = Math.min(low, v);
    high = Math.max(high, v);
  }
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const counts = new Array(count).fill(0);
  for (const v of values) counts[Math.min(Math.floor(((v - low) / (high - low)) * count), count - 1)]++;
  return { low, high, counts };
}

const textOf = (sample) =>
  sample.text ??
  (sample.pieces ?? (sample.parts ? sample.parts.map(([text]) => text) : turnTexts(sample.turns ?? []))).join("");
const turnTexts = (turns) => turns.flatMap((turn) => [turn.text, ...(turn.observed ?? []).map(({ text }) => text)]);

// Samples of a chunk, whose groups begin at `group`, that hold the words in prompt, text, answer, id
// or failure; a hit in the prompt or answer is one of all samples of its group.
function searched(index, chunk, group, words) {
  const wanted = words.toLowerCase();
  const has = (text) => `${text ?? ""}`.toLowerCase().includes(wanted);
  const found = [];
  chunk.forEach((held, offset) => {
    const [first] = sampleRange(index, group + offset);
    const all = has(held.prompt) || has(held.answer) || has(held.prompt_id);
    held.samples.forEach((sample, i) => {
      if (all || has(textOf(sample)) || has(sample.id) || has(sample.detail)) found.push(first + i);
    });
  });
  return found;
}

// A text by who wrote it, token by token where those are known.
function completionHtml(sample, step = null) {
  const environment = (text) => `<i class="env">${escapeHtml(text)}</i>`;
  if (sample.turns && (FORM === "turns" || !sample.pieces)) {
    const own = (from, to) => {
      const held = sample.pieces.slice(from, to);
      const html = held.map((piece, i) => tokenHtml(sample, piece, from + i, step)).join("");
      return { html, text: held.join("") };
    };
    return episodeHtml(sample, sample.pieces ? own : null);
  }
  if (sample.parts)
    return sample.parts.map(([text, own]) => (own ? escapeHtml(text) : environment(text))).join("");
  if (sample.pieces) return sample.pieces.map((piece, i) => tokenHtml(sample, piece, i, step)).join("");
  if (sample.text !== undefined) return escapeHtml(sample.text);
  return '<span class="dim">Its text is not in this page.</span>';
}

// What a token can be shaded by: its depth from 0 to 8, or null without a value; the marks of the
// scale; and what it means.
const SHADES = {
  logprob: {
    depth: ({ logprob }) => (logprob === null ? null : Math.max(-logprob, 0)),
    marks: ["certain", "−2", "−4", "−6", "−8"],
    text: "its log-probability when it was sampled",
  },
  ratio: {
    depth: ({ logprob, policy }) => (logprob === null || policy === null ? null : 8 * Math.abs(policy - logprob)),
    marks: ["1", "1.3", "1.6", "2.1", "2.7"],
    text: "the importance ratio of trainer and engine, either way",
  },
  entropy: {
    depth: ({ entropy }) => (entropy === null ? null : 2 * entropy),
    marks: ["0", "1", "2", "3", "4 nats"],
    text: "the entropy of the distribution that it was drawn from, by the trainer",
  },
  staleness: {
    depth: ({ behind }) => behind,
    marks: ["0", "2", "4", "6", "8"],
    text: "how many updates its weights were behind those that it trained",
  },
};
let SHADE = "logprob";
// How episodes are shown: by turns, or as one text with all that the template writes.
let FORM = "turns";

function shadeOf(token) {
  if (!token.isOwn) return "env";
  const depth = SHADES[SHADE].depth(token);
  // A token without a log-probability is a mistake; the other values not every run has.
  if (depth === null) return SHADE === "logprob" ? "t9" : "t0";
  return `t${Math.min(Math.round(depth), 8)}`;
}

// What `data-t` of a token says, and what is read from it.
const written = (token) =>
  [token.id, token.logprob, token.policy, token.entropy, token.version, token.behind, token.isOwn ? 1 : 0]
    .map((v) => v ?? "none")
    .join(" ");
function tokenOf(data) {
  const [id, logprob, policy, entropy, version, behind, isOwn] = data
    .split(" ")
    .map((text) => (text === "none" ? null : Number(text)));
  return { id, logprob, policy, entropy, version, behind, isOwn: isOwn === 1 };
}

// A token of a sample that trained `step`, or of none.
function tokenHtml({ ids, logprobs, policy, entropy, versions, mask }, piece, i, step = null) {
  const version = (Array.isArray(versions) ? versions[i] : versions) ?? null;
  const token = {
    id: ids[i],
    logprob: logprobs[i] ?? null,
    policy: policy?.[i] ?? null,
    entropy: entropy?.[i] ?? null,
    version,
    behind: step === null || version === null || version < 0 ? null : step - 1 - version,
    isOwn: mask === 1 || mask[i] === 1,
  };
  return `<i class="${shadeOf(token)}" data-t="${written(token)}">${escapeHtml(piece)}</i>`;
}

const signed = (v) => (!v ? number(v) : `${v >= 0 ? "+" : "−"}${number(Math.abs(v))}`);

// A sample: its score, what makes it up, its text. One that the filter leaves out stands back.
function cardHtml(index, i, sample, functions, { isTrained, isShown, step }) {
  const failure = index.failures[index.failure[i]];
  const score = failure ? `<b class="bad">${escapeHtml(failure)}</b>` : `<b>${number(index.reward[i])}</b>`;
  const lines = [
    ...(isTrained ? [["mean advantage", signed(index.advantage[i])]] : []),
    ...functions.map((name) => [name, number(index.parts[name][i])]),
    ["tokens", number(index.tokens[i])],
    ...(sample.turns ? [["turns", number(sample.turns.length)]] : []),
    ["end", index.stops[index.stop[i]]],
  ];
  const line = ([name, value]) => `<div><dt>${escapeHtml(name)}</dt><dd>${escapeHtml(value)}</dd></div>`;
  return `<article class="card${isShown ? "" : " other"}">
    <p class="score">${score}<span class="dim">${escapeHtml(sample.id)}</span></p>
    <dl>${lines.map(line).join("")}</dl>
    ${sample.prompt ? `<div class="text prompt">${escapeHtml(sample.prompt.trim())}</div>${imagesHtml(sample.images)}` : ""}
    ${sample.detail ? `<p class="detail bad">${escapeHtml(sample.detail)}</p>` : ""}
    <div class="text">${completionHtml(sample, step)}</div></article>`;
}

// The samples of a group by their place in it: with the order `worst` or `best` by score, so that
// what the group stands there for comes first, else as they were sampled.
function placesIn(index, group, order, by = "") {
  const [first, end] = sampleRange(index, group);
  const places = [...new Array(end - first).keys()];
  const sign = { worst: 1, best: -1 }[order];
  const score = scoreOf(index, by) ?? [];
  const rank = (i) => sign * (score[first + i] ?? sign * Infinity);
  return sign ? places.sort((a, b) => (rank(a) === rank(b) ? a - b : rank(a) - rank(b))) : places;
}

// A card for each sample of a group, side by side, with the same lines in all.
function groupHtml(index, group, held, mask, { order, by } = {}) {
  const [first, end] = sampleRange(index, group);
  const has = (column) => column.slice(first, end).some((v) => v !== null && v !== undefined);
  const functions = index.functions.filter(
    (name) => has(index.parts[name]) && isTelling(name, index.parts[name].slice(first, end)),
  );
  const isTrained = has(index.advantage);
  const isTraining = index.splits[index.groups.split[group]] === "train";
  const step = isTraining ? index.groups.step[group] : null;
  const cards = placesIn(index, group, order, by).map((offset) => {
    const isShown = mask[first + offset];
    return cardHtml(index, first + offset, held.samples[offset], functions, { isTrained, isShown, step });
  });
  const absent = '<span class="dim">Its texts are not in this page.</span>';
  const answer = `<p class="answer"><span class="dim">answer</span> ${escapeHtml(String(held.answer))}</p>`;
  return `<div class="text prompt">${escapeHtml(held.prompt.trim()) || absent}</div>${imagesHtml(held.images)}
    ${held.answer === null ? "" : answer}<div class="cards">${cards.join("")}</div>`;
}

// Where the browser gets samples from: what lies in the page, or the server of a page that is live.
// `about` says what there is to choose from; `select` counts what a filter lets through and orders
// its groups; `places` are the next of these: their number, an index with them, a mask of it, what
// was asked in short and, when they are opened, their texts.
class SamplesInPage {
  constructor(index, chunks) {
    Object.assign(this, { index, chunks, opened: new Map(), words: "", found: null });
    this.firstGroup = index.groups.chunk.reduce((found, chunk, group) => {
      found[chunk] ??= group;
      return found;
    }, []);
    this.about = {
      runs: index.runs,
      splits: index.splits,
      functions: index.functions,
      hasSteps: new Set(index.groups.step).size > 1,
      newestFrom: newestFrom(index.groups.step),
      hasScores: index.reward.some((v) => v !== null) || index.failure.some((kind) => kind),
    };
  }

  // Chunks are unpacked once.
  open(chunk) {
    if (!this.opened.has(chunk)) this.opened.set(chunk, unpack(this.chunks[chunk].textContent));
    return this.opened.get(chunk);
  }

  async textsOf(group) {
    const chunk = this.index.groups.chunk[group];
    return (await this.open(chunk))[group - this.firstGroup[chunk]];
  }

  // `isAsked` says whether the answer is still waited for; `tell` shows how far a search is.
  async select(filter, isAsked, tell) {
    const { index } = this;
    if (filter.search !== this.words) await this.search(filter.search, isAsked, tell);
    const numbered = (names, name) => (name === "" ? null : names.indexOf(name));
    const [run, split] = [numbered(index.runs, filter.run), numbered(index.splits, filter.split)];
    this.mask = matching(index, { ...filter, run, split, found: this.found });
    this.groups = ordered(index, this.mask, filter.order, filter.by);
    const score = scoreOf(index, filter.by);
    const scores = [];
    const lengths = [];
    this.mask.forEach((shown, i) => {
      if (!shown) return;
      if ((score[i] ?? null) !== null) scores.push(score[i]);
      lengths.push(index.tokens[i]);
    });
    return {
      num: lengths.length,
      all: index.reward.length,
      numGroups: this.groups.length,
      scores: bins(scores),
      lengths: bins(lengths),
    };
  }

  async search(words, isAsked, tell) {
    const hits = new Set();
    for (let chunk = 0; words !== "" && chunk < this.chunks.length; chunk++) {
      for (const i of searched(this.index, await this.open(chunk), this.firstGroup[chunk], words))
        hits.add(i);
      if (!isAsked()) return; // other words were typed meanwhile
      if (chunk % 8 === 7) tell(`searching, ${percent(chunk / this.chunks.length)}`);
    }
    [this.words, this.found] = [words, words === "" ? null : hits];
  }

  async places(offset) {
    return this.groups.slice(offset, offset + PER_PAGE).map((group) => ({
      index: this.index,
      group,
      number: group,
      mask: this.mask,
      question: this.textsOf(group).then((held) => held.prompt.trim().slice(-300) || held.prompt_id),
      texts: () => this.textsOf(group),
    }));
  }
}

class ServedSamples {
  constructor(about) {
    this.about = about;
  }

  static async ask(path, query = {}) {
    const given = Object.entries(query).filter(([, value]) => value !== null && value !== "");
    const reply = await fetch(`${path}?${new URLSearchParams(given)}`);
    if (!reply.ok) throw new Error(`${path}: ${await reply.text()}`);
    return reply.json();
  }

  async select(filter, isAsked, tell) {
    const late = setTimeout(() => isAsked() && tell("searching"), 300);
    this.query = filter;
    this.first = await ServedSamples.ask("samples", filter);
    clearTimeout(late);
    return { ...this.first, numGroups: this.first.num_groups };
  }

  async places(offset) {
    const later = { ...this.query, offset, until: this.first.all };
    const page = offset ? await ServedSamples.ask("samples", later) : this.first;
    return page.numbers.map((number, group) => ({
      index: page.index,
      group,
      number,
      mask: page.mask,
      question: Promise.resolve(page.questions[group]),
      texts: () => ServedSamples.ask("group", { number }),
    }));
  }

  // How many samples that are let through have come since they were selected.
  async newer() {
    const now = await ServedSamples.ask("samples", this.query);
    this.about = { ...this.about, splits: now.splits, functions: now.functions };
    for (const name of ["hasSteps", "hasScores", "newestFrom"]) this.about[name] = now[name];
    return now.num - this.first.num;
  }
}

// The page's part: controls, the list of groups, the histograms of what is shown.
let BROWSER = null;
class SampleBrowser {
  constructor(area, source) {
    BROWSER = this;
    Object.assign(this, { area, source, asked: 0, groups: 0, bins: null });
    this.list = area.querySelector(".groups");
    this.count = area.querySelector(".count");
    this.more = area.querySelector(".more");
    this.limits = { low: null, high: null };
    this.fillControls();
    this.listen();
    this.apply();
  }

  field(name) {
    return this.area.querySelector(`[name=${name}]`);
  }

  // Controls that have nothing to choose from are hidden.
  fillControls() {
    const { runs, splits, functions, hasSteps, hasScores } = this.source.about;
    const option = ([value, text]) => `<option value="${escapeHtml(value)}">${escapeHtml(text)}</option>`;
    const fill = (name, choices, isNeeded) => {
      this.field(name).innerHTML = choices.map(option).join("");
      this.field(name).closest("label").hidden = !isNeeded;
    };
    const chosen = Object.fromEntries(
      ["run", "split", "by", "order"].map((name) => [name, this.field(name).value]),
    );
    const named = (names) => names.map((name) => [name, name]);
    fill("run", [["", "all"], ...named(runs)], runs.length > 1);
    fill("split", [["", "all"], ...named(splits)], splits.length > 1);
    fill("by", [["", "reward"], ...named(functions)], functions.length > 1);
    const orders = [
      ...(hasSteps
        ? [
            ["newest", "newest first"],
            ["oldest", "oldest first"],
          ]
        : [["oldest", "as sampled"]]),
      ...(hasScores
        ? [
            ["best", "best first"],
            ["worst", "worst first"],
            ["spread", "widest spread first"],
          ]
        : []),
      ["longest", "longest first"],
    ];
    fill("order", orders, true);
    for (const [name, value] of Object.entries(chosen)) if (value) this.field(name).value = value;
    for (const name of ["from", "to"]) this.field(name).closest("label").hidden = !hasSteps;
    this.area.querySelector(".spread").hidden = !hasScores;
  }

  listen() {
    const forget = () => (this.limits = { low: null, high: null });
    for (const name of ["show", "by", "run", "split", "from", "to", "order"])
      this.field(name).addEventListener("input", () => {
        if (name === "by") forget();
        this.apply();
      });
    this.area.querySelector(".limits").onclick = () => {
      forget();
      this.apply();
    };
    let typing = 0;
    this.field("search").addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.apply(), 250);
    });
    this.field("shade").addEventListener("input", () => this.shade());
    this.field("form").addEventListener("input", () => {
      FORM = this.field("form").value;
      this.apply();
    });
    this.more.onclick = () => this.drawMore();
    new IntersectionObserver(
      (entries) => {
        if (entries.some((entry) => entry.isIntersecting) && !this.more.hidden) this.drawMore();
      },
      { rootMargin: "400px" },
    ).observe(this.more);
    let pending = 0;
    addEventListener("resize", () => {
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(() => this.drawSpread());
    });
  }

  // Show what the controls ask for.
  async apply() {
    const asked = ++this.asked;
    const isAsked = () => asked === this.asked;
    const numberIn = (name) => (this.field(name).value === "" ? null : Number(this.field(name).value));
    this.by = this.field("by").value;
    const filter = {
      search: this.field("search").value.trim(),
      show: this.field("show").value,
      order: this.field("order").value,
      by: this.by,
      run: this.field("run").value,
      split: this.field("split").value,
      from: numberIn("from"),
      to: numberIn("to"),
      ...this.limits,
    };
    const found = await this.source.select(filter, isAsked, (text) => (this.count.textContent = text));
    if (!isAsked()) return;
    const [num, all, groups] = [found.num, found.all, found.numGroups].map((n) => n.toLocaleString("en"));
    const among = filter.from === null ? "" : `, from step ${filter.from.toLocaleString("en")} on`;
    const order = this.field("order").selectedOptions[0].textContent;
    this.count.textContent = `${num} of ${all} samples, in ${groups} ${groups === "1" ? "group" : "groups"}${among}, ${order}`;
    this.area.querySelector(".limits").hidden = this.limits.low === null;
    const newer = this.area.querySelector(".newer");
    if (newer) newer.hidden = true;
    globalThis.CSS?.highlights?.clear();
    this.list.replaceChildren();
    [this.drawn, this.groups, this.bins] = [0, found.numGroups, found];
    await this.drawMore();
    this.drawSpread();
  }

  // Shade the tokens on the page by what is chosen, and say what that means.
  shade() {
    SHADE = this.field("shade").value;
    const { text, marks } = SHADES[SHADE];
    this.area.querySelector(".shade-text").textContent = text;
    const scale = this.area.querySelectorAll(".scale i");
    marks.forEach((mark, i) => (scale[i].textContent = mark));
    for (const token of this.list.querySelectorAll("[data-t]")) token.className = shadeOf(tokenOf(token.dataset.t));
  }

  // The samples with the lowest reward of the newest steps.
  showLowest() {
    const { hasSteps, newestFrom } = this.source.about;
    const wanted = { search: "", show: "all", by: "", run: "", split: "", order: "worst", to: "" };
    for (const [name, value] of Object.entries({ ...wanted, from: hasSteps ? newestFrom : "" }))
      this.field(name).value = value;
    this.limits = { low: null, high: null };
    this.apply();
  }

  // Offer what has come since, and leave what is being looked at in its place.
  async refresh() {
    const newer = await this.source.newer();
    this.fillControls();
    const button = this.area.querySelector(".newer");
    button.hidden = newer === 0;
    button.textContent = newer > 0 ? `show ${newer.toLocaleString("en")} newer` : "show them as they are now";
    button.onclick = () => this.apply();
    return this;
  }

  async drawMore() {
    const [asked, offset] = [this.asked, this.drawn];
    this.more.hidden = true;
    const next = this.groups ? await this.source.places(offset) : [];
    if (asked !== this.asked || offset !== this.drawn) return;
    next.forEach((place, i) => this.list.append(this.groupElement(place, offset + i === 0)));
    this.drawn += next.length;
    this.more.hidden = !next.length || this.drawn >= this.groups;
  }

  groupElement(place, isOpen) {
    const { index, group, mask } = place;
    const details = document.createElement("details");
    details.className = "group";
    details.innerHTML = `<summary><span class="where">${escapeHtml(this.placeOf(place))}</span>
      ${this.source.about.hasScores ? this.scoresOf(place) : ""}<span class="question"></span></summary><div class="body"></div>`;
    place.question.then((text) => (details.querySelector(".question").textContent = text));
    details.ontoggle = async () => {
      const body = details.querySelector(".body");
      if (!details.open || body.hasChildNodes()) return;
      const shown = { order: this.field("order").value, by: this.by };
      body.innerHTML = groupHtml(index, group, await place.texts(), mask, shown);
      this.highlight(body);
      const cards = body.querySelector(".cards");
      const first = body.querySelector(".card:not(.other)");
      if (first) cards.scrollLeft = first.offsetLeft - cards.offsetLeft;
    };
    details.open = isOpen;
    return details;
  }

  // Run, split and step, as far as there are several.
  placeOf({ index, group, number }) {
    const { runs, splits, hasSteps } = this.source.about;
    const place = [];
    if (runs.length > 1) place.push(runs[index.groups.run[group]]);
    if (splits.length > 1) place.push(index.splits[index.groups.split[group]]);
    if (hasSteps) place.push(`step ${index.groups.step[group]}`);
    return place.join(" · ") || `#${number}`;
  }

  // The mean of a group's scores, and each of them.
  scoresOf({ index, group, mask }) {
    const [first, end] = sampleRange(index, group);
    const score = scoreOf(index, this.by) ?? [];
    const marks = [];
    const held = [];
    for (let i = first; i < end; i++) {
      const failed = index.failure[i];
      const kind = `${failed ? "failed" : ""} ${mask[i] ? "" : "other"}`;
      if (marks.length < 64) marks.push(`<i class="${kind}">${failed ? "×" : number(score[i])}</i>`);
      if ((score[i] ?? null) !== null) held.push(score[i]);
    }
    return `<span class="mean">${number(mean(held))}</span><span class="strip">${marks.join(" ")}</span>`;
  }

  // Mark the words of the search, where the browser can do so without changing the text.
  highlight(body) {
    const words = this.field("search").value.trim().toLowerCase();
    if (!words || !globalThis.CSS?.highlights) return;
    const marked = CSS.highlights.get("found") ?? new Highlight();
    const texts = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
      const text = node.data.toLowerCase();
      for (let at = text.indexOf(words); at >= 0; at = text.indexOf(words, at + 1)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + words.length);
        marked.add(range);
      }
    }
    CSS.highlights.set("found", marked);
  }

  // Histograms of score and length of the samples shown.
  drawSpread() {
    if (this.bins === null) return;
    const [ofScores, ofLengths] = this.area.querySelectorAll(".spread .plot");
    if (this.source.about.hasScores)
      drawBins(ofScores, this.bins.scores, false, (low, high) => {
        this.limits = { low, high };
        this.apply();
      });
    drawBins(ofLengths, this.bins.lengths, true);
  }
}

// A histogram, of whole numbers where `isWhole`; `choose` gets the limits of the bar that is clicked.
function drawBins(plot, held, isWhole, choose = null) {
  plot.onclick = plot.onpointermove = null;
  if (!hasRoom(plot)) return;
  if (held === null) {
    plot.innerHTML = `<p class="dim">None of the samples shown has one.</p>`;
    return;
  }
  const { low, high, counts } = held;
  const left = PAD.left;
  const right = plot.clientWidth - PAD.right;
  const bottom = plot.clientHeight - 22;
  const y = axis(counts, "zero", true);
  const slot = (right - left) / counts.length;
  const step = tickStep(low, high, 5, isWhole);
  const sx = (v) => left + ((v - low) / (high - low)) * (right - left);
  const sy = (v) => bottom - ((v - y.low) / (y.high - y.low)) * (bottom - PAD.top);
  const edge = (bin) => low + ((high - low) * bin) / counts.length;
  const drawn = [
    horizontals(y, sy, left, right),
    ...counts.map((count, bin) =>
      svg("rect", {
        x: left + bin * slot + 0.5,
        width: Math.max(slot - 1, 1),
        y: sy(count),
        height: bottom - sy(count),
        fill: "var(--c0)",
      }),
    ),
    ...ticks(low, high, step).map((t) =>
      svg("text", { x: sx(t), y: bottom + 16, "text-anchor": "middle" }, tick(t, step)),
    ),
  ];
  plot.innerHTML = picture(plot, drawn.join(""));
  const binAt = (event) => {
    const x = event.clientX - plot.getBoundingClientRect().left;
    return Math.min(Math.max(Math.floor((x - left) / slot), 0), counts.length - 1);
  };
  plot.onpointermove = (event) => {
    const bin = binAt(event);
    showTip(
      event,
      row("var(--c0)", `${number(edge(bin))} to ${number(edge(bin + 1))}`, counts[bin].toLocaleString("en")),
    );
  };
  plot.onpointerleave = () => (TIP.hidden = true);
  if (choose === null) return;
  const hair = 1e-9 * (high - low); // edges are rounded; the upper one belongs to the next bar
  plot.onclick = (event) => {
    const bin = binAt(event);
    const isLast = bin === counts.length - 1;
    choose(edge(bin) - hair, edge(bin + 1) + (isLast ? hair : -hair));
  };
}

async function startSamples() {
  const area = document.getElementById("samples");
  if (!area) return null;
  if (area.dataset.live !== undefined) {
    const about = await ServedSamples.ask("samples");
    area.hidden = about.all === 0;
    return about.all ? new SampleBrowser(area, new ServedSamples({ ...about, runs: [""] })) : null;
  }
  if (typeof DecompressionStream === "undefined") {
    area.querySelector(".count").textContent =
      "This browser cannot open the compressed samples of the page; those of 2023 and later can";
    return null;
  }
  const index = await unpack(document.getElementById("index").textContent);
  const chunks = [...document.querySelectorAll("script.chunk")];
  return new SampleBrowser(area, new SamplesInPage(index, chunks));
}

function tokenTip(event) {
  const token = event.target.closest?.("[data-t]");
  if (!token) return;
  const { id, logprob, policy, entropy, version, behind, isOwn } = tokenOf(token.dataset.t);
  const lines = [["token", id]];
  if (!isOwn) lines.push(["written by", "the environment"]);
  else if (logprob !== null)
    lines.push(["log-prob", logprob.toFixed(3)], ["probability", percent(Math.exp(logprob))]);
  if (isOwn && policy !== null && logprob !== null)
    lines.push(["log-prob of the trainer", policy.toFixed(3)], ["ratio", number(Math.exp(policy - logprob))]);
  if (isOwn && entropy !== null) lines.push(["entropy", `${number(entropy)} nats`]);
  if (isOwn) lines.push(["weight version", version]);
  if (isOwn && behind !== null) lines.push(["updates behind", behind]);
  showTip(event, lines.map(([name, value]) => `<div>${name}<b>${value}</b></div>`).join(""));
  token.onpointerleave = () => (TIP.hidden = true);
}
