// Jobs side by side: their curves over each other, and what differs between them.

import { chart, drawn, grouped, MOST_CURVES } from "./chart.js";
import { duration, h, now, number, seconds, table } from "./dom.js";
import { jobPath, read } from "./server.js";

export function compareView(view, keys, { state, place }) {
  const charts = [];
  let closed = false;
  place("comparison");
  view.append(h("h1", {}, "Comparison"), h("p", { className: "empty" }, "Loading..."));

  async function load() {
    const jobs = await Promise.all(keys.map(async (key) => {
      const [facts, training] = await Promise.all([read(jobPath(key, "status")), read(jobPath(key, "history"))]);
      return { key, facts, ...training };
    }));
    const { manifests } = await read(`/api/compare?${keys.map((key) => `job=${encodeURIComponent(key)}`).join("&")}`);
    if (closed) return;
    const labels = jobs.map(({ facts }) => `${facts.name}@${facts.uid.slice(0, 8)}`);
    const figures = h("div", { className: "charts" });
    const scale = h("label", {}, h("input", { type: "checkbox", onchange: (event) => charts.forEach((one) => one.logarithmic(event.target.checked)) }), " log scale");
    view.replaceChildren(h("h1", {}, "Comparison"), facts(jobs, labels), h("div", { className: "row" }, scale), figures, ...differences(manifests, labels));
    const names = namesOf(jobs, "curves").slice(0, MOST_CURVES);
    for (const [, group] of grouped(names)) for (const name of group) {
      const lines = jobs.flatMap((job, index) => (Object.hasOwn(job.curves, name) ? [{ name: labels[index], xs: job.curves[name][0], ys: job.curves[name][1] }] : []));
      if (!lines.some(drawn)) continue;
      const made = chart(name);
      charts.push(made);
      figures.append(made.figure);
      made.draw(lines);
    }
  }

  load().catch((error) => { if (!closed) { state(error.message); view.replaceChildren(h("p", { className: "empty" }, error.message)); } });
  return { close() { closed = true; charts.forEach((one) => one.close()); } };
}

const namesOf = (jobs, part) => [...new Set(jobs.flatMap((job) => Object.keys(job[part])))];

function facts(jobs, labels) {
  const layer = (job, kind) => job.facts.origin?.layers.find((one) => one.kind === kind)?.digest;
  const ran = ({ facts: one }) => (one.started ? duration((seconds(one.finished) ?? now(one)) - seconds(one.started)) : "");
  const rows = [
    ["state", (job) => job.facts.state], ["ran for", ran], ["image", (job) => job.facts.image], ["code", (job) => layer(job, "code")], ["dependencies", (job) => layer(job, "dependencies")],
    ["base", (job) => job.facts.origin?.base], ["replicas", (job) => job.facts.names.length],
    ...["world_size", "strategy", "backend", "device"].map((name) => [name, (job) => job.group[name]]),
    ...namesOf(jobs, "metrics").map((name) => [name, (job) => (Object.hasOwn(job.metrics, name) ? number(job.metrics[name], name) : "")]),
  ];
  const cells = rows.map(([name, value]) => [name, jobs.map((job) => String(value(job) ?? ""))]).filter(([, values]) => values.some(Boolean));
  return table(["", ...labels], cells.map(([name, values]) => {
    const differ = new Set(values).size > 1;
    return [differ ? h("b", {}, `${name} ≠`) : name, ...values];
  }), { label: "What differs" });
}

function differences(manifests, labels) {
  return manifests.map((lines, index) => h("section", {}, h("h2", {}, `Manifest: ${labels[0]} and ${labels[index + 1]}`),
    lines.length ? h("pre", { className: "diff", tabIndex: 0 }, lines.map((line) => h("div", { className: { "+": "added", "-": "removed", "@": "place" }[line[0]] ?? "" }, line))) : h("p", {}, "Their manifests are the same, except for the name.")));
}
