// The pictures of README.md, from the report of a finished quick start:
//
//     npm install --prefix build/pictures @sparticuz/chromium puppeteer-core
//     node docs/site/pictures.mjs runs/quickstart/rl/report.html
import { createRequire } from "node:module";
import { resolve } from "node:path";

const require = createRequire(resolve("build/pictures/package.json"));
const [chromium, puppeteer] = ["@sparticuz/chromium", "puppeteer-core"].map((name) => {
  const found = require(name);
  return found.default ?? found;
});

const [report] = process.argv.slice(2);
const browser = await puppeteer.launch({
  args: [...chromium.args, "--no-sandbox"],
  executablePath: await chromium.executablePath(),
  headless: "shell",
});
for (const value of ["light", "dark"]) {
  const page = await browser.newPage();
  await page.setViewport({ width: 1400, height: 1000 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value }]);
  await page.goto(`file://${resolve(report)}`, { waitUntil: "load" });
  await page.screenshot({ path: `docs/pictures/report-${value}.png` });
  // Shrunk to a phone that cannot be read: it gets a picture of its own width, of the headline
  // numbers and the first chart.
  await page.setViewport({ width: 390, height: 2000, deviceScaleFactor: 2 });
  await page.reload({ waitUntil: "load" });
  const [y, bottom] = await page.evaluate(() => [
    document.querySelector(".tiles").getBoundingClientRect().top - 12,
    document.querySelector(".chart").getBoundingClientRect().bottom + 12,
  ]);
  const clip = { x: 0, y, width: 390, height: bottom - y };
  await page.screenshot({ path: `docs/pictures/report-phone-${value}.png`, clip });
}
await browser.close();
