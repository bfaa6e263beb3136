// The bar over the tokens: what the sample is, and what its tokens are coloured by.
"use strict";
{
  const look = { column: ps.columns[0], percent: 95, typed: NaN };
  let sample = null;
  let box = null; // where the value for full colour is typed
  let legend = null;

  function draw(number) {
    const facts = sample.facts;
    legend = ps.el("span", { class: "legend", id: "legend" });
    const known = ps.columnsOf(sample);
    look.column = known.find((column) => column.key === look.column.key) || known[0];
    const colour = ps.select(
      "colour",
      "Colour by",
      known.map((column) => [column.key, column.label]),
      look.column.key,
      (key) => {
        look.column = known.find((column) => column.key === key);
        look.typed = NaN;
        typed.value = "";
        repaint();
      },
    );
    const percent = ps.el("input", {
      type: "number",
      id: "percent",
      min: "50",
      max: "100",
      step: "1",
      value: String(look.percent),
      "aria-label": "Percentile for full colour",
    });
    percent.addEventListener("input", () => {
      look.percent = Math.max(1, Math.min(100, Number(percent.value) || 95));
      repaint();
    });
    const typed = ps.el("input", {
      type: "number",
      id: "typed",
      min: "0",
      step: "any",
      placeholder: "auto",
      "aria-label": "Value for full colour",
      value: Number.isNaN(look.typed) ? "" : String(look.typed),
    });
    typed.addEventListener("input", () => {
      look.typed = typed.value === "" ? NaN : Number(typed.value);
      repaint();
    });
    box = typed;
    const reward = (sample.columns.rewards || [NaN]).find((value) => Number.isFinite(value));
    const detail = [
      facts.env_name,
      facts.training_mode,
      facts.group_id && "group " + facts.group_id,
      facts.prompt && "prompt " + facts.prompt,
      "rank " + facts.rank + ", micro-step " + facts.micro_step,
      facts.policy_version !== null && "policy " + facts.policy_version,
      facts.staleness !== null && facts.staleness + " behind",
      reward !== undefined && "reward " + ps.number(reward),
      ps.number(sample.count) + " tokens",
    ];
    return ps.el(
      "div",
      { class: "bar-top" },
      ps.el("h1", {}, ps.visible(facts.sample_id || "sample " + number)),
      ps.el(
        "p",
        { class: "dim" },
        detail
          .filter(Boolean)
          .map((text) => ps.visible(String(text)))
          .join("  ·  "),
      ),
      ps.el(
        "div",
        { class: "controls" },
        ps.el("label", {}, "colour by", colour),
        ps.el("label", {}, "full at percentile", percent),
        ps.el("label", {}, "or value", typed),
        legend,
      ),
    );
  }

  function drawLegend(scale) {
    const column = look.column;
    const stops = column.twoSided ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
    const sign = column.key.endsWith("logprobs") ? -1 : 1;
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
    ].map(([text, kind]) => ps.el("span", { class: "tok masked " + kind }, text));
    legend.replaceChildren(
      ps.number(low),
      ...swatches,
      ps.number(column.centre + sign * scale),
      ...(ps.side.exported() ? marks : []),
      ps.el("span", { class: "tok live" }, "by the rule tried"),
    );
  }

  function repaint() {
    const scale = ps.scaleOf(sample, look.column, look.percent, look.typed);
    box.placeholder = ps.number(scale);
    const live = ps.side.masks();
    ps.tokens.paint({ column: look.column, scale, exported: ps.side.exported(), live });
    drawLegend(scale);
  }

  // The trained token furthest from the column's centre; -1 where there is none.
  function worst() {
    const values = sample.columns[look.column.key];
    let best = -1;
    for (let i = 0; i < sample.count; i++)
      if (
        sample.columns.loss_mask[i] &&
        Number.isFinite(values[i]) &&
        (best < 0 || Math.abs(values[i] - look.column.centre) > Math.abs(values[best] - look.column.centre))
      )
        best = i;
    return best;
  }

  function cycle() {
    const known = ps.columnsOf(sample);
    const at = known.findIndex((column) => column.key === look.column.key);
    look.column = known[(at + 1) % known.length];
    look.typed = NaN;
    box.value = "";
    document.getElementById("colour").value = look.column.key;
    repaint();
  }

  ps.bar = {
    // The bar's element for a sample; paint the tokens with `repaint` once they are there.
    show(opened, number) {
      sample = opened;
      return draw(number);
    },
    repaint,
    worst,
    cycle,
  };
}
