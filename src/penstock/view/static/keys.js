// The keyboard: the list of keys, and what each does.
"use strict";
{
  let acts = [];
  const ANYWHERE = new Set(["0", "1", "2", "3", "4", "5", "6", "[", "]", "f", "t", "?", "/"]);

  function help() {
    const dialog = document.getElementById("help");
    if (dialog.open) return dialog.close();
    const rows = acts.map(([keys, text]) =>
      ps.el("tr", {}, ps.el("th", { scope: "row" }, ps.el("kbd", {}, keys)), ps.el("td", {}, text)),
    );
    dialog.replaceChildren(
      ps.el("h2", {}, "Keyboard"),
      ps.el("table", {}, ps.el("tbody", {}, ...rows)),
      ps.el(
        "p",
        { class: "dim small" },
        "On a chart: arrow keys move the cursor, Enter opens the step. Lines under tokens: what the loss masked, solid by the upper threshold, dashed by the lower, dotted without direction. Lines over tokens: the rule being tried. Dimmed tokens are context.",
      ),
      ps.button("close", () => dialog.close()),
    );
    dialog.showModal();
  }

  function pressed(event, isSample) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (document.getElementById("help").open && event.key !== "?") return;
    if (!ANYWHERE.has(event.key) && !isSample()) return;
    for (const [, , does] of acts)
      if (does[event.key]) {
        event.preventDefault();
        does[event.key]();
        return;
      }
  }

  ps.keys = {
    // Start listening. `all` has keys, descriptions and functions; some work only while a sample is open.
    start(all, isSample) {
      acts = [...all, ["?", "this list", { "?": help }]];
      addEventListener("keydown", (event) => pressed(event, isSample));
    },
    help,
  };
}
