// Two recordings of one sample side by side: the cursor is on the same token in both, differences are framed.
"use strict";
{
  const second = ps.newTokens("tokens-b", "Tokens of B; arrow keys move between them");
  let isOn = false;
  let masked = null; // the tokens of B that training masked

  // Per token 1 if any number differs. A token that only one of them has differs too.
  function differing(a, b) {
    const out = new Uint8Array(Math.max(a.count, b.count));
    for (const key of new Set([...Object.keys(a.columns), ...Object.keys(b.columns)])) {
      const [left, right] = [a.columns[key], b.columns[key]];
      for (let i = 0; i < out.length; i++) {
        const [x, y] = [left ? left[i] : NaN, right ? right[i] : NaN];
        if (Array.isArray(x) ? JSON.stringify(x) !== JSON.stringify(y) : !Object.is(x, y)) out[i] = 1;
      }
    }
    return out;
  }

  function alone(holder, a, b, tell) {
    ps.compare.end();
    const own = ps.el("div", { class: "holder" });
    const words = ps.el("p", { class: "empty" }, (a ? "B" : "A") + " did not train this sample in this step.");
    const halves = [ps.el("h2", {}, (a ? "A: " : "B: ") + ps.visible((a || b).home)), own];
    const other = [ps.el("h2", {}, a ? "B" : "A"), words];
    holder.classList.add("both");
    holder.replaceChildren(
      ...(a ? [halves, other] : [other, halves]).map((one) => ps.el("div", { class: "half" }, ...one)),
    );
    ps.tokens.show(own, a || b, tell);
  }

  ps.compare = {
    // Fill the holder with A and B; `tell` is called with the token under either cursor. If one of them did not train the
    // sample, a message takes its place.
    show(holder, a, b, tell) {
      if (!a || !b) return alone(holder, a, b, tell);
      isOn = true;
      masked = ps.exported(b);
      const sides = ["A", "B"].map((name) => ps.el("div", { class: "holder side-" + name.toLowerCase() }));
      holder.classList.add("both");
      holder.replaceChildren(
        ...sides.map((side, i) =>
          ps.el("div", { class: "half" }, ps.el("h2", {}, "AB"[i] + ": " + ps.visible([a, b][i].home)), side),
        ),
      );
      const both = (from, to) => (token, settled) => {
        if (settled && to.cursor() !== token) to.go(token);
        tell(token, settled);
      };
      ps.tokens.show(sides[0], a, both(ps.tokens, second));
      second.show(sides[1], b, both(second, ps.tokens));
      const differs = differing(a, b);
      ps.tokens.paint({ differs });
      second.paint({ differs });
    },
    end() {
      isOn = false;
      second.clear();
      ps.tokens.paint({ differs: null });
    },
    paint: (look) => isOn && second.paint({ ...look, live: null, exported: masked }),
    resize: () => isOn && second.resize(),
  };
}
