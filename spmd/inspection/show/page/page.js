"use strict";
// Everything that the page shows is in the document or in its data block; what comes from a user
// is only ever set as text.
(() => {
  const root = document.documentElement;
  root.classList.add("script");
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const svg = (tag, attributes, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };

  // As in the page: a line never breaks in the middle of `model.py:131`.
  const unbroken = (text) => text.split(/([^\s\/\\:;,()]+\.\w+:\d+)/).map((piece, i) => (i % 2 ? make("span", { className: "at" }, piece) : piece));

  // Theme

  const themes = ["system", "light", "dark"];
  const stored = () => {
    try { return localStorage.getItem("spmd-theme"); } catch { return null; } // a sandboxed frame has none
  };
  const setTheme = (name) => {
    if (name === "system") delete root.dataset.theme;
    else root.dataset.theme = name;
    byId("theme-name").textContent = name;
    try { localStorage.setItem("spmd-theme", name); } catch { /* as above */ }
  };
  setTheme(themes.includes(stored()) ? stored() : "system");
  byId("theme").addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(root.dataset.theme || "system") + 1) % themes.length]);
  });

  // Sorting

  const keyOf = (cell) => {
    const value = cell.dataset.v;
    return value === undefined ? cell.textContent.trim() : Number(value);
  };
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

  const sortBy = (table, header, rows) => {
    const column = [...header.parentNode.children].indexOf(header);
    const numeric = rows.length > 0 && rows[0].cells[column].dataset.v !== undefined;
    const current = header.getAttribute("aria-sort");
    const first = numeric ? "descending" : "ascending";
    const other = numeric ? "ascending" : "descending";
    const order = current === first ? other : first;
    for (const one of header.parentNode.children) one.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const keyed = rows.map((row, i) => [keyOf(row.cells[column]), i, row]);
    keyed.sort((a, b) => sign * compare(a[0], b[0]) || a[1] - b[1]);
    table.tBodies[0].append(...keyed.map((entry) => entry[2]));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const rows = [...table.tBodies[0].rows]; // in the order of the report, whatever is shown
    table.tHead.addEventListener("click", (event) => {
      const button = event.target.closest("button.sort");
      if (!button) return;
      closeDetails(table);
      sortBy(table, button.closest("th"), rows);
    });
  }

  // Ledger: details of a row

  function closeDetails(within) {
    for (const row of within.querySelectorAll("tr.detail")) {
      row.previousElementSibling.querySelector(".open").setAttribute("aria-expanded", "false");
      row.remove();
    }
  }

  const detailOf = (row) => {
    const one = data.details[Number(row.dataset.i)];
    const list = make("dl");
    const add = (name, text) => { if (text) list.append(make("dt", { textContent: name }), make("dd", {}, text)); };
    const shown = (index) => row.cells[index].textContent;
    add("shapes", one.shapes);
    add("alike", one.alike);
    add("payload", `${shown(2)}; on the wire ${shown(3)}, ${shown(4)} ${shown(4) === "1" ? "run" : "runs"}`);
    add("direction", row.dataset.direction);
    add("marks", one.marks.join(", "));
    add("name stack", one.op);
    add("groups", one.groups && `${one.groups}, at most ${one.group_size} devices`);
    add("instruction", one.hlo);
    if (one.parts.length) add("parts", make("ol", {}, ...one.parts.map((text) => make("li", {}, ...unbroken(text)))));
    const frames = one.frames.map((i) => data.frames[i]);
    if (frames.length) {
      add("stack", make("ol", {}, ...frames.map(([file, line, name]) => make("li", {}, ...unbroken(`${file}:${line} ${name}`)))));
    }
    const cell = make("td", { className: "detail" }, list);
    cell.colSpan = row.cells.length;
    cell.setAttribute("role", "cell");
    const detail = make("tr", { className: "detail" }, cell);
    detail.setAttribute("role", "row");
    return detail;
  };

  const toggle = (button) => {
    const row = button.closest("tr");
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) row.nextElementSibling.remove();
    else row.after(detailOf(row));
  };

  const table = byId("rows");
  if (table) {
    table.addEventListener("click", (event) => {
      const button = event.target.closest("button.open");
      if (button) toggle(button);
    });
    table.addEventListener("keydown", (event) => {
      const detailed = event.target.closest("tr");
      if (event.key !== "Escape" || !detailed) return;
      const button = (detailed.matches(".detail") ? detailed.previousElementSibling : detailed).querySelector(".open");
      if (button && button.getAttribute("aria-expanded") === "true") toggle(button);
      if (button) button.focus();
    });
  }

  // Ledger: filters

  const filters = byId("filters");
  if (filters) {
    const rows = [...table.tBodies[0].rows].map((row) => ({
      row,
      text: [row.textContent, row.dataset.line, ...["shapes", "op", "hlo", "parts"].map((name) => (data.details[row.dataset.i] || {})[name] || "")].join("\n").toLowerCase(),
      axes: row.dataset.axes.split(" "),
    }));
    const text = byId("filter-text"), kind = byId("filter-kind"), axis = byId("filter-axis"), direction = byId("filter-direction");
    const apply = () => {
      closeDetails(table);
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const one of rows) {
        const data = one.row.dataset;
        const fits = words.every((word) => one.text.includes(word)) &&
          (!kind.value || data.kind === kind.value) &&
          (!axis.value || one.axes.includes(axis.value)) &&
          (!direction.value || data.direction === direction.value);
        if (one.row.hidden === fits) one.row.hidden = !fits;
        shown += fits;
      }
      byId("shown").textContent = `${shown} of ${rows.length} rows`;
    };
    filters.addEventListener("input", apply);
    filters.addEventListener("submit", (event) => event.preventDefault());
    filters.addEventListener("reset", () => setTimeout(apply)); // the fields are empty only then
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { text.value = ""; apply(); }
    });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("#source button[data-line], #waits button[data-line]");
      if (!button) return;
      filters.reset();
      text.value = button.dataset.line;
      apply();
      byId("ledger").scrollIntoView();
      text.focus({ preventScroll: true });
    });
  }

  // Shardings: filter, and links to a value

  const values = byId("values");
  if (values) {
    const text = byId("values-text");
    const groups = [...values.querySelectorAll(".group")].map((group) => ({
      group,
      rows: [...group.querySelectorAll("details")].map((row) => ({
        row,
        text: `${group.firstElementChild.textContent}\n${row.textContent}`.toLowerCase(),
      })),
    }));
    const apply = () => {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0, count = 0;
      for (const { group, rows } of groups) {
        let some = 0;
        for (const one of rows) {
          one.row.hidden = !words.every((word) => one.text.includes(word));
          some += !one.row.hidden;
        }
        group.hidden = !some;
        shown += some;
        count += rows.length;
      }
      byId("values-shown").textContent = `${shown} of ${count} values`;
    };
    const clear = () => { text.value = ""; apply(); };
    const form = byId("values-filters");
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    text.addEventListener("keydown", (event) => { if (event.key === "Escape") clear(); });
    values.addEventListener("keydown", (event) => {
      const row = event.key === "Escape" && event.target.closest("details");
      if (!row) return;
      row.open = false;
      row.querySelector("summary").focus();
    });
    document.addEventListener("click", (event) => {
      const link = event.target.closest('a[href^="#value-"], a[href^="#made-"]');
      if (!link) return;
      clear(); // what is hidden cannot be gone to
      const row = byId(link.hash.slice(1)).closest("details");
      if (!row) return;
      row.open = true;
      row.querySelector("summary").focus({ preventScroll: true });
    });
  }

  // A plan: candidates by memory and time, code to copy, and the lanes as a file

  const scatter = byId("scatter");
  if (scatter) {
    const marks = [...scatter.querySelectorAll(".mark-of")], about = byId("about");
    const rows = new Map([...document.querySelectorAll("#candidate-rows tr[data-i]")].map((row) => [Number(row.dataset.i), row]));
    let at = 0;
    const tell = (i) => {
      marks[at].setAttribute("tabindex", "-1");
      for (const one of [marks[at], rows.get(at)]) one.classList.remove("here");
      at = i;
      marks[at].setAttribute("tabindex", "0");
      for (const one of [marks[at], rows.get(at)]) one.classList.add("here");
      const one = data.candidates[i];
      const list = make("dl", { className: "facts" });
      for (const [label, text] of one.rows) list.append(make("dt", { textContent: label }), make("dd", { textContent: text }));
      about.replaceChildren(make("h3", { textContent: one.name }), list);
    };
    // The one that is nearest in a direction, the sides counting double. Those at one place come one
    // after the other: to the right and down they count up.
    const center = (mark) => { const b = mark.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; };
    const nearest = (right, down) => {
      const [x, y] = center(marks[at]);
      let best = -1, least = Infinity;
      marks.forEach((mark, i) => {
        const [dx, dy] = [center(mark)[0] - x, center(mark)[1] - y];
        const same = Math.max(Math.abs(dx), Math.abs(dy)) <= 0.5;
        const along = same ? (i - at) * (right + down) / marks.length : dx * right + dy * down;
        const aside = same ? 0 : Math.abs(dx * down) + Math.abs(dy * right);
        if (along > (same ? 0 : 0.5) && along + 2 * aside < least) { best = i; least = along + 2 * aside; }
      });
      return best;
    };
    for (const kind of ["pointerover", "focusin"]) {
      scatter.addEventListener(kind, (event) => {
        const mark = event.target.closest(".mark-of");
        if (mark) tell(Number(mark.dataset.i));
      });
    }
    scatter.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const to = event.key === "Home" ? 0 : event.key === "End" ? marks.length - 1 : moves[event.key] ? nearest(...moves[event.key]) : -1;
      if (to < 0) return;
      event.preventDefault();
      marks[to].focus();
    });
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const text = byId(button.dataset.of);
    let done = true;
    try {
      await navigator.clipboard.writeText(text.textContent);
    } catch { // a frame may not: what is selected can be copied by hand at least
      getSelection().selectAllChildren(text);
      done = document.execCommand("copy");
    }
    byId("copied").textContent = done ? "copied" : "selected: copy it with the keyboard";
  });

  byId("trace")?.addEventListener("click", () => {
    const file = URL.createObjectURL(new Blob([JSON.stringify(data.trace)], { type: "application/json" }));
    make("a", { href: file, download: "layer.json" }).click();
    setTimeout(() => URL.revokeObjectURL(file), 10000);
  });

  // Mesh: which shard of an argument lies on which device

  const grid = byId("devices");
  if (!grid || !data.mesh.length) {
    for (const id of ["held", "mesh-hint"]) byId(id)?.remove();
    return;
  }
  const names = data.mesh.map(([name]) => name), sizes = data.mesh.map(([, size]) => size);
  const count = sizes.reduce((a, b) => a * b, 1);
  const coordinates = Array.from({ length: count }, (_, i) => {
    const place = [];
    for (let d = sizes.length - 1; d >= 0; d--) { place.unshift(i % sizes[d]); i = Math.floor(i / sizes[d]); }
    return place;
  });
  const columns = sizes[sizes.length - 1], rows = sizes.length > 1 ? sizes[sizes.length - 2] : 1;
  const small = count > 256;
  // A long row of devices is drawn in lines of equal length where one divides it.
  const longest = small ? 128 : 16;
  const divides = Array.from({ length: longest }, (_, i) => longest - i).find((n) => columns % n === 0);
  const across = columns <= longest ? columns : divides >= longest / 4 ? divides : longest;
  let chosen = 0, at = 0, cells = [], held = [], same = new Map();

  // As in `Split.range_at`.
  const rangesAt = (argument, place) => argument.splits && argument.splits.map(([axes, , block], d) => {
    const part = axes.reduce((k, axis) => k * sizes[names.indexOf(axis)] + place[names.indexOf(axis)], 0);
    const size = argument.shape[d];
    return [Math.min(part * block, size), Math.min((part + 1) * block, size)];
  });

  const folded = across < columns;
  // Many columns, or a long name, have numbers alone: their axis stands before them.
  const broad = across > 4 || names.at(-1).length > 6;
  // Where a row is folded, columns have no number of their own: each line says its first.
  const columnLabel = (c) => folded ? "" : small ? (c % 8 ? "" : String(c)) : broad ? String(c) : `${names.at(-1)}=${c}`;
  const lineLabel = (r, c) => {
    // Lines of a small grid are lower than a text.
    if (small && (r * Math.ceil(columns / across) + c / across) % 8) return "";
    const row = names.length > 1 ? [[names.at(-2), r]] : [], first = folded ? [[names.at(-1), c]] : [];
    return [...row, ...first].map(([name, k]) => (small ? k : `${name}=${k}`)).join(", ");
  };

  const buildGrid = () => {
    grid.classList.toggle("small", small);
    grid.closest(".mesh").classList.toggle("broad", broad);
    grid.closest(".mesh").classList.toggle("large", across > 8);
    grid.style.setProperty("--columns", across);
    grid.setAttribute("role", "group");
    grid.setAttribute("aria-label", "Devices of the mesh");
    for (let start = 0; start < count; start += rows * columns) {
      const lead = coordinates[start].slice(0, -2).map((k, d) => `${names[d]}=${k}`).join(", ");
      const facet = make("div", { className: "grid" });
      facet.append(make("span", { className: "axis-label line", textContent: broad && !folded && !small ? names.at(-1) : "" }));
      for (let c = 0; c < across; c++) {
        const label = columnLabel(c);
        facet.append(make("span", { className: "axis-label column", textContent: label }));
      }
      for (let i = start; i < start + rows * columns; i++) {
        const r = Math.floor((i - start) / columns), c = (i - start) % columns;
        if (c % across === 0) facet.append(make("span", { className: "axis-label line", textContent: lineLabel(r, c) }));
        const cell = make("div", { className: "device", tabIndex: -1, textContent: small ? "" : String(data.devices[i] ?? i) });
        cell.dataset.i = i;
        cell.setAttribute("role", "img");
        cells[i] = cell;
        facet.append(cell);
      }
      grid.append(make("div", { className: "facet" }, ...(lead ? [make("p", { textContent: lead })] : []), facet));
    }
  };

  const choose = (index) => {
    chosen = index;
    const argument = data.arguments[index];
    const numbers = new Map();
    same = new Map();
    held = coordinates.map((place, i) => {
      const ranges = rangesAt(argument, place);
      const key = JSON.stringify(ranges);
      if (!numbers.has(key)) numbers.set(key, numbers.size);
      if (!same.has(key)) same.set(key, []);
      same.get(key).push(i);
      return { ranges, key, number: numbers.get(key) };
    });
    for (let i = 0; i < count; i++) {
      const one = held[i];
      cells[i].classList.toggle("plain", numbers.size < 2 || !one.ranges);
      cells[i].style.setProperty("--hue", String(Math.round((210 + 360 * one.number / Math.max(numbers.size, 1)) % 360)));
      cells[i].setAttribute("aria-label", `device ${data.devices[i] ?? i}, ${placeText(i)}: ${indexText(argument, one.ranges)}`);
    }
    for (const button of document.querySelectorAll("button.choose")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.i) === index));
    }
    show(at);
  };

  const placeText = (i) => names.map((name, d) => `${name}=${coordinates[i][d]}`).join(", ");
  const indexText = (argument, ranges) => {
    if (!ranges) return argument.sharding;
    const parts = ranges.map(([a, b], d) => (a === 0 && b === argument.shape[d] ? ":" : `${a}:${b}`));
    return `${argument.path}${parts.length ? `[${parts.join(", ")}]` : ""}`;
  };

  let marked = []; // a pod has thousands of cells: only those that change are touched
  const show = (i) => {
    cells[at].tabIndex = -1;
    at = i;
    cells[at].tabIndex = 0;
    const argument = data.arguments[chosen], one = held[i], panel = byId("held");
    const here = one.ranges ? same.get(one.key) : [];
    const others = here.filter((j) => j !== i);
    if (here !== marked) {
      for (const j of marked) cells[j].classList.remove("same");
      for (const j of here) cells[j].classList.add("same");
      marked = here;
    }
    const listed = others.slice(0, 12).map((j) => data.devices[j] ?? j).join(", ");
    const more = others.length > 12 ? ` and ${others.length - 12} more` : "";
    panel.replaceChildren(
      make("h3", { textContent: `device ${data.devices[i] ?? i}` }),
      make("p", { className: "quiet", textContent: placeText(i) }),
      make("p", { className: "index", textContent: indexText(argument, one.ranges) }),
      make("p", { className: "quiet", textContent: `${argument.dtype}[${argument.shape.join(",")}] as ${argument.sharding}, ${argument.nbytes} per device` }),
      ...(one.ranges || []).map(([a, b], d) => make("div", { className: "dim" },
        make("span", { textContent: `dim ${d}` }),
        svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
          svg("rect", { x: argument.shape[d] ? 100 * a / argument.shape[d] : 0, width: argument.shape[d] ? 100 * (b - a) / argument.shape[d] : 0, height: 10 })),
        make("span", { className: "quiet", textContent: `${b - a} of ${argument.shape[d]}` }))),
      make("p", { className: "quiet", textContent: !one.ranges ? "No PartitionSpec says which part lies here." : others.length ? `The same is on device${others.length > 1 ? "s" : ""} ${listed}${more}.` : "No other device has this shard." }),
    );
  };

  grid.addEventListener("pointerover", (event) => {
    const cell = event.target.closest(".device");
    if (cell && Number(cell.dataset.i) !== at) show(Number(cell.dataset.i));
  });
  grid.addEventListener("focusin", (event) => {
    const cell = event.target.closest(".device");
    if (cell && Number(cell.dataset.i) !== at) show(Number(cell.dataset.i));
  });
  grid.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across, Home: -at, End: count - 1 - at };
    const to = at + moves[event.key];
    if (!(to >= 0 && to < count)) return;
    event.preventDefault();
    cells[to].focus();
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.choose");
    if (button) choose(Number(button.dataset.i));
  });
  if (data.arguments.length) { buildGrid(); choose(0); }
})();
