// The table of runs in a folder: their states, last steps and rewards.
"use strict";
{
  const ORDERS = {
    last: ["latest change first", (a, b) => (b.last ?? 0) - (a.last ?? 0)],
    name: ["name", (a, b) => a.export.localeCompare(b.export)],
    reward: ["highest reward", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
    step: ["most steps", (a, b) => (b.step ?? 0) - (a.step ?? 0)],
  };
  const chosen = new Set(); // kept while the table is drawn again
  let found = null;
  let go = () => {};

  const { cell } = ps;

  function rowOf(run, changed) {
    const box = ps.el("input", { type: "checkbox", checked: chosen.has(run.key), "aria-label": "draw " + run.name });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.key);
      else chosen.delete(run.key);
      changed();
    });
    const open = ps.link(ps.visible(run.name), () => go(run), { data: { open: run.key } });
    const state = run.state ? (run.state.state === "running" ? "live" : run.state.state) : "";
    const took = run.state ? run.state.earlier_s + ((run.state.ended ?? Date.now() / 1000) - run.state.began) : null;
    return ps.el(
      "tr",
      {},
      cell(box),
      cell(open, true),
      cell(state ? ps.el("span", { class: "word " + state }, state) : "–", true),
      cell(ps.number(run.step)),
      cell(ps.number(run.reward)),
      cell(ps.spark(run.curve, "rewards of the last steps of " + run.name), true),
      cell(run.last === null ? "–" : ps.ago(run.last)),
      cell(took === null ? "–" : ps.duration(took)),
      cell(ps.number(run.events)),
    );
  }

  const NAMES = ["", "run", "state", "last step", "reward now", "last steps", "last change", "ran for", "events"];
  const LEFT = new Set([1, 2, 5]);

  // Show the table; `open` is called with a run, and with the keys of others to draw together with it.
  ps.runsPage = function (element, answer, open) {
    found = answer.runs.map((run) => ({
      ...run,
      name: run.export + (run.run ? " / " + run.run : ""),
      key: run.export + "/" + run.run,
    }));
    go = (run) => open(run, []);
    const list = ps.el("div", {});
    for (const key of chosen) if (!found.some((run) => run.key === key)) chosen.delete(key);
    const few = () => chosen.size < 2;
    const together = () => {
      const all = found.filter((run) => chosen.has(run.key));
      open(all[0], all.slice(1).map((run) => run.key));
    };
    const draw = ps.button("draw chosen together", together, { id: "draw-together", disabled: few() });
    const changed = () => (draw.disabled = few());
    const [boxes, fill] = ps.orderedList({
      id: "run",
      orders: ORDERS,
      order: "order",
      find: "find",
      rows: found,
      nameOf: (run) => run.name,
      fill: (rows) => ps.fill(list, ps.table("runs", NAMES, (i) => LEFT.has(i), rows.map((run) => rowOf(run, changed)))),
    });
    const count = ps.number(found.length) + (found.length === 1 ? " run" : " runs");
    const more = answer.left_out ? `; ${ps.number(answer.left_out)} that changed earlier are left out` : "";
    ps.fill(
      element,
      ps.el(
        "div",
        { class: "controls tools" },
        ...boxes,
        draw,
        ps.el("span", { class: "dim", role: "status" }, count + more),
      ),
      list,
    );
    fill();
  };
}
