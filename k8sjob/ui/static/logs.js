// The output of a job: lines of all replicas, searched, chosen by replica, followed.

import { h } from "./dom.js";
import { jobPath, read } from "./server.js";

const KEPT = 20000; // lines in memory
const SHOWN = 2000; // lines on the page

export function logView(key) {
  let lines = [], pending = 0, stored = null;
  const search = h("input", { type: "search", placeholder: "Search the output", ariaLabel: "Search the output", oninput: renew });
  const replica = h("select", { ariaLabel: "Replica", onchange: choose }, h("option", { value: "" }, "all replicas"));
  const follow = h("input", { type: "checkbox", checked: true, onchange: () => follow.checked && renew() });
  const counted = h("span", { className: "dim", role: "status" });
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
    h("div", { className: "row" }, search, replica, h("label", {}, follow, " follow"), counted), pane);

  const fits = (line) => (!replica.value || line.replica === replica.value) && (!search.value || line.text.toLowerCase().includes(search.value.toLowerCase()));

  function element({ replica: from, text, gap }) {
    const wanted = search.value.toLowerCase(), parts = [];
    let at = 0;
    if (wanted) {
      const lower = text.toLowerCase();
      for (let found = lower.indexOf(wanted); found >= 0; found = lower.indexOf(wanted, at)) {
        parts.push(text.slice(at, found), h("mark", {}, text.slice(found, found + wanted.length)));
        at = found + wanted.length;
      }
    }
    parts.push(text.slice(at));
    const number = Number(from.replace(/\D+/g, "")) + (from.startsWith("master") ? 0 : 1);
    return h("div", { className: gap ? "line gap" : "line" }, h("span", { className: `from color-${number % 6}` }, from), " ", parts);
  }

  function toEnd() { pane.scrollTop = pane.scrollHeight; }

  function renew() {
    const found = (stored ?? lines).filter(fits);
    pane.replaceChildren(...found.slice(-SHOWN).map(element));
    const more = found.length > SHOWN ? `, the last ${SHOWN} shown` : "";
    counted.textContent = search.value || more ? `${found.length} ${found.length === 1 ? "line" : "lines"}${more}` : "";
    if (follow.checked) toEnd();
  }

  async function choose() {
    stored = null;
    // Of large jobs the first replicas are followed; the others are read when they are asked for.
    if (replica.value && !lines.some((line) => line.replica === replica.value)) {
      const asked = replica.value;
      const found = await read(jobPath(key, `output/${encodeURIComponent(asked)}`));
      if (replica.value !== asked) return;
      stored = found.length ? found : null; // one without lines yet is followed
    }
    renew();
  }

  return {
    section,
    replicas(names) {
      const chosen = replica.value;
      replica.replaceChildren(h("option", { value: "" }, "all replicas"), ...names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
    },
    clear() { lines = []; follow.checked = true; renew(); },
    add(more) {
      lines.push(...more);
      if (lines.length > KEPT) lines = lines.slice(-KEPT);
      if (!pending) pending = requestAnimationFrame(() => { pending = 0; if (!stored && follow.checked) renew(); });
    },
  };
}
