// Elements, and how values are written. Text from jobs and clusters is only ever a text node.

/** An element. Properties whose name begins with "on" are listeners; null children are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** 1 line, 2,000 lines. */
export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const whole = Math.max(0, Math.round(seconds));
  const [d, hours, m, s] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  if (d) return `${d} d ${hours} h`;
  if (hours) return `${hours} h ${m} min`;
  return m ? `${m} min ${s} s` : `${s} s`;
}

/** A number in four digits; bytes and seconds by the name of what they measure. */
export function number(value, name = "") {
  if (value === null) return "not finite"; // JSON has no such numbers
  if (typeof value !== "number") return String(value ?? "");
  if (name.endsWith("_bytes")) return bytes(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${value >= 100 || !unit ? Math.round(value) : value.toFixed(value < 10 ? 2 : 1)} ${units[unit]}`;
}

/** A time as a stamp, or in seconds already, in seconds since 1970. */
export const seconds = (time) => (typeof time === "string" ? Date.parse(time) / 1000 : time ?? null);

/** Now in seconds, by the clock of the job's place, or when the record of the job was written. */
export const now = (job) => seconds(job.at) ?? Date.now() / 1000 + (job.skew ?? 0);

/** Until when a job has run, in seconds: the clock of one that is suspended or waits in a queue stands still. */
export const until = (job) => seconds(job.finished) ?? (["Suspended", "Queued"].includes(job.state) ? seconds(job.since) : null) ?? now(job);

/** How long ago a job was created, and how long it has been running or has run. */
export function times(job) {
  const [created, started] = [job.created, job.started].map(seconds);
  return {
    age: created === null ? "" : duration(Date.now() / 1000 + (job.skew ?? 0) - created),
    time: started === null ? "" : duration(until(job) - started),
  };
}

/** A moment in seconds since 1970 as the clock's time, with the date unless it is today's. */
export function moment(at) {
  const date = new Date(at * 1000), isToday = date.toDateString() === new Date().toDateString();
  return date.toLocaleString([], { hourCycle: "h23", timeStyle: "medium", ...(isToday ? {} : { dateStyle: "short" }) });
}

/** A state as a word with a colored mark of its own shape. */
export function stateBadge(state) {
  return h("span", { className: `state state-${state.toLowerCase()}` }, state);
}

export function table(headings, rows, properties = {}) {
  return h("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: properties.label ?? "table" },
    h("table", { ariaLabel: properties.label ?? null },
      h("thead", {}, h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell ?? "")))))));
}

/** Ask before something is changed; whether it was confirmed. */
export function confirmed(title, text, button) {
  const dialog = document.getElementById("dialog");
  return new Promise((resolve) => {
    const answer = (yes) => () => { resolve(yes); dialog.close(); };
    dialog.replaceChildren(
      h("h2", { id: "dialog-title" }, title), h("p", {}, text),
      h("div", { className: "row" },
        h("button", { type: "button", onclick: answer(false), autofocus: true }, "Cancel"),
        h("button", { type: "button", className: "danger", onclick: answer(true) }, button)));
    dialog.onclose = () => resolve(false);
    dialog.showModal();
  });
}

/** A message above the page until it is closed; one that stands there already is not repeated. */
export function notice(text, kind = "error") {
  const place = document.getElementById("notices");
  if ([...place.children].some((box) => box.firstChild.textContent === text)) return;
  const box = h("div", { className: `notice ${kind}` }, h("span", {}, text),
    h("button", { type: "button", ariaLabel: "Close this notice", onclick: () => box.remove() }, "×"));
  place.append(box);
  if (kind !== "error") setTimeout(() => box.remove(), 8000);
}
