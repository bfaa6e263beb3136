// Environments and prompts over the run, from the plane's log: which are learned, slow or never solved.
"use strict";
{
  const SHOWN = 300;
  const SORTS = {
    groups: ["most often trained", (a, b) => b.groups - a.groups],
    gained: ["most gained", (a, b) => change(b) - change(a)],
    lost: ["most lost", (a, b) => change(a) - change(b)],
    low: ["lowest mean reward", (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity)],
    high: ["highest mean reward", (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity)],
  };
  const change = (one) => (one.first === null ? 0 : one.last - one.first);

  const { cell } = ps;
  const value = (number, digits) => (number === null ? "–" : number.toFixed(digits));

  // A small curve, drawn once it is on the page.
  ps.spark = function (values, label) {
    const canvas = ps.el("canvas", { class: "spark", role: "img", "aria-label": label });
    requestAnimationFrame(() => {
      const { pen, width, height } = ps.prepare(canvas, 22);
      if (!values.length) return;
      const low = Math.min(...values);
      const high = Math.max(...values);
      const x = (i) => 2 + (i / Math.max(values.length - 1, 1)) * (width - 4);
      const y = (v) => (high === low ? height / 2 : 3 + (1 - (v - low) / (high - low)) * (height - 6));
      const colour = ps.palette().accent;
      pen.strokeStyle = pen.fillStyle = colour;
      pen.lineWidth = 1.5;
      pen.beginPath();
      values.forEach((v, i) => (i ? pen.lineTo(x(i), y(v)) : pen.moveTo(x(i), y(v))));
      pen.stroke();
      pen.fillRect(x(values.length - 1) - 2, y(values[values.length - 1]) - 2, 4, 4);
    });
    return canvas;
  };
  const { spark } = ps;

  // A name that opens its page over steps. The "=" before the name distinguishes an empty name from none.
  function opening(kind, name) {
    if (ps.source.isEmbedded) return ps.visible(name || "–");
    return ps.link(ps.visible(name || "–"), () => ps.query.open({ of: kind, name: "=" + name }), { data: { over: kind } });
  }

  const stepLink = (step, open) => ps.link("step " + step, () => open(step));
  const share = (number) => (number === null ? "–" : ps.percent(number, 1));

  function environments(found) {
    const names = ["environment", "reward", "groups", "mean reward", "tokens", "seconds", "truncated"];
    const rows = found.envs.map((one) =>
      ps.el(
        "tr",
        {},
        cell(opening("env", one.env), true),
        cell(spark(one.curve, "rewards of " + (one.env || "groups without a name")), true),
        cell(ps.number(one.groups)),
        cell(value(one.reward, 3)),
        cell(value(one.length, 0)),
        cell(value(one.seconds, 1)),
        cell(share(one.truncated)),
      ),
    );
    return ps.table("envs", names, (i) => i < 2, rows);
  }

  function prompts(rows, open) {
    const names = ["prompt", "environment", "reward", "groups", "first", "last", "best", "mean", "last trained"];
    const lines = rows.map((one) =>
      ps.el(
        "tr",
        {},
        cell(opening("prompt", one.prompt), true),
        cell(ps.visible(one.env || "–"), true),
        cell(spark(one.curve, "rewards of this prompt"), true),
        cell(ps.number(one.groups)),
        ...["first", "last", "best", "mean"].map((key) => cell(value(one[key], 3))),
        cell(stepLink(one.last_step, open)),
      ),
    );
    return ps.table("prompts", names, (i) => i < 3, lines);
  }

  // ---------------------------------------------------------------- one environment or prompt over steps

  const CHARTS = [
    ["Reward", "mean of its samples", "reward", ps.number],
    ["Length", "mean tokens of a sample", "length", ps.number],
    ["Seconds", "mean of a rollout", "seconds", ps.number],
    ["Truncated", "share of rollouts that ended by a limit", "truncated", share],
    ["Without a reward", "share of groups", "unscored", share],
    ["Groups", "trained in the step", "groups", ps.number],
  ];
  const ROWS = 200;

  function panel(title, note, xs, ys, format, open) {
    const last = [...ys].reverse().find(Number.isFinite) ?? NaN;
    const canvas = ps.el("canvas", { role: "img", "aria-label": `${title} over steps, latest ${format(last)}` });
    canvas.dataset.curve = title;
    const read = ps.el("div", { class: "keys" }, ps.el("span", { class: "key" }, ps.el("b", {}, format(last))));
    const draw = () => {
      const range = [xs[0], xs[xs.length - 1]];
      const colour = ps.palette().lines[0];
      const scale = ps.drawLines(canvas, [{ xs, ys, colour }], range, false);
      canvas.onclick = (event) =>
        open(xs[ps.nearest(xs, scale.back(event.clientX - canvas.getBoundingClientRect().left))]);
    };
    requestAnimationFrame(draw);
    const head = ps.el("div", { class: "head" }, ps.el("h2", {}, title), ps.el("span", { class: "dim small" }, note));
    return ps.el("section", { class: "panel chart" }, head, read, ps.el("div", { class: "canvas" }, canvas));
  }

  function stepsTable(found, open) {
    const names = ["step", "groups", "reward", "tokens", "seconds", "truncated"];
    const rows = found.steps
      .map((step, i) =>
        ps.el(
          "tr",
          {},
          cell(stepLink(step, open), true),
          cell(ps.number(found.groups[i])),
          cell(value(found.reward[i], 3)),
          cell(value(found.length[i], 0)),
          cell(value(found.seconds[i], 1)),
          cell(share(found.truncated[i])),
        ),
      )
      .reverse();
    const note = rows.length > ROWS ? `the last ${ROWS} of ${ps.number(rows.length)} steps with it` : "";
    return [ps.el("p", { class: "dim small" }, note), ps.table("over-steps", names, (i) => !i, rows.slice(0, ROWS))];
  }

  // The page of one environment or one prompt; a click on a chart or a step opens its groups.
  ps.overSteps = function (element, found, kind, name, open) {
    const numbers = (key) => found[key].map((number) => (number === null ? NaN : number));
    const charts = CHARTS.map(([title, note, key, format]) => [title, note, numbers(key), format])
      .filter(([title, , ys]) => ys.some(title === "Without a reward" ? Boolean : Number.isFinite))
      .map(([title, note, ys, format]) => panel(title, note, found.steps, ys, format, open));
    const unused = Object.entries(found.unused);
    const lost = unused.reduce((sum, [, count]) => sum + count, 0);
    const why = unused.map(([reason, count]) => ps.number(count) + " " + ps.visible(reason)).join(", ");
    const rewards = numbers("reward").filter(Number.isFinite);
    const leave = () => ps.query.open({ of: null, name: null });
    const back = ps.link("← all environments and prompts", leave, { id: "all-prompts" });
    const other =
      kind === "env"
        ? ps.card("prompts", ps.number(found.num_prompts), "trained so far")
        : ps.card("environment", ps.visible(found.envs.join(", ") || "–"), "");
    ps.fill(
      element,
      back,
      ps.el("h1", {}, (kind === "env" ? "Environment " : "Prompt ") + ps.visible(name || "–")),
      ps.el(
        "div",
        { class: "cards over-steps" },
        other,
        ps.card("steps", ps.number(found.steps.length), "with a group of it"),
        ps.card("groups", ps.number(found.groups.reduce((a, b) => a + b, 0)), "trained"),
        ps.card("reward", ps.number(rewards[rewards.length - 1]), rewards.length ? "first " + ps.number(rewards[0]) : ""),
        ps.card("never trained", ps.number(lost), lost ? "groups: " + why : "every group was trained, or waits"),
      ),
      ps.el("div", { class: "curves" }, ...charts),
      ...stepsTable(found, open),
    );
  };

  ps.promptsPage = function (element, found, open) {
    if (!found.envs) {
      const text = found.error || "No plane has kept its log here, so prompts over steps are not known.";
      return ps.fill(element, ps.el("p", { class: "empty" }, text));
    }
    if (!found.prompts.length)
      return ps.fill(element, ps.el("p", { class: "empty" }, "No step has been trained yet."));
    const list = ps.el("div", {});
    const fill = (rows) => {
      const more = rows.length > SHOWN ? "the first " + SHOWN + " of " + ps.number(rows.length) : ps.number(rows.length);
      ps.fill(list, ps.el("p", { class: "dim small", id: "prompts-shown" }, more + " shown"), prompts(rows.slice(0, SHOWN), open));
    };
    const [boxes, draw] = ps.orderedList({
      id: "prompt",
      orders: SORTS,
      order: "sort",
      find: "prompt",
      rows: found.prompts,
      nameOf: (one) => one.prompt + " " + one.env,
      fill,
    });
    const note =
      found.num_prompts > found.prompts.length
        ? "the " + ps.number(found.prompts.length) + " of " + ps.number(found.num_prompts) + " prompts trained most often"
        : ps.number(found.num_prompts) + (found.num_prompts === 1 ? " prompt" : " prompts");
    const summary = `${note}, ${ps.number(found.groups)} groups in ${ps.number(found.steps)} steps`;
    ps.fill(
      element,
      ps.el("h2", {}, "Environments, last 10 steps"),
      environments(found),
      ps.el("h2", {}, "Prompts"),
      ps.el("div", { class: "controls tools" }, ...boxes, ps.el("span", { class: "dim" }, summary)),
      list,
    );
    draw();
  };
}
