// What happened to a run, on the time axis of its charts and as a list: kills, restarts, rewinds, evictions, quarantines.
"use strict";
{
  const NAMES = {
    kill: ["kill", "kills"],
    restart: ["restart", "restarts"],
    rewind: ["rewind", "rewinds"],
    evict: ["eviction", "evictions"],
    quarantine: ["quarantine", "quarantines"],
    lose: ["loss", "losses"],
  };
  const APART = 8; // pixels; marks closer than this are merged
  const LISTED = 6; // events named in one tooltip
  const RANK = ["kill", "rewind", "lose", "evict", "quarantine", "restart"];

  const when = (event) => (event.at === null ? "" : ps.clock(event.at) + "  ");
  const worst = (events) => RANK.find((kind) => events.some((event) => event.kind === kind)) || "restart";

  function tooltip(events) {
    const lines = events
      .slice(0, LISTED)
      .map((event) => `${when(event)}step ${ps.number(event.step)}: ${ps.visible(event.text)}`);
    if (events.length > LISTED) lines.push("and " + ps.number(events.length - LISTED) + " more");
    return lines.join("\n");
  }

  // Marks for a chart's axis. `last` is the last step drawn: later events are marked at the end.
  ps.eventMarks = function (events, scale, range, last) {
    const found = [];
    for (const event of events) {
      const step = event.step > last && range[1] >= last ? range[1] : event.step;
      if (step < range[0] || step > range[1]) continue;
      const x = scale.x(step);
      const before = found[found.length - 1];
      if (before && x - before.x < APART) before.events.push(event);
      else found.push({ x, events: [event] });
    }
    return found.map(({ x, events: own }) => {
      const side = x > (scale.left + scale.right) / 2 ? " left" : "";
      const mark = ps.el("i", { class: "event " + worst(own) + side, data: { text: tooltip(own) } });
      mark.style.left = x + "px";
      return mark;
    });
  };

  const counted = (events) =>
    RANK.map((kind) => [kind, events.filter((event) => event.kind === kind).length])
      .filter(([, count]) => count)
      .map(([kind, count]) => ps.number(count) + " " + NAMES[kind][count === 1 ? 0 : 1])
      .join(", ");

  // Fill the list of events; it stays hidden while there is none.
  ps.eventList = function (element, events) {
    element.hidden = !events.length;
    if (!events.length) return;
    const rows = [...events]
      .reverse()
      .map((event) =>
        ps.el(
          "tr",
          {},
          ps.cell(ps.number(event.step)),
          ps.cell(event.at === null ? "–" : ps.clock(event.at), true),
          ps.cell(ps.el("span", { class: "word " + event.kind }, (NAMES[event.kind] || [event.kind])[0]), true),
          ps.el("td", { class: "name why" }, ps.visible(event.text)),
        ),
      );
    const summary = ps.el("summary", {}, counted(events) + ": marked under every chart");
    ps.fill(element, summary, ps.table("", ["before step", "time", "what", ""], Boolean, rows));
  };
}
