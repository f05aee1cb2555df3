"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const UNIT = 65535;
  const [SHAPE, DTYPE, SHADE, RULE, SHARD, TOTAL, BYTES, MARK, EXPLAIN, OUTLINE] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];

  // ---------------------------------------------------------------- words

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  // As Python rounds: a half goes to the even neighbour.
  const tenths = (value) => {
    const below = Math.floor(value * 10), isHalf = value * 10 - below === 0.5;
    return ((isHalf ? below + (below % 2) : Math.round(value * 10)) / 10).toFixed(1);
  };
  const bytes = (count) => {
    let power = 0;
    while (count >= 1024 && power < UNITS.length - 1) { count /= 1024; power += 1; }
    return `${power ? tenths(count) : count} ${UNITS[power]}`;
  };
  const percent = (part, all) => {
    const share = all ? (100 * part) / all : 0;
    return share > 0 && share < 0.05 ? "< 0.1%" : `${share.toFixed(1)}%`;
  };
  const number = (count) => count.toLocaleString("en-US");
  const SVG = "http://www.w3.org/2000/svg";
  const make = (tag, classes = "", text = "") => {
    const element = document.createElement(tag);
    if (classes) element.className = classes;
    if (text !== "") element.textContent = text;
    return element;
  };
  // Colours come again after so many, with a pattern.
  const COLOURS = 8;
  const againOf = (shade) => Math.min(3, Math.floor(Math.max(0, data.shades[shade][1]) / COLOURS));
  const colourOf = (shade) => {
    const colour = data.shades[shade][1];
    return colour < 0 ? "neutral" : `c${colour % COLOURS} again${againOf(shade)}`;
  };

  // ---------------------------------------------------------------- trees

  const unpack = (text) => {
    const raw = atob(text.slice(1));
    const octets = new Uint8Array(raw.length);
    for (let at = 0; at < raw.length; at += 1) octets[at] = raw.charCodeAt(at);
    return text[0] === "2" ? new Uint16Array(octets.buffer) : new Uint32Array(octets.buffer);
  };

  // Nodes are in the order of a walk, so what is below a node is one run: node … ends[node].
  const grow = (packed) => {
    const names = unpack(packed.names), parents = unpack(packed.parents);
    const kinds = unpack(packed.kinds), counts = unpack(packed.counts);
    const size = names.length;
    const tree = {
      size, parents, counts,
      words: (node) => data.words[names[node]],
      kind: (node) => kinds[node] - 1,
      wide: unpack(packed.wide), tall: unpack(packed.tall),
      ends: new Uint32Array(size), depth: new Uint16Array(size), times: new Float64Array(size),
      bytes: new Float64Array(size), total: new Float64Array(size), leaves: new Float64Array(size),
      paths: new Array(size), open: new Uint8Array(size), root: 0,
    };
    tree.times[0] = 1; tree.paths[0] = "";
    for (let node = 1; node < size; node += 1) {
      const parent = parents[node];
      tree.depth[node] = tree.depth[parent] + 1;
      tree.times[node] = tree.times[parent] * counts[node];
      tree.paths[node] = parent ? `${tree.paths[parent]}/${tree.words(node)}` : tree.words(node);
    }
    tree.ends.fill(size);
    for (let node = size - 1; node >= 0; node -= 1) {
      const kind = kinds[node] - 1;
      if (kind >= 0) {
        tree.ends[node] = node + 1;
        tree.bytes[node] = data.kinds[kind][BYTES] * tree.times[node];
        tree.total[node] = data.kinds[kind][TOTAL] * tree.times[node];
        tree.leaves[node] = tree.times[node];
      } else {
        let end = node + 1;
        while (end < size && parents[end] === node) end = tree.ends[end];
        tree.ends[node] = end;
      }
      if (node) {
        tree.bytes[parents[node]] += tree.bytes[node];
        tree.total[parents[node]] += tree.total[node];
        tree.leaves[parents[node]] += tree.leaves[node];
      }
    }
    openSome(tree);
    return tree;
  };

  // Opens level by level, as long as the table stays short.
  const openSome = (tree) => {
    tree.open[0] = 1;
    let rows = 0;
    const wide = [];
    for (let node = 1; node < tree.size; node = tree.ends[node]) { rows += 1; wide.push(node); }
    for (let at = 0; at < wide.length && rows < 40; at += 1) {
      const inner = [];
      for (let node = wide[at] + 1; node < tree.ends[wide[at]]; node = tree.ends[node]) inner.push(node);
      if (inner.length && inner.length < 40) {
        tree.open[wide[at]] = 1; rows += inner.length; wide.push(...inner);
      }
    }
  };

  const known = new Map();
  const state = { view: 0, folded: true, shade: -1, mark: false, query: [], pinned: 0, shown: 0 };
  let tree, rows = [], matches = null;

  const choose = () => {
    const view = data.views[state.view];
    const folded = state.folded || !view.flat;
    const key = `${state.view} ${folded}`;
    if (!known.has(key)) known.set(key, grow(folded ? view.folded : view.flat));
    tree = known.get(key);
    state.pinned = 0; state.shown = 0;
    aim();
  };

  const pathOf = (node) => tree.paths[node] || "(all)";
  const explanation = (node) => {
    const path = tree.paths[node], parts = path.split("/");
    return data.kinds[tree.kind(node)][EXPLAIN]
      .map((piece) => (typeof piece === "string" ? piece : piece === 0 ? path : (piece > 0 ? parts.slice(-piece) : parts.slice(0, -piece)).join("/")))
      .join("");
  };

  // ---------------------------------------------------------------- search

  const kindWords = data.kinds.map((kind) =>
    [kind[SHAPE], kind[DTYPE], data.shades[kind[SHADE]][0], kind[RULE], kind[SHARD], kind[MARK]].join(" ").toLowerCase());

  const search = () => {
    matches = null;
    if (!state.query.length && state.shade < 0 && !state.mark) return;
    matches = new Uint8Array(tree.size);
    tree.lower = tree.lower || tree.paths.map((path) => path.toLowerCase());
    const byKind = state.query.map((word) => kindWords.map((text) => text.includes(word)));
    for (let node = tree.size - 1; node > 0; node -= 1) {
      const kind = tree.kind(node);
      if (kind >= 0) {
        const record = data.kinds[kind];
        if (state.shade >= 0 && record[SHADE] !== state.shade) continue;
        if (state.mark && !record[MARK]) continue;
        const path = tree.lower[node];
        if (!state.query.every((word, at) => byKind[at][kind] || path.includes(word))) continue;
        matches[node] = 1;
      }
      if (matches[node]) matches[tree.parents[node]] = 1;
    }
  };

  const list = () => {
    rows = [];
    // What is found is open, unless it was closed since.
    const isOpen = matches ? (node) => !shut.has(node) : (node) => tree.open[node];
    for (let node = 1; node < tree.size;) {
      if (matches && !matches[node]) { node = tree.ends[node]; continue; }
      rows.push(node);
      node = tree.kind(node) < 0 && !isOpen(node) ? tree.ends[node] : node + 1;
    }
  };
  let shut = new Set();
  const isOpen = (node) => (matches ? !shut.has(node) : !!tree.open[node]);
  const setOpen = (node, open) => {
    if (matches) { if (open) shut.delete(node); else shut.add(node); } else tree.open[node] = open ? 1 : 0;
  };

  // ---------------------------------------------------------------- the table

  const scroll = $("scroll"), spacer = $("spacer");
  const HEADS = 34;
  let rowHeight = 30;

  const cell = (classes, text) => {
    const element = make("div", classes, text);
    element.setAttribute("role", "gridcell");
    if (text) element.title = text;
    return element;
  };

  const nameOf = (node) => tree.words(node) || (tree.size === 2 ? "(the array)" : '""');

  const specCell = (shade) => {
    const element = cell("spec", "");
    element.append(make("span", `swatch ${colourOf(shade)}`), make("span", "mono", data.shades[shade][0]));
    return element;
  };

  const rowOf = (node, at, largest) => {
    const kind = tree.kind(node), isLeaf = kind >= 0, record = data.kinds[kind];
    const row = make("div", isLeaf ? "row leaf" : "row module");
    row.id = `n${node}`;
    row.dataset.node = node;
    row.setAttribute("role", "row");
    row.setAttribute("aria-level", tree.depth[node]);
    row.setAttribute("aria-rowindex", at + 1);
    row.setAttribute("aria-selected", node === state.pinned);
    if (!isLeaf) row.setAttribute("aria-expanded", isOpen(node));
    row.style.top = `${at * rowHeight}px`;
    const path = cell("path", "");
    path.title = tree.paths[node];
    path.style.paddingLeft = `${(tree.depth[node] - 1) * 14}px`;
    path.append(make("span", "twist", isLeaf ? "" : isOpen(node) ? "▾" : "▸"));
    path.append(make("b", "", nameOf(node)));
    if (tree.counts[node] > 1) path.append(make("span", "times", `×${number(tree.counts[node])}`));
    row.append(path);
    if (isLeaf) {
      row.append(cell("shape mono", record[SHAPE]), cell("dtype", record[DTYPE]), specCell(record[SHADE]));
      row.append(cell(record[MARK] ? "rule mono warn" : "rule mono", record[RULE]), cell("shard mono", record[SHARD]));
    } else {
      row.append(cell("shape", ""), cell("dtype", ""), cell("spec", `${number(tree.leaves[node])} leaves`));
      row.append(cell("rule", ""), cell("shard", ""));
    }
    const size = cell("bytes", ""), fill = make("i");
    fill.style.width = `${(100 * tree.bytes[node]) / largest}%`;
    size.append(fill, make("span", "", bytes(tree.bytes[node])));
    row.append(size);
    return row;
  };

  const paintRows = () => {
    const first = Math.max(0, Math.floor(scroll.scrollTop / rowHeight) - 8);
    const last = Math.min(rows.length, Math.ceil((scroll.scrollTop + scroll.clientHeight) / rowHeight) + 8);
    const largest = tree.bytes[0] || 1;
    const made = document.createDocumentFragment();
    for (let at = first; at < last; at += 1) made.append(rowOf(rows[at], at, largest));
    if (!rows.length) made.append(make("div", "empty", "Nothing matches."));
    spacer.replaceChildren(made);
    if (rows.includes(state.pinned) && $(`n${state.pinned}`)) scroll.setAttribute("aria-activedescendant", `n${state.pinned}`);
    else scroll.removeAttribute("aria-activedescendant");
  };

  const paintTable = () => {
    list();
    rowHeight = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
    const height = Math.max(rows.length * rowHeight, rows.length ? 0 : 66);
    spacer.style.height = `${height}px`;
    // Contained, so that its size does not depend on its rows.
    scroll.style.height = `${Math.min(height + HEADS, 0.72 * innerHeight)}px`;
    scroll.setAttribute("aria-rowcount", rows.length);
    paintRows();
    let found = 0;
    if (matches) {
      for (let node = 1; node < tree.size; node += 1) if (matches[node] && tree.kind(node) >= 0) found += tree.times[node];
    }
    const all = data.views[state.view].leaves;
    $("count").textContent = matches ? `${number(found)} of ${number(all)} leaves` : `${number(all)} ${all === 1 ? "leaf" : "leaves"}`;
  };

  const reveal = (node) => {
    if (!matches || matches[node]) {
      let changed = false;
      for (let above = tree.parents[node]; above > 0; above = tree.parents[above]) {
        if (!isOpen(above)) { setOpen(above, true); changed = true; }
      }
      if (changed) paintTable();
    }
    const at = rows.indexOf(node);
    if (at < 0) return;
    const top = at * rowHeight;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    else if (top + rowHeight + HEADS > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + rowHeight + HEADS - scroll.clientHeight;
  };

  // ---------------------------------------------------------------- the words about a node

  // The array, and in it what one device holds.
  const outline = (record) => {
    if (!record[OUTLINE].length) return [];
    const [width, height, across, down] = record[OUTLINE];
    const figure = make("figure");
    const picture = document.createElementNS(SVG, "svg");
    picture.setAttribute("viewBox", `-1 -1 ${width + 2} ${height + 2}`);
    picture.setAttribute("width", width + 2);
    picture.setAttribute("aria-hidden", "true");
    for (const [classes, w, h] of [["whole", width, height], [`part ${colourOf(record[SHADE])}`, across, down]]) {
      const side = document.createElementNS(SVG, "rect");
      side.setAttribute("class", classes);
      side.setAttribute("width", w);
      side.setAttribute("height", h);
      picture.append(side);
    }
    const share = record[TOTAL] / (record[BYTES] || 1);
    const held = share > 1 ? `each device holds 1/${number(Math.round(share))}` : "each device holds all of it";
    figure.append(picture, make("figcaption", "", `${record[SHAPE]}: ${held}`));
    return [figure];
  };

  const explain = (node) => {
    const box = $("explain"), kind = tree.kind(node);
    state.shown = node;
    const made = kind >= 0 ? [] : [make("h2", "", pathOf(node))];
    if (kind >= 0) {
      if (tree.times[node] > 1) {
        made.push(make("p", "", `${number(tree.times[node])} leaves alike, ${bytes(tree.bytes[node])} per device together. Each:`));
      }
      const words = make("pre");
      words.append(make("b", "", tree.paths[node]), explanation(node).slice(tree.paths[node].length));
      made.push(words);
      made.push(...outline(data.kinds[kind]));
    } else {
      const end = tree.ends[node], sums = new Map();
      for (let at = node; at < end; at += 1) {
        const inner = tree.kind(at);
        if (inner >= 0) sums.set(data.kinds[inner][SHADE], (sums.get(data.kinds[inner][SHADE]) || 0) + tree.bytes[at]);
      }
      const leaves = tree.leaves[node];
      const share = node ? ` (${percent(tree.bytes[node], tree.bytes[0])} of all shown)` : "";
      made.push(make("p", "", `${number(leaves)} ${leaves === 1 ? "leaf" : "leaves"}: ${bytes(tree.bytes[node])} per device${share}, ${bytes(tree.total[node])} in all`));
      const items = make("ul");
      [...sums].sort((a, b) => b[1] - a[1]).forEach(([shade, sum]) => {
        const item = make("li");
        item.append(make("span", `swatch ${colourOf(shade)}`), make("span", "mono", data.shades[shade][0]), make("span", "", bytes(sum)));
        items.append(item);
      });
      made.push(items);
    }
    box.replaceChildren(...made);
    halo(node);
  };

  const pin = (node, { scrollTo = true } = {}) => {
    state.pinned = node;
    explain(node);
    if (scrollTo) reveal(node);
    paintRows();
  };

  // ---------------------------------------------------------------- the map

  // New rows under a pointer that rests say nothing; it has to move.
  let pointer = "", moved = false;
  document.addEventListener("mousemove", (event) => {
    const where = `${event.screenX} ${event.screenY}`;
    moved = where !== pointer;
    pointer = where;
  }, true);

  const canvas = $("canvas"), stage = canvas.parentElement, pen = canvas.getContext("2d");
  const isTall = () => matchMedia("(max-width: 560px)").matches;

  // Stretches the tree-map so that the module in view fills the canvas.
  let lens = null;
  const aim = () => {
    const map = isTall() ? tree.tall : tree.wide, root = 4 * tree.root;
    lens = {
      map, left: map[root], top: map[root + 1],
      across: stage.clientWidth / (map[root + 2] - map[root] || UNIT),
      down: stage.clientHeight / (map[root + 3] - map[root + 1] || UNIT),
    };
  };
  const place = (node) => {
    const { map, left, top, across, down } = lens, at = 4 * node;
    return [
      (map[at] - left) * across, (map[at + 1] - top) * down,
      (map[at + 2] - map[at]) * across, (map[at + 3] - map[at + 1]) * down,
    ];
  };

  const fits = (text, width) => pen.measureText(text).width <= width;

  // At least four characters of what is too long.
  const begun = (text, room) => {
    for (let end = text.length - 1; end >= 4; end -= 1) if (fits(`${text.slice(0, end)}…`, room)) return `${text.slice(0, end)}…`;
    return "";
  };
  // As much of the end of a path as fits; "kernel" alone says less than its module.
  const nameIn = (node, room) => {
    const parts = tree.paths[node].slice(tree.root ? tree.paths[tree.root].length + 1 : 0).split("/");
    const ends = parts.slice(0, -1).map((_, at) => parts.slice(at).join("/"));
    const last = parts.at(-2) || parts[0];
    return [...ends, last].find((text) => text && fits(text, room)) || begun(last, room);
  };

  const write = (node, left, top, width, height) => {
    if (Math.max(width, height) < 40 || Math.min(width, height) < 18) return;
    const upright = width < 40 && height > width;
    pen.save();
    pen.beginPath(); pen.rect(left, top, width, height); pen.clip();
    pen.translate(left, top);
    if (upright) { pen.translate(width / 2 + 8, 0); pen.rotate(Math.PI / 2); }
    const room = (upright ? height : width) - 12, depth = upright ? 20 : height;
    pen.font = fonts.name;
    const name = nameIn(node, room);
    pen.fillText(name, 6, depth < 24 ? Math.max(1, depth / 2 - 7) : upright ? 1 : 7);
    pen.font = fonts.more;
    const size = bytes(tree.bytes[node]);
    const times = tree.times[node] > 1 ? `×${number(tree.times[node])}  ` : "";
    const line = [times + size, size].find((text) => fits(text, room)) || "";
    const spec = data.shades[data.kinds[tree.kind(node)][SHADE]][0];
    if (name && depth >= 40) pen.fillText(line, 6, 25);
    if (name && depth >= 58 && fits(spec, room)) pen.fillText(spec, 6, 42);
    pen.restore();
  };

  let fonts = {};
  const paintMap = () => {
    const ratio = devicePixelRatio || 1, width = stage.clientWidth, height = stage.clientHeight;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const css = (name) => style.getPropertyValue(name).trim();
    const colours = data.shades.map(([, colour]) => css(colour < 0 ? "--neutral" : `--c${colour % COLOURS}`));
    const gap = css("--gap"), ink = css("--on"), hatch = css("--hatch");
    const patterns = [null, ...[1, 2, 3].map((again) => pattern(again))];
    fonts = { name: `600 13px ${css("--sans")}`, more: `12px ${css("--sans")}` };
    pen.fillStyle = gap; pen.fillRect(0, 0, width, height);
    pen.textBaseline = "top";
    aim();
    const end = tree.ends[tree.root];
    for (let node = tree.root; node < end; node += 1) {
      const kind = tree.kind(node);
      if (kind < 0) continue;
      const [left, top, wide, high] = place(node);
      if (wide <= 0 || high <= 0) continue;
      const shade = data.kinds[kind][SHADE];
      pen.globalAlpha = matches && !matches[node] ? 0.16 : 1;
      const inset = wide > 3 && high > 3 ? 1 : 0;
      pen.fillStyle = colours[shade]; pen.fillRect(left, top, wide - inset, high - inset);
      if (data.shades[shade][1] < 0 && wide > 6 && high > 6) stripes(left, top, wide - inset, high - inset, hatch);
      if (pen.globalAlpha < 1) continue;
      if (againOf(shade) && inset) { pen.fillStyle = patterns[againOf(shade)]; pen.fillRect(left, top, wide - inset, high - inset); }
      pen.fillStyle = ink; write(node, left, top, wide, high);
    }
    pen.globalAlpha = 1;
    // Modules have wider gaps, the outer ones the widest.
    pen.strokeStyle = gap;
    for (let node = tree.root + 1; node < end; node += 1) {
      if (tree.kind(node) >= 0) continue;
      const [left, top, wide, high] = place(node), inside = tree.depth[node] - tree.depth[tree.root];
      if (wide < 8 || high < 8 || inside > 3) continue;
      pen.lineWidth = inside === 1 ? 5 : inside === 2 ? 3 : 2;
      pen.strokeRect(left, top, wide, high);
    }
    canvas.setAttribute("aria-label", `Tree-map of ${pathOf(tree.root)}: ${bytes(tree.bytes[tree.root])} per device`);
    if (!tree.bytes[tree.root]) {
      pen.fillStyle = css("--quiet"); pen.font = fonts.name; pen.fillText("no bytes", 12, 12);
    }
    crumbs(); halo(state.shown);
  };

  // Dots, lines, or a grid.
  const pattern = (again) => {
    const tile = make("canvas"), size = 8;
    tile.width = tile.height = size;
    const dot = tile.getContext("2d");
    dot.fillStyle = "rgb(0 0 0 / 32%)";
    if (again === 1) dot.fillRect(3, 3, 2, 2);
    if (again > 1) dot.fillRect(0, 3, size, 1);
    if (again > 2) dot.fillRect(3, 0, 1, size);
    return pen.createPattern(tile, "repeat");
  };

  const stripes = (left, top, wide, high, colour) => {
    pen.save();
    pen.beginPath(); pen.rect(left, top, wide, high); pen.clip();
    pen.beginPath();
    for (let at = -high; at < wide; at += 9) { pen.moveTo(left + at, top + high); pen.lineTo(left + at + high, top); }
    pen.strokeStyle = colour; pen.lineWidth = 1; pen.stroke();
    pen.restore();
  };

  const halo = (node) => {
    const box = $("halo");
    const inView = node > 0 && node >= tree.root && node < tree.ends[tree.root] && tree.bytes[node] > 0;
    box.classList.toggle("hidden", !inView);
    if (!inView) return;
    const [left, top, wide, high] = place(node);
    Object.assign(box.style, { left: `${left}px`, top: `${top}px`, width: `${Math.max(4, wide)}px`, height: `${Math.max(4, high)}px` });
  };

  const crumbs = () => {
    const chain = [];
    for (let node = tree.root; node > 0; node = tree.parents[node]) chain.unshift(node);
    chain.unshift(0);
    const made = chain.flatMap((node, at) => {
      const isLast = at === chain.length - 1;
      const text = node ? tree.words(node) : "all";
      if (isLast) return [make("span", "mono", text)];
      const button = make("button", "mono", text);
      button.type = "button";
      button.addEventListener("click", () => zoom(node));
      return [button, make("span", "", "›")];
    });
    $("crumbs").replaceChildren(...made);
  };

  const zoom = (node) => { tree.root = node; paintMap(); };
  const zoomInto = (leaf) => {
    let node = leaf;
    while (node > 0 && tree.parents[node] !== tree.root) node = tree.parents[node];
    if (node > 0 && tree.kind(node) < 0) zoom(node);
  };

  const leafAt = (x, y) => {
    const end = tree.ends[tree.root];
    for (let node = tree.root; node < end;) {
      const [left, top, wide, high] = place(node);
      const inside = x >= left && x < left + wide && y >= top && y < top + high;
      if (!inside) { node = tree.ends[node]; continue; }
      if (tree.kind(node) >= 0) return node;
      node += 1;
    }
    return 0;
  };

  const neighbour = (from, dx, dy) => {
    const [left, top, wide, high] = place(from), x = left + wide / 2, y = top + high / 2;
    let best = 0, least = Infinity;
    for (let node = tree.root; node < tree.ends[tree.root]; node += 1) {
      if (tree.kind(node) < 0 || node === from) continue;
      const [l, t, w, h] = place(node);
      if (w <= 0 || h <= 0) continue;
      // What lies beside it is nearest; how far off the line counts twice.
      const ahead = dx ? (dx > 0 ? l - (left + wide) : left - (l + w)) : (dy > 0 ? t - (top + high) : top - (t + h));
      if (ahead < -1) continue;
      const aside = dx ? Math.max(0, t - y, y - (t + h)) : Math.max(0, l - x, x - (l + w));
      const cost = ahead + 2 * aside;
      if (cost < least) { least = cost; best = node; }
    }
    return best || from;
  };

  const pointed = (event) => {
    const box = canvas.getBoundingClientRect();
    return leafAt(event.clientX - box.left, event.clientY - box.top);
  };
  canvas.addEventListener("mousemove", (event) => { const node = pointed(event); if (moved && node !== state.shown) explain(node || state.pinned); });
  canvas.addEventListener("mouseleave", () => explain(state.pinned));
  canvas.addEventListener("click", (event) => { const node = pointed(event); if (node) pin(node); });
  canvas.addEventListener("dblclick", (event) => { const node = pointed(event); if (node) zoomInto(node); });
  const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  const firstLeaf = () => {
    let best = 0;
    for (let node = tree.root; node < tree.ends[tree.root]; node += 1) {
      if (tree.kind(node) >= 0 && (!best || tree.bytes[node] > tree.bytes[best])) best = node;
    }
    return best;
  };
  const isInView = (node) => node > 0 && tree.kind(node) >= 0 && node >= tree.root && node < tree.ends[tree.root];
  canvas.addEventListener("keydown", (event) => {
    const here = isInView(state.pinned) ? state.pinned : 0;
    if (event.key in ARROWS) pin(here ? neighbour(here, ...ARROWS[event.key]) : firstLeaf());
    else if (event.key === "Home") pin(firstLeaf());
    else if (event.key === "Enter" && here) zoomInto(here);
    else if (event.key === "Escape" || event.key === "Backspace") { if (tree.root) zoom(tree.parents[tree.root]); }
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("focus", () => { if (canvas.matches(":focus-visible") && !isInView(state.pinned) && tree.bytes[0]) pin(firstLeaf()); });

  // ---------------------------------------------------------------- keys of the table

  scroll.addEventListener("scroll", () => requestAnimationFrame(paintRows));
  const nodeOf = (event) => { const row = event.target.closest(".row"); return row ? Number(row.dataset.node) : 0; };
  const toggle = (node, open = !isOpen(node)) => { if (tree.kind(node) < 0) { setOpen(node, open); paintTable(); } };
  scroll.addEventListener("click", (event) => { const node = nodeOf(event); if (node) { toggle(node); pin(node, { scrollTo: false }); } });
  scroll.addEventListener("mousemove", (event) => {
    const node = nodeOf(event);
    if (moved && node && node !== state.shown) explain(node);
  });
  scroll.addEventListener("mouseleave", () => explain(state.pinned));
  scroll.addEventListener("focus", () => { if (scroll.matches(":focus-visible") && !rows.includes(state.pinned) && rows.length) pin(rows[0]); });
  scroll.addEventListener("keydown", (event) => {
    const at = Math.max(0, rows.indexOf(state.pinned)), node = rows[at];
    if (!rows.length) return;
    const page = Math.max(1, Math.floor((scroll.clientHeight - HEADS) / rowHeight) - 1);
    const to = (next) => pin(rows[Math.min(rows.length - 1, Math.max(0, next))]);
    const isLeaf = tree.kind(node) >= 0;
    const moves = {
      ArrowDown: () => to(at + 1), ArrowUp: () => to(at - 1), Home: () => to(0), End: () => to(rows.length - 1),
      PageDown: () => to(at + page), PageUp: () => to(at - page),
      ArrowRight: () => (!isLeaf && !isOpen(node) ? toggle(node, true) : to(at + 1)),
      ArrowLeft: () => (!isLeaf && isOpen(node) ? toggle(node, false) : tree.parents[node] && pin(tree.parents[node])),
      Enter: () => toggle(node), " ": () => toggle(node),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  });

  // ---------------------------------------------------------------- the top

  const paintTop = () => {
    const view = data.views[state.view];
    const facts = [
      ["per device", bytes(view.per_device), ""],
      ["in all", bytes(view.total), ""],
      ["replicated", data.devices > 1 ? percent(view.replicated, view.total) : "0.0%", "of all bytes"],
      ["leaves", number(view.leaves), ""],
      ["mesh", data.mesh || "none", data.devices ? `${number(data.devices)} ${data.devices === 1 ? "device" : "devices"}` : ""],
    ];
    $("facts").replaceChildren(...facts.map(([name, value, more]) => {
      const group = make("div"), shown = make("dd", "", value);
      if (more) shown.append(" ", make("small", "", more));
      group.append(make("dt", "", name), shown);
      return group;
    }));
    [...$("views").children].forEach((button, at) => button.setAttribute("aria-pressed", at === state.view));
    $("fold").setAttribute("aria-pressed", state.folded);
    $("fold").classList.toggle("hidden", !view.flat);
    legend();
  };

  const legend = () => {
    const sums = new Map();
    let marked = 0;
    for (let node = 1; node < tree.size; node += 1) {
      const kind = tree.kind(node);
      if (kind < 0) continue;
      const record = data.kinds[kind];
      sums.set(record[SHADE], (sums.get(record[SHADE]) || 0) + tree.bytes[node]);
      if (record[MARK]) marked += tree.times[node];
    }
    const chips = [...sums].sort((a, b) => a[0] - b[0]).map(([shade, sum]) => {
      const chip = make("button", "chip");
      chip.type = "button";
      chip.setAttribute("aria-pressed", state.shade === shade);
      chip.append(make("span", `swatch ${colourOf(shade)}`), make("span", "mono", data.shades[shade][0]));
      chip.append(make("span", "", `${bytes(sum)} · ${percent(sum, tree.bytes[0])}`));
      chip.addEventListener("click", () => { state.shade = state.shade === shade ? -1 : shade; refresh(); $("legend").children[chips.indexOf(chip)]?.focus(); });
      return chip;
    });
    if (marked) {
      const chip = make("button", "chip");
      chip.type = "button";
      chip.setAttribute("aria-pressed", state.mark);
      chip.append(make("span", "warn", "▲"), make("span", "warn", "no rule, or not fully applied"), make("span", "", `${number(marked)} ${marked === 1 ? "leaf" : "leaves"}`));
      chip.addEventListener("click", () => { state.mark = !state.mark; refresh(); $("legend").lastChild.focus(); });
      chips.push(chip);
    }
    $("legend").replaceChildren(...chips);
  };

  const refresh = () => { shut = new Set(); search(); paintTop(); paintTable(); paintMap(); };
  const switchTo = (view, folded) => {
    state.view = view; state.folded = folded; state.shade = -1; state.mark = false;
    choose(); refresh(); explain(0);
    scroll.scrollTop = 0;
  };

  const heading = document.title;
  $("title").textContent = heading;
  $("lead").textContent = "Where every array lies. The area is bytes per device, the colour is the layout.";
  data.views.forEach((view, at) => {
    const button = make("button", "", view.title);
    button.type = "button";
    button.addEventListener("click", () => switchTo(at, state.folded));
    $("views").append(button);
  });
  $("fold").addEventListener("click", () => switchTo(state.view, !state.folded));
  $("open-all").addEventListener("click", () => { shut = new Set(); if (!matches) tree.open.fill(1); paintTable(); });
  $("close-all").addEventListener("click", () => {
    if (matches) { for (let node = 1; node < tree.size; node += 1) if (tree.kind(node) < 0) shut.add(node); } else tree.open.fill(0);
    scroll.scrollTop = 0; paintTable();
  });
  const input = $("search");
  input.addEventListener("input", () => {
    state.query = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    shut = new Set(); search(); scroll.scrollTop = 0; paintTable(); paintMap();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && rows.length) { event.preventDefault(); scroll.focus(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== input && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault(); input.focus(); input.select();
    }
  });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (theme) => {
    document.documentElement.dataset.theme = theme;
    $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  };
  let chosen = false;
  dark.addEventListener("change", () => { if (!chosen) { setTheme(dark.matches ? "dark" : "light"); paintMap(); } });
  $("theme").addEventListener("click", () => {
    chosen = true;
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    paintMap();
  });
  setTheme(dark.matches ? "dark" : "light");

  let pending = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(() => { paintMap(); paintTable(); });
  }).observe(stage);

  $("views").classList.toggle("hidden", data.views.length < 2);
  if (data.remarks.length) {
    const details = $("remarks");
    details.classList.remove("hidden");
    details.firstElementChild.textContent = `${data.remarks.length === 1 ? "1 remark" : `${number(data.remarks.length)} remarks`}`;
    details.lastElementChild.replaceChildren(...data.remarks.map((text) => make("li", "", text)));
  }
  switchTo(0, true);
})();
