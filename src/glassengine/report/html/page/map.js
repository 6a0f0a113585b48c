// The map: modules from top to bottom, steps from left to right, each cell in the color of its worst tensor.
const MOST_GROUPS = 64, MOST_COLUMNS = 64;

// Prefixes of module paths, as deep as they can be with few enough of them; of a chosen module what is inside it.
function groups() {
  const within = sitesWithin(state.module);
  const inside = state.module ? state.module.split(".").length : 0;
  const used = new Uint8Array(sites.length);
  for (let row = 0; row < rows.length; row += 1) used[rows.site[row]] = 1;
  const paths = sites.map((site, place) => (used[place] && (!within || within[place]) ? moduleOf(site) : null));
  let best = null;
  for (let depth = inside || 1; depth < 24; depth += 1) {
    const known = new Map();
    const groupOf = new Int32Array(sites.length).fill(-1);
    let deeper = false;
    paths.forEach((path, place) => {
      if (!path) return;
      const name = path.slice(0, depth).join(".");
      if (path.length > depth) deeper = true;
      if (!known.has(name)) known.set(name, known.size);
      groupOf[place] = known.get(name);
    });
    if (best && known.size > MOST_GROUPS) break;
    best = { names: [...known.keys()], groupOf };
    if (!deeper) break;
  }
  return best;
}

// Steps, several in one column where there are many.
function columnsOfSteps() {
  const each = Math.ceil(page.steps.length / MOST_COLUMNS);
  const found = [];
  for (let first = 0; first < page.steps.length; first += each) {
    const part = page.steps.slice(first, first + each);
    const name = part.length > 1 ? `${part[0].step}\u2013${part.at(-1).step}` : stepName(part[0].step);
    found.push({ name, first: part[0].step, last: part.at(-1).step, text: part.map((one) => one.text).join("") });
  }
  return found;
}

// On a narrow screen the end of a path: beginnings are alike.
const ended = (name) => (at("map-body").clientWidth < 640 && name.length > 17 ? `\u2026${name.slice(-16)}` : name);

// Several orders of some groups in one: the longest, and what it lacks behind what it follows in another.
function merged(orders) {
  const [longest, ...others] = [...orders].sort((left, right) => right.length - left.length);
  const order = [...(longest ?? [])];
  for (const other of others) {
    let after = -1;
    for (const group of other) {
      const place = order.indexOf(group);
      after = place >= 0 ? place : after + 1;
      if (place < 0) order.splice(after, 0, group);
    }
  }
  return order;
}

function drawMap() {
  const body = at("map-body");
  if (!rows.length) { body.replaceChildren(el("p", {}, "No tensor was judged.")); return; }
  const { names, groupOf } = groups();
  const columns = columnsOfSteps();
  const columnOf = new Map();
  let next = 0;
  for (const { step } of page.steps) { while (step > columns[next].last) next += 1; columnOf.set(step, next); }
  const cells = names.map(() => columns.map(() => null));
  const seen = new Map();
  for (const row of keptRows(["step", "module", "verdict", "q", "own"], false)) {
    const group = groupOf[rows.site[row]];
    if (group < 0) continue;
    if (!seen.has(rows.level[row])) seen.set(rows.level[row], new Set());
    seen.get(rows.level[row]).add(group);
    const line = cells[group];
    const column = columnOf.get(rows.step[row]);
    const level = levelOf(row);
    const cell = line[column] ?? (line[column] = { level: -1, row, own: false, inherited: false, count: 0 });
    cell.count += 1;
    if (level > cell.level) { cell.level = level; cell.row = row; }
    if (rows.verdict[row] >= SUSPICIOUS) { if (rows.flags[row] & INHERITED) cell.inherited = true; else cell.own = true; }
  }
  const order = merged([...seen.values()].map((groups) => [...groups]));
  const shownGroups = order.slice(0, 4 * MOST_GROUPS);
  const table = el("table", { class: "map" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "module"), ...columns.map((column) => el("th", { scope: "col" }, column.name, column.text ? el("span", { class: "read", title: shown(column.text) }, short(column.text)) : null)))),
    el("tbody", {}, ...shownGroups.map((group) => el("tr", {}, el("th", { scope: "row", title: short(names[group]) }, ended(short(names[group])) || "(root)"),
      ...columns.map((column, place) => el("td", {}, mapCell(cells[group][place], names[group], column)))))));
  const guilty = shownGroups.findIndex((group) => cells[group].some((cell) => cell?.own));
  const way = el("p", { class: "links" }, state.module ? el("button", { type: "button", on: { click: () => change({ module: state.module.split(".").slice(0, -1).join(".") }) } }, `up from ${short(state.module)}`) : null);
  const more = order.length > shownGroups.length ? el("p", { class: "about" }, `${shownGroups.length} of ${order.length} modules; choose a cell to see inside.`) : null;
  body.replaceChildren(way, el("div", { class: "map-scroll", tabindex: 0, role: "region", "aria-label": "Map of modules and steps" }, table), ...(more ? [more] : []), legend());
  // The first module that is wrong stands a few lines below the top.
  const line = table.tBodies[0].rows[guilty - 3];
  if (line) line.closest(".map-scroll").scrollTop = line.offsetTop - table.tHead.offsetHeight;
}

function mapCell(cell, name, column) {
  if (!cell) return el("span", { class: "empty" });
  const sign = cell.own ? "\u25cf" : cell.inherited ? "\u25cb" : "";
  const word = cell.own ? (page.knows_inherited ? ", made there" : "") : cell.inherited ? ", passed on" : "";
  const label = `${short(name) || "root"}, ${column.name}: ${VERDICTS[rows.verdict[cell.row]]}${word} ${sizeOf(cell.row)}`;
  const style = `${classOf(cell.level)}${cell.inherited && !cell.own ? " inherited" : ""}`;
  const open = () => { change({ module: name, step: column.first === column.last ? String(column.first) : "", row: String(cell.row) }, { replace: false }); at("tensors").scrollIntoView(); };
  return el("button", { type: "button", class: style, "aria-label": label, title: label, on: { click: open } }, sign);
}
