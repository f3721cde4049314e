// The list of jobs: filters, one row a job, and the choice of jobs to compare. What takes reading (why,
// progress, curve) is asked for the rows on the screen.

import { h, number, seconds, stateBadge, times, until } from "./dom.js";
import { follow, read } from "./server.js";

const ACTIVE = new Set(["Created", "Running", "Restarting", "Suspended", "Queued", "Deleting"]);
const STATES = { all: () => true, active: (job) => ACTIVE.has(job.state), failed: (job) => job.state === "Failed" || job.state === "Stopped", succeeded: (job) => job.state === "Succeeded" };
const EXPLAINED = new Set(["Failed", "Queued", "Suspended", "Restarting", "Deleting"]); // by the controller's message
const AGES = [["Today", 0], ["Last 7 days", 6], ["Older", Infinity]]; // days before today that a group goes back
const REFRESH_MS = 5000;
const SOON_MS = 200; // after rows were scrolled into view
const AGAIN_MS = 1000; // after rows that took too long
const FOCUSABLE = "a, button, input";
const MOST = 64; // rows that are read at once
const COLUMNS = { // what a column is sorted by
  Name: (job) => job.name,
  State: (job) => job.state,
  Progress: (job) => (job.state === "Succeeded" ? 1 : job.state === "Running" ? job.details?.progress?.fraction ?? -1 : -1), // of others it is known once they were on the screen
  Replicas: (job) => Object.values(job.counts).reduce((sum, count) => sum + count, 0),
  Age: (job) => -(seconds(job.created) ?? 0),
  Time: (job) => (seconds(job.started) === null ? -1 : until(job) - seconds(job.started)),
};
const filters = { text: "", state: "all", where: "", column: "Age", descending: false }; // kept while the page is open

export function jobList(view, { state }) {
  const jobs = new Map(), rows = new Map(), chosen = new Set();
  let loaded = false, stale = new Set(); // jobs of an earlier connection, until this one has sent its whole list

  const text = h("input", { type: "search", placeholder: "Filter by name, message, key=value  ( / )", ariaLabel: "Filter jobs", value: filters.text, oninput: () => { filters.text = text.value; filter(); } });
  const states = new Map(Object.keys(STATES).map((name) => [name, h("button", { type: "button", onclick: () => { filters.state = name; filter(); } }, name)]));
  const where = h("select", { ariaLabel: "Namespace", onchange: () => { filters.where = where.value; filter(); } }, h("option", { value: "" }, "all places"));
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare/${[...chosen].join(",")}`; } }, "Compare");
  const column = h("select", { ariaLabel: "Sort by", onchange: () => sort(column.value) }, Object.keys(COLUMNS).map((title) => h("option", {}, title)));
  const reverse = h("button", { type: "button", ariaLabel: "Reverse the order", onclick: () => sort(filters.column) }, "⇅");
  const counted = h("span", { className: "dim", role: "status" });
  const problems = h("div");
  const body = h("tbody");
  const groups = AGES.map(([title]) => h("tr", { className: "group" }, h("th", { scope: "rowgroup", colSpan: 7 }, title)));
  const headings = Object.keys(COLUMNS).map((title) => h("th", { scope: "col" }, h("button", { type: "button", onclick: () => sort(title) }, title)));
  const empty = h("p", { className: "empty" }, "Loading...");
  const command = h("code", {}, "k8sjob run train.py");
  const copy = h("button", { type: "button", onclick: () => navigator.clipboard.writeText(command.textContent).then(() => { copy.textContent = "Copied"; }) }, "Copy");
  const first = h("p", { className: "empty", hidden: true }, "No jobs yet. Start one: ", command, " ", copy);
  view.append(
    h("h1", {}, "Jobs"),
    h("div", { className: "row filters" }, text, h("div", { className: "row states", role: "group", ariaLabel: "State" }, [...states.values()]), where, h("div", { className: "row sorting" }, column, reverse), compare, counted),
    problems,
    h("table", { className: "jobs", ariaLabel: "Jobs" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { className: "hidden" }, "Compare")), headings)),
      body),
    empty, first);
  const onScreen = new Set(); // keys
  const observer = new IntersectionObserver((changes) => {
    for (const { target, isIntersecting } of changes) onScreen[isIntersecting ? "add" : "delete"](target.dataset.key);
    lookIn(SOON_MS);
  });
  let timer = 0, reading = false, isLive = false;
  order();

  function row(job) {
    const clock = times(job);
    const box = h("input", { type: "checkbox", ariaLabel: `Compare ${job.name}`, checked: chosen.has(job.key), onchange: () => choose(job.key, box.checked) });
    const counts = Object.entries(job.counts).map(([what, count]) => `${count} ${what}`).join(", ");
    return h("tr", { "data-key": job.key },
      h("td", {}, box),
      h("td", { className: "name" },
        h("a", { href: `#/job/${encodeURIComponent(job.key)}` }, job.name), " ",
        h("span", { className: "dim" }, job.place.startsWith("record") ? "record" : job.place === "local" ? `local @${job.uid.slice(0, 8)}` : job.namespace),
        job.labels.length > 0 && h("div", { className: "labels" }, job.labels.map((label) => h("button", { type: "button", title: "Filter by this label", onclick: () => { text.value = filters.text = label; filter(); } }, label))),
        h("div", { className: "dim message" }, note(job))),
      h("td", {}, stateBadge(job.state)),
      h("td", { className: "progress" }, progress(job)),
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
    const about = [job.name, job.namespace, job.state, job.kind, job.reason, job.message, job.details?.why].join(" ").toLowerCase();
    const labelled = (word) => job.labels.some((label) => label.toLowerCase() === word);
    return (!filters.where || job.namespace === filters.where) && words.every((word) => labelled(word) || about.includes(word));
  }

  function filter() {
    const fitting = [...jobs.values()].filter(fits), visible = new Set(fitting.filter(STATES[filters.state]));
    for (const [name, button] of states) {
      button.textContent = `${name} ${fitting.filter(STATES[name]).length}`;
      button.ariaPressed = String(name === filters.state);
    }
    let shown = 0;
    const ages = new Set();
    for (const [key, job] of jobs) {
      const fit = visible.has(job);
      rows.get(key).hidden = !fit;
      shown += fit;
      if (fit) ages.add(groups[age(job)]);
    }
    for (const group of groups) group.hidden = ages.size < 2 || !ages.has(group);
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
    column.value = filters.column;
    const by = COLUMNS[filters.column], sign = filters.descending ? -1 : 1;
    const ascending = (a, b) => (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0);
    const sorted = [...jobs.values()].sort((a, b) => sign * ascending(a, b) || COLUMNS.Age(a) - COLUMNS.Age(b));
    const grouped = filters.column === "Age" && !filters.descending;
    const elements = [...new Set(sorted.flatMap((job) => [grouped && groups[age(job)], rows.get(job.key)]))].filter(Boolean);
    if (elements.every((element, index) => element === body.children[index])) return; // a moved row loses the focus
    const focused = document.activeElement;
    body.replaceChildren(...elements);
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
      onScreen.delete(key);
      rows.get(key)?.remove();
      rows.delete(key);
      jobs.delete(key);
      choose(key, false);
    }
    for (const job of changed) {
      const details = jobs.get(job.key)?.details; // until they are read again
      if (details?.state === job.state) job.details = details;
      const made = row(job), before = rows.get(job.key);
      const focused = before ? [...before.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement) : -1;
      jobs.set(job.key, job);
      rows.set(job.key, made);
      observer.observe(made);
      if (before) observer.unobserve(before);
      if (before) before.replaceWith(made);
      made.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
    }
    if (changed.length) order();
    problems.replaceChildren(...Object.entries(why).map(([place, message]) => h("div", { className: "notice error" }, `${place}: ${message}`)));
    places();
    filter();
  }

  function lookIn(ms) {
    clearTimeout(timer);
    timer = setTimeout(look, ms);
  }

  /** Read the rows on the screen, and the newest running jobs, which are sorted by their progress. */
  async function look() {
    if (reading || !isLive || document.hidden) return lookIn(reading ? SOON_MS : REFRESH_MS);
    const running = [...jobs.values()].filter((job) => job.state === "Running").sort((a, b) => COLUMNS.Age(a) - COLUMNS.Age(b));
    const asked = [...new Set([...onScreen, ...running.map((job) => job.key)])].slice(0, MOST);
    const query = asked.map((key) => `job=${encodeURIComponent(key)}`).join("&");
    reading = true;
    const answers = query ? await read(`/api/rows?${query}`).catch(() => null) : {}; // the stream says why there is none
    reading = false;
    if (!body.isConnected) return;
    for (const key of asked) {
      const job = jobs.get(key), details = answers?.[key]; // the job may have gone, or changed, meanwhile
      if (!job || details?.state !== job.state || JSON.stringify(details) === JSON.stringify(job.details)) continue;
      job.details = details;
      rows.get(key).querySelector(".message").textContent = note(job);
      rows.get(key).querySelector(".progress").replaceChildren(...progress(job));
    }
    if (filters.column === "Progress") order();
    filter();
    lookIn(answers && asked.some((key) => jobs.has(key) && !answers[key]) ? AGAIN_MS : REFRESH_MS);
  }

  const stream = follow("/api/events", {
    open() { stale = new Set(jobs.keys()); },
    jobs: update,
    state(now) {
      isLive = now === "live";
      state(now);
    },
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
  return { close() { stream.close(); clearTimeout(timer); observer.disconnect(); clearInterval(clock); removeEventListener("keydown", keys); } };
}

/** The index of the group that a job belongs to by its age. */
function age(job) {
  const today = new Date().setHours(0, 0, 0, 0) / 1000;
  return AGES.findIndex(([, days]) => seconds(job.created) >= today - days * 86400);
}

const note = (job) => job.details?.why || (EXPLAINED.has(job.state) ? job.message : "");

function progress(job) {
  const { progress: now, curve } = job.details ?? {};
  return [curve?.length > 1 && sparkline(curve),
    typeof now?.fraction === "number" && h("progress", { max: 1, value: now.fraction, ariaLabel: `${Math.round(now.fraction * 100)} % done` }),
    now && h("span", {}, now.text)].filter(Boolean);
}

function sparkline(curve) {
  const [width, height] = [60, 18];
  const scale = (values, size) => {
    const low = Math.min(...values) / 2, range = Math.max(...values) / 2 - low; // of 1e308 and -1e308, too
    return values.map((value) => (range ? ((value / 2 - low) / range) * size : size / 2).toFixed(1));
  };
  const values = curve.map(([, value]) => value), x = scale(curve.map(([at]) => at), width), y = scale(values.map((value) => -value), height);
  const [svg, line] = ["svg", "polyline"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  const attributes = { class: "sparkline", viewBox: `-1 -1 ${width + 2} ${height + 2}`, role: "img", "aria-label": `loss from ${number(values[0])} to ${number(values.at(-1))}` };
  for (const [name, value] of Object.entries(attributes)) svg.setAttribute(name, value);
  line.setAttribute("points", x.map((at, index) => `${at},${y[index]}`).join(" "));
  svg.append(line);
  return svg;
}
