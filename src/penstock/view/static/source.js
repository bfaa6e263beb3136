// Where the data comes from: the server, or, in a page written by `penstock view --html`, the page itself.
"use strict";
{
  const holder = document.getElementById("embedded");
  const embedded = holder ? JSON.parse(holder.textContent) : null;
  const kept = new Map();
  if (embedded) {
    // Encode the keys as this browser encodes queries: browsers escape different characters.
    const asked = Object.entries(embedded.answers).map(([key, answer]) => {
      const [name, query] = [key.slice(0, key.indexOf("?")), key.slice(key.indexOf("?") + 1)];
      return [name + "?" + new URLSearchParams(query), answer];
    });
    embedded.answers = Object.fromEntries(asked);
  }
  const FRESH = new Set([
    ...["overview", "runs", "events", "points", "dropped", "history", "over_steps", "whatif", "search"],
  ]); // never cached

  // Retry once without a response: tunnels and idle connections break now and then.
  async function get(address) {
    try {
      return await fetch(address, { credentials: "same-origin" });
    } catch {
      await new Promise((done) => setTimeout(done, 400));
      return fetch(address, { credentials: "same-origin" });
    }
  }

  async function ask(name, query) {
    const key = name + "?" + new URLSearchParams(query || {});
    if (embedded) {
      if (!(key in embedded.answers)) throw new Error("This page holds one part of a run; that is not in it.");
      return embedded.answers[key];
    }
    if (kept.has(key)) return kept.get(key);
    const answer = await get("api/" + key);
    if (!answer.ok) throw new Error(await answer.text());
    const found = await answer.json();
    if (!FRESH.has(name)) {
      kept.set(key, found);
      if (kept.size > 24) kept.delete(kept.keys().next().value);
    }
    return found;
  }

  // A record's lists as typed arrays; null becomes NaN, a column of nulls is left out. Where a token has a list of values
  // of its own (routed experts), the lists stay as they are.
  function columns(record) {
    const found = {};
    const count = record.token_ids.length;
    for (const [name, values] of Object.entries(record)) {
      if (!Array.isArray(values) || values.length !== count || name === "images") continue;
      if (typeof values[count - 1] === "boolean") found[name] = Uint8Array.from(values);
      else if (Array.isArray(values[count - 1])) found[name] = values;
      else {
        const array = Float64Array.from(values, (value) => (value === null ? NaN : value));
        if (name === "token_ids" || array.some((value) => !Number.isNaN(value))) found[name] = array;
      }
    }
    return found;
  }

  const opened = ({ record, texts }) => ({
    fields: record,
    columns: columns(record),
    texts,
    count: record.token_ids.length,
  });
  const ofRun = (at) => ({ export: at.export, run: at.run });
  const ofStep = (at) => ({ ...ofRun(at), step: at.step });

  function* embeddedSamples() {
    for (const [key, answer] of Object.entries(embedded.answers))
      if (key.startsWith("sample?")) yield [Number(new URLSearchParams(key.slice(7)).get("sample")), opened(answer)];
  }

  function searchEmbedded(query) {
    const wanted = query.trim().toLowerCase();
    const ids = /^\d+([\s,]+\d+)*$/.test(wanted) ? " " + wanted.split(/[\s,]+/).join(" ") + " " : null;
    const found = [];
    for (const [index, sample] of embeddedSamples()) {
      const all = Array.from(sample.columns.token_ids);
      const text = all.map((id) => sample.texts[id] ?? "").join("");
      if (text.toLowerCase().includes(wanted) || (ids && (" " + all.join(" ") + " ").includes(ids)))
        found.push([index, -1]);
    }
    return { found };
  }

  ps.source = {
    isEmbedded: Boolean(embedded),
    overview: () => ask("overview"),
    runs: () => ask("runs"),
    run: (at) => ask("run", ofRun(at)),
    events: (at) => ask("events", ofRun(at)),
    points: (at, first) => ask("points", { ...ofRun(at), first }),
    step: (at) => ask("step", ofStep(at)),
    group: (at, group) => ask("group", { ...ofStep(at), group }),
    dropped: (at) => ask("dropped", ofRun(at)),
    history: (at) => ask("history", ofRun(at)),
    overSteps: (at, of, name) => ask("over_steps", { ...ofRun(at), of, name }),
    droppedGroup: async (at, group) =>
      (await ask("dropped_group", { ...ofRun(at), group })).samples.map((one) => opened(one)),
    sample: async (at) => opened(await ask("sample", { ...ofStep(at), sample: at.sample })),
    whatIf: (at, rule, thresholds) =>
      embedded
        ? ps.countRule([...embeddedSamples()].map(([, sample]) => sample), rule, thresholds)
        : ask("whatif", { ...ofStep(at), rule, ...thresholds }),
    search: (at, query) => (embedded ? searchEmbedded(query) : ask("search", { ...ofStep(at), query })),
    image: (digest) => (embedded ? embedded.images[digest] || null : "image/" + encodeURIComponent(digest)),
    // Drop the cached answer about a run that has new steps.
    forgetRun: (at) => kept.delete("run?" + new URLSearchParams(ofRun(at))),
  };
}
