// Changes of a running run: one event stream from the server. The browser reconnects when it breaks.
"use strict";
{
  let line = null;
  let isOpen = false;
  let callbacks = null; // set once the page is ready
  const read = {}; // by export and run: how far its files have been read

  function connect() {
    if (line) line.close();
    line = new EventSource("events?read=" + encodeURIComponent(JSON.stringify(read)));
    line.addEventListener("open", () => turn(true));
    line.addEventListener("error", () => {
      turn(false);
      // The browser reconnects by itself unless the server rejected the request. Then we do.
      if (line.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
    });
    for (const name of ["overview", "rows"])
      line.addEventListener(name, (event) => {
        turn(true);
        Object.assign(read, JSON.parse(event.lastEventId || "{}"));
        callbacks[name](JSON.parse(event.data));
      });
  }

  function turn(now) {
    if (isOpen === now) return;
    isOpen = now;
    callbacks.line(now);
  }

  ps.live = {
    isOpen: () => isOpen,
    // Start. `given` has a callback for each event (overview, rows) and for the state of the connection (line).
    start(given) {
      callbacks = given;
      if (ps.source.isEmbedded) return;
      connect();
      // A browser opens at most six connections per host: a hidden tab must not hold one.
      document.addEventListener("visibilitychange", () => (document.hidden ? line.close() : connect()));
    },
    // Subscribe to new rows of this run, whose curves are now shown.
    follow(at, places) {
      const key = at.export + "\n" + at.run;
      if (ps.source.isEmbedded || key in read) return;
      read[key] = places || {};
      if (callbacks) connect();
    },
  };
}
