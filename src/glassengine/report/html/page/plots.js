// What the values of a tensor say: worst elements, distances in ulp, and the largest error along every axis.
function bars(heights, { label, names, levels = null, height = 90 }) {
  const width = 600, base = height - 14, step = width / Math.max(heights.length, 1);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "bars", role: "img", "aria-label": label });
  heights.forEach((part, place) => {
    const tall = part > 0 ? Math.max(2, part * (base - 4)) : 0;
    const bar = svg("rect", { x: place * step, y: base - tall, width: Math.max(step - (step > 4 ? 1 : 0), 0.7), height: tall, class: levels ? levels[place] : "plain" });
    bar.append(svg("title", {}, names[place]));
    plot.append(bar);
  });
  plot.append(svg("text", { x: 2, y: height - 2 }, names[0] ?? ""));
  const last = svg("text", { x: width - 2, y: height - 2, "text-anchor": "end" }, names.at(-1) ?? "");
  if (heights.length > 1) plot.append(last);
  return plot;
}

function logHeights(counts) {
  const most = Math.log10(Math.max(...counts, 1) + 1);
  return counts.map((count) => (count ? Math.log10(count + 1) / most : 0));
}

function ulpPlot(ulp) {
  const names = ulp.histogram.map((count, place) => `${place === 0 ? "equal" : place === 1 ? "1 ulp" : `2^${place - 1} ulp`}: ${many(count)}`);
  const label = `Histogram of errors in ulp; the largest is ${ulp.max_ulp} ulp`;
  return [el("h3", {}, "Errors in ulp"), el("p", { class: "about" }, `Elements by distance in representable values, counts on a logarithmic scale. Largest: ${many(ulp.max_ulp ?? 0)} ulp at [${(ulp.worst_index ?? []).join(", ")}]${ulp.num_nonfinite_mismatch ? `; ${many(ulp.num_nonfinite_mismatch)} elements are finite on one side only` : ""}.`), bars(logHeights(ulp.histogram), { label, names: names.length ? names : ["nothing"] })];
}

const sizeOfError = (value) => (value === "inf" || value === "nan" ? Infinity : Number(value));

function axisPlot(axis) {
  const values = axis.maxima.map(sizeOfError);
  const finite = values.filter(Number.isFinite);
  const most = Math.max(...finite, 0);
  const heights = values.map((value) => (Number.isFinite(value) ? (most ? value / most : 0) : 1));
  const top = values.indexOf(Math.max(...values));
  const place = (index) => (axis.step === 1 ? `index ${index}` : `indices ${index * axis.step} to ${Math.min((index + 1) * axis.step, axis.size) - 1}`);
  const hit = values.filter((value) => value > 0).length;
  const words = values[top] > 0 ? `largest at ${place(top)}; ${hit} of ${values.length} ${axis.step === 1 ? "indices" : "pieces"} differ` : "nothing differs";
  const levels = values.map((value, index) => (Number.isFinite(value) ? (index === top ? "most" : "plain") : "nan"));
  return [el("h3", {}, `Axis ${axis.axis}, size ${many(axis.size)}`), el("p", { class: "about" }, `Largest error of every index: ${words}.`), bars(heights, { label: `Largest error along axis ${axis.axis}: ${words}`, names: values.map((value, index) => `${place(index)}: ${number(value)}`), levels })];
}

function worstTable(elements) {
  if (!elements.length) return [];
  const difference = (one) => (typeof one.baseline === "number" && typeof one.candidate === "number" ? number(one.candidate - one.baseline, 4) : "");
  return [el("h3", {}, "Worst elements"), el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Worst elements" }, el("table", {}, el("thead", {}, el("tr", {}, ...["index", "baseline", "candidate", "difference"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...elements.map((one) => el("tr", {}, el("th", { scope: "row", class: "number" }, `[${one.index.join(", ")}]`), ...[exact(one.baseline), exact(one.candidate), difference(one)].map((text) => el("td", { class: "number" }, text)))))))];
}

async function valuesOf(row, detail) {
  const place = page.valued_rows.indexOf(row);
  if (place < 0 && !detail.values) return [el("p", { class: "about" }, page.why_no_values)];
  const found = place < 0 ? detail.values : await item("values", place);
  return [...worstTable(found.worst), ...found.axes.filter((axis) => axis.size > 1).flatMap(axisPlot), ...(found.ulp ? ulpPlot(found.ulp) : [])];
}
