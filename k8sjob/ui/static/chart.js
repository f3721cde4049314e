// Curves, drawn by uPlot: several lines over one axis of epochs.

import { h, number } from "./dom.js";

const COLORS = ["--blue", "--orange", "--green", "--purple", "--red", "--teal", "--pink", "--brown"];
const HEIGHT = 200;

/** Names whose curves are drawn: thousands of figures would hang the browser. */
export const MOST_CURVES = 60;

const LABELS = new Map([["samples_per_s", "samples/s"], ["step_s", "seconds a step"], ["wait_s", "seconds a step lost to the slowest rank"], ["grad_norm", "gradient norm"], ["memory_bytes", "memory, peak"]]);

/** What a number of the runtime's is called on the page. */
export const label = (name) => LABELS.get(name) ?? name;

/** Whether a line {xs, ys} has anything to draw. */
export const drawn = ({ xs, ys }) => xs.length > 1 && ys.some((y) => y !== null);

/**
 * A chart that is drawn again with `draw(lines)`; a line is {name, xs, ys}.
 *
 * @param title what stands above it, and for readers of the page who do not see it with the last values.
 */
export function chart(title, xLabel = "epoch") {
  const place = h("div", { className: "plot" });
  const caption = h("figcaption", {}, label(title));
  const figure = h("figure", { className: "chart" }, caption, place);
  let plot = null, made = "", logarithmic = false, last = [];

  function make(names) {
    plot?.destroy();
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(name).trim();
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    plot = new uPlot({
      width: Math.max(place.clientWidth, 240), height: HEIGHT,
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
      axes: [axis, { ...axis, size: 74, values: (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, title))) }],
      series: [{ label: xLabel, value: (_plot, x) => (x === null ? "" : number(x)) },
        ...names.map((name, index) => ({
          label: label(name), stroke: color(COLORS[index % COLORS.length]), width: 1.5, spanGaps: true,
          dash: index >= COLORS.length ? [6, 4] : undefined,
          points: { show: (u, series) => u.data[series].filter((y) => y !== null && y !== undefined).length < 40 },
          value: (_plot, y) => (y === null ? "" : number(y, title)),
        }))],
      cursor: { y: false },
    }, [[], ...names.map(() => [])], place);
  }

  function draw(lines) {
    last = lines;
    const names = lines.map((line) => line.name);
    const key = JSON.stringify([names, logarithmic]);
    if (key !== made) { make(names); made = key; }
    const usable = (y) => y !== null && (!logarithmic || y > 0);
    const tables = lines.map(({ xs, ys }) => [xs, ys.map((y) => (usable(y) ? y : null))]);
    plot.setData(tables.length ? uPlot.join(tables) : [[]]);
    const ends = lines.map(({ name, ys }) => `${label(name)} ${number(ys.at(-1), title)}`);
    figure.setAttribute("aria-label", `${label(title)}: last ${ends.join(", ")}`);
  }

  const watcher = new ResizeObserver(() => plot?.setSize({ width: Math.max(place.clientWidth, 240), height: HEIGHT }));
  watcher.observe(place);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => { made = ""; draw(last); };
  dark.addEventListener("change", redraw);
  return {
    figure, draw,
    logarithmic(yes) { logarithmic = yes; if (last.length) draw(last); },
    close() { watcher.disconnect(); dark.removeEventListener("change", redraw); plot?.destroy(); },
  };
}

/** The charts of curves by name: all losses share one, each other name has its own. */
export function grouped(names) {
  const last = ["samples_per_s", "step_s", "wait_s", "grad_norm", "memory_bytes"];
  const losses = names.filter((name) => /loss/i.test(name));
  const others = names.filter((name) => !losses.includes(name)).sort((a, b) => last.indexOf(a) - last.indexOf(b));
  return [...(losses.length ? [["loss", losses]] : []), ...others.map((name) => [name, [name]])];
}
