// What all tabs share. Text from runs goes into the page as text nodes only, never as markup.

export const COLORS = ["#00897b", "#d81b60", "#3949ab", "#ef6c00", "#6d4c41", "#8e24aa", "#558b2f", "#0288d1", "#c0a000", "#546e7a"];

/** The runs, as the server has told last; `chosen`, the numbers of those that are shown; where the page is. */
export const page = { runs: [], chosen: new Set([0]), tab: "overview", params: new URLSearchParams() };

export async function api(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") query.append(key, one);
    }
  }
  const response = await fetch(`api/${name}?${query}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error || `the server answered ${response.status}`);
  return answer;
}

/** An element. `given` has properties of the element, `class`, and `on...` functions; children are elements or text. */
export function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null) continue;
    if (key === "class") made.className = value;
    else if (key === "data") Object.assign(made.dataset, value);
    else if (key === "label") made.setAttribute("aria-label", value);
    else made[key] = value;
  }
  made.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined).map((one) => (one instanceof Node ? one : String(one))));
  return made;
}

export function show(...children) {
  document.getElementById("main").replaceChildren(...children.filter(Boolean));
}

export function table(heads, rows) {
  const numeric = heads.map((head) => head.startsWith("#"));
  const cell = (tag, value, index) => el(tag, { class: numeric[index] ? "number" : "" }, value ?? "");
  return el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, index) => cell("th", head.replace(/^#/, ""), index)))),
    el("tbody", {}, rows.map((row) => {
      const line = el("tr", { class: row.go ? "link" : "", onclick: row.go, tabIndex: row.go ? 0 : undefined },
        (row.cells || row).map((value, index) => cell("td", value, index)));
      if (row.go) line.onkeydown = (event) => { if (event.key === "Enter") row.go(); };
      return line;
    })));
}

/** The address of a tab with arguments. */
export function address(tab, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) if (value !== undefined && value !== null && value !== "") query.set(key, value);
  return `#${tab}${query.size ? `?${query}` : ""}`;
}

export function go(tab, params) { location.hash = address(tab, params); }

/** Change arguments of the address without a new entry in the history. */
export function keep(params) {
  const all = Object.fromEntries(page.params);
  for (const [key, value] of Object.entries(params)) all[key] = value;
  page.params = new URLSearchParams(address(page.tab, all).split("?")[1] || "");
  history.replaceState(null, "", address(page.tab, all));
}

/** The run that a tab about one run shows. */
export function run() {
  const asked = Number(page.params.get("run") ?? [...page.chosen][0] ?? 0);
  return page.runs[asked] || page.runs[0];
}

export function runChooser() {
  if (page.runs.length < 2) return null;
  const select = el("select", { label: "run", onchange: () => go(page.tab, { run: select.value }) },
    page.runs.map((one) => el("option", { value: one.run }, one.name)));
  select.value = run().run;
  return el("label", {}, "run", select);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (typeof value !== "number") return "–";
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (value < 1000) return `${number(value, 3)} ${unit}`;
    value /= 1000;
  }
  return `${number(value, 3)} TB`;
}

export function seconds(value) {
  if (typeof value !== "number") return "–";
  if (value < 1) return `${number(1000 * value, 3)} ms`;
  if (value < 100) return `${number(value, 3)} s`;
  return value < 6000 ? `${number(value / 60, 3)} min` : `${number(value / 3600, 3)} h`;
}

export function clock(value) {
  return typeof value === "number" ? new Date(1000 * value).toLocaleString("sv-SE") : "–";
}

/** The canvas of the right number of pixels for its size, and its context. */
export function context(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const drawn = canvas.getContext("2d");
  drawn.setTransform(scale, 0, 0, scale, 0, 0);
  drawn.clearRect(0, 0, width, height);
  return [drawn, width, height];
}

export function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue(name); }
