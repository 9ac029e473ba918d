// Events of a run, and the updates of its weights with versions and staleness.

import { address, api, bytes, clock, el, keep, page, run, runChooser, seconds, show, table } from "./common.js";
import { charts } from "./curves.js";

const ROWS = 200;

export async function events(here) {
  const place = el("div");
  const kind = el("select", { label: "kind", onchange: () => { keep({ kind: kind.value, offset: "" }); load(); } });
  const text = el("input", { type: "search", placeholder: "text", value: page.params.get("text") || "", oninput: () => { keep({ text: text.value, offset: "" }); load(); } });
  const pages = el("span");
  const fillKinds = () => {
    kind.replaceChildren(el("option", { value: "" }, "all kinds"), ...Object.entries(run().events).sort().map(([name, count]) => el("option", { value: name }, `${name} (${count})`)));
    kind.value = page.params.get("kind") || "";
  };
  let asked = 0;
  const load = async () => {
    const mine = ++asked;
    const offset = Number(page.params.get("offset") || 0);
    const found = await api("events", { run: run().run, kind: kind.value, text: text.value, offset, limit: ROWS });
    if (!here() || mine !== asked) return;
    pages.replaceChildren(`${found.total} events `,
      offset > 0 ? el("button", { onclick: () => { keep({ offset: Math.max(0, offset - ROWS) }); load(); } }, "newer") : "",
      offset + ROWS < found.total ? el("button", { onclick: () => { keep({ offset: offset + ROWS }); load(); } }, "older") : "");
    place.replaceChildren(table(["time", "#step", "kind", "what", ""], found.rows.map((event) => {
      const { time, step, kind: name, text: what, ...rest } = event;
      const color = { death: "bad", alarm: "warn", replace: "good", end: "quiet" }[name] || "";
      return [clock(time), step ?? "", el("span", { class: color }, name ?? ""), what ?? "",
        Object.keys(rest).length ? el("details", {}, el("summary", {}, "more"), el("pre", {}, JSON.stringify(rest, null, 1))) : ""];
    })));
  };
  fillKinds();
  show(el("div", { class: "bar" }, runChooser(), kind, text, pages), place);
  await load();
  let known = JSON.stringify(run().events);
  return { refresh: async () => {
    const now = JSON.stringify(run().events);
    if (now !== known && !page.params.get("offset")) { known = now; fillKinds(); await load(); }
  } };
}

export async function weights(here) {
  const place = el("div"), pages = el("span", { class: "quiet" });
  const wanted = page.params.get("version");
  const load = async () => {
    const offset = Number(page.params.get("offset") || 0);
    const found = await api("events", { run: run().run, kind: "update", offset, limit: ROWS });
    if (!here()) return;
    pages.replaceChildren(`${found.total} updates `,
      offset > 0 ? el("button", { onclick: () => { keep({ offset: Math.max(0, offset - ROWS) }); load(); } }, "newer") : "",
      offset + ROWS < found.total ? el("button", { onclick: () => { keep({ offset: offset + ROWS }); load(); } }, "older") : "");
    place.replaceChildren(table(["#version", "#step", "time", "#bytes", "took", "paused", "proof", "digest", "receivers"], found.rows.map((event) => ({
      cells: [String(event.version) === wanted ? el("b", {}, event.version) : event.version ?? "–", event.step ?? "", clock(event.time), bytes(event.bytes), seconds(event.seconds), seconds(event.pause_seconds),
        event.proof ? el("span", { class: "good" }, event.proof) : el("span", { class: "quiet" }, "none"), event.digest ?? "–", event.receivers === undefined ? "" : JSON.stringify(event.receivers)],
      go: event.version === undefined ? undefined : () => { location.hash = address("samples", { run: run().run, step: "all", version: event.version }); },
    }))));
  };
  const names = [...new Set(page.runs.filter((one) => page.chosen.has(one.run)).flatMap((one) => Object.keys(one.metrics)))].filter((name) => /stale|version|off_policy|update_weights|sync/.test(name)).sort().slice(0, 12);
  const state = () => ({ log: false, smooth: 0, byTime: false, first: null, last: null });
  const shown = charts(names, state, () => {});
  show(el("div", { class: "bar" }, runChooser(), pages, el("span", { class: "quiet" }, "Click an update for the samples that have tokens of its version.")),
    names.length ? el("h2", {}, "Staleness and versions") : null, names.length ? shown.node : null, el("h2", {}, "Updates"), place);
  await load();
  let known = run().events.update;
  return { close: shown.close, refresh: async () => {
    if (run().events.update !== known && !page.params.get("offset")) { known = run().events.update; await load(); await shown.load(); }
  } };
}
