// One job: its state, why it is in trouble, its training, replicas, output, and how it was made.

import { timeline } from "./attempts.js";
import { board, direction, drawn, grouped, label, MOST_CURVES } from "./chart.js";
import { confirmed, counted, duration, h, moment, notice, now, number, stateBadge, table, until } from "./dom.js";
import { logView } from "./logs.js";
import { rankMap } from "./ranks.js";
import { change, follow, jobPath, read } from "./server.js";

const DRAW_MS = 500;
const WHY_MS = 3000;
const OLD_S = 60; // numbers of a running job are not older, unless its steps are slow
const MOST_ROWS = 100;
const MOST_EVENTS = 200;
const MOST_PROCESSES = 64; // of a replica: what a script reports of its group may be any number
const NOTABLE = 0.05; // a smaller part of the time that ranks wait is not worth a mark
const STARTS = ["Created", "Running", "Restarting"];
const ENDED = ["Succeeded", "Failed", "Stopped", "Deleted"];
const ACTIONS = {
  suspend: ["Suspend", "Its replicas are stopped after a checkpoint; the job stays.", (s) => STARTS.includes(s)],
  resume: ["Resume", "Its replicas start again, from the newest checkpoint.", (s) => s === "Suspended"],
  rerun: ["Rerun", "A new run of the same job starts; in a cluster the job of this name is replaced.", (s) => ["Failed", "Succeeded", "Stopped"].includes(s)],
  delete: ["Delete", "It is stopped and removed with its output; its checkpoints remain.", (s) => s !== "Deleted"],
};

export function jobView(view, key, { state, place }) {
  let job = null, facts = null, training = null, curves = new Map(), replicas = new Map(), earlier = new Map(), checkpoint = null, explained = "", attempts = [], isStale = true, areReplicasNew = false, group = {}, lastLines = new Map();
  let drawTimer = 0, whyTimer = 0, closed = false;
  const charts = board(), map = rankMap(aboutRank);
  const title = h("h1"), badge = h("span", { className: "row" }), about = h("span", { className: "dim" }), message = h("p", { className: "dim message" });
  const actions = h("span", { className: "row actions" }, Object.entries(ACTIONS).map(([name, [text]]) => h("button", { type: "button", "data-action": name, hidden: true, className: name === "delete" ? "danger" : "", onclick: () => act(name) }, text)));
  const head = h("div", { className: "row head" }, title, badge, about, actions, message), why = h("section", { className: "why", ariaLive: "polite" });
  const numbers = h("div", { className: "tiles", hidden: true }), aged = h("p", { className: "dim", hidden: true }), health = h("dl", { className: "health" });
  const history = h("section", { className: "history" }), events = h("ul", { className: "events" });
  const replicaRows = table([], [], { label: "Replicas" }), moreReplicas = h("p", { className: "dim" });
  const parts = h("section", { hidden: true }, h("h2", {}, "Replicas"), replicaRows, moreReplicas);
  const many = h("p", { className: "dim", hidden: true }, `The curves of the first ${MOST_CURVES} names are shown.`);
  const output = logView(key);
  const details = h("section", {}, ...[[(run, status) => runPanel(run, status, group), "Run", "run", "status"], [timing, "Time to the first step", "timing"], [usage, "Where the time went", "usage"], [(data) => h("pre", {}, data.text), "Manifest", "manifest"]].map((row) => folded(...row)));
  view.append(head, why, numbers, aged, health, history, charts.controls, many, charts.figures, map.section, parts, output.section, h("section", {}, h("h2", {}, "Events"), events), details);

  // --- what the server sends ---------------------------------------------------------------------

  function reset() {
    [training, curves, replicas, earlier, checkpoint, isStale] = [null, new Map(), new Map(), new Map(), null, true];
    output.clear();
    events.replaceChildren();
  }

  function take(news) {
    if (news.job.state) job = news.job;
    // The current phase changes with the first number, and when a group hangs or continues.
    const isStalled = attempts.at(-1)?.segments.at(-1)?.phase === "stalled";
    const isNewPhase = (Object.keys(news.points).length && (isStalled || !curves.size)) || Boolean(news.training.hang) !== Boolean(training?.hang);
    training = news.training;
    if (training.group.world_size) group = training.group;
    const changed = Object.entries(news.replicas);
    if (changed.length) areReplicasNew = true;
    for (const [name, replica] of changed) {
      const ended = endedAttempt(replica, replicas.get(name));
      if (ended) earlier.set(`${name} ${replica.restarts}`, [`${name}, attempt ${replica.restarts}`, ended]);
      replicas.set(name, replica);
    }
    for (const [name, [remain, xs, ys]] of Object.entries(news.points)) {
      if (!curves.has(name)) curves.set(name, { name, xs: [], ys: [] });
      curves.get(name).xs.splice(remain, Infinity, ...xs);
      curves.get(name).ys.splice(remain, Infinity, ...ys);
    }
    for (const event of news.events) list(event);
    for (const { replica, text } of news.lines) lastLines.set(replica, text);
    if (news.lines.length) output.add(news.lines);
    if (isNewPhase || changed.length || news.events.some(({ kind }) => kind !== "checkpoint")) {
      isStale = true;
      look();
    }
    if (!drawTimer) drawTimer = setTimeout(draw, DRAW_MS);
  }

  /** Events by their own times, the newest first; of checkpoints in a row the newest. */
  function list({ kind, time, replica, text }) {
    const older = [...events.children].filter(({ dataset }) => Number(dataset.time) <= time);
    if (kind === "checkpoint") {
      checkpoint = { time, name: text.split("/").at(-1).replace(/^checkpoint /, "") };
      if (older[0]?.dataset.kind === kind) older.shift().remove();
      const { segments = [], marks } = attempts.at(-1) ?? {};
      // A connection begins with events that the attempts have already.
      if (segments.length && time > Math.max(segments[0].begin, ...marks.map((mark) => mark.time))) marks.push({ kind, time, text });
    }
    events.insertBefore(h("li", { "data-kind": kind, "data-time": time }, h("time", {}, moment(time)), " ", replica && h("b", {}, `${replica} `), text), older[0] ?? null);
    if (events.childElementCount > MOST_EVENTS) events.lastElementChild.remove();
  }

  /** Ask why, soon: what has changed may have a reason. */
  function look() {
    if (!whyTimer) whyTimer = setTimeout(explain, job ? WHY_MS : 0);
  }

  async function explain() {
    whyTimer = 0;
    try {
      const findings = await read(jobPath(key, "why")), text = JSON.stringify(findings);
      if (closed) return;
      if (text !== explained) { // a screen reader reads again what is replaced
        explained = text;
        why.replaceChildren(...findings.map((finding, index) => h("div", { className: index ? "cause" : "cause first" },
          h("p", {}, h("b", {}, "Why "), finding.message), h("p", {}, h("b", {}, "Next "), finding.next_step))));
      }
      if (isStale) { // the whole output of a replica is read for it
        isStale = false;
        attempts = await read(jobPath(key, "attempts")).catch((error) => { isStale = true; throw error; });
      }
      drawAttempts();
    } catch (error) {
      if (!closed && error.status === 502) notice(error.message); // the stream tells of all others
    }
  }

  /** The attempts; their last phase grows while the job runs. */
  function drawAttempts() {
    const last = attempts.at(-1)?.segments.at(-1);
    if (closed || !last) return;
    if (facts && job && !ENDED.includes(job.state)) last.end = Math.max(last.end, now(facts));
    history.replaceChildren(...timeline(attempts));
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
    map.draw(ranks());
    if (areReplicasNew) drawReplicas();
    areReplicasNew = false;
  }

  function heading() {
    if (!facts) return;
    const current = job?.state ?? facts.state;
    const isTimed = job?.started && (job.finished || !ENDED.includes(current)); // when a job was deleted is not known
    const verb = { Created: "waiting", Running: "running", Restarting: "running" }[current] ?? "ran";
    const time = isTimed ? `${verb} for ${duration(until({ at: facts.at, skew: facts.skew, ...job }) - job.started)}` : "";
    title.textContent = facts.name;
    badge.replaceChildren(stateBadge(current), training?.hang && current === "Running" ? h("span", { className: "state state-stalled" }, "stalled") : "");
    about.textContent = [facts.kind, facts.namespace, time].filter(Boolean).join(" · ");
    message.textContent = job?.message ?? "";
    message.hidden = current === "Succeeded" || !message.textContent;
    for (const button of actions.children) { // never made again: a press takes longer than a redraw
      const { action } = button.dataset;
      button.hidden = !facts.can.includes(action) || !ACTIONS[action][2](current);
    }
  }

  /** The ranks, each with its replica, and a note where the others wait for it. */
  function ranks() {
    if (!facts?.processes || !replicas.size) return [];
    const { names } = facts, { slowest, waited, hang } = training ?? {}, runs = (job?.state ?? facts.state) === "Running";
    let [first, each] = facts.processes;
    const reported = group.world_size / names.length;
    if (each === 1 && first === 1 && Number.isInteger(reported) && reported <= MOST_PROCESSES) first = each = reported; // nproc_per_node: auto
    return Array.from({ length: first + (names.length - 1) * each }, (_, rank) => {
      const name = names[rank < first ? 0 : 1 + Math.floor((rank - first) / each)];
      const { phase = "no pod", reason, waiting, node = "" } = replicas.get(name) ?? {};
      const note = !runs ? "" : hang?.rank === rank ? "keeps the others waiting" : slowest === rank && waited >= NOTABLE ? `is the slowest, the others wait ${Math.round(100 * waited)} %` : "";
      return { rank, name, node, state: (waiting && reason) || phase, note };
    });
  }

  function aboutRank({ rank, name, node, state, note }) {
    const last = lastLines.get(name);
    return [`rank ${rank}`, `${name}${node && ` on ${node}`}`, state, note, last && `last line of ${name}: ${last.slice(0, 200)}`].filter(Boolean).join(" · ");
  }

  /** The first replicas, failed ones before the others, and at the end what has ended before. */
  function drawReplicas() {
    const isFailed = ([, { phase }]) => phase === "Failed", ended = [...earlier.values()];
    const isOver = new Set(ended.map(([, replica]) => replica));
    const row = (name, { phase, reason, node, restarts, exit_code: code, message: text }) => [name, phase, reason, node, restarts || "", code ?? "", text];
    const rows = [...replicas].sort((a, b) => isFailed(b) - isFailed(a)).slice(0, MOST_ROWS).map(([name, replica]) => row(name, isOver.has(replica) ? { ...replica, exit_code: null, message: replica.waiting ? replica.message : "" } : replica));
    rows.push(...ended.slice(-MOST_ROWS).map(([name, replica]) => row(name, { ...replica, phase: "ended", restarts: 0 }).map((text) => h("span", { className: "dim" }, text))));
    // In the same region: who has scrolled in it, or has its focus, stays there.
    replicaRows.replaceChildren(...table(["Replica", "Phase", "Reason", "Node", "Restarts", "Exit code", "Message"], rows, { label: "Replicas" }).children);
    const more = replicas.size - MOST_ROWS;
    moreReplicas.textContent = more > 0 ? `${counted(more, "more replica")} ${more === 1 ? "is" : "are"} not shown` : "";
    parts.hidden = false;
  }

  function tiles() {
    if (!training || !facts) return;
    const n = training, shown = [], state = job?.state ?? facts.state, isLogged = new Set(["loss"]);
    const add = (title, value, ...more) => value !== "" && value !== undefined && shown.push(h("div", { className: "tile" }, h("span", { className: "label" }, title), h("span", { className: "value" }, value), more));
    const note = (text) => h("span", { className: "label" }, text);
    if (n.epoch) add("epoch", n.epochs ? `${n.epoch} of ${n.epochs}` : n.epoch, n.epochs ? h("progress", { max: 1, value: n.fraction, ariaLabel: "Training done" }) : null, n.steps ? note(`step ${n.step} of ${n.steps}`) : null);
    if (Object.hasOwn(n.metrics, "loss")) add("loss", number(n.metrics.loss));
    const metric = bestMetric([...curves.values()]);
    if (metric) {
      isLogged.add(metric.name);
      add(`best ${metric.name}`, number(metric.best), note(`last ${number(n.metrics[metric.name])}`));
    }
    for (const name of ["samples_per_s", "memory_bytes"]) if (n[name] !== null) add(label(name), number(n[name], name));
    if (n.eta_s && state === "Running") add("time left", duration(n.eta_s));
    numbers.replaceChildren(...shown);
    numbers.hidden = !shown.length;

    const age = now(facts) - Math.max(n.time, curves.get("time")?.ys.at(-1) ?? 0);
    const isOld = shown.length > 0 && state !== "Succeeded" && (state !== "Running" || age > Math.max(OLD_S, 3 * (n.step_s ?? 0)));
    numbers.classList.toggle("old", isOld);
    aged.hidden = !isOld;
    aged.textContent = `These numbers are ${duration(age)} old.`;

    const { world_size: size, strategy, device } = n.group;
    const restarts = Math.max(n.restarts, ...[...replicas.values()].map((replica) => replica.restarts));
    const items = [
      ["start", n.starting],
      ["slowest rank", n.slowest !== null && n.waited !== null && `${n.slowest} (others wait ${Math.round(100 * n.waited)} %)`],
      ["processes", size && [size, [strategy, device && `on ${device}`].filter(Boolean).join(" ")].filter(Boolean).join(", ")],
      ["restarts", restarts],
      ["last checkpoint", checkpoint && `${checkpoint.name}, ${duration(now(facts) - checkpoint.time)} ago`],
      ...Object.entries(n.metrics).filter(([name]) => !isLogged.has(name)).map(([name, value]) => [name, number(value, name)]),
    ].filter(([, value]) => value);
    health.replaceChildren(...items.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    health.hidden = !items.length;
  }

  function folded(make, title, ...parts) {
    const inside = h("div", {}, "Loading...");
    return h("details", { ontoggle: async (event) => {
      if (!event.target.open) return;
      try { inside.replaceChildren(make(...await Promise.all(parts.map((part) => read(jobPath(key, part)))))); } catch (error) { inside.replaceChildren(error.message); }
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
      const { done, key: next } = await change(jobPath(key, name));
      notice(done, "done");
      if (next) location.hash = `#/job/${encodeURIComponent(next)}`;
      else if (name === "delete") location.hash = "#/";
    } catch (error) {
      notice(error.message);
    }
  }

  const stream = follow(jobPath(key, "events"), { open: reset, news: take, problem: ({ message }) => notice(message), state });
  read(jobPath(key, "status")).then((status) => {
    if (closed) return;
    facts = status;
    place(`${facts.namespace}/${facts.name}`);
    output.replicas(facts.names);
    draw();
    look();
  }).catch((error) => { if (!closed) view.replaceChildren(h("p", { className: "empty" }, error.message)); });
  const again = setInterval(() => { if (job && !ENDED.includes(job.state) && !document.hidden) { draw(); look(); } }, 15000);
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

/** Of the numbers that a script logs the one that tells most, {name, best}: an accuracy, or else a loss. */
function bestMetric(lines) {
  const named = lines.filter(({ name, ys }) => name !== "loss" && label(name) === name && direction(name) && ys.length);
  const line = named.find(({ name }) => direction(name) > 0) ?? named[0];
  const finite = line?.ys.filter((y) => y !== null) ?? []; // null is smaller than any loss
  return line && { name: line.name, best: finite.length ? (direction(line.name) > 0 ? Math.max : Math.min)(...finite) : null };
}

/** How a replica's last attempt ended, if another one runs now; `before` is the replica as it was. */
function endedAttempt(replica, before) {
  if (replica.restarts && replica.exit_code !== null && ["Running", "Pending"].includes(replica.phase)) return replica;
  return before?.phase === "Failed" && replica.restarts > before.restarts ? before : null;
}

/** What ran, and with what: its command, image and files. */
function runPanel(run, { image: name, origin, replicas, written }, group) {
  const versions = ["torch", "cuda", "python"].filter((name) => group[name]).map((name) => `${name} ${group[name]}`).join(", ");
  const rows = [["command", run.command], ["strategy", group.strategy], ["versions", versions], ["commit", run.commit], ["files written", written && h("pre", {}, written)], ["image", name ?? "not known"]];
  for (const layer of origin?.layers ?? []) rows.push([layer.kind, `${layer.digest}  ${number(layer.size, "_bytes")}`]);
  if (origin) rows.push(["files of the code", origin.files], ["installed", origin.installed], ["base", origin.base || "not known"], ["platform", origin.platform]);
  for (const replica of replicas.filter(({ digest }) => digest)) rows.push([replica.name, `runs ${replica.digest}`]);
  return h("div", {}, table(["", ""], rows.filter(([, value]) => value), { label: "Run" }), run.yaml ? [h("h3", {}, "job.yaml"), h("pre", { tabIndex: 0 }, run.yaml)] : null);
}

function timing(start) {
  const whole = start.seconds === null ? "No first training step is known." : `About ${Math.round(start.seconds)} s from the submission to the first training step.`;
  return h("div", {}, h("p", {}, whole),
    table(["Until", "Took", "Replica", ""], start.phases.map((phase, index) => [start.ends[index], `${number(phase.seconds)} s`, phase.replica, phase.detail]), { label: "Phases" }),
    [...start.notes, ...start.missing.map((text) => `unknown: ${text}`)].map((text) => h("p", { className: "dim" }, text)));
}

function usage({ seconds, device, note }) {
  const whole = Object.values(seconds).reduce((sum, part) => sum + part, 0) || 1;
  const rows = Object.entries(seconds).map(([use, part]) => [use, h("progress", { max: whole, value: part, ariaLabel: use }), `${((100 * part) / whole).toFixed(1)} %`, `${number(part / 3600)} ${device} hours`]);
  return h("div", {}, note && h("p", {}, note), table(["Use", "", "Part", "Time"], rows, { label: "Where the time went" }));
}
