// Where the data comes from: the server, or, in a page written by `penstock view --html`, the page itself.
"use strict";
{
  const holder = document.getElementById("embedded");
  const embedded = holder ? JSON.parse(holder.textContent) : null;
  const kept = new Map();

  async function ask(name, query) {
    const key = name + "?" + new URLSearchParams(query || {});
    if (embedded) {
      if (!(key in embedded.answers)) throw new Error("This page holds one part of a run; that is not in it.");
      return embedded.answers[key];
    }
    if (kept.has(key)) return kept.get(key);
    const answer = await fetch("api/" + key, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(await answer.text());
    const found = await answer.json();
    if (name !== "overview") {
      kept.set(key, found);
      if (kept.size > 12) kept.delete(kept.keys().next().value);
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

  ps.source = {
    isEmbedded: Boolean(embedded),
    overview: () => ask("overview"),
    run: (at) => ask("run", { export: at.export, run: at.run }),
    step: (at) => ask("step", { export: at.export, run: at.run, step: at.step }),
    async sample(at) {
      const query = { export: at.export, run: at.run, step: at.step, sample: at.sample };
      const { record, texts } = await ask("sample", query);
      return { facts: record, columns: columns(record), texts, count: record.token_ids.length };
    },
    image: (digest) => (embedded ? embedded.images[digest] || null : "image/" + encodeURIComponent(digest)),
  };
}
