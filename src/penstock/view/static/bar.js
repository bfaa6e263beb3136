// The bar above the tokens: details of the sample, and the column its tokens are coloured by.
"use strict";
{
  const KINDS = [
    ["fixed", "fixed"],
    ["step", "this step"],
    ["sample", "this sample"],
  ];
  let column = ps.columns[0];
  let typed = NaN;
  let sample = null;
  let scales = null; // of the step's trained tokens, by column
  let box = null; // where the value for full colour is typed
  let legend = null;
  let openGroup = () => {};

  const kind = () => ps.query.get("scale") || "fixed";

  function details(row) {
    const fields = sample.fields;
    const rollout = fields.rollout || {};
    const reward = (sample.columns.rewards || [NaN]).find((value) => Number.isFinite(value));
    const found = [
      fields.env_name,
      fields.training_mode,
      fields.group_id && "group " + fields.group_id,
      fields.prompt && "prompt " + fields.prompt,
      "rank " + fields.rank + ", micro-step " + fields.micro_step,
      fields.policy_version !== null && "policy " + fields.policy_version,
      fields.staleness !== null && fields.staleness + " behind",
      reward !== undefined && "reward " + ps.number(reward),
      rollout.truncated && "truncated",
      rollout.stop_condition && "stopped by " + rollout.stop_condition,
      Number.isFinite(rollout.seconds) && ps.number(rollout.seconds) + " s",
      row && row.advantage !== null && "advantage " + ps.signed(row.advantage),
      ps.number(sample.count) + " tokens",
    ];
    return found
      .filter(Boolean)
      .map((text) => ps.visible(String(text)))
      .join("  ·  ");
  }

  function colourBox() {
    const known = ps.columnsOf(sample);
    const wanted = ps.query.get("colour") || column.key;
    column = known.find((one) => one.key === wanted) || known[0];
    return ps.select(
      "colour",
      "Colour by",
      known.map((one) => [one.key, one.label]),
      column.key,
      (key) => choose(known.find((one) => one.key === key)),
    );
  }

  function choose(one) {
    column = one;
    typed = NaN;
    box.value = "";
    ps.query.set({ colour: one === ps.columns[0] ? null : one.key });
    repaint();
  }

  function typedBox() {
    const value = Number.isNaN(typed) ? "" : String(typed);
    const label = "Value for full colour";
    return ps.input({ type: "number", id: "typed", min: "0", step: "any", "aria-label": label, value }, (text) => {
      typed = text === "" ? NaN : Number(text);
      repaint();
    });
  }

  function draw(number, row) {
    const fields = sample.fields;
    legend = ps.el("div", { class: "legend", id: "legend" });
    box = typedBox();
    const scale = ps.select("scale", "Scale of the colours", KINDS, kind(), (value) => {
      ps.query.set({ scale: value === "fixed" ? null : value });
      repaint();
    });
    const group = fields.group_id
      ? ps.button("its group", () => openGroup(fields.group_id), { id: "to-group" })
      : null;
    return ps.el(
      "div",
      { class: "bar-top" },
      ps.el(
        "div",
        { class: "head" },
        ps.el("h1", {}, ps.visible(fields.sample_id || "sample " + number)),
        row && !row.trains ? ps.el("span", { class: "mark", id: "idle" }, "trains nothing") : null,
        ps.el("span", { class: "grow" }),
        group,
      ),
      ps.el("p", { class: "dim" }, details(row)),
      ps.el(
        "div",
        { class: "controls" },
        ps.el("label", {}, "colour by", colourBox()),
        ps.el("label", {}, "scale", scale),
        ps.el("label", {}, "full colour at", box),
        legend,
      ),
    );
  }

  function drawLegend({ scale, name }) {
    const stops = column.twoSided ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
    const swatches = stops.map((stop) => {
      const swatch = ps.el("i", {});
      swatch.style.backgroundColor = ps.colour(stop, column);
      return swatch;
    });
    const low = column.twoSided ? column.centre - scale : column.centre;
    const marks = [
      ["masked high", "high"],
      ["masked low", "low"],
      ["masked", "other"],
    ].map(([text, side]) => ps.el("span", { class: "tok masked " + side }, text));
    ps.fill(
      legend,
      ps.number(low),
      ...swatches,
      ps.number(column.centre + (column.negative ? -scale : scale)),
      ps.el("span", { class: "dim", id: "scale-name" }, "(" + name + ")"),
      ...(ps.side.exported() ? marks : []),
      ps.el("span", { class: "tok live" }, "by the rule tried"),
    );
  }

  function repaint() {
    const found = ps.scaleOf(sample, column, kind(), scales, typed);
    box.placeholder = ps.number(found.scale);
    const look = { column, scale: found.scale, exported: ps.side.exported(), live: ps.side.masks() };
    ps.tokens.paint(look);
    ps.compare.paint(look);
    drawLegend(found);
  }

  // The trained token furthest from the column's centre, -1 if there is none.
  function worst() {
    const values = sample.columns[column.key];
    const far = (i) => Math.abs(values[i] - column.centre);
    let best = -1;
    for (let i = 0; values && i < sample.count; i++)
      if (sample.columns.loss_mask[i] && Number.isFinite(values[i]) && (best < 0 || far(i) > far(best))) best = i;
    return best;
  }

  function cycle() {
    const known = ps.columnsOf(sample);
    const at = known.findIndex((one) => one.key === column.key);
    choose(known[(at + 1) % known.length]);
    document.getElementById("colour").value = column.key;
  }

  ps.bar = {
    // The bar's element for a sample; paint the tokens with `repaint` once they are there.
    show(opened, number, row, ofStep, toGroup) {
      sample = opened;
      scales = ofStep;
      openGroup = toGroup;
      return draw(number, row);
    },
    repaint,
    worst,
    cycle,
    column: () => column,
  };
}
