// Links to sections: what they lead to is unfolded, and links to what is not there are hidden.
"use strict";

function showLinks() {
  for (const link of document.querySelectorAll(".jump a, .look a")) {
    const target = document.getElementById(link.hash.slice(1));
    const isThere = target !== null && target.closest("[hidden]") === null;
    const hasScores = BROWSER?.source.about.hasScores ?? false;
    link.parentElement.hidden = !isThere || (link.hash === "#lowest-reward" && !hasScores);
  }
}

function follow(hash) {
  const folded = document.getElementById(hash.slice(1))?.querySelector(":scope > details");
  if (folded) folded.open = true;
  if (hash === "#lowest-reward") BROWSER?.showLowest();
}

// `samples` is a promise of the browser of samples: a page may be opened at a link.
async function startLinks(samples) {
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    if (link) follow(link.hash);
  });
  addEventListener("popstate", () => follow(location.hash));
  await samples;
  showLinks();
  follow(location.hash);
}
