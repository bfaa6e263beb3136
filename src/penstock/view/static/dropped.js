// Groups that did not reach the trainer, by reason, with their tokens while the plane keeps them.
"use strict";
{
  const WHY = {
    stale: "older than max_staleness allows",
    overflow: "the table was full, and others were worth more",
    sampled_out: "used as often as it may be",
    evicted: "its tenant was evicted, or its environment left env_weights",
    quarantined: "set aside, then given up",
    "columns missing": "its late columns did not come in time",
    "scored as error": "none of its samples could be scored",
  };
  const tokens = ps.newTokens("dropped-tokens", "Tokens of the group that was set aside");
  let at = null;
  // Where the tokens of a group are shown. It stays when the table is loaded again: a live run does that every few seconds.
  let shown = { of: "", holder: null };

  // Mean lengths by state. A length bias shows as a difference between trained and accepted samples.
  function lengths(found) {
    const of = (name) => (found[name] === undefined ? null : Number(found[name].toPrecision(3)));
    if (of("accepted") === null) return null;
    const others = ["committed", "dropped", "quarantined"]
      .filter((name) => of(name) !== null)
      .map((name) => ps.number(of(name)) + " " + (name === "committed" ? "trained" : name));
    return ps.card("mean length", ps.number(of("accepted")), "tokens of a sample accepted; " + others.join(", "));
  }

  function reasons(ledger, means) {
    const total = Object.values(ledger.dropped).reduce((a, b) => a + b, 0);
    const filtered = Object.values(ledger.discarded).reduce((a, b) => a + b, 0);
    const long = ledger.over_length;
    const listed = (found) =>
      Object.entries(found)
        .map(([why, n]) => ps.number(n) + " " + ps.visible(why))
        .join(", ");
    return ps.el(
      "div",
      { class: "cards" },
      ps.card("accepted", ps.number(ledger.accepted), "samples"),
      ps.card("trained", ps.number(ledger.committed), ps.percent(ledger.committed, ledger.accepted) + " of accepted"),
      ps.card(
        "held",
        ps.number((ledger.waiting || 0) + ledger.held + ledger.scheduled + ledger.delivered),
        "waiting or under way" + (ledger.waiting ? ", " + ps.number(ledger.waiting) + " for late columns" : ""),
      ),
      ps.card("dropped", ps.number(total), listed(ledger.dropped) || "none"),
      ps.card("quarantined", ps.number(ledger.quarantined), "no step could be made with them"),
      ps.card(
        "too long",
        ps.number(long.truncated_samples + long.dropped_samples),
        long.truncated_samples + long.dropped_samples
          ? `${ps.number(long.truncated_samples)} truncated by ${ps.number(long.truncated_tokens)} tokens, ` +
              `${ps.number(long.dropped_samples)} of ${ps.number(long.dropped_tokens)} tokens dropped`
          : "no sample was longer than seq_len",
      ),
      lengths(means || {}),
      ps.card("filtered", ps.number(filtered), listed(ledger.discarded) || "none before they were put or when late columns came"),
    );
  }

  async function show(group, holder) {
    try {
      const samples = await ps.source.droppedGroup(at, group.id);
      const view = ps.el("div", { class: "holder kept" });
      const pick = (value) => tokens.show(view, samples[Number(value)], () => {});
      const rollouts = samples.map((sample, i) => [String(i), ps.visible(sample.fields.sample_id || "rollout " + i)]);
      ps.fill(holder, ps.select("dropped-sample", "Rollout", rollouts, "0", pick), view);
      tokens.paint({ column: ps.columns[0], scale: 1 });
      pick("0");
    } catch (error) {
      holder.replaceChildren(ps.el("p", { class: "dim" }, error.message));
    }
  }

  function table(groups, holder) {
    const names = ["group", "prompt", "what became of it", "samples", "tokens", "policy", "its tokens"];
    const rows = groups.map((group) => {
      const button = ps.button("show", () => show(group, holder), { data: { group: group.id } });
      const why = group.state === "quarantined" ? "quarantined: " + group.reason : "dropped: " + group.reason;
      return ps.el(
        "tr",
        {},
        ps.cell(ps.visible(group.id), true),
        ps.cell(ps.visible(group.prompt || "–"), true),
        ps.el(
          "td",
          { class: "name why" },
          ps.visible(why),
          WHY[group.reason] ? ps.el("span", { class: "dim" }, " (" + WHY[group.reason] + ")") : null,
        ),
        ...["samples", "tokens", "policy_version"].map((key) => ps.cell(ps.number(group[key]))),
        ps.cell(group.is_kept ? button : ps.el("span", { class: "dim" }, "freed")),
      );
    });
    return ps.table("dropped", names, (i) => i < 3, rows);
  }

  ps.droppedPage = function (element, found, place) {
    at = { ...place };
    if (!found.ledger) {
      const text = found.error || "No plane has kept its log here, so what was dropped is not known.";
      return ps.fill(element, ps.el("p", { class: "empty" }, text));
    }
    const of = [place.export, place.run].join("\n");
    if (shown.of !== of || !element.contains(shown.holder)) shown = { of, holder: ps.el("div", { id: "dropped-group" }) };
    const { holder } = shown;
    const why = [...new Set(found.groups.map((group) => group.reason))].sort();
    const list = ps.el("div", {});
    const fill = () => {
      const wanted = ps.query.get("reason") || "";
      const groups = found.groups.filter((group) => !wanted || group.reason === wanted);
      ps.fill(list, table(groups, holder));
    };
    const box = ps.select(
      "reason",
      "Reason",
      [["", "all reasons"], ...why.map((one) => [one, ps.visible(one.length > 60 ? one.slice(0, 60) + "…" : one)])],
      ps.query.get("reason") || "",
      (value) => {
        ps.query.set({ reason: value || null });
        fill();
      },
    );
    const above = [
      reasons(found.ledger, found.lengths),
      ps.el(
        "div",
        { class: "controls tools", hidden: !found.groups.length },
        ps.el("label", {}, "reason", box),
        ps.el("span", { class: "dim" }, "the last " + ps.number(found.groups.length) + " groups, newest first"),
      ),
    ];
    const below = found.groups.length
      ? list
      : ps.el("p", { class: "empty" }, "Everything that was accepted was trained, or waits for it.");
    if (!element.contains(holder)) ps.fill(element, holder);
    // The holder is not moved: an element that is taken out and put back loses its scroll position.
    for (const child of [...element.children]) if (child !== holder) child.remove();
    holder.before(...above);
    holder.after(below);
    fill();
  };
}
