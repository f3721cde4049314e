// A map of the ranks: a square for each process, coloured by the state of its replica, a row for each node.

import { counted, h } from "./dom.js";

const MOST_NODES = 16; // nodes that have a row each

/** @param about what is known of a rank, as text: asked for the one that is looked at alone. */
export function rankMap(about) {
  let ranks = [], squares = [], shape = "", chosen = -1, summary = "";
  const under = ({ target }) => choose(squares.indexOf(target));
  const grid = h("div", { className: "ranks", tabIndex: 0, role: "group", onmouseover: under, onmouseleave: () => choose(-1), onfocus: () => choose(0), onblur: () => choose(-1), onkeydown: byKey });
  const words = h("p", { className: "dim" });
  const section = h("section", { hidden: true }, h("h2", {}, "Ranks"), grid, words);

  function choose(index) {
    squares[chosen]?.classList.remove("chosen");
    squares[index]?.classList.add("chosen");
    chosen = index;
    const text = squares[index] ? about(ranks[index]) : summary;
    words.ariaLive = squares[index] ? "polite" : "off"; // the summary changes with each report
    if (words.textContent !== text) words.textContent = text;
  }

  function byKey(event) {
    const to = { ArrowLeft: chosen - 1, ArrowUp: chosen - 1, ArrowRight: chosen + 1, ArrowDown: chosen + 1, Home: 0, End: squares.length - 1 }[event.key];
    if (to === undefined) return;
    choose(Math.min(Math.max(to, 0), squares.length - 1));
    event.preventDefault();
  }

  return {
    section,
    /** @param newest of each rank its `node`, `state`, and where it stands out a `note`. */
    draw(newest) {
      ranks = newest;
      section.hidden = ranks.length < 2;
      const nodes = Map.groupBy(ranks, ({ node }) => node), before = shape;
      shape = ranks.map(({ node }) => node).join();
      if (shape !== before) { // thousands of squares are made once, and then colored
        squares = ranks.map(() => h("span", { className: "rank" }));
        const isSplit = nodes.size > 1 && nodes.size <= MOST_NODES, rows = isSplit ? [...nodes] : [["", ranks]];
        grid.replaceChildren(...rows.map(([node, row]) => h("div", { className: "row" }, isSplit && h("span", { className: "node" }, node || "no node"), h("div", {}, row.map(({ rank }) => squares[rank])))));
      }
      ranks.forEach(({ state, note }, rank) => { squares[rank].dataset.state = state; squares[rank].classList.toggle("notable", Boolean(note)); });
      const states = [...Map.groupBy(ranks, ({ state }) => state)].map(([state, alike]) => `${alike.length.toLocaleString("en")} ${state}`);
      const notes = ranks.filter(({ note }) => note).map(({ rank, note }) => `rank ${rank} ${note}`);
      summary = [`${counted(ranks.length, "rank")} on ${counted(nodes.size - nodes.has(""), "node")}: ${states.join(", ")}`, ...notes].join("; ");
      grid.ariaLabel = `${summary}. Arrows read each rank.`;
      choose(chosen);
    },
  };
}
