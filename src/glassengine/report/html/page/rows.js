// The rows as columns of numbers, the names of sites, and which rows the filters keep.
const rows = {};
let sites = [];
const ARRAYS = { Uint8: Uint8Array, Uint16: Uint16Array, Uint32: Uint32Array, Float32: Float32Array };

// Every machine that a browser runs on is little-endian, as the files are.
function decode(text, into, offset, size) {
  const bytes = atob(text);
  const target = new Uint8Array(into.buffer, offset * size);
  for (let place = 0; place < bytes.length; place += 1) target[place] = bytes.charCodeAt(place);
}

async function loadRows(progress) {
  const { num_items: total, items_per_file: each } = filesOf.rows;
  for (const column of page.columns) rows[column.name] = new ARRAYS[column.type](total);
  rows.length = total;
  const files = numFiles("rows") + numFiles("sites");
  let done = 0;
  const step = () => { done += 1; progress(done, files); };
  // A few at a time: each is some megabytes of text.
  for (let place = 0; place < numFiles("rows"); place += 1) {
    const part = await load("rows", place);
    for (const column of page.columns) decode(part[column.name], rows[column.name], place * each, ARRAYS[column.type].BYTES_PER_ELEMENT);
    loaded.delete(`rows-${place}`);
    step();
  }
  const names = [];
  for (let place = 0; place < numFiles("sites"); place += 1) { names.push(await load("sites", place)); step(); }
  sites = names.flat();
  byRatio = total === 0 || rows.noise_ratio.some((ratio) => !Number.isNaN(ratio));
}

const siteOf = (row) => sites[rows.site[row]];
const nameOf = (column, row) => page.names[column][rows[column][row]];

// Which sites a module holds or a pattern matches, by number; null where all are.
function sitesWithin(module) {
  if (!module) return null;
  const kept = new Uint8Array(sites.length);
  sites.forEach((site, place) => {
    if (site === module || (site.startsWith(module) && "./:@[".includes(site[module.length]))) kept[place] = 1;
  });
  return kept;
}

function sitesLike(pattern) {
  if (!pattern) return null;
  const like = new RegExp(pattern, "i");
  const kept = new Uint8Array(sites.length);
  sites.forEach((site, place) => { if (like.test(site)) kept[place] = 1; });
  return kept;
}

// The rows that the filters keep, in their order. `except` names filters that do not count: the map shows all steps.
function keptRows(except = [], ordered = true) {
  const want = (name) => (except.includes(name) ? "" : state[name]);
  const module = sitesWithin(want("module"));
  let like = null;
  try { like = sitesLike(want("q")); } catch { like = null; }
  const place = (column) => { const found = page.names[column].indexOf(want(column)); return want(column) === "" ? -1 : found < 0 ? -2 : found; };
  const [level, kase, dtype] = [place("level"), place("case"), place("dtype")];
  const step = want("step") === "" ? -1 : Number(want("step"));
  const rank = want("rank") === "" ? -1 : Number(want("rank"));
  const verdicts = want("verdict") ? new Set(want("verdict").split(",").map((name) => VERDICTS.indexOf(name))) : null;
  const own = want("own") !== "";
  const found = new Uint32Array(rows.length);
  const worst = ordered && state.order === "worst";
  let size = 0;
  for (let place = 0; place < rows.length; place += 1) {
    const row = worst ? rows.worst[place] : place;
    if (verdicts && !verdicts.has(rows.verdict[row])) continue;
    if (own && rows.flags[row] & INHERITED) continue;
    if (level !== -1 && rows.level[row] !== level) continue;
    if (kase !== -1 && rows.case[row] !== kase) continue;
    if (dtype !== -1 && rows.dtype[row] !== dtype) continue;
    if (step !== -1 && rows.step[row] !== step) continue;
    if (rank !== -1 && rows.rank[row] !== rank) continue;
    const site = rows.site[row];
    if (module && !module[site]) continue;
    if (like && !like[site]) continue;
    found[size] = row;
    size += 1;
  }
  return found.subarray(0, size);
}
