// The table of tensors: filters above, and only as many rows in the document as can be seen.
const ROW_HEIGHT = 28, HEAD_HEIGHT = 30, TALLEST = 6e6;
let kept = new Uint32Array(0);
let scroller = null, space = null;

function select(name, label, options) {
  if (options.length < 2 && !options.some(([value]) => value === state[name])) return null;
  const box = el("select", { "data-name": name, "aria-label": label, on: { change: (event) => change({ [name]: event.target.value }) } }, el("option", { value: "" }, `every ${label}`), ...options.map(([value, text]) => el("option", { value }, short(text).slice(0, 60))));
  box.value = state[name];
  return box;
}

function drawFilters() {
  const counts = new Uint32Array(VERDICTS.length);
  for (let row = 0; row < rows.length; row += 1) counts[rows.verdict[row]] += 1;
  const chosen = new Set(state.verdict ? state.verdict.split(",") : []);
  const toggle = (name) => { chosen.has(name) ? chosen.delete(name) : chosen.add(name); change({ verdict: [...chosen].join(",") }); };
  const verdicts = el("fieldset", { "aria-label": "Verdicts" }, ...[...VERDICTS].reverse().map((name) => el("button", { type: "button", class: "verdict", "data-verdict": name, "aria-pressed": chosen.has(name) ? "true" : "false", on: { click: () => toggle(name) } }, `${name} ${many(counts[VERDICTS.indexOf(name)])}`)));
  const ofNames = (column) => page.names[column].filter((name) => name !== "").map((name) => [name, name]);
  const ranks = [...new Set(rows.rank)].sort((left, right) => left - right).map((rank) => [String(rank), `rank ${rank}`]);
  const order = el("select", { "aria-label": "Order", on: { change: (event) => change({ order: event.target.value }) } }, el("option", { value: "worst" }, "worst first"), el("option", { value: "run" }, "in order of execution"));
  order.value = state.order;
  const search = el("input", { type: "search", id: "search", placeholder: "regular expression", "aria-label": "Names that match a regular expression", maxlength: 1000, on: { input: (event) => change({ q: event.target.value }) } });
  search.value = state.q;
  const own = el("input", { type: "checkbox", on: { change: (event) => change({ own: event.target.checked ? "1" : "" }) } });
  own.checked = state.own !== "";
  const module = state.module ? el("button", { type: "button", on: { click: () => change({ module: "" }) } }, `module ${short(state.module).slice(-60)} \u00d7`) : null;
  at("filters").replaceChildren(...[order, verdicts, search, select("step", "step", page.steps.map(({ step }) => [String(step), stepName(step)])), select("level", "comparison", ofNames("level")), select("case", "case", ofNames("case")), select("dtype", "dtype", ofNames("dtype")), select("rank", "rank", ranks), page.knows_inherited ? el("label", {}, own, "without what is passed on") : null, module, el("span", { class: "kept", role: "status", id: "kept" })].filter(Boolean));
}

function drawTable() {
  kept = keptRows();
  const text = `${many(kept.length)} of ${many(rows.length)} tensors`;
  let pattern = "";
  try { sitesLike(state.q); } catch (error) { pattern = `; not a regular expression: ${shown(error.message).slice(0, 120)}`; }
  at("kept").textContent = text + pattern;
  at("kept").classList.toggle("bad-pattern", pattern !== "");
  if (!scroller) {
    space = el("div", { class: "space" });
    const heads = ["verdict", "step", "site", "error/floor", "error/bound", "largest", "SNR dB", "compared, case"];
    scroller = el("div", { class: byRatio ? "rows" : "rows by-signal", tabindex: 0, role: "grid", "aria-label": "Tensors", "aria-colcount": heads.length, on: { scroll: () => requestAnimationFrame(drawRows), keydown: tableKeys } },
      el("div", { class: "rows-head", role: "row", "aria-rowindex": 1 }, ...heads.map((name) => el("span", { role: "columnheader" }, name))), space);
    at("table-body").replaceChildren(scroller);
    new ResizeObserver(() => drawRows()).observe(scroller);
  }
  scroller.setAttribute("aria-rowcount", kept.length + 1);
  space.style.height = `${Math.max(1, Math.min(kept.length * ROW_HEIGHT, TALLEST))}px`;
  scroller.scrollTop = 0;
  drawRows();
}

const numSeen = () => Math.max(1, Math.ceil((scroller.clientHeight - HEAD_HEIGHT) / ROW_HEIGHT));
// A browser limits how tall an element is: of millions of rows, scrolling is in proportion.
function firstSeen() {
  const hidden = Math.min(kept.length * ROW_HEIGHT, TALLEST) - (scroller.clientHeight - HEAD_HEIGHT);
  if (kept.length * ROW_HEIGHT <= TALLEST) return Math.floor(scroller.scrollTop / ROW_HEIGHT);
  return Math.round((Math.min(scroller.scrollTop, hidden) / hidden) * (kept.length - numSeen()));
}

function drawRows() {
  const first = Math.max(0, Math.min(firstSeen(), kept.length - 1));
  const last = Math.min(kept.length, first + numSeen() + 2);
  const top = kept.length * ROW_HEIGHT <= TALLEST ? first * ROW_HEIGHT : scroller.scrollTop;
  const drawn = [];
  for (let place = first; place < last; place += 1) drawn.push(tableRow(kept[place], place, top + (place - first) * ROW_HEIGHT));
  space.replaceChildren(...drawn);
  const chosen = drawn.find((node) => node.getAttribute("aria-selected") === "true");
  if (chosen) scroller.setAttribute("aria-activedescendant", chosen.id); else scroller.removeAttribute("aria-activedescendant");
}

// As much of the end of a name as there is room for: beginnings are alike.
const CHARACTER = 7.9;
function narrowed(name) {
  const room = Math.max(8, Math.floor(scroller.firstElementChild.children[2].clientWidth / CHARACTER));
  return name.length > room ? `\u2026${name.slice(1 - room)}` : name;
}

function tableRow(row, place, top) {
  const isChosen = state.row === String(row);
  const cell = (...content) => el("span", { role: "gridcell" }, ...content);
  const node = el("div", { class: "row", role: "row", id: `row-${row}`, "aria-rowindex": place + 2, "aria-selected": isChosen ? "true" : "false", on: { click: () => choose(row, false) } },
    cell(chip(row)), cell(String(rows.step[row])), el("span", { role: "gridcell", title: short(siteOf(row)) }, el("code", {}, narrowed(short(siteOf(row))))),
    cell(number(rows.noise_ratio[row])), cell(number(rows.bound_ratio[row])), cell(rows.flags[row] & SHAPE ? "shape" : number(rows.max_abs_diff[row])), cell(decibels(rows.snr_db[row])),
    cell(short([nameOf("level", row), nameOf("case", row)].filter(Boolean).join(", "))));
  node.style.top = `${top}px`;
  return node;
}

function show(place) {
  const tall = kept.length * ROW_HEIGHT <= TALLEST;
  const first = firstSeen(), seen = numSeen() - 1;
  if (place >= first && place < first + seen) return;
  const wanted = place < first ? place : place - seen + 1;
  const hidden = Math.min(kept.length * ROW_HEIGHT, TALLEST) - (scroller.clientHeight - HEAD_HEIGHT);
  scroller.scrollTop = tall ? wanted * ROW_HEIGHT : (wanted / (kept.length - numSeen())) * hidden;
}

function move(by) {
  if (!kept.length) return;
  const now = kept.indexOf(Number(state.row === "" ? -1 : state.row));
  const place = now < 0 ? 0 : Math.max(0, Math.min(kept.length - 1, now + by));
  show(place);
  change({ row: String(kept[place]) });
}

function tableKeys(event) {
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: numSeen() - 1, PageUp: 1 - numSeen(), Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined) { if (event.key === "Enter") at("detail").focus(); return; }
  event.preventDefault();
  move(Math.max(-1e9, Math.min(1e9, by)));
}

// Opens a tensor, whichever filters hide it.
function choose(row, follow = true) {
  const hidden = kept.indexOf(row) < 0;
  change({ ...(hidden ? { ...DEFAULTS, order: state.order } : {}), row: String(row) }, { replace: false });
  const place = kept.indexOf(row);
  if (place >= 0) show(place);
  if (follow) at("tensors").scrollIntoView();
}
