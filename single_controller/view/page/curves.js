// Curves of metrics: several runs over each other, log scale, smoothing, zoom.

import { COLORS, api, clock, context, el, ink, keep, number, page, show } from "./common.js";

const SHOWN_BY_DEFAULT = 60;

/** One curve's drawing: draws series of several runs, and lets the user zoom by dragging. */
export class Chart {
  constructor(name, options) {
    this.name = name;
    this.options = options;
    this.series = [];
    this.value = el("span", { class: "value" });
    this.canvas = el("canvas", { label: `curve of ${name}` });
    this.node = el("div", { class: "chart", data: { metric: name } }, el("h3", {}, name), this.value, this.canvas);
    this.canvas.onpointermove = (event) => this.hover(event);
    this.canvas.onpointerleave = () => { this.at = null; this.draw(); };
    this.canvas.onpointerdown = (event) => { this.from = event.offsetX; this.canvas.setPointerCapture(event.pointerId); };
    this.canvas.onpointerup = (event) => {
      const [a, b] = [this.from, event.offsetX].sort((x, y) => x - y);
      this.from = null;
      if (b - a > 5 && this.toX) options.zoom(this.toX(a), this.toX(b));
    };
    this.canvas.ondblclick = () => options.zoom(null, null);
  }

  async load() {
    const { byTime, first, last } = this.options.state();
    const asked = page.runs.filter((one) => page.chosen.has(one.run) && this.name in one.metrics);
    this.series = await Promise.all(asked.map(async (one) => {
      const begun = byTime ? one.about.started || 0 : 0;  // limits, as the axis, are since each run's start
      const [from, to] = [first, last].map((at) => (at ? Number(at) + begun : at));
      const answer = await api("series", { run: one.run, name: this.name, x: byTime ? "time" : "step", first: from, last: to, points: 800 });
      return { run: one, ...(answer[this.name] || { x: [], mean: [], min: [], max: [] }) };
    }));
    this.draw();
  }

  draw() {
    const { log, smooth, byTime } = this.options.state();
    const [pen, width, height] = context(this.canvas);
    const left = 52, bottom = height - 18, top = 6, right = width - 6;
    const shift = (one) => (byTime ? one.run.about.started || 0 : 0);
    const usable = (value) => value !== null && (!log || value > 0);
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const one of this.series) {
      one.line = smoothed(one.mean, smooth, usable);
      one.x.forEach((x, i) => {
        x0 = Math.min(x0, x - shift(one)); x1 = Math.max(x1, x - shift(one));
        for (const y of smooth ? [one.line[i]] : [one.min[i], one.max[i]]) if (usable(y)) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
      });
    }
    this.node.dataset.points = this.series.reduce((sum, one) => sum + one.x.length, 0);
    pen.font = "10px system-ui"; pen.fillStyle = ink("--quiet"); pen.strokeStyle = ink("--line");
    if (!(y1 >= y0)) { pen.fillText(log ? "no positive values" : "no values", left, height / 2); return; }
    const f = log ? Math.log10 : (value) => value;
    let [low, high] = [f(y0), f(y1)];
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; }
    const px = (x) => left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * (right - left);
    const py = (y) => bottom - (f(y) - low) / (high - low) * (bottom - top);
    this.toX = (pixel) => x0 + Math.min(1, Math.max(0, (pixel - left) / (right - left))) * (x1 - x0);
    pen.textBaseline = "middle"; pen.textAlign = "right";
    for (let i = 0; i <= 4; i++) {
      const y = bottom - i / 4 * (bottom - top), value = low + i / 4 * (high - low);
      pen.beginPath(); pen.moveTo(left, y); pen.lineTo(right, y); pen.stroke();
      pen.fillText(number(log ? 10 ** value : value, 3), left - 4, y);
    }
    pen.textBaseline = "top";
    pen.textAlign = "left"; pen.fillText(byTime ? `${number(x0 / 60, 3)} min` : number(x0), left, bottom + 4);
    pen.textAlign = "right"; pen.fillText(byTime ? `${number(x1 / 60, 3)} min` : number(x1), right, bottom + 4);
    const shownValues = [];
    for (const one of this.series) {
      const color = COLORS[one.run.run % COLORS.length];
      pen.strokeStyle = pen.fillStyle = color;
      pen.globalAlpha = 0.18;  // the range within each bucket
      one.x.forEach((x, i) => {
        if (usable(one.min[i]) && usable(one.max[i]) && one.max[i] >= y0 && one.min[i] <= y1) {
          const a = py(Math.min(Math.max(one.min[i], y0), y1)), b = py(Math.min(Math.max(one.max[i], y0), y1));
          pen.fillRect(px(x - shift(one)) - 0.5, b, 1.5, Math.max(1, a - b));
        }
      });
      pen.globalAlpha = 1; pen.lineWidth = 1.5; pen.beginPath();
      let down = false;
      one.x.forEach((x, i) => {
        if (!usable(one.line[i])) { down = false; return; }
        const point = [px(x - shift(one)), py(one.line[i])];
        if (down) pen.lineTo(...point); else pen.moveTo(...point);
        if (one.x.length === 1) pen.fillRect(point[0] - 2, point[1] - 2, 4, 4);
        down = true;
      });
      pen.stroke();
      let index = one.x.length - 1;
      if (this.at !== null && this.at !== undefined && one.x.length) {
        const wanted = this.toX(this.at);
        index = one.x.reduce((best, x, i) => (Math.abs(x - shift(one) - wanted) < Math.abs(one.x[best] - shift(one) - wanted) ? i : best), 0);
        if (usable(one.line[index])) { pen.beginPath(); pen.arc(px(one.x[index] - shift(one)), py(one.line[index]), 3, 0, 7); pen.fill(); }
      }
      if (index >= 0) shownValues.push(`${byTime ? clock(one.x[index]) : `step ${one.x[index]}`}: ${number(one.mean[index])}`);
    }
    this.value.textContent = shownValues.slice(0, 3).join("   ");
  }

  hover(event) { this.at = event.offsetX; this.draw(); }
}

function smoothed(values, weight, usable) {
  let last = 0, bias = 0;
  return values.map((value) => {
    if (!usable(value)) return value;
    last = weight * last + (1 - weight) * value;
    bias = weight * bias + (1 - weight);
    return last / bias;
  });
}

/** Charts of some metrics that load when they are scrolled into view. */
export function charts(names, state, zoom) {
  const all = names.map((name) => new Chart(name, { state, zoom }));
  const visible = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = all.find((one) => one.node === entry.target);
      if (entry.isIntersecting && !visible.has(chart)) { visible.add(chart); chart.load(); } else if (!entry.isIntersecting) visible.delete(chart);
    }
  });
  all.forEach((one) => observer.observe(one.node));
  return { node: el("div", { class: "charts" }, all.map((one) => one.node)), visible, close: () => observer.disconnect(), draw: () => visible.forEach((one) => one.draw()), load: () => Promise.all([...visible].map((one) => one.load())) };
}

export async function curves() {
  const text = el("input", { type: "search", placeholder: "name of a metric", value: page.params.get("find") || "", oninput: () => fill() });
  const log = el("input", { type: "checkbox", checked: page.params.has("log"), onchange: () => { keep({ log: log.checked ? 1 : "" }); shown.draw(); } });
  const smooth = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: page.params.get("smooth") || 0, label: "smoothing", oninput: () => { keep({ smooth: smooth.value }); shown.draw(); } });
  const x = el("select", { label: "x axis", onchange: () => { keep({ x: x.value, first: "", last: "" }); shown.load(); } }, el("option", {}, "step"), el("option", {}, "time"));
  x.value = page.params.get("x") || "step";
  const state = () => ({ log: log.checked, smooth: Number(smooth.value), byTime: x.value === "time", first: page.params.get("first"), last: page.params.get("last") });
  const zoom = (first, last) => { keep({ first: first ?? "", last: last ?? "" }); shown.load(); };
  const place = el("div");
  let shown = null, names = "";
  function fill() {
    const found = [...new Set(page.runs.filter((one) => page.chosen.has(one.run)).flatMap((one) => Object.keys(one.metrics)))].sort();
    const wanted = text.value.toLowerCase();
    const matching = found.filter((name) => name.toLowerCase().includes(wanted));
    if (JSON.stringify([matching, [...page.chosen]]) === names) return;
    names = JSON.stringify([matching, [...page.chosen]]);
    keep({ find: text.value });
    shown?.close();
    shown = charts(matching.slice(0, SHOWN_BY_DEFAULT), state, zoom);
    place.replaceChildren(shown.node, matching.length > SHOWN_BY_DEFAULT ? el("p", { class: "quiet" }, `${matching.length - SHOWN_BY_DEFAULT} more: type a part of the name above`) : "");
    if (!found.length) place.replaceChildren(el("p", { class: "quiet" }, "no metrics yet"));
  }
  show(el("div", { class: "bar" }, text, el("label", {}, log, "log scale"), el("label", {}, "smoothing", smooth), el("label", {}, "x axis", x), el("span", { class: "quiet" }, "drag to zoom, double-click to zoom out")), place);
  fill();
  return {
    refresh: async () => { fill(); if (page.runs.some((one) => !one.about.ended)) await shown.load(); },
    close: () => shown.close(),
  };
}
