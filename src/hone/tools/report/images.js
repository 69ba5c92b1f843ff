// The images of samples: small pictures with the place of their tokens; a click enlarges one.
"use strict";
// Small pictures by hash, as data URIs; null where a server has them.
let PICTURES = new Map();

const pictureOf = (hash) =>
  PICTURES === null ? `picture?hash=${encodeURIComponent(hash)}` : (PICTURES.get(hash) ?? null);

// An image without a picture, of which there are only so many, is named alone.
function imageHtml({ hash, text }) {
  const source = pictureOf(hash);
  const picture =
    source === null
      ? ""
      : `<button type="button" onclick="enlarge(this)"><img src="${escapeHtml(source)}" alt="" onerror="this.parentElement.remove()"></button>`;
  return `<figure>${picture}<figcaption>${escapeHtml(text)}</figcaption></figure>`;
}

// Its longer edge gets so many pixels, as far as there is room.
const LARGE = 480;
function enlarge(button) {
  const picture = button.firstElementChild;
  const { naturalWidth: width, naturalHeight: height } = picture;
  const isLarge = button.classList.toggle("large");
  picture.style.width = isLarge ? `${Math.round((LARGE / Math.max(width, height)) * width)}px` : "";
}

const imagesHtml = (images = []) => (images.length ? `<div class="images">${images.map(imageHtml).join("")}</div>` : "");

function startPictures() {
  const held = document.getElementById("pictures");
  if (held) PICTURES = new Map(Object.entries(JSON.parse(held.textContent)));
  else if (document.getElementById("samples")?.dataset.live !== undefined) PICTURES = null;
}
