// The right column: all columns of one token, distributions of the sample, and masking rules to try.
"use strict";
{
  let sample = null;
  let other = null; // the same sample of the run it is compared with
  let parts = null;
  let tried = null; // the rule being tried, kept from sample to sample
  let live = null;
  let exported = null;
  let pick = () => {};
  let onRule = () => {};

  const section = (title, ...children) => ps.el("section", {}, ps.el("h2", {}, title), ...children);

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

  function text(of, key, i) {
    const values = of.columns[key];
    if (!values || i >= of.count) return "–";
    if (values instanceof Uint8Array) return values[i] ? "yes" : "no";
    return key === "token_ids" ? String(values[i]) : ps.value(values[i]);
  }

  function line(name, key, ...cells) {
    const differs = cells.length > 1 && cells[0] !== cells[1];
    return ps.el(
      "tr",
      { class: differs ? "differs" : "" },
      ps.el("th", { scope: "row" }, name),
      ...cells.map((cell, side) => ps.el("td", { data: side ? { other: key } : { column: key } }, cell)),
    );
  }

  function showToken(i) {
    const known = [...new Set([...Object.keys(sample.columns), ...(other ? Object.keys(other.columns) : [])])];
    const rows = [...ORDER.filter((key) => known.includes(key)), ...known.filter((key) => !ORDER.includes(key))];
    const cells = rows.map((key) =>
      line(ps.labels[key] || key, key, ...[sample, other].filter(Boolean).map((one) => text(one, key, i))),
    );
    const said = [sample, other].filter(Boolean).map((one) => ps.visible(roleOf(one, i)) || "–");
    if (said.some((role) => role !== "–")) cells.push(line("role", "role", ...said));
    if (live) cells.push(line("masked by " + ps.rules[tried.name].label, "live", live[i] ? "yes" : "no"));
    const head = other
      ? ps.el("thead", {}, ps.el("tr", {}, ...["", "A", "B"].map((name) => ps.el("th", { scope: "col" }, name))))
      : null;
    ps.fill(
      parts.token,
      ps.el(
        "p",
        { class: "piece" },
        ps.el("code", {}, ps.tokens.text(i) ?? "–"),
        ps.el("span", { class: "dim" }, "token " + i),
      ),
      ps.el("table", {}, ...[head, ps.el("tbody", {}, ...cells)].filter(Boolean)),
    );
  }

  // The role whose turn a token belongs to; empty if unknown.
  function roleOf(one, i) {
    const roles = (one.fields.rollout || {}).roles;
    if (!roles) return "";
    for (let k = 0, end = 0; k + 1 < roles.runs.length; k += 2) {
      end += roles.runs[k + 1];
      if (i < end) return roles.names[roles.runs[k]] || "";
    }
    return "";
  }

  // What is known of the rollout: metrics and info by name, and why it failed.
  function rolloutTable() {
    const known = sample.fields.rollout || {};
    const shown = (value) => (typeof value === "number" ? ps.number(value) : ps.visible(JSON.stringify(value)));
    const rows = [
      ...Object.entries(known.metrics || {}),
      ...Object.entries(known.info || {}),
      ...["agent", "error"].filter((name) => known[name]).map((name) => [name, known[name]]),
    ].map(([name, value]) => line(ps.visible(name), name, typeof value === "string" ? ps.visible(value) : shown(value)));
    return rows.length ? ps.el("table", { id: "rollout" }, ps.el("tbody", {}, ...rows)) : null;
  }

  // The screen reader's text for the token under the cursor.
  function spoken(i) {
    const column = ps.bar.column();
    const words = [ps.tokens.text(i), "token " + i, sample.columns.loss_mask[i] ? "trained" : "context"];
    if (column && sample.columns[column.key]) words.push(column.label + " " + text(sample, column.key, i));
    if (exported && exported[i]) words.push("masked");
    return words.join(", ");
  }

  // What a rule masks beside what training masked, as a table; `of` is the number of trained tokens.
  ps.ruleTable = function (found, prefix) {
    const row = (name, value, id) =>
      ps.el(
        "tr",
        {},
        ps.el("th", { scope: "row" }, name),
        ps.el("td", { id: prefix + id }, ps.number(value)),
        ps.el("td", { class: "dim" }, ps.percent(value, found.trained)),
      );
    const rows = [
      row("masked now", found.masked, "live-masked"),
      row("of these high", found.high, "live-high"),
      row("of these low", found.low, "live-low"),
    ];
    if (found.in_training !== undefined)
      rows.push(
        row("masked in training", found.in_training, "trained-masked"),
        row("in both", found.both, "in-both"),
        row("now only", found.now_only, "now-only"),
        row("in training only", found.training_only, "training-only"),
      );
    return ps.el("table", {}, ps.el("tbody", {}, ...rows));
  };

  function recount() {
    live = ps.judge(sample, tried.name, tried.thresholds);
    const found = ps.countRule([sample], tried.name, tried.thresholds);
    const none = "This sample has no values for this rule.";
    parts.counts.replaceChildren(found ? ps.ruleTable(found, "") : ps.el("p", { class: "dim" }, none));
    onRule(live);
    drawMarks();
  }

  // Where a rule's thresholds lie on the axis of the ratio, in powers of ten.
  ps.edgesOf = function (name, t) {
    const edges = name === "icepop" ? [t.low, t.high] : name === "ppo" ? [1 - t.low, 1 + t.high] : [];
    return edges.map(Math.log10).filter(Number.isFinite);
  };
  ps.power = (value) => ps.number(Number((10 ** value).toPrecision(3)));

  function drawMarks() {
    const c = sample.columns;
    const log = (value) => Math.log10(value);
    ps.histogram(parts.ratio, c.importance_ratio || [], {
      mask: c.loss_mask,
      transform: log,
      format: ps.power,
      marks: ps.edgesOf(tried.name, tried.thresholds).map((edge) => 10 ** edge),
      centre: 1,
      label: "ratio",
    });
    ps.histogram(parts.kl, c.mismatch_kl || [], {
      mask: c.loss_mask,
      transform: (value) => log(Math.max(value, 1e-9)),
      format: ps.power,
      label: "mismatch KL",
    });
    drawScatter();
  }

  function drawScatter() {
    const c = sample.columns;
    ps.scatter(parts.scatter, c.inference_logprobs || [], c.trainer_logprobs || [], {
      mask: sample.fields.training_mode === "sft" ? [] : c.loss_mask,
      marked: live || exported,
      onPick: pick,
      cursor: ps.tokens.cursor(),
    });
  }

  // Sections with the trainer's values. If it exported none, explain how it can.
  function computed(...sections) {
    const isKnown = ["trainer_logprobs", "importance_ratio", "is_masked"].some((key) => sample.columns[key]);
    if (!isKnown) for (const one of sections) one.hidden = true;
    return isKnown ? sections : [...sections, ps.notExported()];
  }

  // The lines that make a training loop record what it computes.
  ps.notExported = () =>
    ps.el(
      "section",
      { class: "panel", id: "not-exported" },
      ps.el("h2", {}, "From the trainer"),
      ps.el(
        "p",
        { class: "dim small" },
        "Ratios, mismatch and masks are not recorded here: they need the trainer's log-probabilities. In its loop:",
      ),
      ps.el(
        "pre",
        {},
        "exporter = ps.TokenExporter(folder)\nexporter.write(step, batch, terms)\nexporter.close_step(step)",
      ),
    );

  ps.side = {
    // Fill the column for a sample; `go` opens a token, `changed` is called with the masks of the rule being tried.
    show(element, opened, compared, go, changed) {
      sample = opened;
      other = compared;
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
      };
      tried = tried || ps.ruleChooser("", " The Step page counts over all samples.", recount);
      parts.token.append(ps.el("p", { class: "dim" }, "Point at a token, or move with the arrow keys."));
      element.replaceChildren(
        section("Token", parts.token),
        ...[rolloutTable()].filter(Boolean).map((table) => section("Rollout", table)),
        ...computed(
          section("What would be masked", tried.box, tried.inputs, tried.about, parts.counts),
          section("Ratio", parts.ratio),
          section("Mismatch KL", parts.kl),
          section("Trainer and sampler", parts.scatter),
        ),
      );
      tried.begin(ps.ruleOf(sample.fields.rule, tried.name), sample);
    },
    token(i) {
      if (sample && parts) showToken(i);
    },
    // The cursor has settled: draw it in the scatter plot too, and announce the token to screen readers.
    settle(i) {
      if (!sample || !parts) return;
      drawScatter();
      document.getElementById("spoken").textContent = spoken(i);
    },
    masks: () => live,
    exported: () => exported,
    redraw: () => sample && parts && drawMarks(),
  };
}
