// From a row to a level: its color and its word. Rounding is gray whatever its size; beyond it the color says how much.
const VERDICTS = page.names.verdict;
const [IDENTICAL, ROUNDING, SUSPICIOUS, WRONG] = [0, 1, 2, 3];
const INHERITED = 1, NONFINITE = 2, SHAPE = 4;
const RATIOS = [4, 16, 100, 1e3, 1e4, 1e6];
const DECIBELS = [100, 80, 60, 40, 20, 0];
let byRatio = true;

// Level 0 same, 1 floor, 2 to 8 beyond it (s1 to s7), 9 not a number or another shape. A higher one is worse.
function levelOf(row) {
  const verdict = rows.verdict[row];
  if (verdict === IDENTICAL) return 0;
  if (verdict === ROUNDING) return 1;
  if (rows.flags[row] & (NONFINITE | SHAPE)) return 9;
  if (byRatio) {
    const ratio = rows.noise_ratio[row];
    if (Number.isNaN(ratio)) return verdict === WRONG ? 6 : 3;
    return 2 + RATIOS.filter((limit) => ratio >= limit).length;
  }
  const snr = rows.snr_db[row];
  if (Number.isNaN(snr)) return verdict === WRONG ? 6 : 3;
  return 2 + DECIBELS.filter((limit) => snr < limit).length;
}

const classOf = (level) => (level === 0 ? "same" : level === 1 ? "floor" : level === 9 ? "nan" : `s${level - 1}`);

function sizeOf(row) {
  if (rows.flags[row] & SHAPE) return "shapes differ";
  if (rows.flags[row] & NONFINITE) return "not finite on one side";
  const ratio = rows.noise_ratio[row];
  if (!Number.isNaN(ratio)) return `${number(ratio)} times the noise floor`;
  const snr = rows.snr_db[row];
  return Number.isNaN(snr) ? "" : `${number(snr)} dB`;
}

function chip(row) {
  const verdict = VERDICTS[rows.verdict[row]];
  const inherited = rows.flags[row] & INHERITED ? " inherited" : "";
  const kind = rows.verdict[row] >= SUSPICIOUS && rows.flags[row] & (NONFINITE | SHAPE) ? "nan" : verdict;
  return el("span", { class: `chip ${kind}${inherited}` }, `${inherited ? "\u25cb " : rows.verdict[row] >= SUSPICIOUS ? "\u25cf " : ""}${verdict}`);
}

function legend() {
  const words = byRatio
    ? ["below 4x the floor", "4x", "16x", "100x", "1e3x", "1e4x", "1e6x and more"]
    : ["above 100 dB", "100 dB", "80 dB", "60 dB", "40 dB", "20 dB", "below 0 dB"];
  const one = (name, text) => el("li", {}, el("span", { class: `swatch ${name}` }), text);
  return el("ul", { class: "legend", "aria-label": "Colors" },
    one("same", "identical"), one("floor", "explained by rounding"), ...words.map((text, place) => one(`s${place + 1}`, text)),
    one("nan", "NaN, infinity or another shape"), ...(page.knows_inherited ? [one("inherited", "passed on")] : []));
}
