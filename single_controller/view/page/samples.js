// The table of samples, and one sample with its tokens.

import { COLORS, address, api, bytes, clock, el, go, keep, number, page, run, runChooser, seconds, show, table } from "./common.js";

const ROW = 26, PAGE = 100, TOKENS = 4000;
const COLUMNS = [["step", "step"], ["row", "row"], ["reward", "reward"], ["completion", "completion"], ["prompt", "prompt"], ["finish", "ended by"], ["oldest", "oldest version"], ["newest", "newest version"], ["group", "group"], ["difference", "log-prob difference"], ["equal", "equal rewards"]];
const FILTERS = ["min_reward", "max_reward", "min_completion", "max_completion", "version", "finish", "equal", "min_group", "max_group"];

export async function samples(here) {
  const get = (name) => page.params.get(name) || "";
  const pages = new Map();
  let total = 0, asked = 0, known = [];
  const about = el("span", { class: "quiet", id: "sample-count" });
  const head = el("div", { class: "grid-head" }), body = el("div"), scroll = el("div", { class: "scroll", tabIndex: 0 }, body);
  body.style.position = "relative";
  const widths = COLUMNS.map(([name]) => (name === "finish" ? "1.3fr" : "1fr")).join(" ");
  head.style.gridTemplateColumns = widths;
  const step = el("input", { type: "text", size: 8, value: get("step") || "last", label: "step", onchange: () => change({ step: step.value.trim() }) });
  const field = (name, title) => {
    const made = el("input", { type: "number", step: "any", value: get(name), label: title, onchange: () => change({ [name]: made.value }) });
    return made;
  };
  const finish = el("select", { label: "ended by", onchange: () => change({ finish: finish.value }) });
  const equal = el("select", { label: "groups", onchange: () => change({ equal: equal.value }) },
    el("option", { value: "" }, "all groups"), el("option", { value: "yes" }, "equal rewards"), el("option", { value: "no" }, "different rewards"));
  equal.value = get("equal");

  const query = () => ({ run: run().run, step: get("step") || "last", sort: get("sort") || "reward", order: get("order") || "up", ...Object.fromEntries(FILTERS.map((name) => [name, get(name)])) });
  function change(what) { keep(what); scroll.scrollTop = 0; load(); }

  async function load() {
    const mine = ++asked;
    pages.clear();
    const found = await api("samples", { ...query(), offset: 0, limit: PAGE });
    if (!here() || mine !== asked) return;
    take(found);
    const reasons = Object.entries(found.finish).sort();
    finish.replaceChildren(el("option", { value: "" }, "any end"), ...reasons.filter(([name]) => name).map(([name, count]) => el("option", { value: name }, `${name} (${count})`)));
    finish.value = get("finish");
    about.textContent = `${found.total} of ${found.all} samples; ${found.equal_groups} of ${found.groups} groups have equal rewards; steps ${found.steps[0] ?? "–"} to ${found.steps.at(-1) ?? "–"} are kept${found.unreadable.length ? `; ${found.unreadable.join("; ")}` : ""}`;
    known = found.steps;
    head.replaceChildren(...COLUMNS.map(([name, title]) => {
      const isHere = query().sort === name;
      return el("button", { class: isHere ? "here" : "", onclick: () => change({ sort: name, order: isHere && query().order === "up" ? "down" : "up" }) }, title, isHere ? (query().order === "up" ? " ▲" : " ▼") : "");
    }));
    draw();
  }

  function take(found) {
    total = found.total;
    body.style.height = `${ROW * total}px`;
    pages.set(found.offset / PAGE, found.rows);
  }

  async function fetchPage(index) {
    pages.set(index, null);
    const mine = asked;
    const found = await api("samples", { ...query(), offset: index * PAGE, limit: PAGE });
    if (here() && mine === asked) { take(found); draw(); }
  }

  function draw() {
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 5), last = Math.min(total, first + Math.ceil(scroll.clientHeight / ROW) + 10);
    const rows = [];
    for (let i = first; i < last; i++) {
      const index = Math.floor(i / PAGE);
      if (!pages.has(index)) fetchPage(index);
      const row = pages.get(index)?.[i % PAGE];
      const open = row && (() => go("sample", { run: run().run, step: row.step, row: row.row }));
      const line = el("div", { class: "grid-row", tabIndex: 0, onclick: open, data: row ? { step: row.step, row: row.row } : {} },
        COLUMNS.map(([name]) => el("span", {}, !row ? "…" : name === "finish" ? row.finish ?? "–" : name === "equal" ? (row.equal ? "yes" : "") : name === "oldest" || name === "newest" ? (row[name] < 0 ? "–" : row[name]) : number(row[name]))));
      line.onkeydown = (event) => { if (event.key === "Enter" && open) open(); };
      line.style.top = `${ROW * i}px`;
      line.style.gridTemplateColumns = widths;
      rows.push(line);
    }
    body.replaceChildren(...rows);
  }
  scroll.onscroll = draw;
  show(el("div", { class: "bar" }, runChooser(), el("label", {}, "step", step), el("span", { class: "quiet" }, "a number, last or all"),
    el("label", {}, "reward", field("min_reward", "smallest reward"), "to", field("max_reward", "largest reward")),
    el("label", {}, "completion", field("min_completion", "shortest completion"), "to", field("max_completion", "longest completion")),
    el("label", {}, "version", field("version", "version")), finish, equal), el("div", { class: "bar" }, about), head, scroll);
  await load();
  return { refresh: async () => {
    const newest = run().samples?.[1];
    if ((get("step") || "last") === "last" && newest !== undefined && newest !== known.at(-1) && scroll.scrollTop === 0) await load();
  } };
}

// --- one sample ---

const PAINTS = {
  "log-prob": (at) => scaleDown(at.log_probs ?? at.rollout_log_probs),
  "engine's log-prob": (at) => scaleDown(at.rollout_log_probs),
  ratio: (at) => bothWays(ratioOf(at) === null ? null : Math.log(ratioOf(at)), 1),
  advantage: (at, most) => bothWays(at.advantages ?? null, most.advantages),
  mask: (at) => (at.loss_mask ? "rgb(0 150 136 / 45%)" : ""),
  version: (at) => (at.versions === null || at.versions === undefined || at.versions < 0 ? "" : faded(COLORS[at.versions % COLORS.length])),
  nothing: () => "",
};
const LEGENDS = {
  "log-prob": "the trainer's log-prob: red is unlikely", "engine's log-prob": "the engine's log-prob: red is unlikely",
  ratio: "trainer / engine: blue below 1, red above", advantage: "blue negative, red positive", mask: "green is trained",
  version: "one color for each version of the weights", nothing: "",
};

const faded = (color) => `${color}66`;
function scaleDown(value) { return value === null || value === undefined ? "" : `rgb(214 40 40 / ${Math.round(Math.min(1, -value / 6) * 75)}%)`; }
function bothWays(value, most) {
  if (value === null || value === undefined || !most) return "";
  const share = Math.round(Math.min(1, Math.abs(value) / most) * 75);
  return value < 0 ? `rgb(30 100 220 / ${share}%)` : `rgb(214 40 40 / ${share}%)`;
}
function ratioOf(at) {
  return typeof at.log_probs === "number" && typeof at.rollout_log_probs === "number" ? Math.exp(at.log_probs - at.rollout_log_probs) : null;
}

export async function sample(here) {
  const step = page.params.get("step"), row = Number(page.params.get("row") || 0), first = Number(page.params.get("first") || 0);
  const found = await api("sample", { run: run().run, step, row, first, count: TOKENS });
  if (!here()) return {};
  const names = Object.keys(found.columns);
  const at = (i) => Object.fromEntries(names.map((name) => [name, found.columns[name][i]]));
  const most = Object.fromEntries(names.map((name) => [name, found.columns[name].reduce((sum, value) => Math.max(sum, Math.abs(value ?? 0)), 0)]));
  const side = el("div", { class: "card", id: "token" }, el("p", { class: "quiet" }, "Click a token."));
  const paint = el("select", { label: "color", onchange: () => { keep({ color: paint.value }); color(); } }, Object.keys(PAINTS).map((name) => el("option", {}, name)));
  paint.value = page.params.get("color") || "log-prob";
  const legend = el("span", { class: "quiet" });
  const spans = found.tokens.map((token, i) => {
    const piece = found.pieces[i];
    const span = el("span", { title: "", onclick: () => choose(i), data: { token: found.first + i } }, piece === null ? `${token} ` : visible(piece));
    if (names.includes("loss_mask") && !found.columns.loss_mask[i]) span.classList.add("off");
    return span;
  });
  function color() {
    legend.textContent = LEGENDS[paint.value];
    spans.forEach((span, i) => { span.style.backgroundColor = PAINTS[paint.value](at(i), most); });
  }
  function choose(i) {
    document.querySelectorAll(".tokens .chosen").forEach((one) => one.classList.remove("chosen"));
    spans[i].classList.add("chosen");
    keep({ token: found.first + i });
    const values = at(i), version = values.versions, update = found.updates[version], ratio = ratioOf(values);
    const fingerprint = (found.text.fingerprints || {})[version];
    const lines = [["position", found.first + i], ["token", `${found.tokens[i]}${found.pieces[i] === null ? "" : ` ${JSON.stringify(found.pieces[i])}`}`],
      ...names.map((name) => [name.replaceAll("_", " "), number(values[name])]), ["ratio", number(ratio)],
      ["weights of its generation", fingerprint ?? "–"]];
    const parts = [el("h3", {}, "Token"), list(lines)];
    if (update) {
      parts.push(el("h3", {}, `The update to version ${version}`), list([["time", clock(update.time)], ["step", update.step ?? "–"], ["bytes", bytes(update.bytes)], ["took", seconds(update.seconds)], ["proof", update.proof ?? "none"], ["digest", update.digest ?? "–"]]),
        fingerprint && update.digest ? el("p", { class: fingerprint === update.digest ? "good" : "bad" }, fingerprint === update.digest ? "The engine had these weights." : "The engine's weights were others.") : "",
        el("p", {}, el("a", { href: address("weights", { run: run().run, version }) }, "all updates")));
    } else if (version !== undefined && version !== null && version >= 0) parts.push(el("p", { class: "quiet" }, `No update to version ${version} is in the events.`));
    const more = el("div");
    side.replaceChildren(...parts, more);
    if (found.several.length) api("token", { run: run().run, step, row, token: found.first + i }).then((columns) => more.replaceChildren(...several(columns)), (error) => more.replaceChildren(error.message));
  }
  const line = found.line;
  const facts = [["reward", number(line.reward)], ...Object.entries(found.text.reward_parts || {}).map(([name, value]) => [`reward: ${name}`, number(value)]),
    ["ended by", line.finish ?? "–"], ["prompt", `${line.prompt} tokens`], ["completion", `${line.completion} tokens`], ["versions", line.newest < 0 ? "–" : line.oldest === line.newest ? line.newest : `${line.oldest} to ${line.newest}`],
    ["log-prob difference", number(line.difference)], ...Object.entries(found.text.columns || {}).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]),
    ...Object.entries(found.row_columns).filter(([name]) => !["rewards", "prompt_lengths"].includes(name)).map(([name, value]) => [name.replaceAll("_", " "), number(value)]),
    ...(found.text.info ? [["session", JSON.stringify(found.text.info)]] : [])];
  const ofRow = (to, token) => address("sample", { run: run().run, step: found.step, row: to, color: paint.value, token, first: token >= TOKENS ? token - token % TOKENS : "" });
  const group = found.group.length > 1 ? el("div", {}, el("h3", {}, line.equal ? "Its group: all rewards are equal" : "Its group"),
    el("p", {}, found.group.map((one, i) => [i ? ", " : "", one.row === found.row ? el("b", {}, `row ${one.row}: ${number(one.reward)}`) : el("a", { href: ofRow(one.row) }, `row ${one.row}: ${number(one.reward)}`)]))) : null;
  const more = found.length > TOKENS ? el("p", {}, `tokens ${found.first} to ${found.first + found.tokens.length - 1} of ${found.length} `,
    found.first > 0 ? el("a", { href: address("sample", { run: run().run, step, row, first: Math.max(0, found.first - TOKENS) }) }, "earlier") : "", " ",
    found.first + found.tokens.length < found.length ? el("a", { href: address("sample", { run: run().run, step, row, first: found.first + TOKENS }) }, "later") : "") : null;
  show(el("div", { class: "bar" }, el("a", { href: address("samples", { run: run().run, step }) }, "← samples"), el("b", {}, `step ${found.step}, row ${found.row}`),
    el("label", {}, "color", paint), legend), el("div", { class: "two" },
    el("div", {}, tree(found, ofRow), more, turns(found, spans), more?.cloneNode(true),
      ["prompt", "completion"].filter((name) => typeof found.text[name] === "string").map((name) => el("details", {}, el("summary", {}, `text of the ${name}`), el("div", { class: "text" }, found.text[name])))),
    el("div", {}, side, el("p"), el("div", { class: "card" }, el("h3", {}, "Sample"), list(facts), group))));
  color();
  if (page.params.has("token")) { const i = Number(page.params.get("token")) - found.first; if (spans[i]) { choose(i); spans[i].scrollIntoView({ block: "center" }); } }
  return {};
}

function list(lines) {
  return el("table", {}, el("tbody", {}, lines.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, String(value).slice(0, 2000))))));
}

/** What a token has several values of: a line for each row of the last dimension. */
function several(columns) {
  return Object.entries(columns).map(([name, { shape, values }]) => {
    const width = shape.at(-1) || 1, count = shape.reduce((product, one) => product * one, 1), lines = [];
    for (let i = 0; i < values.length; i += width) lines.push(values.slice(i, i + width).map((value) => number(value)).join(", "));
    return el("div", { data: { column: name } }, el("h3", {}, `${name.replaceAll("_", " ")} (${shape.join(" × ")})`), el("pre", {}, `${lines.map((line, i) => (lines.length > 1 ? `${i}: ${line}` : line)).join("\n") || "none"}${count > values.length ? "\n..." : ""}`));
  });
}

/** The tree of a session that is several rows. A line is what some rows have in common, below what they share before. */
function tree(found, ofRow) {
  if (!found.branches.length) return null;
  const reward = new Map(found.group.map((one) => [one.row, one.reward]));
  const below = (parent) => el("ul", { class: "list" }, found.branches.map((node, i) => (node.parent === parent ? el("li", {},
    el("a", { class: node.rows.includes(found.row) ? "here" : "", href: ofRow(node.rows.includes(found.row) ? found.row : node.rows[0], node.start) }, node.turns.map((turn) => `${turn.kind} ${turn.tokens}`).join(", ") || `tokens ${node.start} to ${node.end}`),
    node.ends.map((row) => [" → ", row === found.row ? el("b", {}, `row ${row}: ${number(reward.get(row))}`) : el("a", { href: ofRow(row) }, `row ${row}: ${number(reward.get(row))}`)]), below(i)) : null)));
  return el("div", { id: "tree" }, el("h3", {}, `Its session: ${found.branches.reduce((sum, node) => sum + node.ends.length, 0)} branches`), below(null));
}

/** Line ends and control characters as signs, so that a token is never invisible and never moves others. */
function visible(piece) {
  return piece.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (sign) => (sign === "\t" ? "→\t" : `\\x${sign.codePointAt(0).toString(16).padStart(2, "0")}`)).replaceAll("\n", "↵\n");
}

/** The tokens, by turns where the sample has them, else by prompt and completion. */
function turns(found, spans) {
  const known = Array.isArray(found.text.turns) ? found.text.turns.filter((one) => one && typeof one === "object") : [];
  const given = known.length ? known : [
    { start: 0, end: found.prompt_length, kind: "given" }, { start: found.prompt_length, end: found.length, kind: "sampled" }];
  const placed = [];
  let until = found.first;
  const last = found.first + spans.length;
  const block = (start, end, kind) => {
    if (end <= start) return;
    placed.push(el("div", { class: `turn ${kind === "sampled" ? "sampled" : ""}` }, el("div", { class: "who" }, `${kind}, ${end - start} tokens`), el("div", { class: "tokens" }, spans.slice(start - found.first, end - found.first))));
  };
  for (const turn of given) {
    const start = Math.min(last, Math.max(until, Number(turn.start) || 0)), end = Math.min(last, Math.max(start, Number(turn.end) || 0));
    block(until, start, "between");
    block(start, end, String(turn.kind));
    until = Math.max(until, end);
  }
  block(until, last, "rest");
  return el("div", { id: "tokens" }, placed);
}
