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
}
await browser.close();
