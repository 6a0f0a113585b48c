// What all parts use: elements, the data beside the page, and the state in the address.

// Makes an element. Texts become text nodes: no name is ever read as markup.
const el = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, ...children);
const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, ...children);

function filled(node, attributes, ...children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const at = (id) => document.getElementById(id);
const page = JSON.parse(at("index").textContent);
const filesOf = Object.fromEntries(page.files.map((one) => [one.kind, one]));

// --- data: scripts that call glassReport(kind, number, items) -------------------------------------------------------
const waiting = new Map();
const loaded = new Map();
const FILE = /^data\/[a-z]+-\d+\.js$/;
const policy = window.trustedTypes
  ? window.trustedTypes.createPolicy("glass-data", { createScriptURL: (url) => { if (!FILE.test(url)) throw new TypeError(url); return url; } })
  : { createScriptURL: (url) => url };

window.glassReport = (kind, number, items) => { waiting.get(`${kind}-${number}`)?.resolve(items); };

// Of a report that is one file: data that are in the page, compressed.
function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function load(kind, number) {
  const name = `${kind}-${number}`;
  const own = at(`data-${name}`);
  if (own && !loaded.has(name)) loaded.set(name, unpacked(own.textContent));
  if (!loaded.has(name)) {
    loaded.set(name, new Promise((resolve, reject) => {
      waiting.set(name, { resolve });
      const script = document.createElement("script");
      script.src = policy.createScriptURL(`data/${name}.js`);
      script.addEventListener("load", () => { script.remove(); waiting.delete(name); });
      script.addEventListener("error", () => { script.remove(); reject(new Error(`data/${name}.js is missing: the folder data belongs beside index.html`)); });
      document.head.append(script);
    }));
  }
  return loaded.get(name);
}

const numFiles = (kind) => (filesOf[kind] ? Math.ceil(filesOf[kind].num_items / filesOf[kind].items_per_file) : 0);

async function item(kind, number) {
  const each = filesOf[kind].items_per_file;
  return (await load(kind, Math.floor(number / each)))[number % each];
}

// --- state: what is chosen, as the part of the address behind # -----------------------------------------------------
const DEFAULTS = { order: "worst", verdict: "", module: "", q: "", level: "", case: "", dtype: "", step: "", rank: "", own: "", row: "" };
const state = { ...DEFAULTS };
const listeners = [];
const onState = (act) => listeners.push(act);

function readAddress() {
  const text = location.hash.slice(1);
  Object.assign(state, DEFAULTS);
  if (!text.includes("=")) return;
  for (const [name, value] of new URLSearchParams(text)) if (name in DEFAULTS) state[name] = value;
}

// Changes the state, shows it, and writes it into the address; a step in the history only for what is opened.
function change(values, { replace = true } = {}) {
  const before = { ...state };
  Object.assign(state, values);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  const text = kept.length ? `#${new URLSearchParams(kept)}` : location.pathname + location.search;
  try { history[replace ? "replaceState" : "pushState"](null, "", text); } catch { /* some browsers refuse this on a disk */ }
  announce(before);
}

function announce(before) {
  const changed = new Set(Object.keys(state).filter((name) => state[name] !== before[name]));
  if (changed.size) for (const act of listeners) act(changed);
}

window.addEventListener("hashchange", () => { const before = { ...state }; readAddress(); announce(before); });
