// The top bar: which run and step, the pages, and whether the run goes on.
"use strict";
{
  const NAMES = { run: "Run", step: "Step", groups: "Groups", samples: "Samples", prompts: "Prompts", dropped: "Dropped" };

  // The run's state as a label and as a sentence.
  function stateOf(run) {
    if (ps.source.isEmbedded) return ["", "A part of a run, in one file."];
    const said = run.state;
    const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
    const lost = ps.live.isOpen() ? "" : " Nobody answers at the address of this page; it tries again by itself.";
    const count = run.steps.length + (run.steps.length === 1 ? " step" : " steps");
    const exported =
      run.source === "plane"
        ? count +
          " read from the plane: tokens as they were put, while their frames are kept. What the trainer computed, such" +
          " as its log-probabilities, needs a TokenExporter."
        : run.steps.length
          ? run.steps.length + (run.steps.length === 1 ? " exported step." : " exported steps.")
          : "Nothing was exported yet; it appears here when it is.";
    if (!said) return [lost ? "offline" : "", exported + lost];
    const took = said.ended ? ", after " + ps.number(Math.round(said.ended - said.began)) + " s" : "";
    const words = {
      running: "Running since " + clock(said.began) + ".",
      finished: "Finished at " + clock(said.ended) + took + ".",
      stopped: "Stopped at " + clock(said.ended) + took + "; it can be continued.",
      failed: "Ended with an error at " + clock(said.ended) + took + "; see its logs.",
      gone: "Its process is gone, and did not say why.",
    }[said.state];
    const word = said.state === "running" ? (lost ? "offline" : "live") : said.state;
    const none = " No step has been exported yet; the first appears here when it comes.";
    const steps = run.source === "plane" ? " " + exported : run.steps.length ? "" : none;
    const again = lost && said.state !== "running" ? " `penstock view` with its folder shows it again." : lost;
    return [word, words + steps + again];
  }

  // Boxes to choose from: exports where there are several, runs of the chosen one where there are several.
  function pickers({ at, overview, go }, chosen) {
    const other = { sample: -1, token: -1 };
    const exports = overview.exports.map((one) => [one.name, one.name]);
    const runs = chosen.runs.map((one) => [one.run, one.run === "" ? chosen.folder : one.run]);
    const found = [];
    if (exports.length > 1)
      found.push(ps.select("export", "Export", exports, at.export, (value) => go({ export: value, ...other })));
    if (runs.length > 1) found.push(ps.select("run", "Run", runs, at.run, (value) => go({ run: value, ...other })));
    return found.length ? found : [ps.el("span", { class: "dim where" }, ps.visible(chosen.folder))];
  }

  const button = (id, label, text, click) =>
    ps.el("button", { type: "button", id, "aria-label": label, title: label, on: { click } }, text);

  ps.top = {
    stateOf,
    draw(element, page) {
      const { at, overview, run, address, go } = page;
      if (element.querySelector("#step:focus")) return; // a box that is open is left alone
      const word = run.run === "(evaluation)" ? "version " : "step ";
      const steps = run.steps.map((number) => [String(number), word + number]).reverse();
      const open = (value) => go({ step: Number(value), sample: -1, token: -1 });
      const tabs = Object.entries(NAMES).map(([name, text]) => {
        const on = at.page === name;
        const href = address({ ...at, page: name });
        return ps.el(
          "a",
          { href, class: on ? "on" : "", id: "tab-" + name, "aria-current": on ? "page" : "false" },
          text,
        );
      });
      const [state, words] = stateOf(run);
      ps.fill(
        element,
        ps.el("span", { class: "brand" }, "penstock"),
        ...pickers(
          page,
          overview.exports.find((one) => one.name === at.export),
        ),
        steps.length ? ps.select("step", "Step", steps, String(at.step), open) : null,
        ps.el("nav", { "aria-label": "Pages" }, ...tabs),
        ps.el("span", { class: "grow" }),
        state ? ps.el("span", { class: "word " + state, id: "live", title: words }, state) : null,
        overview.parting && overview.parting.step !== undefined
          ? button("parting", "Where the runs first differ", "where they differ", page.openParting)
          : null,
        button("show-list", "List of samples  (l)", "☰", page.toggleList),
        button("theme", "Light or dark  (t)", "◐", page.theme),
        button("show-help", "Keyboard  (?)", "?", ps.keys.help),
      );
    },
  };
}
