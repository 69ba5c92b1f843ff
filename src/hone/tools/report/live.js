// A page that is served by `hone watch`: asks each few seconds whether the run has written anything,
// and then for the page anew, from which it takes all but the samples that are being looked at.
"use strict";
const LIVE_EVERY_MS = 3000;

// What is folded out stays so.
function replaceLive(area, fresh) {
  const open = new Set([...area.querySelectorAll("details[open] > summary")].map((s) => s.firstChild.data));
  area.innerHTML = fresh.innerHTML;
  for (const summary of area.querySelectorAll("details > summary"))
    if (open.has(summary.firstChild.data)) summary.parentElement.open = true;
}

// Charts that are there already are drawn again where they are.
const layoutOf = ({ sections, zero, why_zero }) =>
  JSON.stringify([sections.map(({ title, charts }) => [title, charts.map((c) => [c.title, c.notes])]), zero, why_zero]);

function takeOver(page) {
  const data = JSON.parse(page.getElementById("data").textContent);
  const isSame = layoutOf(data) === layoutOf(DATA);
  Object.assign(DATA, data);
  const fresh = page.querySelectorAll(".live");
  document.querySelectorAll(".live").forEach((area, i) => {
    if (!(area.classList.contains("charted") && isSame)) replaceLive(area, fresh[i]);
  });
  if (isSame) redraw();
  else {
    DRAWN.clear();
    drawAll();
  }
  document.title = page.title;
}

async function startLive(stamp, starting, episodes) {
  let samples = await starting;
  for (;;) {
    await new Promise((done) => setTimeout(done, LIVE_EVERY_MS));
    if (document.hidden) continue;
    try {
      const now = await ServedSamples.ask("stamp");
      document.body.classList.remove("lost");
      if (now.stamp === stamp) continue;
      const text = await (await fetch("./")).text();
      takeOver(new DOMParser().parseFromString(text, "text/html"));
      stamp = now.stamp;
      await episodes.refresh();
      samples = samples ? await samples.refresh() : await startSamples();
      showLinks();
    } catch (error) {
      document.body.classList.add("lost"); // the server has ended, or the way to it
    }
  }
}
