// Plays a scene: messages travel between nodes, bars fill lanes and cells change, as time runs.
// Model: scene, as `Scene.as_json` of scene.py writes it; time, where it stands while at rest;
// selected: number of a bar, or -1; movable: whether bars can be dragged to another place of their
// lane, which sends {bar, place}; timed: where the picture that follows on the page has plots over
// the scene's time, and `size`, its pixels
// and how high it is shown. It needs no kernel: a model of get, set, save_changes,
// on and send suffices.
const FONT = "12px system-ui, sans-serif", SMALL = "10px system-ui, sans-serif";
const LEFT = 84, RIGHT = 14, AXIS = 22, GAP = 10, SECONDS = 12, STEP_MS = 700;
const INK = "#1f2933", FAINT = "#8a949e", ACCENT = "#b3245b";
const MORE = "#24679f", LESS = "#b8501c", SVG = "http://www.w3.org/2000/svg";
const SPEEDS = [0.25, 0.5, 1, 2, 4];

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const short = (value) => `${Number(Number(value).toPrecision(4))}`;

// The last index of `times` (sorted) that is not after `time`, or -1.
function lastBefore(times, time) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function make(name, attributes, parent, text = "") {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

// A label, its first word alone, or nothing: what has room.
function fitting(pen, label, room) {
  return [label, label.split(" ")[0], ""].find((one) => pen.measureText(one).width <= room) ?? "";
}

function render({ model, el }) {
  const root = make("div", { class: "scene-player", role: "group" }, el);
  const canvas = make("canvas", { tabindex: 0, role: "img" }, root);
  const row = make("div", { class: "scene-controls" }, root);
  const playing = make("button", { type: "button", class: "scene-play" }, row, "Play");
  const back = make("button", { type: "button", "aria-label": "To the event before" }, row, "◀");
  const on = make("button", { type: "button", "aria-label": "To the next event" }, row, "▶");
  const scrub = make("input", { type: "range", min: 0, step: "any", "aria-label": "Time" }, row);
  const clock = make("output", { class: "scene-clock" }, row);
  const speed = make("select", { "aria-label": "Speed" }, row);
  for (const one of SPEEDS) make("option", { value: one }, speed, `${one} x`);
  speed.value = 1;
  const words = make("div", { class: "scene-words", "aria-live": "polite" }, root);
  const over = make("div", { class: "scene-over" }, el);
  const keys = make("details", { class: "scene-keys" }, row);
  make("summary", {}, keys, "Keys");
  make("span", {}, keys, "On the picture: Space plays and stops, ← → step from event to event, " +
    "Home and End go to the ends, Shift with an arrow chooses a task, Alt with ← → moves it.");
  const ruler = document.createElement("canvas").getContext("2d");
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");

  let scene, time = 0, isPlaying = false, before = 0, frame = 0, dragged = null, hovered = -1,
    hoveredNode = -1, inCell = "";
  let width = 0, space = 0, rowHeight = 0, height = 0, events = [], inLane = [], lit, faint, clocks = [], near = 50;

  const lanes = () => scene.lanes.length;
  const isOwn = () => lanes() === scene.nodes.length; // lane i is what node i does
  const isNew = () => model.get("time") < 0; // nobody has played it
  const toX = (at) => LEFT + (at / scene.end) * (width - LEFT - RIGHT);
  const toTime = (x) => ((x - LEFT) / (width - LEFT - RIGHT)) * scene.end;
  const top = (lane) => space + lane * rowHeight;
  const colour = (kind) => scene.kinds[kind]?.colour ?? "#cfd6dc";
  const place = (node) => {
    const { x, y } = scene.nodes[node], inset = 38;
    return [inset + x * (width - 2 * inset), inset + y * (space - 2 * inset - GAP)];
  };
  const drawn = () => scene.nodes.length || scene.grids.length;
  // A grid's heading in lines that are no wider than its cells, where its words are not.
  const heading = ({ name, wide, rows }) => {
    const room = wide * (width - 16) - (rows.some(Boolean) ? 56 : 0), lines = [];
    ruler.font = `600 ${FONT}`;
    for (const word of name.split(" ")) {
      const longer = `${lines.at(-1) ?? ""} ${word}`;
      if (lines.length && ruler.measureText(longer).width <= room) lines.splice(-1, 1, longer);
      else lines.push(word);
    }
    return lines;
  };
  // Left, top, and the size of a cell: a heading stands above, names of rows on the left.
  const cells = (grid) => {
    const { x, y, wide, high, rows, columns } = grid;
    const beside = rows.some(Boolean) ? 56 : 0;
    const above = 4 + 14 * heading(grid).length + (columns.some(Boolean) ? 14 : 0);
    const key = scene.messages.start.length ? 18 : 2, room = space - key - 6;
    const [left, from] = [8 + x * (width - 16) + beside, key + y * room + above];
    return [left, from, (wide * (width - 16) - beside) / columns.length,
      (high * room - above) / rows.length];
  };
  const radius = () => clamp(0.32 * near, 4, scene.levels.length ? 17 : 15);

  function take() {
    scene = model.get("scene");
    if (!scene?.end) return;
    const { bars, messages } = scene;
    inLane = scene.lanes.map(() => []);
    bars.lane.forEach((lane, bar) => inLane[lane].push(bar));
    for (const mine of inLane) mine.sort((a, b) => bars.start[a] - bars.start[b]);
    events = [...new Set([0, scene.end, ...bars.start, ...messages.start, ...messages.end,
      ...scene.grids.flatMap((grid) => grid.times), ...scene.notes.map(([at]) => at)])];
    events.sort((a, b) => a - b);
    scrub.max = scene.end;
    time = clamp(isNew() ? scene.moment : model.get("time"), 0, scene.end);
    canvas.setAttribute("aria-label", scene.words);
    root.setAttribute("aria-label", scene.words);
    hovered = hoveredNode = -1;
    cover();
    lay();
  }

  // The clock goes on through the plots of the picture that follows.
  function cover() {
    const [wide, high, shown = high] = model.get("size") ?? [], boxes = model.get("timed") ?? [];
    over.replaceChildren();
    clocks = [];
    if (!wide || !boxes.length) return;
    const svg = over.appendChild(document.createElementNS(SVG, "svg"));
    svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    svg.style.maxWidth = `${wide}px`;
    svg.style.height = `${shown}px`;
    svg.style.maxHeight = `${(100 * high) / wide}vw`;
    clocks = boxes.map(([left, right, from, to]) => {
      const line = svg.appendChild(document.createElementNS(SVG, "line"));
      line.setAttribute("y1", from);
      line.setAttribute("y2", to);
      return [line, left, right];
    });
  }

  function lay() {
    width = Math.max(240, root.clientWidth || 860);
    space = drawn() ? Math.round(clamp(scene.tall * Math.max(width, 620), 86, 460)) : 20;
    rowHeight = scene.lane_pixels;
    const all = scene.nodes.map((_, node) => place(node)); // how close two nodes come
    near = Math.min(...all.flatMap(([x, y], one) =>
      all.slice(one + 1).map(([right, down]) => Math.hypot(right - x, down - y))));
    height = space + lanes() * rowHeight + (lanes() ? AXIS : 0);
    const dense = window.devicePixelRatio || 1;
    for (const one of [canvas, lit = document.createElement("canvas"),
      faint = document.createElement("canvas")]) {
      [one.width, one.height] = [width * dense, height * dense];
      one.getContext("2d").scale(dense, dense);
    }
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    drawBars(lit.getContext("2d"), 1);
    drawBars(faint.getContext("2d"), 0.28);
    draw();
  }

  // All bars once, so that a frame copies two pictures however many there are.
  function drawBars(pen, alpha) {
    const { bars } = scene;
    pen.globalAlpha = alpha;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    bars.lane.forEach((lane, bar) => {
      const left = toX(bars.start[bar]), wide = toX(bars.end[bar]) - left;
      pen.fillStyle = colour(bars.kind[bar]);
      pen.fillRect(left, top(lane) + 1, Math.max(wide - (wide > 3 ? 1 : 0), 0.7), rowHeight - 2);
      pen.font = rowHeight > 15 ? FONT : SMALL;
      const label = rowHeight < 10 ? "" : fitting(pen, bars.label[bar], wide - 3);
      pen.fillStyle = scene.kinds[bars.kind[bar]]?.is_dark ? "white" : INK;
      pen.fillText(label, left + wide / 2, top(lane) + rowHeight / 2);
    });
  }

  function draw() {
    const pen = canvas.getContext("2d"), ink = getComputedStyle(root).color;
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    if (lanes()) drawLanes(pen, ink);
    for (const grid of scene.grids) drawGrid(pen, ink, grid);
    if (scene.nodes.length) drawSpace(pen, ink);
    drawLegend(pen, ink);
    for (const [line, left, right] of clocks) {
      const x = left + (time / scene.end) * (right - left);
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
    const note = describe();
    if (words.textContent !== note) words.textContent = note;
    scrub.value = time;
    scrub.setAttribute("aria-valuetext", `${short(time)} of ${short(scene.end)} ${scene.unit}`);
    clock.textContent = `${short(time)} / ${short(scene.end)} ${scene.unit}`;
  }

  function drawLegend(pen, ink) {
    let x = 6;
    if (!scene.bars.start.length && !scene.messages.start.length) return;
    pen.font = FONT;
    const each = scene.kinds.map(({ name }) => pen.measureText(name).width + 32);
    if (each.reduce((sum, wide) => sum + wide, 0) > width) pen.font = SMALL;
    pen.textAlign = "left";
    for (const kind of scene.kinds) {
      if (x + pen.measureText(kind.name).width + 16 > width) return;
      pen.fillStyle = kind.colour;
      pen.fillRect(x, 4, 12, 10);
      pen.fillStyle = ink;
      pen.fillText(kind.name, x + 16, 9.5);
      x += pen.measureText(kind.name).width + 32;
    }
  }

  function drawLanes(pen, ink) {
    const now = toX(time), dense = window.devicePixelRatio || 1, bottom = top(lanes());
    pen.drawImage(faint, 0, 0, width, height);
    if (now > LEFT) {
      const wide = now - LEFT, tall = lanes() * rowHeight;
      pen.clearRect(LEFT, space, wide, tall);
      pen.drawImage(lit, LEFT * dense, space * dense, wide * dense, tall * dense,
        LEFT, space, wide, tall);
    }
    pen.fillStyle = ink;
    pen.font = rowHeight > 11 ? FONT : SMALL;
    pen.textAlign = "right";
    const every = Math.ceil(12 / rowHeight);
    scene.lanes.forEach((name, lane) => {
      pen.fillStyle = lane === theNode() ? ACCENT : ink;
      if (lane % every === 0) pen.fillText(name, LEFT - 8, top(lane) + rowHeight / 2);
    });
    pen.fillStyle = ink;
    pen.font = SMALL;
    pen.textAlign = "center";
    for (let part = 0; part <= 4; part++) {
      const at = (part / 4) * scene.end;
      pen.fillText(short(at), clamp(toX(at), LEFT, width - 22), bottom + 9);
    }
    if (isOwn()) drawCrossings(pen);
    const pointed = hovered >= 0 ? hovered : model.get("selected"), { label } = scene.bars;
    // What has the same label, such as one microbatch on every stage, is one journey.
    if (pointed >= 0 && label[pointed])
      label.forEach((other, bar) => other === label[pointed] && outline(pen, bar, ink, 1.2));
    outline(pen, model.get("selected"), ACCENT);
    outline(pen, hovered, ink);
    if (dragged?.moved) drawDragged(pen);
    pen.fillStyle = ACCENT;
    pen.fillRect(now - 0.75, space - 2, 1.5, lanes() * rowHeight + 4);
  }

  // Messages on their way from lane to lane.
  function drawCrossings(pen) {
    pen.strokeStyle = ACCENT;
    pen.lineWidth = 1.2;
    flying((source, target, share, message) => {
      const { start, end } = scene.messages;
      const [x, y] = [toX(start[message]), top(source) + rowHeight / 2];
      const [toRight, down] = [toX(end[message]) - x, (target - source) * rowHeight];
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(x + share * toRight, y + share * down);
      pen.stroke();
    });
  }

  function flying(each) {
    const { source, target, start, end } = scene.messages;
    for (let message = 0; message < start.length && start[message] <= time; message++)
      if (time < end[message])
        each(source[message], target[message],
          (time - start[message]) / (end[message] - start[message]), message);
  }

  function outline(pen, bar, ink, line = 2) {
    const { bars } = scene;
    if (!(bar in bars.lane)) return;
    pen.strokeStyle = ink;
    pen.lineWidth = line;
    const left = toX(bars.start[bar]);
    pen.strokeRect(left, top(bars.lane[bar]) + 1, toX(bars.end[bar]) - left, rowHeight - 2);
  }

  function drawDragged(pen) {
    const { bars } = scene, lane = bars.lane[dragged.bar];
    const wide = toX(bars.end[dragged.bar]) - toX(bars.start[dragged.bar]);
    pen.globalAlpha = 0.8;
    pen.fillStyle = colour(bars.kind[dragged.bar]);
    pen.fillRect(dragged.x - wide / 2, top(lane) - 4, wide, rowHeight);
    pen.globalAlpha = 1;
    const others = inLane[lane].filter((bar) => bar !== dragged.bar), at = placeOf(dragged);
    const x = at < others.length ? toX(bars.start[others[at]]) : toX(bars.end[others[at - 1]]);
    pen.fillStyle = ACCENT;
    pen.fillRect(x - 1.5, top(lane) - 3, 3, rowHeight + 6);
  }

  function placeOf({ bar, x }) {
    const { bars } = scene, others = inLane[bars.lane[bar]].filter((other) => other !== bar);
    return others.filter((other) => toX((bars.start[other] + bars.end[other]) / 2) < x).length;
  }

  function drawSpace(pen, ink) {
    const { nodes, edges, levels, bars } = scene, size = radius();
    pen.strokeStyle = FAINT;
    pen.lineWidth = 1.4;
    pen.beginPath();
    for (const [a, b] of edges) {
      pen.moveTo(...place(a));
      pen.lineTo(...place(b));
    }
    pen.stroke();
    pen.font = size > 12 ? FONT : SMALL;
    nodes.forEach((node, index) => {
      const [x, y] = place(index), mine = isOwn() ? inLane[index] : [];
      const last = lastBefore(mine.map((bar) => bars.start[bar]), time), bar = mine[last];
      const isBusy = last >= 0 && time < bars.end[bar];
      pen.fillStyle = isBusy ? colour(bars.kind[bar]) : "white";
      pen.fillRect(x - size, y - size, 2 * size, 2 * size);
      if (levels[index]) {
        const [times, values] = levels[index], at = lastBefore(times, time);
        const part = at < 0 ? 0 : clamp(values[at], 0, 1);
        pen.fillStyle = "#2f7fb8";
        const side = isOwn() ? 5 : 2 * size;
        pen.fillRect(x + size - side, y + size - 2 * size * part, side, 2 * size * part);
      }
      pen.strokeStyle = index === theNode() ? ACCENT : ink;
      pen.lineWidth = index === theNode() ? 3 : 1.2;
      pen.strokeRect(x - size, y - size, 2 * size, 2 * size);
      pen.textAlign = "center";
      if (isBusy && size > 9) {
        pen.fillStyle = scene.kinds[bars.kind[bar]]?.is_dark ? "white" : INK;
        pen.fillText(fitting(pen, bars.label[bar], 2 * size - 4), x - (levels[index] ? 2 : 0), y);
      }
      pen.fillStyle = isOwn() ? ink : INK; // one that does nothing of its own has room for its name
      if (size > 6) pen.fillText(node.name, x, isOwn() ? y + size + 8 : y);
    });
    flying((source, target, share, message) => {
      const [x, y] = place(source), [right, down] = place(target);
      const far = Math.hypot(right - x, down - y) || 1, side = Math.min(5, size / 2);
      // Beside the edge, on the right of its way: two directions do not meet.
      const isFar = theNode() >= 0 && source !== theNode() && target !== theNode();
      pen.globalAlpha = isFar ? 0.25 : 1; // the others step back from the messages of one node
      const at = [x + share * (right - x) - (side * (down - y)) / far,
        y + share * (down - y) + (side * (right - x)) / far];
      pen.beginPath();
      pen.arc(at[0], at[1], clamp(size / 2.4, 2.5, 6), 0, 2 * Math.PI);
      pen.fillStyle = colour(scene.messages.kind[message]);
      pen.fill();
      pen.strokeStyle = ACCENT;
      pen.lineWidth = 1.5;
      pen.stroke();
      const label = scene.messages.label[message];
      pen.fillStyle = ink;
      pen.textAlign = "center";
      if (label && nodes.length <= 24) pen.fillText(label, at[0], at[1] - 12);
      pen.globalAlpha = 1;
    });
  }

  // A cell with words of its own is coloured; others have a square as large as the value: filled
  // above zero, hollow below. What is gone is crossed out; above 100 stands what is still to come.
  function drawGrid(pen, ink, grid) {
    const [left, from, wide, high] = cells(grid), { rows, columns, labels } = grid;
    const moment = lastBefore(grid.times, time), values = grid.values[moment] ?? [];
    pen.fillStyle = ink;
    pen.textAlign = "left";
    pen.font = `600 ${FONT}`;
    heading(grid).reverse().forEach((line, up) =>
      pen.fillText(line, left, from - 14 * up - (columns.some(Boolean) ? 24 : 9)));
    pen.font = SMALL;
    pen.textAlign = "right";
    rows.forEach((name, row) => high > 7 && pen.fillText(name, left - 5, from + (row + 0.5) * high));
    pen.textAlign = "center";
    columns.forEach((name, column) =>
      pen.fillText(fitting(pen, name, wide + 4), left + (column + 0.5) * wide, from - 7));
    pen.strokeStyle = FAINT;
    pen.lineWidth = 0.5;
    pen.strokeRect(left, from, wide * columns.length, high * rows.length);
    rows.forEach((_, row) => columns.forEach((_, column) => {
      const at = row * columns.length + column, value = values[at], label = labels[at] ?? "";
      const [x, y] = [left + column * wide, from + row * high];
      const [middle, centre] = [x + wide / 2, y + high / 2];
      if (value === undefined || (value > 100 && !label)) return;
      if (value === null) {
        pen.strokeStyle = FAINT;
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(x + 2, centre);
        pen.lineTo(x + wide - 2, centre);
        pen.stroke();
        pen.fillStyle = FAINT;
      } else if (value > 100) pen.fillStyle = FAINT;
      else if (labels.length) {
        const share = Math.abs(value) / 100;
        pen.globalAlpha = 0.08 + 0.92 * share;
        pen.fillStyle = value < 0 ? LESS : MORE;
        pen.fillRect(x + 1, y + 1, wide - 2, high - 2);
        pen.globalAlpha = 1;
        pen.fillStyle = share > 0.7 ? "white" : ink;
      } else if (value) {
        const side = Math.max(1.5, Math.sqrt(Math.abs(value) / 100) * (Math.min(wide, high) - 2));
        [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [MORE, LESS, 1.5];
        const box = [middle - side / 2, centre - side / 2, side, side];
        if (value > 0) pen.fillRect(...box); else pen.strokeRect(...box);
      }
      if (label) pen.fillText(fitting(pen, label, wide - 3), middle, centre);
    }));
  }

  // The node that is pointed at, itself or by what its lane does.
  function theNode() {
    if (hoveredNode >= 0) return hoveredNode;
    const bar = hovered >= 0 ? hovered : model.get("selected");
    return isOwn() && bar in scene.bars.lane ? scene.bars.lane[bar] : -1;
  }

  function run(now) {
    if (!isPlaying) return;
    if (still.matches) { // no motion: from event to event
      if (now - before > STEP_MS / Number(speed.value)) { before = now; step(1); }
    } else {
      const passed = Math.min(now - before, 100) / 1000;
      before = now;
      time = Math.min(scene.end, time + (passed * Number(speed.value) * scene.end) / SECONDS);
      draw();
    }
    if (time >= scene.end) stop();
    else frame = requestAnimationFrame(run);
  }

  function play() {
    if (time >= scene.end || isNew()) time = 0;
    isPlaying = true;
    playing.textContent = "Stop";
    before = performance.now();
    frame = requestAnimationFrame(run);
  }

  function stop() {
    isPlaying = false;
    cancelAnimationFrame(frame);
    playing.textContent = "Play";
    settle();
  }

  // The kernel is told where time rests, not every frame.
  function settle() {
    model.set("time", time);
    model.save_changes();
  }

  function goTo(at) {
    time = clamp(at, 0, scene.end);
    draw();
    if (!isPlaying) settle();
  }

  function step(by) {
    const at = lastBefore(events, time + 1e-9 * scene.end);
    const isOn = events[at] >= time - 1e-9 * scene.end;
    goTo(events[clamp(by > 0 ? at + 1 : isOn ? at - 1 : at, 0, events.length - 1)]);
  }

  // Of what is pointed at or selected, or what happens now.
  function describe() {
    const { bars, notes, levels, nodes } = scene;
    if (inCell) return inCell;
    if (hoveredNode >= 0) {
      const [times, values] = levels[hoveredNode] ?? [[], []], full = values[lastBefore(times, time)];
      return `${nodes[hoveredNode].name}` + (full === undefined ? "" : `: ${short(100 * full)} % full`);
    }
    const bar = dragged ? dragged.bar : hovered >= 0 ? hovered : model.get("selected");
    if (!(bar in bars.lane)) return notes[lastBefore(notes.map(([at]) => at), time)]?.[1] ?? "";
    return `${bars.label[bar]}: ${short(bars.start[bar])} to ${short(bars.end[bar])} ` +
      `${scene.unit} on ${scene.lanes[bars.lane[bar]]}`;
  }

  function select(bar) {
    model.set("selected", bar);
    model.save_changes();
    draw();
  }

  function selectBeside(lanesOn, placesOn) {
    const { bars } = scene, bar = model.get("selected");
    if (!(bar in bars.lane)) return select(inLane.find((mine) => mine.length)?.[0] ?? -1);
    const lane = clamp(bars.lane[bar] + lanesOn, 0, lanes() - 1), mine = inLane[lane];
    const at = lanesOn ? lastBefore(mine.map((one) => bars.start[one]), bars.start[bar])
      : mine.indexOf(bar) + placesOn;
    select(mine[clamp(at, 0, mine.length - 1)] ?? bar);
  }

  function moveBy(places) {
    const bar = model.get("selected");
    if (!model.get("movable") || !(bar in scene.bars.lane)) return;
    const mine = inLane[scene.bars.lane[bar]], at = mine.indexOf(bar) + places;
    if (at >= 0 && at < mine.length) model.send({ bar, place: at });
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, lane = Math.floor((event.clientY - box.top - space) / rowHeight);
    if (!(lane in inLane)) return { x, bar: -1, y: event.clientY - box.top };
    const { bars } = scene, found = toTime(x);
    const bar = inLane[lane].find((one) => bars.start[one] <= found && found < bars.end[one]);
    return { x, lane, bar: bar ?? -1 };
  }

  // What the mouse is on above the lanes: a node's number, and a cell in words.
  function above({ x, y }) {
    const node = y === undefined ? -1 : scene.nodes.findIndex((_, one) => {
      const [right, down] = place(one);
      return Math.max(Math.abs(x - right), Math.abs(y - down)) <= radius() + 2;
    });
    for (const grid of y === undefined ? [] : scene.grids) {
      const [left, from, wide, high] = cells(grid);
      const column = Math.floor((x - left) / wide), row = Math.floor((y - from) / high);
      if (!(column in grid.columns && row in grid.rows)) continue;
      const at = row * grid.columns.length + column, name = grid.labels[at] ?? "";
      const value = grid.values[lastBefore(grid.times, time)]?.[at];
      const where = [grid.rows[row], grid.columns[column], name].filter(Boolean).join(", ");
      return [node, `${grid.name}: ${where || `${row + 1}, ${column + 1}`}: ` +
        `${value === undefined || value > 100 ? "not yet" : value === null ? "gone" : `${value} %`}`];
    }
    return [node, ""];
  }

  canvas.addEventListener("pointerdown", (event) => {
    const { x, bar } = at(event);
    if (bar < 0) return;
    select(bar);
    dragged = { bar, x, from: x, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event), { x, bar } = found, [node, cell] = above(found);
    if (dragged && model.get("movable")) {
      dragged.x = x;
      dragged.moved ||= Math.abs(x - dragged.from) > 4;
    } else if (bar === hovered && node === hoveredNode && cell === inCell) return;
    [hovered, hoveredNode, inCell] = [bar, node, cell];
    if (!isPlaying) draw();
  });
  const release = () => {
    const last = dragged;
    dragged = null;
    if (last?.moved) {
      const place = placeOf(last);
      if (place !== inLane[scene.bars.lane[last.bar]].indexOf(last.bar))
        model.send({ bar: last.bar, place });
    }
    draw();
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", () => { dragged = null; draw(); });
  canvas.addEventListener("pointerleave", () => {
    [hovered, hoveredNode, inCell] = [-1, -1, ""];
    if (!isPlaying) draw();
  });
  canvas.addEventListener("keydown", (event) => {
    const sign = { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0;
    const down = { ArrowDown: 1, ArrowUp: -1 }[event.key] ?? 0;
    if (event.key === " ") isPlaying ? stop() : play();
    else if (event.key === "Home") goTo(0);
    else if (event.key === "End") goTo(scene.end);
    else if (event.altKey && sign) moveBy(sign);
    else if (event.shiftKey && (sign || down)) selectBeside(down, sign);
    else if (sign) step(sign);
    else return;
    // Neither the page nor the notebook shall take the key as well.
    event.preventDefault();
    event.stopPropagation();
  });
  playing.addEventListener("click", () => (isPlaying ? stop() : play()));
  back.addEventListener("click", () => { if (isPlaying) stop(); step(-1); });
  on.addEventListener("click", () => { if (isPlaying) stop(); step(1); });
  scrub.addEventListener("input", () => { time = Number(scrub.value); draw(); });
  scrub.addEventListener("change", () => { if (!isPlaying) settle(); });

  const resized = new ResizeObserver(() => {
    if (scene?.end && root.clientWidth && Math.max(240, root.clientWidth) !== width) lay();
  });
  resized.observe(root);
  const retime = () => { if (!isPlaying && scene?.end) {
    time = clamp(isNew() ? scene.moment : model.get("time"), 0, scene.end);
    draw();
  } };
  const reselect = () => draw();
  model.on("change:scene", take);
  model.on("change:timed", cover);
  model.on("change:time", retime);
  model.on("change:selected", reselect);
  take();
  return () => {
    cancelAnimationFrame(frame);
    resized.disconnect();
    model.off?.("change:scene", take);
    model.off?.("change:timed", cover);
    model.off?.("change:time", retime);
    model.off?.("change:selected", reselect);
  };
}

export default { render };
