"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const percent = (value) => `${Math.round(value / 2)}%`;
  const gate = (value) => (value / 200).toFixed(2);
  const KINDS = ["future", "passed", "missed", "forced", "chosen"];
  const MISSED = 2, CHOSEN = 4;
  const BRANCHES = ["cmp", "sel", "win"], SHARES = ["selected", "random", "best"];
  const SHARE_COLOURS = ["sel", "random", "best"];
  const DASHES = { random: [5, 4], best: [2, 3] };

  for (const layer of data.layers) {
    for (const name of ["cells", "gates", "shares", "mass"]) layer[name] = bytes(layer[name]);
  }
  const spans = [...by("text").children].map((element) => ({
    element,
    first: Number(element.dataset.first),
    end: Number(element.dataset.end),
  }));
  const spanOf = new Array(data.length);
  spans.forEach((span, i) => spanOf.fill(i, span.first, span.end));

  const state = { layer: data.layer, head: data.head, token: data.token, hover: null };
  readAddress();

  const layer = () => data.layers[state.layer];
  const shown = () => state.hover ?? state.token;
  const kind = (block, query) => layer().cells[(state.head * layer().count + block) * data.length + query];
  const value = (name, query, i) => layer()[name][(query * layer().heads + state.head) * 3 + i];
  const massOf = (query, block) => layer().mass[(query * layer().heads + state.head) * layer().count + block];
  const selected = (query) => {
    const blocks = Array.from({ length: layer().count }, (_, block) => block);
    return blocks.filter((block) => kind(block, query) > MISSED);
  };

  function readAddress() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const integer = (name, end, otherwise) => {
      const number = Number.parseInt(wanted.get(name), 10);
      return number >= 0 && number < end ? number : otherwise;
    };
    state.layer = integer("layer", data.layers.length, state.layer);
    state.head = integer("head", data.layers[state.layer].heads, Math.min(state.head, data.layers[state.layer].heads - 1));
    state.token = integer("token", data.length, state.token);
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  function prepare(canvas) {
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(box.width * ratio));
    canvas.height = Math.max(1, Math.round(box.height * ratio));
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    return { context, width: box.width, height: box.height };
  }

  let image = null;  // the map of this layer and kv head, one pixel per query and block
  function paintMap() {
    const { count } = layer();
    image = document.createElement("canvas");
    image.width = data.length;
    image.height = count;
    const context = image.getContext("2d");
    const colours = ["page", "passed", "missed", "forced", "chosen"].map((name) => {
      const hex = colour(name);
      return [1, 3, 5].map((i) => Number.parseInt(hex.slice(i, i + 2), 16));
    });
    const pixels = context.createImageData(data.length, count);
    for (let block = 0; block < count; block++) {
      for (let query = 0; query < data.length; query++) {
        const at = 4 * ((count - 1 - block) * data.length + query);
        pixels.data.set(colours[kind(block, query)], at);
        pixels.data[at + 3] = 255;
      }
    }
    context.putImageData(pixels, 0, 0);
  }

  function drawMap() {
    const { context, width, height } = prepare(by("map")), query = shown();
    context.imageSmoothingEnabled = false;
    context.drawImage(image, 0, 0, width, height);
    const x = (query + 0.5) * width / data.length, step = height / layer().count;
    context.fillStyle = colour("ink");
    context.fillRect(x - 0.75, 0, 1.5, height);
    context.lineWidth = 2;
    context.strokeStyle = colour("ink");
    for (const block of selected(query)) {
      context.strokeRect(x - 5, height - (block + 1) * step, 10, step);
    }
  }

  function drawLines(id, name, colours, names, format) {
    const { context, width, height } = prepare(by(id)), { size } = layer();
    const x = (i) => (i + 0.5) * width / data.length, y = (v) => 2 + (height - 4) * (1 - v / 200);
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.fillStyle = colour("faint");
    context.font = "11px system-ui, sans-serif";
    for (const v of [0, 100, 200]) {
      context.fillText(format(v), 2, v ? y(v) + 11 : y(v) - 3);
      context.beginPath();
      context.moveTo(0, y(v));
      context.lineTo(width, y(v));
      context.stroke();
    }
    names.forEach((label, line) => {
      context.strokeStyle = colour(colours[line]);
      context.lineWidth = 2;
      context.setLineDash(DASHES[label] || []);
      context.beginPath();
      let sum = 0;
      for (let i = 0; i < data.length; i++) {  // the mean over at most one block of tokens
        sum += value(name, i, line) - (i >= size ? value(name, i - size, line) : 0);
        context.lineTo(x(i), y(sum / Math.min(i + 1, size)));
      }
      context.stroke();
    });
    context.setLineDash([]);
    context.fillStyle = colour("ink");
    context.fillRect(x(shown()) - 0.75, 0, 1.5, height);
  }

  function legend(id, name, colours, names, format) {
    by(id).replaceChildren(...names.map((label, i) => {
      const item = document.createElement("span");
      item.textContent = `${label} ${format(value(name, shown(), i))}`;
      item.style.color = `var(--${colours[i]})`;
      return item;
    }));
  }

  function textOf(first, end) {
    return spans.filter((s) => s.first >= first && s.first < end).map((s) => s.element.textContent).join("");
  }

  function readout() {
    const query = shown(), { size, count } = layer(), blocks = selected(query);
    const chosen = blocks.filter((block) => kind(block, query) === CHOSEN).length;
    const visible = Math.floor(query / size) + 1;
    const paragraph = document.createElement("p"), token = document.createElement("strong");
    token.textContent = `Token ${query} ${JSON.stringify(spans[spanOf[query]].element.textContent)}`;
    paragraph.append(
      token,
      ` reads ${blocks.length} of ${visible} ${visible === 1 ? "block" : "blocks"}, ${chosen} by its own choice. They hold `
      + `${percent(value("shares", query, 0))} of dense attention's probability; with random blocks `
      + `${percent(value("shares", query, 1))}, with the best ${percent(value("shares", query, 2))}. Gates: `
      + `${BRANCHES.map((name, i) => `${name} ${gate(value("gates", query, i))}`).join(", ")}.`,
    );
    const table = document.createElement("table");
    for (let block = 0; block < count; block++) {
      const cell = kind(block, query);
      if (cell < MISSED) continue;
      const row = table.insertRow(), text = textOf(block * size, (block + 1) * size);
      const key = document.createElement("i");
      key.className = `key ${KINDS[cell]}`;
      row.insertCell().append(key, KINDS[cell] === "forced" ? "always" : KINDS[cell]);
      row.insertCell().textContent = `${block * size}–${Math.min(data.length, (block + 1) * size) - 1}`;
      row.insertCell().textContent = text.replace(/\s+/g, " ").trim();
      row.insertCell().textContent = percent(massOf(query, block));
    }
    by("readout").replaceChildren(paragraph, table);
  }

  function markText() {
    const query = shown(), { size } = layer();
    for (const span of spans) {
      const names = span.first > query ? ["future"] : [KINDS[kind(Math.floor(span.first / size), query)]];
      if (span === spans[spanOf[query]]) names.push("query");
      span.element.className = names.join(" ");
    }
  }

  function update() {
    by("position").textContent = `${shown()} of ${data.length}`;
    by("query").value = shown();
    drawMap();
    drawLines("gates", "gates", BRANCHES, BRANCHES, (v) => String(v / 200));
    drawLines("shares", "shares", SHARE_COLOURS, SHARES, percent);
    legend("gate-values", "gates", BRANCHES, BRANCHES, gate);
    legend("share-values", "shares", SHARE_COLOURS, SHARES, percent);
    readout();
    markText();
  }

  function choose(changes) {
    Object.assign(state, changes);
    state.head = Math.min(state.head, layer().heads - 1);
    if ("layer" in changes || "head" in changes) {
      by("layer").value = state.layer;
      by("head").replaceChildren(...Array.from({ length: layer().heads }, (_, i) => new Option(i, i)));
      by("head").value = state.head;
      const [title, context] = data.titles[state.layer];
      by("title").textContent = title;
      by("context").textContent = context;
      paintMap();
    }
    update();
    if (state.hover === null) {
      history.replaceState(null, "", `#layer=${state.layer}&head=${state.head}&token=${state.token}`);
    }
  }

  function move(event) {
    const step = (event.shiftKey ? layer().size : 1) * ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] || 0);
    if (!step) return;
    event.preventDefault();
    const token = Math.min(data.length - 1, Math.max(0, state.token + step));
    choose({ token, hover: null });
    spans[spanOf[token]].element.scrollIntoView({ block: "nearest" });
  }

  function queryAt(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const query = Math.floor((event.clientX - box.left) / box.width * data.length);
    return Math.min(data.length - 1, Math.max(0, query));
  }

  by("controls").addEventListener("submit", (event) => event.preventDefault());
  by("layer").addEventListener("change", (event) => choose({ layer: Number(event.target.value) }));
  by("head").addEventListener("change", (event) => choose({ head: Number(event.target.value) }));
  by("query").addEventListener("input", (event) => choose({ token: Number(event.target.value), hover: null }));
  for (const id of ["map", "gates", "shares"]) {
    by(id).addEventListener("pointermove", (event) => choose({ hover: queryAt(event) }));
    by(id).addEventListener("pointerleave", () => choose({ hover: null }));
    by(id).addEventListener("click", (event) => choose({ token: queryAt(event), hover: null }));
  }
  by("map").addEventListener("keydown", move);
  by("text").addEventListener("keydown", move);
  const clicked = (event) => event.target.closest("[data-first]");
  by("text").addEventListener("click", (event) => {
    if (clicked(event)) choose({ token: Number(clicked(event).dataset.first), hover: null });
  });
  by("text").addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && clicked(event)) choose({ hover: Number(clicked(event).dataset.first) });
  });
  by("text").addEventListener("pointerleave", () => choose({ hover: null }));
  window.addEventListener("resize", update);
  window.addEventListener("hashchange", () => {
    readAddress();
    choose({ layer: state.layer, hover: null });
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => choose({ layer: state.layer }));
  choose({ layer: state.layer });
})();
