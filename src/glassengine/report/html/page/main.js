// Begins: reads the data, draws every part, and draws again what a change of the state concerns.
let openAll = null;

async function drawSkipped() {
  const body = at("skipped-body");
  if (!body || !filesOf.skipped.num_items) return;
  const list = el("div", {});
  const read = async (place) => {
    const found = await load("skipped", place);
    list.append(el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Tensors that were not compared" }, el("table", {}, el("tbody", {}, ...found.slice(0, 2000).map((one) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, short(one.site))), el("td", {}, one.side), el("td", {}, one.step === undefined ? "" : stepName(one.step)), el("td", {}, short(one.reason))))))));
    if (place + 1 < numFiles("skipped") || found.length > 2000) list.append(el("p", { class: "about" }, `${many(filesOf.skipped.num_items)} in all; the JSON document has every one.`));
  };
  const details = el("details", {}, el("summary", {}, `Each of the ${many(filesOf.skipped.num_items)}`), list);
  details.addEventListener("toggle", () => { if (details.open && !list.childElementCount) read(0).catch(failed); });
  body.replaceChildren(details);
}

function failed(error) {
  const box = at("progress");
  box.hidden = false;
  box.textContent = `The data cannot be shown: ${shown(String(error.message ?? error))}`;
}

function redraw(changed) {
  const any = (...names) => names.some((name) => changed.has(name));
  const filters = any("verdict", "module", "q", "level", "case", "dtype", "step", "rank", "own");
  if (any("module", "level", "case", "rank", "dtype")) drawMap();
  if (any("module", "level", "case", "rank", "step", "dtype")) drawCourse();
  if (filters || any("order")) {
    // What is being typed stays where it is.
    const typing = document.activeElement?.id === "search" ? [at("search").selectionStart, at("search").selectionEnd] : null;
    const pressed = document.activeElement?.dataset?.verdict;
    drawFilters();
    if (typing) { at("search").focus(); at("search").setSelectionRange(...typing); }
    if (pressed) document.querySelector(`[data-verdict="${pressed}"]`).focus();
    drawTable();
  }
  if (any("row")) { if (scroller) drawRows(); drawDetail().catch(failed); }
}

function keys(event) {
  const typing = event.target.closest("input, select, textarea, dialog");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { if (typing) typing.blur(); else if (state.row !== "") change({ row: "" }); return; }
  if (typing) return;
  const acts = {
    "/": () => { at("search")?.focus(); at("tensors").scrollIntoView(); },
    j: () => move(1), k: () => move(-1),
    f: () => { if (page.first_row !== null) choose(page.first_row); },
    m: () => at("map").scrollIntoView(), t: () => at("tensors").scrollIntoView(),
    "?": () => at("help").showModal(),
  };
  if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
}

// On paper: the first rows as they are ordered, since what is scrolled cannot be printed.
function forPaper() {
  if (!space) return;
  openAll = [...kept.subarray(0, 100)].map((row, place) => tableRow(row, place, place * ROW_HEIGHT));
  space.style.height = `${openAll.length * ROW_HEIGHT}px`;
  space.replaceChildren(...openAll);
}

async function begin() {
  readAddress();
  const box = at("progress");
  for (const link of document.querySelectorAll('nav a[href^="#"], .skip')) link.addEventListener("click", (event) => { event.preventDefault(); const target = at(link.hash.slice(1)); target?.scrollIntoView(); target?.querySelector("h2")?.setAttribute("tabindex", "-1"); target?.querySelector("h2")?.focus({ preventScroll: true }); });
  at("help-button").hidden = false;
  at("help-button").addEventListener("click", () => at("help").showModal());
  if (filesOf.rows.num_items > 20000) box.hidden = false;
  await loadRows((done, all) => { box.textContent = `Reading the data: ${done} of ${all} files`; });
  page.rank_matters = rows.rank.some((rank) => rank > 0);
  box.hidden = true;
  drawMap();
  drawCourse();
  drawFilters();
  drawTable();
  await drawSkipped();
  onState(redraw);
  document.addEventListener("keydown", keys);
  window.addEventListener("beforeprint", forPaper);
  window.addEventListener("afterprint", drawTable);
  if (state.row !== "") { const place = kept.indexOf(Number(state.row)); if (place >= 0) show(place); await drawDetail(); }
  document.documentElement.dataset.ready = "yes";
}

begin().catch(failed);
