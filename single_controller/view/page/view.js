// The page: header, tabs, and what is asked again and again.

import { COLORS, address, api, el, page, show } from "./common.js";
import { overview, ranks } from "./ranks.js";
import { curves } from "./curves.js";
import { timeline } from "./timeline.js";
import { events, weights } from "./events.js";
import { sample, samples } from "./samples.js";

const TABS = {
  overview: ["Overview", overview],
  curves: ["Curves", curves],
  timeline: ["Timeline", timeline],
  ranks: ["Ranks", ranks],
  weights: ["Weights", weights],
  samples: ["Samples", samples],
  events: ["Events", events],
  sample: [null, sample],
};
const ASK_SECONDS = 2;

let current = { refresh: null, close: null };

async function ask() {
  const answer = await api("runs");
  page.runs = answer.runs;
  page.time = answer.time;
  header();
}

function header() {
  document.getElementById("runs").replaceChildren(...page.runs.map((one) => {
    const box = el("input", { type: "checkbox", checked: page.chosen.has(one.run), onchange: () => {
      if (box.checked) page.chosen.add(one.run); else page.chosen.delete(one.run);
      if (!page.chosen.size) page.chosen.add(one.run);
      route();
    } });
    const swatch = el("span", { class: "swatch" });
    swatch.style.backgroundColor = COLORS[one.run % COLORS.length];
    return el("label", {}, page.runs.length > 1 ? box : null, swatch, el("b", {}, one.name),
      el("span", { class: "quiet" }, `${one.state}, step ${one.last_step ?? "–"}`));
  }));
  document.title = page.runs.map((one) => one.name).join(", ");
  document.getElementById("tabs").replaceChildren(...Object.entries(TABS).filter(([, [title]]) => title).map(([name, [title]]) => {
    const alarms = name === "events" ? page.runs.reduce((sum, one) => sum + (one.events.alarm || 0) + (one.events.death || 0), 0) : 0;
    const here = page.tab === name || (page.tab === "sample" && name === "samples");
    return el("a", { href: address(name), class: here ? "here" : "" }, title, alarms ? el("span", { class: "count" }, alarms) : null);
  }));
}

async function route() {
  const [tab, query] = location.hash.slice(1).split("?");
  page.tab = TABS[tab] ? tab : "overview";
  page.params = new URLSearchParams(query || "");
  current.close?.();
  current = { refresh: null, close: null };
  const mine = current;
  header();
  try {
    Object.assign(mine, await TABS[page.tab][1](() => mine === current));
  } catch (error) {
    if (mine === current) show(el("p", { class: "bad" }, error.message));
  }
}

async function again() {
  try {
    await ask();
    await current.refresh?.();
    document.getElementById("footer").textContent = "";
  } catch (error) {
    document.getElementById("footer").textContent = `not up to date: ${error.message}`;
  }
  setTimeout(again, 1000 * ASK_SECONDS);
}

window.addEventListener("hashchange", route);
try {
  await ask();
  page.chosen = new Set(page.runs.map((one) => one.run));
  await route();
  setTimeout(again, 1000 * ASK_SECONDS);
} catch (error) {
  show(el("p", { class: "bad" }, error.message));
}
