// The attempts of a job on one axis of time: the phases of each as a bar, what happened in it as marks.

import { counted, duration, h, moment } from "./dom.js";

const SHOWN = 10; // attempts

/** An element that covers a part of the axis; of the page's own styles only its place is set here. */
function placed(element, [from, to], begin, end) {
  element.style.left = `${(100 * (begin - from)) / (to - from)}%`;
  element.style.width = `${(100 * (end - begin)) / (to - from)}%`;
  return element;
}

function bar({ segments, marks }, axis) {
  const parts = segments.map(({ phase, begin, end, waits }) => {
    const wait = h("span", { className: "waits" });
    wait.style.height = `${100 * waits}%`;
    return placed(h("span", { className: `phase phase-${phase.replace(" ", "-")}`, title: `${phase} ${duration(end - begin)}, from ${moment(begin)}` }, waits ? wait : null), axis, begin, end);
  });
  const signs = marks.map(({ kind, time, text }) => placed(h("span", { className: `mark mark-${kind}`, title: `${moment(time)} ${kind} ${text}` }), axis, Math.max(time, axis[0]), Math.max(time, axis[0])));
  return h("div", { className: "attempt", ariaHidden: "true" }, parts, signs);
}

/** An attempt in words: how long each phase took, in the order in which they came, and each fault. */
function words({ segments, marks }) {
  const spent = new Map();
  for (const { phase, begin, end, waits } of segments) {
    const [seconds, waited] = spent.get(phase) ?? [0, 0];
    spent.set(phase, [seconds + end - begin, waited + (end - begin) * waits]);
  }
  const phases = [...spent].map(([phase, [seconds, waited]]) => h("span", { className: `key phase-${phase.replace(" ", "-")}` }, `${phase} ${duration(seconds)}`, waited / seconds >= 0.01 ? ` (${Math.round((100 * waited) / seconds)} % waiting)` : ""));
  const checkpoints = marks.filter(({ kind }) => kind === "checkpoint").length;
  const told = marks.filter(({ kind }) => kind !== "checkpoint" && kind !== "warning").map(({ kind, time, text }) => h("span", { className: `key mark-${kind}` }, `${moment(time)} ${kind} ${text}`));
  return h("div", { className: "row" }, phases, checkpoints ? h("span", { className: "key mark-checkpoint" }, counted(checkpoints, "checkpoint")) : null, told);
}

/** @param attempts as the server has them, with at least one segment. */
export function timeline(attempts) {
  const shown = attempts.slice(-SHOWN), segments = shown.flatMap((attempt) => attempt.segments);
  const begin = Math.min(...segments.map((segment) => segment.begin)), end = Math.max(...segments.map((segment) => segment.end));
  const axis = [begin, Math.max(end, begin + 1)], earlier = attempts.length - shown.length;
  return [h("h2", {}, "Timeline"), earlier ? h("p", { className: "dim" }, `${counted(earlier, "earlier attempt")} not shown`) : "",
    h("ol", { className: "attempts", start: earlier + 1 }, shown.map((attempt) => h("li", {}, bar(attempt, axis), words(attempt)))),
    h("div", { className: "row axis dim", ariaHidden: "true" }, axis.map((time) => h("span", {}, moment(time))))];
}
