// The top bar: run, step, pages, and whether the run is running.
"use strict";
{
  const NAMES = { runs: "Runs", run: "Run", step: "Step", groups: "Groups", samples: "Samples", prompts: "Prompts", dropped: "Dropped" };

  const PLANE = " read from the plane: tokens as they were put, while their frames are kept. What the trainer computed, such" +
    " as its log-probabilities, needs a TokenExporter.";

  function stepsOf(run) {
    const count = ps.number(run.steps.length) + (run.steps.length === 1 ? " step" : " steps");
    if (run.source === "plane") return count + PLANE;
    if (run.steps.length) return count.replace(" step", " exported step") + ".";
    return "No step has been exported yet; the first appears here when it comes.";
  }

  function sentence(run, state) {
    const ran = state.earlier_s + (state.ended ?? 0) - state.began;
    const end = state.ended ? `${ps.clock(state.ended)} (${ps.ago(state.ended)}), after ${ps.duration(ran)}` : "";
    const starts = state.earlier_s ? " over all its starts" : "";
    const last = run.last ? ` Last step ${ps.ago(run.last)}.` : "";
    return {
      running: (state.of === "plane" ? "Its plane runs" : "Running") + ` since ${ps.clock(state.began)}.` + last,
      finished: `Finished at ${end}${starts}.`,
      stopped: (state.of === "plane" ? "Its plane was closed" : "Stopped") + ` at ${end}${starts}; it can be continued.`,
      failed: `Ended with an error at ${end}${starts}; see its logs.`,
      gone:
        (state.of === "plane" ? "Its plane is gone: it ended without closing its log." : "Its process is gone, and left no reason.") +
        (state.ended ? ` Last sign of it ${ps.ago(state.ended)}.` : ""),
    }[state.state];
  }

  // The run's state as a label and as a sentence, and its age.
  function stateOf(run) {
    if (ps.source.isEmbedded) return ["", "A part of a run, in one file.", ""];
    const { state } = run;
    const lost = ps.live.isOpen() ? "" : " The server of this page does not answer; it tries again by itself.";
    const age = run.last ? ps.ago(run.last) : "";
    if (!state) {
      const last = run.last ? ` Last step ${age}.` : "";
      return [lost ? "offline" : "", stepsOf(run) + last + lost, age];
    }
    const word = state.state === "running" ? (lost ? "offline" : "live") : state.state;
    const steps = run.source === "plane" || !run.steps.length ? " " + stepsOf(run) : "";
    const again = lost && state.state !== "running" ? " `penstock view` with its folder shows it again." : lost;
    return [word, sentence(run, state) + steps + again, state.ended ? ps.ago(state.ended) : age];
  }

  // Boxes to choose from: exports where there are several, runs of the chosen one where there are several.
  function pickers({ at, overview, go }, chosen) {
    const other = { sample: -1, token: -1 };
    if (at.page === "runs") return [];
    const exports = overview.exports.map((one) => [one.name, one.name]);
    const runs = chosen.runs.map((one) => [one.run, one.run === "" ? chosen.folder : one.run]);
    const found = [];
    if (exports.length > 1)
      found.push(ps.select("export", overview.is_many ? "Run" : "Export", exports, at.export, (value) => go({ export: value, ...other })));
    if (runs.length > 1) found.push(ps.select("run", "Run", runs, at.run, (value) => go({ run: value, ...other })));
    return found.length ? found : [ps.el("span", { class: "dim where" }, ps.visible(chosen.folder))];
  }

  const button = (id, label, text, click) => ps.button(text, click, { id, "aria-label": label, title: label });

  // The button that follows the newest step. Shown while the run is running.
  function follow({ at, run, followNewest }) {
    const newest = run.steps[run.steps.length - 1];
    if (!run.state || run.state.state !== "running" || newest === undefined || at.page === "run") return null;
    const isOn = ps.query.get("follow") === "1";
    const text = isOn ? "following" : newest === at.step ? "follow" : "newest: " + newest;
    const found = button("follow", "Go to the newest step, and on as steps come", text, () => followNewest(!isOn));
    found.setAttribute("aria-pressed", String(isOn));
    if (isOn) found.className = "on";
    return found;
  }

  ps.top = {
    stateOf,
    draw(element, page) {
      const { at, overview, run, address, go } = page;
      if (element.querySelector("#step:focus")) return; // a box that is open is left alone
      const word = run.run === "(evaluation)" ? "version " : "step ";
      const steps = run.steps.map((number) => [String(number), word + number]).reverse();
      const open = (value) => {
        document.activeElement.blur();
        go({ step: Number(value), sample: -1, token: -1 });
      };
      const tabs = Object.entries(NAMES).filter(([name]) => name !== "runs" || overview.is_many).map(([name, text]) => {
        const on = at.page === name;
        const href = address({ ...at, page: name });
        return ps.el(
          "a",
          { href, class: on ? "on" : "", id: "tab-" + name, "aria-current": on ? "page" : "false" },
          text,
        );
      });
      const [state, words, age] = stateOf(run);
      const isTable = at.page === "runs";
      ps.fill(
        element,
        ps.el("span", { class: "brand" }, "penstock"),
        ...pickers(
          page,
          overview.exports.find((one) => one.name === at.export),
        ),
        steps.length && !isTable ? ps.select("step", "Step", steps, String(at.step), open) : null,
        isTable ? null : follow(page),
        ps.el("nav", { "aria-label": "Pages" }, ...tabs),
        ps.el("span", { class: "grow" }),
        state && !isTable ? ps.el("span", { class: "word " + state, id: "live", title: words }, state) : null,
        isTable ? null : ps.el("span", { class: "dim small", id: "age", title: words }, age),
        overview.difference && overview.difference.step !== undefined
          ? button("difference", "Where the runs first differ", "where they differ", page.openDifference)
          : null,
        button("show-list", "List of samples  (l)", "☰ samples", page.toggleList),
        button("theme", "Light or dark  (t)", "◐", page.theme),
        button("show-help", "Keyboard  (?)", "?", ps.keys.help),
      );
    },
  };
}
