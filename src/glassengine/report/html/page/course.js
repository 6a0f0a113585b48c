// The course: error over noise floor along the execution, with what rounding explains as a gray band.
const COURSE = { height: 200, left: 46, bottom: 18, bins: 560 };

// The height of a row, 0 to 1, on a logarithmic scale: of ratios 0.01 to 1e6, else of decibels 160 to 0.
const ofRatio = (ratio) => Math.min(1, Math.max(0, (Math.log10(ratio) + 2) / 8));
function heightOf(row) {
  if (rows.flags[row] & (NONFINITE | SHAPE)) return 1;
  if (byRatio) return Number.isNaN(rows.noise_ratio[row]) ? (rows.verdict[row] >= SUSPICIOUS ? 0.6 : 0) : ofRatio(rows.noise_ratio[row]);
  return Number.isNaN(rows.snr_db[row]) ? 0 : Math.min(1, Math.max(0, (160 - rows.snr_db[row]) / 160));
}

function drawCourse() {
  const body = at("course-body");
  const kept = keptRows(["verdict", "q", "own"], false);
  if (!kept.length) { body.replaceChildren(el("p", {}, "No tensor is kept by the filters.")); return; }
  const { height, left, bottom } = COURSE;
  const width = Math.max(280, body.clientWidth);
  const count = Math.min(COURSE.bins, Math.floor((width - left) / 2), kept.length);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "bars", role: "group", "aria-label": `Error of ${many(kept.length)} tensors in order of execution` });
  const y = (part) => (height - bottom) * (1 - part);
  if (byRatio) {
    plot.append(svg("rect", { x: left, y: y(ofRatio(1)), width: width - left, height: y(0) - y(ofRatio(1)), class: "floor" }));
    for (const [ratio, text] of [[1, "1x"], [4, ""], [100, "100x"], [1e4, "1e4x"], [1e6, "1e6x"]]) {
      plot.append(svg("line", { x1: left, x2: width, y1: y(ofRatio(ratio)), y2: y(ofRatio(ratio)), class: "line" }), svg("text", { x: 4, y: Math.max(10, y(ofRatio(ratio)) + 4) }, text));
    }
  } else {
    for (const snr of [160, 120, 80, 40, 0]) plot.append(svg("text", { x: 4, y: Math.max(10, y((160 - snr) / 160) + 4) }, `${snr} dB`));
  }
  const step = (width - left) / count;
  let flagged = 0;
  for (let bin = 0; bin < count; bin += 1) {
    let worst = -1, most = -1;
    for (let place = Math.floor((bin * kept.length) / count); place < Math.floor(((bin + 1) * kept.length) / count); place += 1) {
      const value = levelOf(kept[place]) + heightOf(kept[place]);
      if (value > most) { most = value; worst = kept[place]; }
    }
    const part = Math.max(0.01, heightOf(worst));
    const level = levelOf(worst);
    if (level > 1) flagged += 1;
    const inherited = rows.flags[worst] & INHERITED;
    const bar = svg("rect", { x: left + bin * step, y: y(part), width: Math.max(step - (count < 300 ? 1 : 0), 0.8), height: y(0) - y(part), class: `${level <= 1 ? "plain" : classOf(level)} pick`, opacity: inherited ? 0.55 : 1, on: { click: () => choose(worst) } });
    bar.append(svg("title", {}, `${stepName(rows.step[worst])}, ${short(siteOf(worst))}: ${sizeOf(worst)}`));
    plot.append(bar);
  }
  plot.append(svg("text", { x: left, y: height - 4 }, "first"), svg("text", { x: width - 26, y: height - 4 }, "last"));
  const words = byRatio ? "Error over noise floor, on a logarithmic scale; the gray band is what rounding alone explains, the dashed line above it four times that." : "Signal-to-noise ratio: two records have no measured noise floor, and verdicts are by tolerance.";
  body.replaceChildren(plot, el("p", { class: "about" }, `${words} ${many(kept.length)} tensors, ${flagged} of ${count} bars beyond rounding; ${page.knows_inherited ? "pale bars only pass an error on." : "a bar may be made there or passed on."}`));
}
