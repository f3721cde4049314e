// The page: which view the address names, and the state of the connection.

import { h, notice } from "./dom.js";
import { jobList } from "./list.js";
import { jobView } from "./job.js";
import { compareView } from "./compare.js";
import { takeToken } from "./server.js";

const view = document.getElementById("view");
const crumbs = document.getElementById("crumbs");
const connection = document.getElementById("connection");
let current = null;

/** Shows the state of the view's stream. */
function state(text) {
  connection.textContent = text;
  connection.className = text === "live" || text === "ended" ? text : "broken";
  if (text.startsWith("the token")) view.replaceChildren(h("p", { className: "empty" }, text, "."));
}

/** The text without its percent escapes; as it is where one of them is none. */
function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function show() {
  takeToken();
  current?.close();
  view.replaceChildren();
  connection.textContent = connection.className = "";
  const [, name, rest = ""] = decoded(location.hash).split("/");
  const place = (text) => {
    crumbs.replaceChildren(...(text ? [h("span", { ariaHidden: "true" }, "/"), h("span", {}, text)] : []));
    document.title = text ? `${text} · k8sjob` : "k8sjob";
  };
  place("");
  if (name === "job") current = jobView(view, rest, { state, place });
  else if (name === "compare") current = compareView(view, rest.split(","), { state, place });
  else current = jobList(view, { state, place });
  view.focus({ preventScroll: true });
  scrollTo(0, 0);
}

addEventListener("hashchange", show);
addEventListener("unhandledrejection", (event) => notice(event.reason?.message ?? String(event.reason)));
show();
