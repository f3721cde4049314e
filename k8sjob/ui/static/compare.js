// Jobs side by side: their curves over each other, and what differs between them.

import { board, direction, drawn, grouped, MOST_CURVES } from "./chart.js";
import { duration, h, number, seconds, table, until } from "./dom.js";
import { jobPath, read } from "./server.js";

export function compareView(view, keys, { state, place }) {
  const charts = board();
  let closed = false;
  place("comparison");
  view.append(h("h1", {}, "Comparison"), h("p", { className: "empty" }, "Loading..."));

  async function load() {
    const jobs = await Promise.all(keys.map(async (key) => {
      const [facts, training] = await Promise.all([read(jobPath(key, "status")), read(jobPath(key, "history"))]);
      return { key, facts, ...training };
    }));
    const { manifests, settings } = await read(`/api/compare?${keys.map((key) => `job=${encodeURIComponent(key)}`).join("&")}`);
    if (closed) return;
    const labels = jobs.map(({ facts }) => `${facts.name}@${facts.uid.slice(0, 8)}`);
    const line = ({ curves, steps, counts_epochs: counts }, name, index) => {
      const [xs, ys] = curves[name], times = Object.hasOwn(curves, "time") ? { xs: curves.time[0], ys: curves.time[1] } : null;
      return { name: labels[index], xs, ys, times, steps, unit: counts ? "epoch" : "number" };
    };
    const names = namesOf(jobs, "curves").filter((name) => name !== "time").slice(0, MOST_CURVES);
    const groups = grouped(names).flatMap(([, group]) => group).map((name) => [name, jobs.flatMap((job, index) => (Object.hasOwn(job.curves, name) ? [line(job, name, index)] : []))]);
    charts.draw(groups.filter(([, lines]) => lines.some(drawn)));
    const without = labels.filter((_, index) => !Object.values(jobs[index].curves).some(([xs]) => xs.length > 1));
    view.replaceChildren(h("h1", {}, "Comparison"), facts(jobs, labels, settings), without.length ? h("p", {}, `Without curves: ${without.join(", ")}`) : "", charts.controls, charts.figures, differences(manifests, labels));
  }

  load().catch((error) => { if (!closed) { state(error.message); view.replaceChildren(h("p", { className: "empty" }, error.message)); } });
  return { close() { closed = true; charts.close(); } };
}

const namesOf = (jobs, part) => [...new Set(jobs.flatMap((job) => Object.keys(job[part])))];

/** The index of the best of some numbers by what their name says; -1 where it says nothing. */
function best(name, values) {
  const sign = direction(name);
  const finite = values.filter((one) => typeof one === "number");
  return sign && new Set(finite).size > 1 ? values.indexOf(Math.max(...finite.map((one) => sign * one)) * sign) : -1;
}

function facts(jobs, labels, settings) {
  const layer = (job, kind) => job.facts.origin?.layers.find((one) => one.kind === kind)?.digest;
  const ran = ({ facts: one }) => (one.started ? duration(until(one) - seconds(one.started)) : "");
  const setting = (name) => [name, (_job, index) => settings[index][name] ?? ""];
  const chosen = [...new Set(settings.flatMap(Object.keys))].filter((name) => name === "run.args" || new Set(settings.map((one) => one[name])).size > 1);
  const rows = [
    ...chosen.filter((name) => name !== "name").map(setting),
    ["state", (job) => job.facts.state], ["ran for", ran], ["image", (job) => job.facts.image], ["code", (job) => layer(job, "code")], ["dependencies", (job) => layer(job, "dependencies")],
    ["base", (job) => job.facts.origin?.base], ["replicas", (job) => job.facts.names.length],
    ...["world_size", "strategy", "backend", "device"].map((name) => [name, (job) => job.group[name]]),
    ...namesOf(jobs, "metrics").map((name) => [name, (job) => (Object.hasOwn(job.metrics, name) ? number(job.metrics[name], name) : ""), best(name, jobs.map((job) => job.metrics[name]))]),
  ];
  const cells = rows.map(([name, value, first]) => [name, jobs.map((job, index) => String(value(job, index) ?? "")), first]).filter(([, values]) => values.some(Boolean));
  return table(["", ...labels], cells.map(([name, values, first = -1]) => {
    const differ = new Set(values).size > 1;
    return [differ ? h("b", {}, `${name} ≠`) : name, ...values.map((text, index) => (index === first ? h("b", { className: "best" }, `${text} ★ best`) : text))];
  }), { label: "What differs" });
}

function differences(manifests, labels) {
  return h("details", {}, h("summary", {}, `Differences of the manifests from ${labels[0]}`), manifests.map((lines, index) => h("section", {}, h("h2", {}, labels[index + 1]),
    lines.length ? h("pre", { className: "diff", tabIndex: 0 }, lines.map((line) => h("div", { className: { "+": "added", "-": "removed", "@": "place" }[line[0]] ?? "" }, line))) : h("p", {}, "The same, except for the name."))));
}
