// A curve over [0, 1] drawn with the mouse, a finger or the keyboard.
// Model: points [[x, y], ...], sorted, both in [0, 1], the first at x = 0 and the last at x = 1;
// top: what y = 1 stands for.
const WIDTH = 860, HEIGHT = 170, LEFT = 60, RIGHT = 24, TOP = 12, BOTTOM = 26;
const COLUMNS = 16, STEP = 0.02, BIG_STEP = 0.1, GRAB = 14, GAP = 0.005;
const SVG = "http://www.w3.org/2000/svg";

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const toX = (x) => LEFT + x * (WIDTH - LEFT - RIGHT);
const toY = (y) => HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM);

function make(name, attributes, parent, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

function render({ model, el }) {
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "curve-editor",
    role: "group", "aria-label": "Learning rate over the run: drawn with points" }, el);
  const frame = make("g", {}, svg);
  const line = make("polyline", { class: "curve" }, svg);
  const dots = make("g", {}, svg);
  let points = [], dragged = null;

  function describe([x, y]) {
    const rate = Number((y * model.get("top")).toPrecision(3));
    return `at ${Math.round(100 * x)} % of the run, rate ${rate}`;
  }

  function drawFrame() {
    frame.replaceChildren();
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const [x, y] = [toX(share), toY(share)];
      make("line", { x1: toX(0), x2: toX(1), y1: y, y2: y, class: "grid" }, frame);
      make("line", { x1: x, x2: x, y1: toY(0), y2: toY(1), class: "grid" }, frame);
      const rate = Number((share * model.get("top")).toPrecision(3));
      make("text", { x: LEFT - 13, y: y + 4, "text-anchor": "end" }, frame, `${rate}`);
      make("text", { x, y: HEIGHT - 8, "text-anchor": "middle" }, frame, `${100 * share} %`);
    }
  }

  function draw(focus = null) {
    line.setAttribute("points", points.map(([x, y]) => `${toX(x)},${toY(y)}`).join(" "));
    dots.replaceChildren();
    points.forEach((point, index) => {
      const dot = make("circle", { cx: toX(point[0]), cy: toY(point[1]), r: 7, tabindex: 0,
        role: "slider", "aria-label": `Point ${index + 1} of ${points.length}`,
        "aria-orientation": "vertical", "aria-valuemin": 0, "aria-valuemax": model.get("top"),
        "aria-valuenow": point[1] * model.get("top"), "aria-valuetext": describe(point) }, dots);
      make("title", {}, dot, describe(point));
      dot.addEventListener("keydown", (event) => onKey(event, index));
      if (index === focus) dot.focus();
    });
  }

  function send() {
    model.set("points", points.map((point) => [...point]));
    model.save_changes();
  }

  // Ends stay at the ends, and no point passes another.
  function move(index, x, y) {
    const last = points.length - 1;
    const low = index === 0 ? 0 : index === last ? 1 : points[index - 1][0] + GAP;
    const high = index === last ? 1 : index === 0 ? 0 : points[index + 1][0] - GAP;
    points[index] = [clamp(x, low, high), clamp(y, 0, 1)];
  }

  // One point a column: a stroke of the mouse becomes a curve of few points.
  function put(x, y) {
    const column = Math.round(x * COLUMNS) / COLUMNS;
    points = points.filter(([other]) => Math.abs(other - column) >= 0.5 / COLUMNS ||
      ((other === 0 || other === 1) && other !== column));
    points.push([column, clamp(y, 0, 1)]);
    points.sort((a, b) => a[0] - b[0]);
  }

  function place(event) {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const y = ((event.clientY - box.top) / box.height) * HEIGHT;
    return [clamp((x - LEFT) / (WIDTH - LEFT - RIGHT), 0, 1),
      clamp((HEIGHT - BOTTOM - y) / (HEIGHT - TOP - BOTTOM), 0, 1), x, y];
  }

  function onKey(event, index) {
    const step = event.shiftKey ? BIG_STEP : STEP;
    const [x, y] = points[index];
    const isEnd = index === 0 || index === points.length - 1;
    let focus = index;
    if (event.key === "ArrowUp") move(index, x, y + step);
    else if (event.key === "ArrowDown") move(index, x, y - step);
    else if (event.key === "ArrowLeft") move(index, x - step, y);
    else if (event.key === "ArrowRight") move(index, x + step, y);
    else if (event.key === "Home") move(index, x, 0);
    else if (event.key === "End") move(index, x, 1);
    else if ((event.key === "Delete" || event.key === "Backspace") && !isEnd) {
      points.splice(index, 1);
      focus = index - 1;
    } else if (event.key === "Enter" && index < points.length - 1) {
      const [nextX, nextY] = points[index + 1];
      points.splice(index + 1, 0, [(x + nextX) / 2, (y + nextY) / 2]);
      focus = index + 1;
    } else return;
    // Neither the page nor the notebook shall take the key as well.
    event.preventDefault();
    event.stopPropagation();
    draw(focus);
    send();
  }

  svg.addEventListener("pointerdown", (event) => {
    const [x, y, pageX, pageY] = place(event);
    const near = points.findIndex(([px, py]) =>
      Math.hypot(toX(px) - pageX, toY(py) - pageY) < GRAB);
    dragged = near;
    if (near < 0) put(x, y);
    svg.setPointerCapture(event.pointerId);
    event.preventDefault();
    draw(near < 0 ? null : near);
  });
  svg.addEventListener("pointermove", (event) => {
    if (dragged === null) return;
    const [x, y] = place(event);
    if (dragged < 0) put(x, y);
    else move(dragged, x, y);
    draw();
    send();
  });
  const release = () => {
    if (dragged === null) return;
    dragged = null;
    send();
  };
  svg.addEventListener("pointerup", release);
  svg.addEventListener("pointercancel", release);

  function take() {
    if (dragged !== null) return;
    const focus = [...dots.children].indexOf(document.activeElement);
    points = model.get("points").map((point) => [...point]);
    draw(focus < 0 ? null : focus);
  }
  model.on("change:points", take);
  model.on("change:top", () => { drawFrame(); draw(); });
  drawFrame();
  take();
}

export default { render };
