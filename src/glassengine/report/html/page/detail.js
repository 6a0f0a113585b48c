// One tensor, opened: what was judged, how it differs, and what stands beside it.
let opened = 0;

function pairsOf(list) {
  return el("dl", {}, ...list.filter(([, text]) => text !== "" && text !== null && text !== undefined).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

function statistics(detail) {
  const sides = [["baseline", detail.baseline], ["candidate", detail.candidate], ["absolute error", detail.abs_error], ["relative error", detail.rel_error]].filter(([, found]) => found);
  if (!sides.length) return [];
  const names = ["dtype", "shape", "min", "mean", "median", "max", "std", "num_nan", "num_inf"];
  const text = (value) => (Array.isArray(value) ? `[${value.join(", ")}]` : typeof value === "number" ? number(value, 6) : String(value ?? ""));
  return [el("h3", {}, "Statistics"), el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Statistics" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, ""), ...sides.map(([name]) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), ...sides.map(([, found]) => el("td", { class: "number" }, text(found[name]))))))))];
}

function rowLinks(title, list) {
  if (!list.length) return [];
  const one = (row) => el("button", { type: "button", title: short(siteOf(row)), on: { click: () => choose(row, false) } }, chip(row), ` ${short(siteOf(row))}`);
  return [el("h3", {}, title), el("div", { class: "links" }, ...list.slice(0, 24).map(one))];
}

const alike = (left, right) => ["step", "level", "case", "rank"].every((name) => rows[name][left] === rows[name][right]);

// The rows of other sites in the same step, level, case and rank, as they lie around a row.
function rowsOf(row, wanted) {
  const found = new Map();
  for (let by = -1; by <= 1; by += 2) {
    for (let place = row + by; place >= 0 && place < rows.length && found.size < wanted.size; place += by) {
      if (wanted.has(rows.site[place]) && alike(place, row) && !found.has(rows.site[place])) found.set(rows.site[place], place);
    }
  }
  return [...found.values()].sort((left, right) => left - right);
}

let usersOf = null;
async function neighbors(row) {
  const along = [];
  for (const by of [-1, 1]) {
    for (let place = row + by, left = 2; place >= 0 && place < rows.length && left > 0; place += by) if (alike(place, row)) { along.push(place); left -= 1; }
  }
  const around = rowLinks("Before and after, in order of execution", along.sort((left, right) => left - right));
  if (!filesOf.inputs?.num_items) return around;
  const graph = (await Promise.all(Array.from({ length: numFiles("inputs") }, (_, place) => load("inputs", place)))).flat();
  if (!usersOf) { usersOf = graph.map(() => []); graph.forEach((inputs, site) => inputs.forEach((input) => usersOf[input]?.push(site))); }
  const site = rows.site[row];
  return [...rowLinks("Inputs", rowsOf(row, new Set(graph[site] ?? []))), ...rowLinks("Read by", rowsOf(row, new Set(usersOf[site] ?? []))), ...around];
}

async function drawDetail() {
  const box = at("detail");
  const row = state.row === "" ? -1 : Number(state.row);
  const mine = (opened += 1);
  if (!(row >= 0 && row < rows.length)) { box.replaceChildren(); return; }
  const detail = await item("details", row);
  const [values, beside] = await Promise.all([valuesOf(row, detail), neighbors(row)]);
  if (mine !== opened) return;
  const f = detail.figures;
  const there = sites[rows.candidate[row]];
  const worst = f?.worst_index ? `[${f.worst_index.join(", ")}]: candidate ${exact(f.candidate_at_worst)}, baseline ${exact(f.baseline_at_worst)}` : "";
  const list = [
    ["in the candidate", there === siteOf(row) ? "" : shown(there)], ["verdict", `${VERDICTS[rows.verdict[row]]}${rows.flags[row] & INHERITED ? ", passed on from its inputs" : ""}`],
    ["step", stepName(rows.step[row])], ["compared", shown(nameOf("level", row))], ["case", shown(nameOf("case", row))], ["rank", page.rank_matters ? String(rows.rank[row]) : ""],
    ["tensor", detail.shape ? `${nameOf("dtype", row)}[${detail.shape.join(", ")}]` : nameOf("dtype", row)],
    ["judged by", shown(nameOf("judged_by", row))], ["paired by", `${shown(detail.method ?? "")}${detail.confidence < 1 ? `, confidence ${number(detail.confidence)}` : ""}`], ["because", shown(detail.reason ?? "")],
    ["error over noise floor", number(rows.noise_ratio[row], 4)], ["error over bound", number(rows.bound_ratio[row], 4)], ["largest at", worst],
    ...(f ? [["different", `${many(f.num_different)} of ${many(f.num_elements)} elements`], ["beyond tolerance", `${many(f.num_beyond_tolerance)} (rtol ${number(f.rtol)}, atol ${number(f.atol)})`], ["largest error", number(f.max_abs_diff, 6)], ["largest relative", number(f.max_rel_diff, 6)], ["rms", number(f.rms_diff, 6)], ["SNR", `${number(f.snr_db, 4)} dB`], ["cosine", number(f.cosine_similarity, 9)], ["not finite on one side", f.num_nonfinite_mismatch ? many(f.num_nonfinite_mismatch) : ""]] : []),
  ];
  box.replaceChildren(el("button", { type: "button", class: "close", "aria-label": "Close the tensor", on: { click: () => change({ row: "" }) } }, "Close"), el("p", { class: "name" }, chip(row), " ", el("code", {}, shown(siteOf(row)))), pairsOf(list), ...values, ...statistics(detail), ...beside);
}
