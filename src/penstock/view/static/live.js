// News of a run at work: one line to the server that it keeps open, opened again by the browser when it breaks.
"use strict";
{
  let line = null;
  let isOpen = false;
  let hears = null; // who is told, once the page is there
  const read = {}; // by export and run: how far its numbers are known

  function connect() {
    if (line) line.close();
    line = new EventSource("events?read=" + encodeURIComponent(JSON.stringify(read)));
    line.addEventListener("open", () => turn(true));
    line.addEventListener("error", () => {
      turn(false);
      // The browser tries again by itself, unless the server has refused: then nobody else would.
      if (line.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
    });
    for (const name of ["overview", "rows"])
      line.addEventListener(name, (event) => {
        turn(true);
        Object.assign(read, JSON.parse(event.lastEventId || "{}"));
        hears[name](JSON.parse(event.data));
      });
  }

  function turn(now) {
    if (isOpen === now) return;
    isOpen = now;
    hears.line(now);
  }

  ps.live = {
    isOpen: () => isOpen,
    // Begin; `told` has a function for each kind of news (overview, rows) and for the line itself.
    start(told) {
      hears = told;
      if (ps.source.isEmbedded) return;
      connect();
      // A browser opens six lines to one address: a tab that nobody looks at must not hold one.
      document.addEventListener("visibilitychange", () => (document.hidden ? line.close() : connect()));
    },
    // Curves of this run are shown from here on: be told of its new rows.
    follow(at, places) {
      const key = at.export + "\n" + at.run;
      if (ps.source.isEmbedded || key in read) return;
      read[key] = places || {};
      if (hears) connect();
    },
  };
}
