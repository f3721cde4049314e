// One job: its state, why it is in trouble, its training, replicas, output, and how it was made.

import { board, drawn, grouped, label, MOST_CURVES } from "./chart.js";
import { confirmed, duration, h, notice, now, number, stateBadge, table } from "./dom.js";
import { logView } from "./logs.js";
import { change, follow, jobPath, read } from "./server.js";

const DRAW_MS = 500;
const WHY_MS = 3000;
const STARTS = ["Created", "Running", "Restarting"];
const ENDED = ["Succeeded", "Failed", "Stopped", "Deleted"];
const ACTIONS = {
  suspend: ["Suspend", "Its replicas are stopped after a checkpoint; the job stays.", (s) => STARTS.includes(s)],
  resume: ["Resume", "Its replicas start again, from the newest checkpoint.", (s) => s === "Suspended"],
  again: ["Submit again", "A new run of the same job starts; in a cluster the job of this name is replaced.", (s) => ["Failed", "Succeeded", "Stopped"].includes(s)],
  delete: ["Delete", "It is stopped and removed with its output; its checkpoints remain.", (s) => s !== "Deleted"],
};

export function jobView(view, key, { state, place }) {
  let job = null, facts = null, training = null, curves = new Map(), replicas = new Map(), explained = "";
  let drawTimer = 0, whyTimer = 0, closed = false;
  const charts = board();
  const head = h("div", { className: "row head" }), why = h("section", { className: "why", ariaLive: "polite" });
  const numbers = h("div", { className: "tiles" });
  const parts = h("section"), events = h("ul", { className: "events" });
  const many = h("p", { className: "dim", hidden: true }, `The curves of the first ${MOST_CURVES} names are shown.`);
  const output = logView(key);
  const details = h("section", {}, ...[["Time to the first step", "timing", timing], ["Where the time went", "usage", usage], ["Manifest", "manifest", (data) => h("pre", {}, data.text)], ["Image", "status", image]].map(([title, part, make]) => folded(title, part, make)));
  view.append(head, why, numbers, charts.controls, many, charts.figures, parts, output.section, h("section", {}, h("h2", {}, "Events"), events), details);

  // --- what the server sends ---------------------------------------------------------------------

  function reset() {
    [training, curves, replicas] = [null, new Map(), new Map()];
    output.clear();
    events.replaceChildren();
  }

  function take(news) {
    if (news.job.state) job = news.job;
    training = news.training;
    for (const [name, one] of Object.entries(news.replicas)) replicas.set(name, one);
    for (const [name, [remain, xs, ys]] of Object.entries(news.points)) {
      if (!curves.has(name)) curves.set(name, { name, xs: [], ys: [] });
      curves.get(name).xs.splice(remain, Infinity, ...xs);
      curves.get(name).ys.splice(remain, Infinity, ...ys);
    }
    for (const { kind, time, replica, text } of news.events) {
      if (kind === "checkpoint" && events.firstElementChild?.dataset.kind === kind) events.firstElementChild.remove();
      events.prepend(h("li", { "data-kind": kind }, h("time", {}, new Date(time * 1000).toLocaleTimeString([], { hour12: false })), " ", replica && h("b", {}, `${replica} `), text));
    }
    while (events.childElementCount > 200) events.lastElementChild.remove();
    if (news.lines.length) output.add(news.lines);
    if (Object.keys(news.replicas).length || news.events.some(({ kind }) => kind === "job")) look();
    if (!drawTimer) drawTimer = setTimeout(draw, DRAW_MS);
  }

  /** Ask why, soon: what has changed may have a reason. */
  function look() {
    if (!whyTimer) whyTimer = setTimeout(explain, job ? WHY_MS : 0);
  }

  async function explain() {
    whyTimer = 0;
    try {
      const found = await read(jobPath(key, "why"));
      const text = JSON.stringify(found);
      if (closed || text === explained) return; // a screen reader reads again what is replaced
      explained = text;
      why.replaceChildren(...found.map((one, index) => h("div", { className: index ? "cause" : "cause first" },
        h("p", {}, h("b", {}, "Why "), one.message), h("p", {}, h("b", {}, "Next "), one.next_step))));
    } catch (error) {
      if (!closed && error.status === 502) notice(error.message); // the stream tells of all others
    }
  }

  // --- what is shown -----------------------------------------------------------------------------

  function draw() {
    drawTimer = 0;
    if (closed) return;
    heading();
    tiles();
    const { steps, counts_epochs: counts } = training ?? {};
    const line = (name) => ({ ...curves.get(name), times: curves.get("time"), steps: counts ? steps : 0, unit: counts ? "epoch" : "number" });
    charts.draw(grouped([...curves.keys()].filter((name) => name !== "time" && drawn(curves.get(name)))).map(([title, names]) => [title, names.map(line)]));
    many.hidden = curves.size < MOST_CURVES;
    const failed = ([, one]) => one.phase === "Failed";
    const rows = [...replicas].sort((a, b) => failed(b) - failed(a)).map(([name, one]) => [name, one.phase, one.reason, one.node, one.restarts || "", one.exit_code ?? "", one.message]);
    if (rows.length) parts.replaceChildren(h("h2", {}, "Replicas"), table(["Replica", "Phase", "Reason", "Node", "Restarts", "Exit code", "Message"], rows, { label: "Replicas" }));
  }

  function heading() {
    if (!facts) return;
    const current = job?.state ?? facts.state;
    const span = job ? [job.created, job.started, job.finished] : [null, null, null];
    const ran = span[1] ? `${span[2] ? "ran" : "running"} for ${duration((span[2] ?? now(facts)) - span[1])}` : "";
    const note = job?.message && current !== "Succeeded" ? h("p", { className: "dim message" }, job.message) : null;
    const focused = document.activeElement?.dataset?.action;
    head.replaceChildren(
      h("h1", {}, facts.name), stateBadge(current), h("span", { className: "dim" }, [facts.kind, facts.namespace, ran].filter(Boolean).join(" · ")),
      h("span", { className: "row actions" }, facts.can.filter((name) => ACTIONS[name][2](current)).map((name) => h("button", { type: "button", "data-action": name, className: name === "delete" ? "danger" : "", onclick: () => act(name) }, ACTIONS[name][0]))),
      note ?? "");
    if (focused) head.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  function tiles() {
    if (!training) return;
    const n = training, shown = [];
    const add = (title, value, more) => value !== "" && value !== null && value !== undefined && shown.push(h("div", { className: "tile" }, h("span", { className: "label" }, title), h("span", { className: "value" }, value), more));
    add("start", n.starting);
    if (n.epoch) add("epoch", n.epochs ? `${n.epoch} of ${n.epochs}` : n.epoch, n.epochs ? h("progress", { max: 1, value: n.fraction, ariaLabel: "Training done" }) : null);
    if (n.steps) add("step", `${n.step} of ${n.steps}`);
    if (n.eta_s && job?.state === "Running") add("time left", duration(n.eta_s));
    for (const [name, value] of Object.entries(n.metrics)) add(name, number(value, name));
    for (const name of ["samples_per_s", "grad_norm", "memory_bytes"]) if (n[name] !== null) add(label(name), number(n[name], name));
    if (n.slowest !== null && n.waited !== null) add("slowest rank", `${n.slowest} (others wait ${Math.round(100 * n.waited)} %)`);
    if (n.group.world_size) add("processes", `${n.group.world_size}, ${n.group.strategy ?? ""} on ${n.group.device ?? "?"}`);
    numbers.replaceChildren(...shown);
  }

  function folded(title, part, make) {
    const inside = h("div", {}, "Loading...");
    return h("details", { ontoggle: async (event) => {
      if (!event.target.open) return;
      try { inside.replaceChildren(make(await read(jobPath(key, part)))); } catch (error) { inside.replaceChildren(error.message); }
    } }, h("summary", {}, title), inside);
  }

  async function act(name) {
    let [title, text] = ACTIONS[name];
    if (name === "delete") {
      try { facts = await read(jobPath(key, "status")); } catch (error) { return notice(error.message); }
      if (facts.written) text += ` These files that it wrote are deleted, too:\n${facts.written}`;
    }
    if (!(await confirmed(`${title} ${facts.name}?`, text, title))) return;
    try {
      const { done } = await change(jobPath(key, name));
      notice(done, "done");
      if (name === "delete" || name === "again") location.hash = "#/";
    } catch (error) {
      notice(error.message);
    }
  }

  const stream = follow(jobPath(key, "events"), { open: reset, news: take, problem: ({ message }) => notice(message), state });
  read(jobPath(key, "status")).then((found) => {
    facts = found;
    place(`${found.namespace}/${found.name}`);
    output.replicas(found.names);
    draw();
    look();
  }).catch((error) => { if (!closed) view.replaceChildren(h("p", { className: "empty" }, error.message)); });
  const again = setInterval(() => { if (job && !ENDED.includes(job.state)) { heading(); look(); } }, 15000);
  return {
    close() {
      closed = true;
      stream.close();
      clearInterval(again);
      clearTimeout(drawTimer);
      clearTimeout(whyTimer);
      charts.close();
    },
  };
}

function timing(found) {
  const whole = found.seconds === null ? "No first training step is known." : `About ${Math.round(found.seconds)} s from the submission to the first training step.`;
  return h("div", {}, h("p", {}, whole),
    table(["Until", "Took", "Replica", ""], found.phases.map((one, index) => [found.ends[index], `${number(one.seconds)} s`, one.replica, one.detail]), { label: "Phases" }),
    [...found.notes, ...found.missing.map((text) => `unknown: ${text}`)].map((text) => h("p", { className: "dim" }, text)));
}

function usage(found) {
  const whole = Object.values(found.seconds).reduce((sum, one) => sum + one, 0) || 1;
  const rows = Object.entries(found.seconds).map(([use, one]) => [use, h("progress", { max: whole, value: one, ariaLabel: use }), `${((100 * one) / whole).toFixed(1)} %`, `${number(one / 3600)} ${found.device} hours`]);
  return h("div", {}, found.note && h("p", {}, found.note), table(["Use", "", "Part", "Time"], rows, { label: "Where the time went" }));
}

function image(found) {
  const origin = found.origin;
  const rows = [["image", found.image ?? "not known"]];
  for (const layer of origin?.layers ?? []) rows.push([layer.kind, `${layer.digest}  ${number(layer.size, "_bytes")}`]);
  if (origin) rows.push(["files", origin.files], ["installed", origin.installed], ["base", origin.base || "not known"], ["platform", origin.platform]);
  for (const one of found.replicas.filter((replica) => replica.digest)) rows.push([one.name, `runs ${one.digest}`]);
  return table(["", ""], rows, { label: "Image" });
}
