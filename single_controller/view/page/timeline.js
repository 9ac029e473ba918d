// The timeline of the script, the calls of its groups and their ranks. Only what is in view is asked of the server.

import { api, clock, context, el, ink, keep, number, page, run, runChooser, seconds, show } from "./common.js";

const LANE = 18, HEAD = 20, LEFT = 220;

function colorOf(name) {
  let hash = 7;
  for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return `hsl(${hash % 360} 55% 55%)`;
}

export async function timeline(here) {
  const canvas = el("canvas", { label: "timeline" });
  const about = el("span", { class: "quiet" }), detail = el("p", { class: "quiet" }, "Move over a part to see it. Scroll with Ctrl to zoom, drag to move. Thin lines are waits, shaded times are pauses of the rollout for an update.");
  const idle = el("table");
  let seen = { lanes: [], bars: [], events: [], span: null }, begin = Number(page.params.get("begin")) || null, end = Number(page.params.get("end")) || null, asked = 0;
  const follow = el("input", { type: "checkbox", checked: !end && !run().about.ended, onchange: () => { if (follow.checked) { end = null; begin = null; load(); } } });

  async function load() {
    const mine = ++asked;
    const found = await api("timeline", { run: run().run, begin, end, pixels: Math.round(canvas.clientWidth || 1000) - LEFT });
    if (!here() || mine !== asked) return;
    seen = found;
    if (!seen.span) { about.textContent = "no calls were recorded"; return; }
    [begin, end] = [seen.begin, seen.end];
    canvas.style.height = `${HEAD + LANE * Math.max(1, seen.lanes.length) + 4}px`;
    about.textContent = `${clock(begin)}, ${seconds(end - begin)}${seen.more ? "; too much for one view: zoom in to see the end" : ""}`;
    canvas.dataset.bars = seen.bars.length;
    idle.replaceChildren(el("thead", {}, el("tr", {}, ["", "busy", "idle"].map((head) => el("th", {}, head)))), el("tbody", {}, seen.lanes.map((lane) => el("tr", {}, el("td", {}, title(lane)), el("td", { class: "number" }, `${number(100 * lane.busy, 3)} %`), el("td", { class: "number" }, `${number(100 * (1 - lane.busy), 3)} %`)))));
    draw();
  }

  const title = (lane) => (lane.group ? `${lane.group.replace(/^group /, "")}${lane.rank === null ? ": calls" : `: rank ${lane.rank}`}` : "script");

  function draw(hover) {
    const [pen, width, height] = context(canvas);
    const scale = (width - LEFT) / (end - begin);
    pen.font = "11px system-ui"; pen.textBaseline = "middle";
    for (let i = 0; i <= 6; i++) {
      const x = LEFT + i / 6 * (width - LEFT);
      pen.fillStyle = ink("--quiet"); pen.textAlign = i === 6 ? "right" : "left";
      pen.fillText(`+${seconds(i / 6 * (end - begin))}`, x, HEAD / 2);
      pen.fillStyle = ink("--line"); pen.fillRect(x, HEAD, 1, height);
    }
    pen.textAlign = "left";
    seen.lanes.forEach((lane, i) => {
      const y = HEAD + LANE * i;
      pen.fillStyle = ink("--ink"); pen.fillText(title(lane).slice(-30), 4, y + LANE / 2, LEFT - 60);
      pen.fillStyle = ink("--quiet"); pen.fillText(`${Math.round(100 * lane.busy)} %`, LEFT - 38, y + LANE / 2);
      pen.fillStyle = ink("--line"); pen.fillRect(0, y + LANE - 1, width, 1);
    });
    pen.save(); pen.beginPath(); pen.rect(LEFT, 0, width - LEFT, height); pen.clip();
    for (const bar of seen.bars) {
      const [lane, from, to, method, count, waited, failed] = bar;
      const x = LEFT + from * scale, w = Math.max(1, (to - from) * scale), y = HEAD + LANE * lane + 2;
      if (count === 1 && waited * scale > 1) {  // earlier calls, or the arguments
        pen.fillStyle = ink("--line");
        pen.fillRect(x - waited * scale, y + LANE / 2 - 4, waited * scale, 3);
      }
      pen.fillStyle = failed ? ink("--bad") : colorOf(method);
      pen.globalAlpha = bar === hover ? 1 : 0.8;
      pen.fillRect(x, y, w, LANE - 5);
      pen.globalAlpha = 1;
      if (w > 40) { pen.fillStyle = "#fff"; pen.fillText(count > 1 ? `${method} × ${count}` : method, x + 3, y + LANE / 2 - 2, w - 6); }
    }
    for (const event of seen.events) {
      const x = LEFT + (event.time - begin) * scale;
      if (event.kind === "update" && typeof event.pause_seconds === "number") {
        pen.fillStyle = ink("--warn"); pen.globalAlpha = 0.15;
        pen.fillRect(x - event.pause_seconds * scale, HEAD, event.pause_seconds * scale, height);
        pen.globalAlpha = 1;
      }
      pen.fillStyle = { death: ink("--bad"), alarm: ink("--warn"), replace: ink("--good") }[event.kind] || ink("--accent");
      pen.fillRect(x, HEAD - 6, 1.5, height);
    }
    pen.restore();
  }

  const at = (event) => begin + (event.offsetX - LEFT) / (canvas.clientWidth - LEFT) * (end - begin);
  let from = null, timer = null;
  const soon = () => { clearTimeout(timer); timer = setTimeout(() => { keep({ begin: begin.toFixed(4), end: end.toFixed(4) }); load(); }, 120); };
  canvas.onpointermove = (event) => {
    if (!seen.span) return;
    if (from) {
      const moved = (from.x - event.offsetX) / (canvas.clientWidth - LEFT) * (end - begin);
      [begin, end, follow.checked] = [from.begin + moved, from.end + moved, false];
      draw(); soon();
      return;
    }
    const lane = Math.floor((event.offsetY - HEAD) / LANE), time = at(event) - seen.begin, slack = (end - begin) / 500;
    const bar = seen.bars.find((one) => one[0] === lane && one[1] - slack <= time && time <= one[2] + slack);
    const near = seen.events.find((one) => Math.abs(one.time - at(event)) < slack * 2);
    if (bar) detail.textContent = `${title(seen.lanes[lane])}: ${bar[3]}${bar[4] > 1 ? ` × ${bar[4]}` : ""}, ${seconds(bar[2] - bar[1])}${bar[5] ? `, waited ${seconds(bar[5])} before` : ""}${bar[6] ? ", failed" : ""}`;
    else if (near) detail.textContent = `${near.kind}, step ${near.step ?? "–"}: ${near.text ?? ""}${typeof near.pause_seconds === "number" ? `, paused ${seconds(near.pause_seconds)}` : ""}`;
    draw(bar);
  };
  canvas.onpointerdown = (event) => { from = { x: event.offsetX, begin, end }; canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = () => { from = null; };
  canvas.onwheel = (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const middle = at(event), factor = Math.exp(event.deltaY / 300);
    [begin, end, follow.checked] = [middle - (middle - begin) * factor, middle + (end - middle) * factor, false];
    soon();
  };
  const zoom = (factor) => { const middle = (begin + end) / 2, half = (end - begin) / 2 * factor; [begin, end, follow.checked] = [middle - half, middle + half, false]; soon(); };
  show(el("div", { class: "bar" }, runChooser(), el("button", { onclick: () => zoom(0.5) }, "zoom in"), el("button", { onclick: () => zoom(2) }, "zoom out"),
    el("button", { onclick: () => { if (seen.span) { [begin, end, follow.checked] = [...seen.span, false]; soon(); } } }, "whole run"),
    el("label", {}, follow, "follow"), about), detail, el("div", { class: "lanes" }, canvas), el("h2", {}, "Share of the time in view"), idle);
  await load();
  return { close: () => clearTimeout(timer), refresh: async () => { if (follow.checked && !run().about.ended) { begin = end = null; await load(); } } };
}
