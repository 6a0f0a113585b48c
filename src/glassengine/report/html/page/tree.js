// The tree of modules: what is inside a module is made when it is opened.
let tree = null;

function growTree() {
  const worst = new Int8Array(sites.length).fill(-1), worstRow = new Int32Array(sites.length).fill(-1), flagged = new Uint32Array(sites.length), count = new Uint32Array(sites.length);
  for (let row = 0; row < rows.length; row += 1) {
    const site = rows.site[row], level = levelOf(row);
    count[site] += 1;
    if (isOwn(row)) flagged[site] += 1;
    if (level > worst[site]) { worst[site] = level; worstRow[site] = row; }
  }
  const root = { name: "", path: "", inside: new Map(), tensors: [], level: -1, row: -1, own: 0, count: 0 };
  sites.forEach((site, place) => {
    if (!count[place]) return;
    let node = root;
    const parts = moduleOf(site);
    const add = (one) => { one.count += count[place]; one.own += flagged[place]; if (worst[place] > one.level) { one.level = worst[place]; one.row = worstRow[place]; } };
    add(node);
    parts.forEach((part, depth) => {
      if (!node.inside.has(part)) node.inside.set(part, { name: part, path: parts.slice(0, depth + 1).join("."), inside: new Map(), tensors: [], level: -1, row: -1, own: 0, count: 0 });
      node = node.inside.get(part);
      add(node);
    });
    node.tensors.push({ site: place, level: worst[place], row: worstRow[place] });
  });
  return root;
}

function branch(node) {
  const sign = node.own ? "\u25cf" : "";
  const words = `${many(node.count)} tensor${node.count === 1 ? "" : "s"}${node.own ? `, ${many(node.own)} ${page.knows_inherited ? "make an error" : "differ"}` : ""}`;
  const line = [el("span", { class: `swatch ${classOf(Math.max(node.level, 0))}` }), sign ? `${sign} ` : "", el("code", {}, short(node.name) || "(root)"), el("span", { class: "num" }, words)];
  const details = el("details", {}, el("summary", {}, ...line));
  details.addEventListener("toggle", () => { if (details.open && details.childElementCount === 1) details.append(inside(node)); });
  return el("li", {}, details);
}

function inside(node) {
  const tensors = node.tensors.slice(0, 500).map((one) => el("li", {}, el("span", { class: `swatch ${classOf(Math.max(one.level, 0))}` }), el("button", { type: "button", on: { click: () => choose(one.row) } }, el("code", {}, short(sites[one.site])))));
  const more = node.tensors.length > tensors.length ? [el("li", {}, `and ${many(node.tensors.length - tensors.length)} more, in the table`)] : [];
  const filter = node.path ? [el("li", {}, el("button", { type: "button", on: { click: () => { change({ module: node.path }, { replace: false }); at("map").scrollIntoView(); } } }, "this module in map and table"))] : [];
  return el("ul", {}, ...filter, ...[...node.inside.values()].map(branch), ...tensors, ...more);
}

function drawTree() {
  tree ??= growTree();
  const top = branch(tree);
  at("tree-body").replaceChildren(rows.length ? el("ul", { class: "tree", tabindex: 0, "aria-label": "Modules" }, top) : el("p", {}, "No tensor was judged."));
  // As far open as the way to the first tensor that is wrong.
  let node = tree, list = top;
  const first = page.first_row ?? -1;
  const way = first >= 0 ? moduleOf(siteOf(first)) : [];
  for (let depth = 0; node && list; depth += 1) {
    list.firstElementChild.append(inside(node));
    list.firstElementChild.open = true;
    const names = [...node.inside.keys()];
    const place = names.indexOf(way[depth]);
    const skip = node.path ? 1 : 0;
    list = place >= 0 ? list.firstElementChild.lastElementChild.children[place + skip] : null;
    node = place >= 0 ? node.inside.get(way[depth]) : null;
  }
}
