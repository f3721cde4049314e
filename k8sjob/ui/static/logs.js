// The output of a job: lines of all replicas by time, searched, chosen by replica, followed.

import { counted, h, notice } from "./dom.js";
import { blob, jobPath, read } from "./server.js";

const KEPT = 20000; // lines in memory
const SHOWN = 2000; // lines on the page
const PAUSE_MS = 250; // of the typing, until all lines are searched on the server

// Levels of Python's logging, of glog (E0312 12:00:01), and lines that end a traceback.
const ERROR = /\b(ERROR|CRITICAL|FATAL)\b|^[EF]\d{4} |^([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception)\b/;
const WARNING = /\b(WARN|WARNING)\b|^W\d{4} |\b[A-Z]\w*Warning:/;
const RANK = /^\[?(rank|default)\d+\]?:? ?/; // torchrun's prefix

const byTime = (a, b) => (a.timestamp < b.timestamp ? -1 : a.timestamp > b.timestamp ? 1 : 0);

/**
 * The lines, each with its level: "error", "warning" or "".
 *
 * @param tracebacks the replicas in whose traceback the lines before these end: all its lines are errors.
 */
function levelled(lines, tracebacks) {
  const level = ({ replica, text }) => {
    const bare = text.replace(RANK, "");
    if (bare.startsWith("Traceback (most recent call last)")) tracebacks.add(replica);
    else if (tracebacks.has(replica) && /^\S/.test(bare)) {
      tracebacks.delete(replica);
      return "error";
    }
    return tracebacks.has(replica) || ERROR.test(bare) ? "error" : WARNING.test(bare) ? "warning" : "";
  };
  return lines.map((line) => ({ ...line, level: level(line) }));
}

export function logView(key) {
  let lines = [], dropped = 0, pending = 0, answer = null, typed = 0, asking = false, stale = false;
  const tracebacks = new Set();
  const search = h("input", { type: "search", placeholder: "Search the output", ariaLabel: "Search the output", oninput: () => { clearTimeout(typed); typed = setTimeout(choose, PAUSE_MS); } });
  const replica = h("select", { ariaLabel: "Replica", onchange: choose }, h("option", { value: "" }, "all replicas"));
  const follow = h("input", { type: "checkbox", checked: true, onchange: () => follow.checked && renew() });
  const summary = h("span", { className: "dim", role: "status" });
  const first = h("button", { type: "button", hidden: true, onclick: toError }, "First error");
  const save = h("button", { type: "button", onclick: download }, "Download");
  const pane = h("div", { className: "log", tabIndex: 0, role: "log", ariaLabel: "Output", ariaLive: "off" });
  let top = 0; // who scrolls up, by any means, reads: the lines stay until the end is reached again
  pane.addEventListener("scroll", () => {
    const ended = pane.scrollTop + pane.clientHeight >= pane.scrollHeight - 20; // also as it grows
    if (ended && !follow.checked) {
      follow.checked = true;
      renew();
    } else if (!ended && pane.scrollTop < top) follow.checked = false;
    top = pane.scrollTop;
  }, { passive: true });
  const section = h("section", {}, h("h2", {}, "Output"),
    h("div", { className: "row" }, search, replica, h("label", {}, follow, " follow"), first, save, summary), pane);

  const path = (part) => jobPath(key, `${part}?${new URLSearchParams({ replica: replica.value, search: search.value })}`);
  const fits = (line) => (!replica.value || line.replica === replica.value) && line.text.toLowerCase().includes(search.value.toLowerCase());
  const isNew = (line) => fits(line) && line.timestamp > (answer.ends[line.replica] ?? "");

  function element({ replica: from, text, gap, level }) {
    const words = search.value.toLowerCase(), parts = [];
    let at = 0;
    if (words) {
      const lower = text.toLowerCase();
      for (let next = lower.indexOf(words); next >= 0; next = lower.indexOf(words, at)) {
        parts.push(text.slice(at, next), h("mark", {}, text.slice(next, next + words.length)));
        at = next + words.length;
      }
    }
    parts.push(text.slice(at));
    const number = Number(from.replace(/\D+/g, "")) + (from.startsWith("master") ? 0 : 1);
    return h("div", { className: `line ${gap ? "gap" : level}`, tabIndex: -1 }, h("span", { className: `from color-${number % 6}` }, from), " ", parts);
  }

  function renew() {
    const chosen = answer?.lines ?? lines.filter(fits), from = Math.max(0, chosen.length - SHOWN);
    const shown = chosen.slice(from);
    pane.replaceChildren(...shown.map(element));
    const total = answer?.total ?? chosen.length + dropped, earlier = total - Math.min(chosen.length, SHOWN);
    summary.textContent = [search.value || earlier ? counted(total, "line") : "", earlier ? `${counted(earlier, "line")} before these ${earlier === 1 ? "is" : "are"} not shown: search, or download` : ""].filter(Boolean).join("; ");
    first.hidden = !shown.some(({ level }) => level === "error");
    if (follow.checked) pane.scrollTop = pane.scrollHeight;
  }

  function toError() {
    follow.checked = false;
    const line = pane.querySelector(".error");
    pane.scrollTop += line.getBoundingClientRect().top - pane.getBoundingClientRect().top - 8;
    line.focus({ preventScroll: true });
  }

  async function choose() {
    if (asking) return void (stale = true); // one search at a time: that of a large job takes a while
    // Of large jobs the first replicas are followed; the others are read when they are asked for.
    if (!search.value && (!replica.value || (!dropped && lines.some(fits)))) answer = null;
    else {
      asking = true;
      summary.textContent = "Searching…";
      try {
        answer = await read(path("output"));
        const more = lines.filter(isNew);
        answer.lines = [...levelled(answer.lines, new Set()), ...more];
        answer.total += more.length;
      } catch (error) {
        answer = null;
        notice(error.message);
      }
      asking = false;
      if (stale) {
        stale = false;
        return choose();
      }
    }
    renew();
  }

  async function download() {
    save.disabled = true;
    try {
      const url = URL.createObjectURL(await blob(path("output.txt")));
      h("a", { href: url, download: `${replica.value || "output"}.log` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10000);
    } catch (error) {
      notice(error.message);
    }
    save.disabled = false;
  }

  return {
    section,
    replicas(names) {
      const chosen = replica.value;
      replica.replaceChildren(h("option", { value: "" }, "all replicas"), ...names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
    },
    clear() { lines = []; dropped = 0; tracebacks.clear(); follow.checked = true; answer ? choose() : renew(); }, // a new connection repeats all lines
    add(news) {
      const more = levelled(news, tracebacks);
      if (answer) {
        const fitting = more.filter(isNew);
        answer.lines = answer.lines.concat(fitting).slice(-KEPT);
        answer.total += fitting.length;
      }
      lines = lines.concat(more).sort(byTime);
      dropped += Math.max(0, lines.length - KEPT);
      lines = lines.slice(-KEPT);
      if (!pending) pending = requestAnimationFrame(() => { pending = 0; if (follow.checked) renew(); });
    },
  };
}
