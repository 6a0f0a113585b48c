// Names, which others wrote: what would turn the direction of text or cannot be seen is shown as an escape.
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}]/gu;
const LONGEST = 300;

const shown = (text) => text.replace(UNSEEN, (found) => `\\u{${found.codePointAt(0).toString(16)}}`);

function short(text) {
  const whole = shown(text);
  return whole.length <= LONGEST ? whole : `${whole.slice(0, 140)}\u2026${whole.slice(-140)}`;
}

// The module path of a site, as parts: "model.layers.6.mlp/mul.0" and "model.layers.6.mlp:out[0]" are of one module.
function moduleOf(site) {
  const end = site.search(/[/:]/);
  const path = (end < 0 ? site : site.slice(0, end)).replace(/@\d+$/, "");
  return path === "" || path === "." ? [] : path.split(".");
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

const decibels = (value) => (Number.isFinite(value) ? value.toFixed(1) : number(value));

// All digits that tell two values apart: nine for one that is a float32, else those of a double.
function exact(value) {
  if (typeof value !== "number") return String(value ?? "");
  return String(Math.fround(value) === value ? Number(value.toPrecision(9)) : value);
}
const many = (value) => value.toLocaleString("en-US");

function stepName(step) {
  if (!page.generates) return `step ${step}`;
  return step === 0 ? "prefill" : `decode ${step}`;
}
