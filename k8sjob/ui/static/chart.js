// Curves, drawn by uPlot: boards of charts that share a cursor, a zoom, a smoothing and an x axis.

import { duration, h, number } from "./dom.js";

const COLORS = ["--blue", "--orange", "--green", "--purple", "--red", "--teal", "--pink", "--brown"];
const BINARY = Array.from({ length: 80 }, (_, power) => 2 ** (power - 10));
const CLOCK = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30, 60, 120, 240, 480, 720, 1440, 2880, 7200, 14400, 43200].map((minutes) => minutes * 60)];

/** Names whose curves are drawn: thousands of figures would hang the browser. */
export const MOST_CURVES = 60;

const LABELS = new Map([["samples_per_s", "samples/s"], ["step_s", "seconds a step"], ["wait_s", "seconds a step lost to the slowest rank"], ["grad_norm", "gradient norm"], ["memory_bytes", "memory, peak"], ["epoch_loss", "loss, mean of the epoch"]]);

/** What a number of the runtime's is called on the page. */
export const label = (name) => LABELS.get(name) ?? name;

/** Whether more of a number is better, by its name: 1, or -1 for less; 0 where the name says nothing. */
export const direction = (name) => (/loss|error|perplexity|(^|_)(mse|mae|rmse|wer|cer|ppl)($|_)/i.test(name) ? -1 : /acc|f1|auc|precision|recall|bleu|rouge|score|samples_per_s/i.test(name) ? 1 : 0);

/** Whether a line {xs, ys} has anything to draw. */
export const drawn = ({ xs, ys }) => xs.length > 1 && ys.some((y) => y !== null);

/** Values averaged as TensorBoard does: exponentially, without the bias to the zero it starts from. */
export function smoothed(ys, weight) {
  let mean = 0, debias = 0;
  return ys.map((y) => {
    if (y === null) return null;
    mean = weight * mean + (1 - weight) * y;
    debias = weight * debias + 1 - weight;
    return mean / debias;
  });
}

/** Ticks with as many digits as tell them apart; bytes in one binary unit. */
export function tickTexts(ticks, name = "") {
  const exact = ticks.filter((tick) => tick !== null), most = Math.max(...exact.map(Math.abs), 0);
  const step = Math.min(...exact.slice(1).map((tick, index) => Math.abs(tick - exact[index])).filter(Boolean));
  const unit = name.endsWith("_bytes") ? Math.min(Math.max(Math.floor(Math.log2(most || 1) / 10), 0), 4) : 0;
  let digits = Number.isFinite(step) ? Math.min(Math.max(Math.ceil(-Math.log10(step / 1024 ** unit) - 1e-9), 0), 12) : 3;
  const exactly = (step / 1024 ** unit) * 10 ** digits;
  if (Number.isFinite(step) && digits < 12 && Math.abs(exactly - Math.round(exactly)) > 1e-6) digits += 1; // 0.25
  const wide = !name.endsWith("_bytes") && (most >= 1e6 || digits > 5);
  const texts = (tick) => (wide ? tick.toExponential(Math.min(Math.max(Math.ceil(Math.log10(most / step)), 0), 8)) : (tick / 1024 ** unit).toFixed(digits));
  return ticks.map((tick) => (tick === null ? "" : texts(tick) + (name.endsWith("_bytes") ? ` ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}` : "")));
}

/** The value at x of a line between its points; that of its end beyond them. */
function between({ xs, ys }, x) {
  let [low, high] = [0, xs.length - 1];
  if (x <= xs[low]) return ys[low];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

/** How the x of a line's points are written: [label, x of an epoch, text of an x]. */
const AXES = {
  epoch: [(line) => line.unit ?? "epoch", (line) => (x) => x, number],
  step: [() => "step", (line) => (x) => Math.round(x * line.steps), number],
  time: [() => "time since the first point", (line) => (x) => between(line.times, x) - line.times.ys[0], duration],
};

/**
 * Charts side by side with their controls; `draw(groups)` draws them again.
 *
 * A group is [title, lines], a line {name, xs, ys}, and where these are known `times`, the line of the
 * seconds since 1970 over the same x, `steps`, those of an epoch, and `unit`, what x counts.
 */
export function board() {
  const charts = new Map(), shared = { by: "epoch", weight: 0, zoom: null, key: `board-${Math.random()}` };
  const redraw = () => charts.forEach((figure) => figure.redraw());
  const zoom = (range) => { shared.zoom = range; redraw(); };
  const axis = h("select", { ariaLabel: "Horizontal axis", onchange: () => { shared.by = axis.value; zoom(null); } }, Object.keys(AXES).map((name) => h("option", { value: name }, `by ${name}`)));
  const weight = h("output", {}, "0");
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => { shared.weight = Number(slider.value); weight.value = slider.value; redraw(); } });
  const controls = h("div", { className: "row", hidden: true }, axis, h("label", { className: "row" }, "Smoothing", slider, weight), h("span", { className: "dim" }, "drag to zoom, double click to reset"));
  const figures = h("div", { className: "charts" });
  return {
    controls, figures,
    draw(groups) {
      const all = groups.flatMap(([, lines]) => lines);
      for (const [name, isKnown] of [["time", ({ times }) => times?.xs.length > 1], ["step", ({ steps }) => steps > 0]]) {
        const option = [...axis.options].find(({ value }) => value === name);
        option.hidden = option.disabled = !all.every(isKnown);
        if (option.disabled && shared.by === name) axis.value = shared.by = "epoch";
      }
      for (const [title, lines] of groups) {
        if (!charts.has(title)) { charts.set(title, chart(title, shared, zoom)); figures.append(charts.get(title).figure); }
        charts.get(title).draw(lines);
      }
      controls.hidden = !charts.size;
    },
    close() { charts.forEach((figure) => figure.close()); },
  };
}

function chart(title, shared, zoom) {
  let plot = null, built = "", lines = [], logarithmic = false, wide = false;
  const hidden = new Set();
  const place = h("div", { className: "plot", tabIndex: 0, role: "group", ariaLabel: `${label(title)}: arrows read the values, + and - zoom, Escape resets`, onkeydown: byKey });
  const legend = h("div", { className: "legend" });
  const pressed = (text, about, act) => h("button", { type: "button", ariaPressed: "false", ariaLabel: `${about}: ${label(title)}`, title: about, onclick: ({ currentTarget }) => { currentTarget.ariaPressed = String(act()); redraw(); } }, text);
  const log = pressed("log", "Logarithmic scale", () => (logarithmic = !logarithmic));
  const enlarge = pressed("⤢", "Enlarge", () => { wide = !wide; figure.classList.toggle("wide", wide); return wide; });
  const save = h("button", { type: "button", ariaLabel: `Download as CSV: ${label(title)}`, title: "Download as CSV", onclick: download }, "CSV");
  const figure = h("figure", { className: "chart" }, h("figcaption", { className: "row" }, h("span", {}, label(title)), log, enlarge, save), place, legend);
  const size = () => ({ width: Math.max(place.clientWidth, 240), height: wide ? 440 : 220 });

  function build() {
    plot?.destroy();
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(name).trim();
    const [xLabel, , xText] = AXES[shared.by];
    const looks = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18 };
    const padded = (min, max) => (min === null ? [0, 1] : min === max ? [min - 0.5, max + 0.5] : [min, max]);
    const series = lines.flatMap(({ name }, index) => {
      const stroke = color(COLORS[index % COLORS.length]);
      const line = { stroke, width: 1.5, spanGaps: true, show: !hidden.has(name), dash: index >= COLORS.length || name === "epoch_loss" ? [6, 4] : undefined, points: { show: (u, at) => u.data[at].filter((y) => y !== null && y !== undefined).length < 40 } };
      return shared.weight ? [{ ...line, stroke: `${stroke}50`, points: { show: false } }, line] : [line];
    });
    plot = new uPlot({
      ...size(),
      legend: { show: false },
      scales: { x: { time: false, range: (_plot, min, max) => shared.zoom ?? padded(min, max) }, y: { distr: logarithmic ? 3 : 1 } },
      axes: [{ ...looks, label: xLabel(lines[0]), size: 34, values: (_plot, ticks) => ticks.map((x) => xText(x)), ...(shared.by === "time" ? { incrs: CLOCK, space: 80 } : {}) },
        { ...looks, label: label(title).length > 24 ? label(title).split(" ")[0] : label(title), size: 74, values: (_plot, ticks) => (logarithmic ? ticks.map((tick) => (tick === null ? "" : number(tick, title))) : tickTexts(ticks, title)), ...(title.endsWith("_bytes") ? { incrs: BINARY } : {}) }],
      series: [{}, ...series],
      // Another chart follows the cursor; the zoom of all is the board's.
      cursor: { y: false, sync: { key: shared.key, filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } }, drag: { setScale: false }, bind: { dblclick: () => () => zoom(null) } },
      hooks: {
        setCursor: [write],
        setSelect: [(u) => { const { left, width } = u.select; if (width > 3) { u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); zoom([left, left + width].map((at) => u.posToVal(at, "x"))); } }],
      },
    }, [[], ...series.map(() => [])], place);
  }

  function draw(newest) {
    lines = newest;
    const key = JSON.stringify([lines.map(({ name }) => name), logarithmic, wide, shared.by, Boolean(shared.weight), [...hidden]]);
    if (key !== built) { build(); built = key; }
    const tables = lines.flatMap((line) => {
      const xs = line.xs.map(AXES[shared.by][1](line));
      const ys = line.ys.map((y) => (y !== null && (!logarithmic || y > 0) ? y : null));
      return shared.weight ? [[xs, ys], [xs, smoothed(ys, shared.weight)]] : [[xs, ys]];
    });
    plot.setData(tables.length ? uPlot.join(tables) : [[]]);
    figure.setAttribute("aria-label", `${label(title)}: last ${lines.map(({ name, ys }) => `${label(name)} ${number(ys.at(-1), title)}`).join(", ")}`);
    write();
  }

  const redraw = () => { if (lines.length) draw(lines); };

  /** The values under the cursor, or the last ones. */
  function write() {
    const at = plot?.cursor.idx ?? null, each = shared.weight ? 2 : 1;
    const valueOf = (index) => {
      if (at === null) return lines[index].ys.at(-1);
      const [xs, row] = [plot.data[0], plot.data[(index + 1) * each]];
      let nearest; // lines have points at x of their own
      for (let far = 0; far < xs.length && nearest === undefined; far += 1) nearest = [row[at - far], row[at + far]].find((y) => typeof y === "number");
      return nearest ?? null;
    };
    const [xLabel, , xText] = AXES[shared.by];
    const texts = lines.map(({ name }, index) => `${label(name)}: ${number(valueOf(index), title)}`);
    const where = at === null || plot.data[0][at] === undefined ? "last" : `${shared.by === "time" ? "after" : xLabel(lines[0])} ${xText(plot.data[0][at])}`;
    if (legend.childElementCount !== lines.length + 1) {
      legend.replaceChildren(h("span", { className: "dim" }), ...lines.map(({ name }, index) => h("button", { type: "button", ariaPressed: "true", style: `--line-color: var(${COLORS[index % COLORS.length]})`, title: "Show or hide", onclick: ({ currentTarget }) => { if (!hidden.delete(name)) hidden.add(name); currentTarget.ariaPressed = String(!hidden.has(name)); redraw(); } })));
    }
    [where, ...texts].forEach((text, index) => { if (legend.children[index].textContent !== text) legend.children[index].textContent = text; });
    legend.ariaLive = document.activeElement === place ? "polite" : "off";
  }

  function byKey(event) {
    const xs = plot?.data[0] ?? [], move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const at = plot?.cursor.idx ?? xs.length - 1;
    if (move && xs.length) plot.setCursor({ left: plot.valToPos(xs[Math.min(Math.max(at + move, 0), xs.length - 1)], "x"), top: 10 }, true, true);
    else if (event.key === "Escape") zoom(null);
    else if (["+", "-"].includes(event.key) && xs.length) {
      const { min, max } = plot.scales.x, part = (max - min) * (event.key === "+" ? 0.25 : 1);
      zoom([xs[at] - part, xs[at] + part]);
    } else return;
    event.preventDefault();
  }

  function download() {
    const cell = (text) => `"${String(text ?? "").replace(/^[=+@-]/, "'$&").replaceAll('"', '""')}"`; // a spreadsheet runs formulas
    const rows = lines.flatMap((line) => line.xs.map((x, index) => [cell(line.name), x, line.steps > 0 ? AXES.step[1](line)(x) : "", line.times?.xs.length ? new Date(between(line.times, x) * 1000).toISOString() : "", line.ys[index] ?? ""].join()));
    const url = URL.createObjectURL(new Blob([[`name,${lines[0].unit ?? "epoch"},step,time,value`, ...rows, ""].join("\n")], { type: "text/csv" }));
    h("a", { href: url, download: `${title.replace(/[^\w.-]+/g, "_") || "curve"}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  const watcher = new ResizeObserver(() => plot?.setSize(size()));
  watcher.observe(place);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const recolor = () => { built = ""; redraw(); };
  dark.addEventListener("change", recolor);
  return { figure, draw, redraw, close() { watcher.disconnect(); dark.removeEventListener("change", recolor); plot?.destroy(); } };
}

/** The charts of curves by name: all losses share one, each other name has its own. */
export function grouped(names) {
  const last = ["samples_per_s", "step_s", "wait_s", "grad_norm", "memory_bytes"];
  const losses = names.filter((name) => /loss/i.test(name));
  const others = names.filter((name) => !losses.includes(name)).sort((a, b) => last.indexOf(a) - last.indexOf(b));
  return [...(losses.length ? [["loss", losses]] : []), ...others.map((name) => [name, [name]])];
}
