// The right column: all columns of one token, distributions of the sample, and masking rules that can be tried out.
"use strict";
{
  let sample = null;
  let parts = null;
  let rule = "dppo";
  let thresholds = {};
  let live = null;
  let exported = null;
  let pick = () => {};
  let onRule = () => {};

  function section(title, ...children) {
    return ps.el("section", {}, ps.el("h2", {}, title), ...children);
  }

  const ORDER = [
    "token_ids",
    "position_ids",
    "loss_mask",
    "mismatch_kl",
    "importance_ratio",
    "log_importance_ratio",
    "prob_delta",
    "trainer_logprobs",
    "inference_logprobs",
    "teacher_logprobs",
    "entropy",
    "advantages",
    "rewards",
    "loss",
    "is_masked",
    "is_masked_high",
    "is_masked_low",
  ];

  function showToken(i) {
    const known = Object.keys(sample.columns);
    const rows = [...ORDER.filter((key) => known.includes(key)), ...known.filter((key) => !ORDER.includes(key))];
    const cells = rows.map((key) => {
      const value = sample.columns[key][i];
      const flag = sample.columns[key] instanceof Uint8Array;
      const text = flag ? (value ? "yes" : "no") : key === "token_ids" ? String(value) : ps.value(value);
      return ps.el(
        "tr",
        {},
        ps.el("th", { scope: "row" }, ps.labels[key] || key),
        ps.el("td", { data: { column: key } }, text),
      );
    });
    if (live)
      cells.push(
        ps.el(
          "tr",
          {},
          ps.el("th", { scope: "row" }, "masked by " + ps.rules[rule].label),
          ps.el("td", { data: { column: "live" } }, live[i] ? "yes" : "no"),
        ),
      );
    parts.token.replaceChildren(
      ps.el(
        "p",
        { class: "piece" },
        ps.el("code", {}, ps.tokens.text(i)),
        ps.el("span", { class: "dim" }, "token " + i),
      ),
      ps.el("table", {}, ps.el("tbody", {}, ...cells)),
    );
  }

  function count(masks) {
    return masks ? masks.reduce((sum, mask) => sum + (mask ? 1 : 0), 0) : 0;
  }

  function recount() {
    live = ps.judge(sample, rule, thresholds);
    const trained = count(sample.columns.loss_mask);
    if (!live) {
      parts.counts.replaceChildren(ps.el("p", { class: "dim" }, "This sample has no values for this rule."));
      onRule(null);
      return;
    }
    let both = 0;
    let only = 0;
    let missed = 0;
    for (let i = 0; i < sample.count; i++) {
      const was = exported && exported[i];
      if (live[i] && was) both += 1;
      else if (live[i]) only += 1;
      else if (was) missed += 1;
    }
    const line = (name, value, id) =>
      ps.el(
        "tr",
        {},
        ps.el("th", { scope: "row" }, name),
        ps.el("td", { id }, ps.number(value)),
        ps.el("td", { class: "dim" }, ps.percent(value, trained)),
      );
    const high = live.reduce((sum, mask) => sum + (mask === 1 ? 1 : 0), 0);
    const rows = [
      line("masked now", both + only, "live-masked"),
      line("of these high", high, "live-high"),
      line("of these low", both + only - high, "live-low"),
    ];
    if (exported)
      rows.push(
        line("masked in training", both + missed, "trained-masked"),
        line("in both", both, "in-both"),
        line("now only", only, "now-only"),
        line("in training only", missed, "training-only"),
      );
    parts.counts.replaceChildren(ps.el("table", {}, ps.el("tbody", {}, ...rows)));
    onRule(live);
    drawMarks();
  }

  function inputs() {
    const boxes = Object.entries(thresholds).map(([name, value]) => {
      const box = ps.el("input", {
        type: "number",
        step: "0.05",
        min: "0",
        value: String(value),
        id: "threshold-" + name,
        "aria-label": name,
      });
      box.addEventListener("input", () => {
        if (box.value === "" || Number.isNaN(Number(box.value))) return;
        thresholds[name] = Number(box.value);
        recount();
      });
      return ps.el("label", {}, name, box);
    });
    parts.about.textContent = "Masks a trained token whose " + ps.rules[rule].about + ".";
    parts.inputs.replaceChildren(
      ...boxes,
      ps.el("button", { type: "button", id: "reset", on: { click: reset } }, "reset"),
    );
  }

  function reset() {
    thresholds = ps.thresholdsOf(sample, rule);
    inputs();
    recount();
  }

  function choose(name) {
    rule = name;
    parts.rule.value = name;
    reset();
  }

  function drawMarks() {
    const c = sample.columns;
    const log = (value) => Math.log10(value);
    const power = (value) => ps.number(Number((10 ** value).toPrecision(3)));
    const edges =
      rule === "icepop"
        ? [thresholds.low, thresholds.high]
        : rule === "ppo"
          ? [1 - thresholds.low, 1 + thresholds.high]
          : [];
    ps.histogram(parts.ratio, c.importance_ratio || [], {
      mask: c.loss_mask,
      transform: log,
      format: power,
      marks: edges,
      label: "ratio",
    });
    ps.histogram(parts.kl, c.mismatch_kl || [], {
      mask: c.loss_mask,
      transform: (value) => log(Math.max(value, 1e-9)),
      format: power,
      label: "mismatch KL",
    });
    drawScatter();
  }

  function drawScatter() {
    const c = sample.columns;
    ps.scatter(parts.scatter, c.inference_logprobs || [], c.trainer_logprobs || [], {
      mask: sample.facts.training_mode === "sft" ? [] : c.loss_mask,
      marked: live || exported,
      onPick: pick,
      cursor: ps.tokens.cursor(),
    });
  }

  ps.side = {
    // Fill the column for a sample; `go` opens a token, `changed` hears of the masks of the rule being tried.
    show(element, opened, go, changed) {
      sample = opened;
      pick = go;
      onRule = changed;
      exported = ps.exported(sample);
      const canvas = (id) => ps.el("canvas", { id });
      parts = {
        token: ps.el("div", { id: "token" }),
        ratio: canvas("ratio"),
        kl: canvas("kl"),
        scatter: canvas("scatter"),
        counts: ps.el("div", { id: "counts" }),
        inputs: ps.el("div", { class: "inputs" }),
        about: ps.el("p", { class: "dim small" }),
      };
      parts.rule = ps.el(
        "select",
        { id: "rule", "aria-label": "Rule", on: { change: () => choose(parts.rule.value) } },
        ...Object.entries(ps.rules).map(([name, one]) => ps.el("option", { value: name }, one.label)),
      );
      parts.token.append(ps.el("p", { class: "dim" }, "Point at a token, or move with the arrow keys."));
      element.replaceChildren(
        section("Token", parts.token),
        section("Ratio", parts.ratio),
        section("Mismatch KL", parts.kl),
        section("Trainer and sampler", parts.scatter),
        section("What would be masked", parts.rule, parts.inputs, parts.about, parts.counts),
      );
      const own = sample.facts.rule && sample.facts.rule.kind;
      choose(ps.rules[own] ? own : own === "opd" ? "dppo" : rule);
    },
    token(i) {
      if (sample && parts) showToken(i);
    },
    // The cursor moved for good: draw it into the scatter too.
    settle: () => sample && parts && drawScatter(),
    masks: () => live,
    exported: () => exported,
    redraw: () => sample && parts && drawMarks(),
  };
}
