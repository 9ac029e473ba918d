// The overview of the runs, and what each rank of a running one does now, for whom it waits, and where it is.

import { address, api, clock, el, number, page, run, runChooser, seconds, show, table } from "./common.js";

const LOOK_SECONDS = 0.7;

export async function overview(here) {
  const problems = el("div", { id: "problems" });
  const place = el("div");
  const draw = () => {
    const open = [...place.querySelectorAll("details")].map((one) => one.open);
    place.replaceChildren(el("div", { class: "cards" }, page.runs.map(card)));
    place.querySelectorAll("details").forEach((one, i) => { one.open = open[i] ?? false; });
  };
  show(problems, place);
  draw();
  let looking = false;
  const look = async () => {
    if (looking) return;  // a cluster that does not respond takes long to say so
    looking = true;
    const found = await Promise.all(page.runs.filter((one) => !one.about.ended).map((one) => api("live", { run: one.run }).catch(() => ({ problems: [] }))));
    looking = false;
    if (!here()) return;
    const lines = [...new Set(found.flatMap((one) => one.problems))];
    problems.replaceChildren(...(lines.length ? [el("h2", { class: "bad" }, "Problems now"), el("ul", { class: "list" }, lines.map((one) => el("li", {}, one))),
      el("p", {}, el("a", { href: address("ranks") }, "Ranks"), " shows where each rank is.")] : []));
  };
  look();
  return { refresh: async () => { draw(); look(); } };
}

function card(one) {
  const about = one.about;
  const age = one.last_time === null ? "" : `, ${seconds(one.age)} ago`;
  const lines = [
    ["state", about.ended ? `${one.state}, ${clock(about.ended.time)}` : one.state],
    ["started", clock(about.started)],
    ["last step", one.last_step === null ? "none yet" : `${one.last_step}${about.ended ? "" : age}`],
    ["samples", one.samples ? el("a", { href: address("samples", { run: one.run }) }, `steps ${one.samples[0]} to ${one.samples[1]}, ${one.samples[2]} kept`) : "none"],
    ["groups", (about.groups || []).join(", ")],
    ["git", about.git ? `${about.git.commit}${about.git.dirty ? ", with changes" : ""}` : "–"],
    ["seeds", about.seeds && Object.keys(about.seeds).length ? JSON.stringify(about.seeds) : "–"],
    ["resumed", (about.resumed || []).map((time) => `${clock(time.time)} at step ${time.step}`).join("; ") || "never"],
  ];
  const metrics = Object.entries(one.metrics).sort();
  return el("div", { class: "card", data: { run: one.run } },
    el("h2", {}, one.name),
    el("table", {}, el("tbody", {}, lines.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value))))),
    one.alarms.length ? el("h3", { class: "warn" }, "Alarms") : null,
    one.alarms.length ? el("ul", { class: "list" }, one.alarms.slice(-5).reverse().map((event) => el("li", {}, `step ${event.step ?? "–"}: ${event.text}${event.advice ? ` (${event.advice})` : ""}`))) : null,
    el("details", {}, el("summary", {}, `${metrics.length} metrics, latest values`), table(["metric", "#value"], metrics.map(([name, value]) => [name, value === null ? "not finite" : number(value)]))),
    el("details", {}, el("summary", {}, "configuration"), el("pre", {}, JSON.stringify(about.config ?? {}, null, 1))),
    el("details", {}, el("summary", {}, "versions"), el("pre", {}, JSON.stringify(about.versions ?? {}, null, 1))));
}

export async function ranks(here) {
  const place = el("div", { id: "groups" }, el("p", { class: "quiet" }, "Asking the ranks ..."));
  const opened = new Set();
  show(el("div", { class: "bar" }, runChooser(), el("span", { class: "quiet" }, "What each rank does now. Click a rank for its stack.")), place);
  let timer = null;
  const render = (seen) => {
    const scrolled = new Map([...place.querySelectorAll("pre")].map((one) => [one.dataset.of, [one.scrollLeft, one.scrollTop]]));
    place.replaceChildren(...draw(seen, opened, () => render(seen)));
    place.querySelectorAll("pre").forEach((one) => { [one.scrollLeft, one.scrollTop] = scrolled.get(one.dataset.of) ?? [0, 0]; });
  };
  const look = async () => {
    try {
      const seen = await api("live", { run: run().run });
      if (!here()) return;
      if (document.getSelection().isCollapsed) render(seen);  // not while the user copies a stack
    } catch (error) {
      if (here()) place.replaceChildren(el("p", { class: "bad" }, error.message));
    }
    if (here()) timer = setTimeout(look, 1000 * LOOK_SECONDS);
  };
  await look();
  return { close: () => clearTimeout(timer) };
}

function draw(seen, opened, redraw) {
  if (seen.ended) return [el("p", { class: "quiet" }, `The run ended ${clock(seen.ended.time)}: ${seen.ended.reason ?? ""}`)];
  const parts = [];
  if (seen.error) parts.push(el("p", { class: "warn" }, seen.error));
  if (seen.problems.length) parts.push(el("ul", { class: "list bad" }, seen.problems.map((one) => el("li", {}, one))));
  if (!seen.groups.length && !seen.error) parts.push(el("p", { class: "quiet" }, "No group is running in this cluster."));
  for (const group of seen.groups) {
    parts.push(el("h2", {}, group.name, " ", el("span", { class: group.state === "open" ? "good" : "bad" }, group.state)));
    if (group.reason) parts.push(el("p", { class: "bad" }, group.reason));
    parts.push(el("p", { class: "quiet" }, `${group.note}; generation ${group.generation}`));
    const body = el("tbody");
    for (const rank of group.ranks) {
      const key = `${group.name} ${rank.rank}`;
      const noteworthy = rank.awaited_by.length || rank.running === null;
      const isOpen = opened.has(key) || (noteworthy && !opened.has(`closed ${key}`));
      const waiting = [rank.waits ? `waits ${rank.waits}` : "", rank.waits_for.length ? `for ${names(rank.waits_for)}` : ""].filter(Boolean).join(", ");
      const line = el("tr", { class: "link", tabIndex: 0, data: { rank: rank.rank, group: group.name }, onclick: () => {
        opened.delete(isOpen ? key : `closed ${key}`); opened.add(isOpen ? `closed ${key}` : key);
        redraw();
      } },
        el("td", { class: "number" }, rank.rank), el("td", {}, `${rank.host}, ${rank.pid}`),
        el("td", { class: !rank.alive || rank.running === null ? "bad" : rank.running.length ? "" : "quiet" }, rank.doing),
        el("td", {}, waiting || (rank.awaited_by.length ? el("span", { class: "warn" }, `${names(rank.awaited_by)} ${rank.awaited_by.length > 1 ? "wait" : "waits"} for it`) : "")),
        el("td", {}, rank.where || ""),
        el("td", { class: "quiet" }, rank.death ? `${clock(rank.death.at)}: ${rank.death.reason}` : ""));
      line.onkeydown = (event) => { if (event.key === "Enter") line.onclick(); };
      body.append(line);
      if (isOpen && rank.stack) body.append(el("tr", {}, el("td"), el("td", { colSpan: 5 }, el("pre", { class: "stack", data: { rank: rank.rank, of: key } }, rank.stack))));
    }
    parts.push(el("table", {}, el("thead", {}, el("tr", {}, ["rank", "host, pid", "runs", "waits", "at", "last death"].map((head) => el("th", {}, head)))), body));
  }
  return parts;
}

function names(numbers) {
  const shown = numbers.slice(0, 8).join(", ");
  return `${numbers.length > 1 ? "ranks" : "rank"} ${shown}${numbers.length > 8 ? ` and ${numbers.length - 8} more` : ""}`;
}
