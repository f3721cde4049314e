// The list of jobs: filters, one row a job, and the choice of jobs to compare.

import { h, now, seconds, stateBadge, times } from "./dom.js";
import { follow } from "./server.js";

const ACTIVE = new Set(["Created", "Running", "Restarting", "Suspended", "Queued", "Deleting"]);
const STATES = { all: () => true, active: (job) => ACTIVE.has(job.state), failed: (job) => job.state === "Failed" || job.state === "Stopped", succeeded: (job) => job.state === "Succeeded" };
const REFRESH_MS = 5000;
const COLUMNS = { // what a column is sorted by
  Name: (job) => job.name,
  State: (job) => job.state,
  Progress: (job) => job.progress?.fraction ?? -1,
  Replicas: (job) => Object.values(job.counts).reduce((sum, count) => sum + count, 0),
  Age: (job) => -(seconds(job.created) ?? 0),
  Time: (job) => (seconds(job.started) === null ? -1 : (seconds(job.finished) ?? now(job)) - seconds(job.started)),
};
const filters = { text: "", state: "all", where: "", column: "Age", descending: false }; // kept while the page is open

export function jobList(view, { state }) {
  const jobs = new Map(), rows = new Map(), chosen = new Set();
  let loaded = false, stale = new Set(); // jobs of an earlier connection, until this one has sent its whole list

  const text = h("input", { type: "search", placeholder: "Filter by name, state, message  ( / )", ariaLabel: "Filter jobs", value: filters.text, oninput: () => { filters.text = text.value; filter(); } });
  const states = new Map(Object.keys(STATES).map((name) => [name, h("button", { type: "button", onclick: () => { filters.state = name; filter(); } }, name)]));
  const where = h("select", { ariaLabel: "Namespace", onchange: () => { filters.where = where.value; filter(); } }, h("option", { value: "" }, "all places"));
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare/${[...chosen].join(",")}`; } }, "Compare");
  const counted = h("span", { className: "dim", role: "status" });
  const problems = h("div");
  const body = h("tbody");
  const headings = Object.keys(COLUMNS).map((title) => h("th", { scope: "col" }, h("button", { type: "button", onclick: () => sort(title) }, title)));
  const empty = h("p", { className: "empty" }, "Loading...");
  const command = h("code", {}, "k8sjob run train.py");
  const copy = h("button", { type: "button", onclick: () => navigator.clipboard.writeText(command.textContent).then(() => { copy.textContent = "Copied"; }) }, "Copy");
  const first = h("p", { className: "empty", hidden: true }, "No jobs yet. Start one: ", command, " ", copy);
  view.append(
    h("h1", {}, "Jobs"),
    h("div", { className: "row filters" }, text, h("div", { className: "row states", role: "group", ariaLabel: "State" }, [...states.values()]), where, compare, counted),
    problems,
    h("table", { className: "jobs", ariaLabel: "Jobs" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { className: "hidden" }, "Compare")), headings)),
      body),
    empty, first);
  order();

  function row(job) {
    const clock = times(job);
    const box = h("input", { type: "checkbox", ariaLabel: `Compare ${job.name}`, checked: chosen.has(job.key), onchange: () => choose(job.key, box.checked) });
    const note = ["Failed", "Queued", "Suspended", "Restarting", "Deleting"].includes(job.state) ? job.message : "";
    const counts = Object.entries(job.counts).map(([what, count]) => `${count} ${what}`).join(", ");
    return h("tr", {},
      h("td", {}, box),
      h("td", { className: "name" },
        h("a", { href: `#/job/${encodeURIComponent(job.key)}` }, job.name), " ",
        h("span", { className: "dim" }, job.place.startsWith("record") ? "record" : job.place === "local" ? `local @${job.uid.slice(0, 8)}` : job.namespace),
        note && h("div", { className: "dim message" }, note)),
      h("td", {}, stateBadge(job.state)),
      h("td", { className: "progress" }, progress(job.progress)),
      h("td", { className: "counts" }, counts),
      h("td", { className: "age", title: job.created ?? "" }, clock.age),
      h("td", { className: "time" }, clock.time));
  }

  function choose(key, yes) {
    if (yes) chosen.add(key); else chosen.delete(key);
    compare.disabled = chosen.size < 2 || chosen.size > 10;
  }

  function fits(job) {
    const words = filters.text.toLowerCase().split(/\s+/).filter(Boolean);
    const about = [job.name, job.namespace, job.state, job.kind, job.reason, job.message].join(" ").toLowerCase();
    return (!filters.where || job.namespace === filters.where) && words.every((word) => about.includes(word));
  }

  function filter() {
    const fitting = [...jobs.values()].filter(fits), visible = new Set(fitting.filter(STATES[filters.state]));
    for (const [name, button] of states) {
      button.textContent = `${name} ${fitting.filter(STATES[name]).length}`;
      button.ariaPressed = String(name === filters.state);
    }
    let shown = 0;
    for (const [key, job] of jobs) {
      const fit = visible.has(job);
      rows.get(key).hidden = !fit;
      shown += fit;
    }
    const all = `${jobs.size} ${jobs.size === 1 ? "job" : "jobs"}`;
    counted.textContent = shown === jobs.size ? all : `${shown} of ${all}`;
    first.hidden = !loaded || jobs.size > 0;
    empty.hidden = shown > 0 || !first.hidden;
    empty.textContent = loaded ? "No job fits the filter." : "Loading...";
  }

  function sort(column) {
    filters.descending = column === filters.column && !filters.descending;
    filters.column = column;
    order();
  }

  function order() {
    for (const heading of headings) {
      heading.ariaSort = heading.textContent !== filters.column ? "none" : filters.descending ? "descending" : "ascending";
    }
    const by = COLUMNS[filters.column], sign = filters.descending ? -1 : 1;
    const ascending = (a, b) => (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0);
    const sorted = [...jobs.values()].sort((a, b) => sign * ascending(a, b) || COLUMNS.Age(a) - COLUMNS.Age(b)).map((job) => rows.get(job.key));
    if (sorted.every((element, index) => element === body.children[index])) return; // a moved row loses the focus
    const focused = document.activeElement;
    body.replaceChildren(...sorted);
    if (focused?.isConnected) focused.focus({ preventScroll: true });
  }

  function places() {
    const names = [...new Set([...jobs.values()].map((job) => job.namespace))].sort();
    if (filters.where && !names.includes(filters.where)) names.push(filters.where);
    if ([...where.options].slice(1).map((one) => one.value).join() === names.join()) return;
    where.replaceChildren(h("option", { value: "" }, "all places"), ...names.map((name) => h("option", { value: name, selected: name === filters.where }, name)));
  }

  function update({ jobs: changed, gone, problems: why, unread }) {
    for (const job of changed) stale.delete(job.key);
    loaded = !unread.length;
    if (loaded) [gone, stale] = [[...gone, ...stale], new Set()];
    for (const key of gone) {
      rows.get(key)?.remove();
      rows.delete(key);
      jobs.delete(key);
      choose(key, false);
    }
    for (const job of changed) {
      const made = row(job), before = rows.get(job.key);
      const focused = before?.contains(document.activeElement) ? document.activeElement.tagName : "";
      jobs.set(job.key, job);
      rows.set(job.key, made);
      if (before) before.replaceWith(made);
      if (focused) made.querySelector(focused).focus({ preventScroll: true });
    }
    if (changed.length) order();
    problems.replaceChildren(...Object.entries(why).map(([place, message]) => h("div", { className: "notice error" }, `${place}: ${message}`)));
    places();
    filter();
  }

  const stream = follow("/api/events", {
    open() { stale = new Set(jobs.keys()); },
    jobs: update,
    state,
  });
  const clock = setInterval(() => {
    for (const [key, job] of jobs) {
      if (rows.get(key).hidden) continue;
      const now = times(job);
      rows.get(key).querySelector(".age").textContent = now.age;
      rows.get(key).querySelector(".time").textContent = now.time;
    }
  }, REFRESH_MS);
  const keys = (event) => {
    if (event.key === "/" && event.target !== text) { event.preventDefault(); text.focus(); }
  };
  addEventListener("keydown", keys);
  return { close() { stream.close(); clearInterval(clock); removeEventListener("keydown", keys); } };
}

function progress(now) {
  if (!now) return null;
  return [now.fraction === null ? null : h("progress", { max: 1, value: now.fraction, ariaLabel: `${Math.round(now.fraction * 100)} % done` }),
    h("span", {}, now.text)];
}
