// Episodes by turns: who says what, how long it took, and what it earned.
"use strict";

const seconds = (s) => (s >= 100 ? `${Math.round(s)} s` : s >= 0.1 ? `${Number(s.toPrecision(2))} s` : `${Number((1000 * s).toPrecision(2))} ms`);
const rewarded = (reward) =>
  reward ? `<span class="${reward > 0 ? "good" : "bad"}">reward ${signed(reward)}</span>` : "";
const tokensText = (n) => (n > 0 ? `${n.toLocaleString("en")} ${n === 1 ? "token" : "tokens"}` : "");

// Texts and episodes that are longer are folded: characters and lines of what is said, turns.
const LONG = { chars: 1200, lines: 16, turns: 12 };
const PEEK = 160;
const isLong = (text) => text.length > LONG.chars || text.split("\n").length > LONG.lines;

// A text without empty lines at its edges; the first line keeps its indentation.
const withoutEdges = (text) => text.replace(/^(?:[^\S\n]*\n)+/, "").trimEnd();

// A line of an episode: its speaker, what is known of it, and what is said, as HTML. What is long,
// by its `text`, is folded to its first words.
function lineHtml(kind, speaker, facts, said, text = "") {
  const who = `<b>${escapeHtml(speaker)}</b><span class="dim">${facts.filter(Boolean).join(" · ")}</span>`;
  const body = `<div class="said">${said}</div>`;
  if (!isLong(text)) return `<li class="turn ${kind}"><p class="speaker">${who}</p>${body}</li>`;
  const size = `${text.length.toLocaleString("en")} characters`;
  const first = text.trim().slice(0, PEEK).replace(/\s+/g, " ");
  const peek = `<span class="peek">${escapeHtml(first)}… <span class="unfold">show all ${size}</span></span>`;
  return `<li class="turn ${kind}"><details><summary><span class="speaker">${who}</span>${peek}</summary>${body}</details></li>`;
}

// What the environment says after a turn. Without messages it is what `between` holds, as HTML. The
// images that it shows are below the last message.
function observedHtml({ observed = [], images, env_s }, between, num) {
  const facts = [tokensText(num), env_s === undefined ? "" : seconds(env_s)];
  const shown = imagesHtml(images);
  if (!observed.length)
    return between.html || shown ? lineHtml("said-by-env", "environment", facts, between.html + shown, between.text) : "";
  return observed
    .map(({ role, name, text, calls = [] }, i) => {
      const kind = role === "tool" ? "tool" : "said-by-env";
      const asked = calls.map((call) => `<span class="call">${escapeHtml(call)}</span>`).join("");
      const speaker = [role || "environment", name].filter(Boolean).join(" ");
      const said = `${escapeHtml(withoutEdges(text))}${asked}${i === observed.length - 1 ? shown : ""}`;
      return lineHtml(kind, speaker, i ? [] : facts, said, [text, ...calls].join("\n"));
    })
    .join("");
}

// The tools that have answered a turn, each once, with how often.
function calledBy({ observed = [] }) {
  const counts = new Map();
  for (const { role, name } of observed)
    if (role === "tool" && name) counts.set(name, (counts.get(name) ?? 0) + 1);
  const named = [...counts].map(([name, n]) => escapeHtml(n > 1 ? `${name} × ${n}` : name));
  return named.length ? `calls ${named.join(", ")}` : "";
}

// One turn of the policy, and what followed it.
function turnHtml(turns, i, own) {
  const [turn, next] = [turns[i], turns[i + 1]];
  const nothing = { html: "", text: "" };
  const said = own ? own(turn.start, turn.end) : { html: escapeHtml(turn.text), text: turn.text };
  const between = own && next ? own(turn.end, next.start) : nothing;
  const facts = [
    calledBy(turn),
    tokensText(turn.end - turn.start),
    turn.policy_s === undefined ? "" : seconds(turn.policy_s),
    turn.stop === "length" ? `<span class="bad">cut</span>` : "",
    rewarded(turn.reward),
  ];
  // What follows the last turn is the episode's end, unless something was answered.
  const isAnswered = next || turn.observed || turn.images;
  const answer = isAnswered ? observedHtml(turn, between, next ? next.start - turn.end : 0) : "";
  return lineHtml("own", `policy ${i + 1}`, facts, said.html || "&nbsp;", said.text) + answer;
}

// The turns of a sample, of many those in the middle folded. `own` gives the tokens from one place to
// another where they are known, as HTML and as text.
function turnsHtml(turns, own = null) {
  const lines = turns.map((_, i) => turnHtml(turns, i, own));
  if (turns.length <= LONG.turns) return lines.join("");
  const edge = LONG.turns / 3;
  const [first, middle, last] = [lines.slice(0, edge), lines.slice(edge, -edge), lines.slice(-edge)];
  const label = `show turns ${edge + 1} to ${turns.length - edge}`;
  return `${first.join("")}<li class="turn middle"><details><summary>${label}</summary>
    <ol class="episode">${middle.join("")}</ol></details></li>${last.join("")}`;
}

// An episode with its abandoned paths, which are folded.
function episodeHtml({ turns, branches = [] }, own = null) {
  const paths = branches.map(
    (path, i) => `<details class="branch"><summary>path ${i + 1} of ${branches.length + 1}, left after
      ${path.length} ${path.length === 1 ? "turn" : "turns"}: its history was rewritten</summary>
      <ol class="episode">${turnsHtml(path)}</ol></details>`,
  );
  const last = paths.length ? `<p class="dim path">path ${paths.length + 1} of ${paths.length + 1}, the last one</p>` : "";
  return `${paths.join("")}${last}<ol class="episode">${turnsHtml(turns, own)}</ol>`;
}

const ENDS = {
  length: "no token was left",
  max_turns: "all turns were used",
  deadline: "its time was over",
};
const KINDS = {
  last: ["Last", "the newest that was written"],
  failed: ["Failed", "no reward, the newest first"],
  worst: ["Worst", "the lowest rewards"],
  longest: ["Longest", "the most turns, then tokens"],
};

// Whether a part of a reward says something: of what an environment counts, such as errors of tools,
// zeros do not.
const isTelling = (name, values) => !name.startsWith("env/") || values.some((v) => v);

const sumOf = (turns, name) => turns.reduce((sum, turn) => sum + (turn[name] ?? 0), 0);

function endHtml({ reward, parts = {}, failure, detail, stop, attempt, turns = [] }) {
  const times = ["policy_s", "env_s"].map((name) => sumOf(turns, name));
  const facts = [
    ENDS[stop] ?? (failure ? "" : "the environment ended it"),
    times[0] ? `policy ${seconds(times[0])}` : "",
    times[1] ? `environment ${seconds(times[1])}` : "",
    attempt ? `attempt ${attempt + 1}` : "",
  ];
  const names = Object.keys(parts).filter((name) => isTelling(name, [parts[name]]));
  const shares = names.map((name) => `${escapeHtml(name)} ${number(parts[name])}`).join(", ");
  const end = failure
    ? `<span class="bad">${escapeHtml(failure)}</span> ${escapeHtml(detail ?? "")}`
    : `reward <b>${number(reward ?? null)}</b>${names.length > 1 ? ` <span class="dim">${shares}</span>` : ""}`;
  return `<ol class="episode">${lineHtml("end", "end", facts, end)}</ol>`;
}

// The section of the episodes that are worth a look.
class EpisodeList {
  constructor(area) {
    this.area = area;
    this.open = new Set();
    this.shown = "";
  }

  // Draw the episodes by kind; what is folded out stays so.
  draw(kinds) {
    const now = JSON.stringify(kinds);
    if (now === this.shown) return;
    const isFirst = this.shown === "";
    this.shown = now;
    this.area.hidden = !Object.keys(kinds).length;
    document.querySelector("[name=form]").closest("label").hidden = this.area.hidden;
    const several = new Set(Object.values(kinds).flat().map(({ split }) => split)).size > 1;
    const list = this.area.querySelector(".kinds");
    list.replaceChildren();
    for (const [kind, [title, hint]] of Object.entries(KINDS)) {
      if (!kinds[kind]) continue;
      const heading = document.createElement("p");
      heading.className = "kind";
      heading.innerHTML = `<b>${title}</b> <span class="dim">${hint}</span>`;
      list.append(heading);
      kinds[kind].forEach((episode, i) => {
        const key = kind === "last" ? kind : `${kind} ${episode.id}`;
        if (isFirst && kind === "last") this.open.add(key);
        list.append(this.element(key, episode, several));
      });
    }
  }

  element(key, episode, several) {
    const { id, run, split, step, prompt = "", images, reward, failure, tokens, turns = [], answer } = episode;
    const details = document.createElement("details");
    details.className = "group";
    const place = [run, several ? split : "", step === undefined ? "" : `step ${step}`, id];
    const score = failure ? `<b class="bad">${escapeHtml(failure)}</b>` : `<b>${number(reward ?? null)}</b>`;
    const size = `${turns.length} ${turns.length === 1 ? "turn" : "turns"} · ${number(tokens ?? 0)} tokens`;
    details.innerHTML = `<summary><span class="where">${escapeHtml(place.filter(Boolean).join(" · "))}</span>
      <span class="mean">${score}</span><span class="size">${size}</span>
      <span class="question">${escapeHtml(prompt.trim().slice(-300))}</span></summary><div class="body"></div>`;
    details.ontoggle = () => {
      this.open[details.open ? "add" : "delete"](key);
      const body = details.querySelector(".body");
      if (!details.open || body.hasChildNodes()) return;
      const asked = prompt
        ? lineHtml("said-by-env", "prompt", [], escapeHtml(prompt.trim()) + imagesHtml(images), prompt)
        : "";
      const wanted =
        answer === undefined ? "" : lineHtml("said-by-env", "answer", [], escapeHtml(`${answer}`), `${answer}`);
      body.innerHTML = `<ol class="episode">${asked}${wanted}</ol>${episodeHtml({ ...episode, turns })}${endHtml(episode)}`;
    };
    details.open = this.open.has(key);
    return details;
  }

  // Ask the server of a live page.
  async refresh() {
    this.draw(await (await fetch("episodes")).json());
  }
}

// The section of a page; null where it has none.
function startEpisodes() {
  const area = document.getElementById("episodes");
  if (!area) return null;
  const list = new EpisodeList(area);
  if (area.dataset.live !== undefined) list.refresh();
  else list.draw(JSON.parse(document.getElementById("picked").textContent));
  return list;
}
