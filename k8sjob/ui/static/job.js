// One job: its state, why it is in trouble, its training, replicas, output, and how it was made.

import { timeline } from "./attempts.js";
import { board, direction, drawn, grouped, label, MOST_CURVES } from "./chart.js";
import { confirmed, counted, duration, h, moment, notice, now, number, stateBadge, table } from "./dom.js";
import { logView } from "./logs.js";
import { rankMap } from "./ranks.js";
import { change, follow, jobPath, read } from "./server.js";

const DRAW_MS = 500;
const WHY_MS = 3000;
const OLD_S = 60; // numbers of a running job are not older, unless its steps are slow
const MOST_ROWS = 100;
const NOTABLE = 0.05; // a smaller part of the time that ranks wait is not worth a mark
const STARTS = ["Created", "Running", "Restarting"];
const ENDED = ["Succeeded", "Failed", "Stopped", "Deleted"];
const PAUSED = ["Suspended", "Queued"];
const ACTIONS = {
  suspend: ["Suspend", "Its replicas are stopped after a checkpoint; the job stays.", (s) => STARTS.includes(s)],
  resume: ["Resume", "Its replicas start again, from the newest checkpoint.", (s) => s === "Suspended"],
  again: ["Submit again", "A new run of the same job starts; in a cluster the job of this name is replaced.", (s) => ["Failed", "Succeeded", "Stopped"].includes(s)],
  delete: ["Delete", "It is stopped and removed with its output; its checkpoints remain.", (s) => s !== "Deleted"],
};

export function jobView(view, key, { state, place }) {
  let job = null, facts = null, training = null, curves = new Map(), replicas = new Map(), earlier = new Map(), checkpoint = null, explained = "", attempts = [], isStale = true, group = {}, lastLines = new Map();
  let drawTimer = 0, whyTimer = 0, closed = false;
  const charts = board(), map = rankMap(aboutRank);
  const head = h("div", { className: "row head" }), why = h("section", { className: "why", ariaLive: "polite" });
  const numbers = h("div", { className: "tiles" }), aged = h("p", { className: "dim", hidden: true }), health = h("dl", { className: "health" });
  const history = h("section", { className: "history" }), parts = h("section"), events = h("ul", { className: "events" });
  const many = h("p", { className: "dim", hidden: true }, `The curves of the first ${MOST_CURVES} names are shown.`);
  const output = logView(key);
  const details = h("section", {}, ...[["Run", "run", (data) => runPanel(data, group)], ["Time to the first step", "timing", timing], ["Where the time went", "usage", usage], ["Manifest", "manifest", (data) => h("pre", {}, data.text)], ["Image", "status", image]].map(([title, part, make]) => folded(title, part, make)));
  view.append(head, why, numbers, aged, health, history, charts.controls, many, charts.figures, map.section, parts, output.section, h("section", {}, h("h2", {}, "Events"), events), details);

  // --- what the server sends ---------------------------------------------------------------------

  function reset() {
    [training, curves, replicas, earlier, checkpoint, isStale] = [null, new Map(), new Map(), new Map(), null, true];
    output.clear();
    events.replaceChildren();
  }

  function take(news) {
    if (news.job.state) job = news.job;
    const beginsToTrain = news.training.epoch && !training?.epoch;
    training = news.training;
    if (training.group.world_size) group = training.group;
    for (const [name, replica] of Object.entries(news.replicas)) {
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
    while (events.childElementCount > 200) events.lastElementChild.remove();
    for (const { replica, text } of news.lines) lastLines.set(replica, text);
    if (news.lines.length) output.add(news.lines);
    if (beginsToTrain || Object.keys(news.replicas).length || news.events.some(({ kind }) => kind !== "checkpoint")) {
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
      attempts.at(-1)?.marks.push({ kind, time, text });
    }
    events.insertBefore(h("li", { "data-kind": kind, "data-time": time }, h("time", {}, moment(time)), " ", replica && h("b", {}, `${replica} `), text), older[0] ?? null);
  }

  /** Ask why, soon: what has changed may have a reason. */
  function look() {
    if (!whyTimer) whyTimer = setTimeout(explain, job ? WHY_MS : 0);
  }

  async function explain() {
    whyTimer = 0;
    try {
      if (isStale) { // the whole output of a replica is read for it
        isStale = false;
        attempts = await read(jobPath(key, "attempts"));
      }
      drawAttempts();
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

  /** The attempts, the last phase of which goes on while the job runs. */
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
    if (replicas.size) parts.replaceChildren(h("h2", {}, "Replicas"), ...replicaTable([...replicas], [...earlier.values()]));
  }

  function heading() {
    if (!facts) return;
    const current = job?.state ?? facts.state;
    const span = job ? [job.created, job.started, job.finished] : [null, null, null];
    const end = span[2] ?? (PAUSED.includes(current) ? job?.since : null);
    const ran = span[1] ? `${end ? "ran" : current === "Created" ? "waiting" : "running"} for ${duration((end ?? now(facts)) - span[1])}` : "";
    const note = job?.message && current !== "Succeeded" ? h("p", { className: "dim message" }, job.message) : null;
    const focused = document.activeElement?.dataset?.action;
    head.replaceChildren(
      h("h1", {}, facts.name), stateBadge(current), training?.hang && current === "Running" ? h("span", { className: "state state-stalled" }, "stalled") : "", h("span", { className: "dim" }, [facts.kind, facts.namespace, ran].filter(Boolean).join(" · ")),
      h("span", { className: "row actions" }, facts.can.filter((name) => ACTIONS[name][2](current)).map((name) => h("button", { type: "button", "data-action": name, className: name === "delete" ? "danger" : "", onclick: () => act(name) }, ACTIONS[name][0]))),
      note ?? "");
    if (focused) head.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  /** The ranks, each with its replica, and a note where the others wait for it. */
  function ranks() {
    if (!facts?.processes || !replicas.size) return [];
    const { names } = facts, { slowest, waited, hang } = training ?? {}, runs = (job?.state ?? facts.state) === "Running";
    let [first, each] = facts.processes;
    if (each === 1 && first === 1 && group.world_size % names.length === 0) first = each = group.world_size / names.length; // nproc_per_node: auto
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
  const again = setInterval(() => { if (job && !ENDED.includes(job.state)) { draw(); look(); } }, 15000);
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
  return line && { name: line.name, best: (direction(line.name) > 0 ? Math.max : Math.min)(...line.ys) };
}

/** How a replica's last attempt ended, if another one runs now; `before` is the replica as it was. */
function endedAttempt(replica, before) {
  if (replica.restarts && replica.exit_code !== null && ["Running", "Pending"].includes(replica.phase)) return replica;
  return before?.phase === "Failed" && replica.restarts > before.restarts ? before : null;
}

/** The first rows, failed replicas before the others, and at the end what has ended before. */
function replicaTable(replicas, earlier) {
  const failed = ([, replica]) => replica.phase === "Failed";
  const row = ([name, { phase, reason, node, restarts, exit_code: code, message }]) => [name, phase, reason, node, restarts || "", code ?? "", message];
  const isOver = new Set(earlier.map(([, replica]) => replica));
  const present = replicas.sort((a, b) => failed(b) - failed(a)).slice(0, MOST_ROWS).map(([name, replica]) => row([name, isOver.has(replica) ? { ...replica, exit_code: null, message: replica.waiting ? replica.message : "" } : replica]));
  const ended = earlier.slice(-MOST_ROWS).map(([name, replica]) => row([name, { ...replica, phase: "ended", restarts: 0 }]).map((text) => h("span", { className: "dim" }, text)));
  const more = replicas.length - present.length;
  return [table(["Replica", "Phase", "Reason", "Node", "Restarts", "Exit code", "Message"], [...present, ...ended], { label: "Replicas" }),
    more > 0 && h("p", { className: "dim" }, `${counted(more, "more replica")} ${more === 1 ? "is" : "are"} not shown`)].filter(Boolean);
}

/** What ran, and with what. */
function runPanel(run, group) {
  const versions = ["torch", "cuda", "python"].filter((name) => group[name]).map((name) => `${name} ${group[name]}`).join(", ");
  const rows = [["command", run.command], ["strategy", group.strategy], ["versions", versions], ["image", run.image], ["files written", run.written && h("pre", {}, run.written)]];
  return h("div", {}, table(["", ""], rows.filter(([, value]) => value), { label: "Run" }), run.yaml ? [h("h3", {}, "job.yaml"), h("pre", { tabIndex: 0 }, run.yaml)] : null);
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
