// Panels that move without a kernel: every picture was drawn beforehand and is put together here.
//
// A page holds places: <div class="replay" data-folder="FOLDER/" data-replay="NAME">, where a panel
// stands, with data-start where it does not start as recorded; with data-lesson and data-guess a
// question stands before it. FOLDER/NAME.js leaves a string in `toolkitReplays`: base64 of gzip of
//
//     uint32 length | header, JSON of that length | int32 rows, one per point of the grid
//
//     row = background, caption, error or -1, count of elements, elements..., columns..., scene
//
// All are places in lists of the header (`backgrounds`, `words`, `elements`, `columns`, `scenes`;
// without scenes a row has none, and with them a page has `toolkitPlayer`). The points
// are in the order of the controls, the last one quickest. toolkit/lab/site/replay.py writes it.
//
// The page holds this module's text itself: from file:// browsers refuse modules and fetch(), but
// take inline modules and classic scripts, so no server is needed.

/** Read a recording. */
export async function unpack(text) {
  const packed = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(plain).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const recording = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const numbers = new Int32Array(buffer, 4 + length);
  let end = 0;
  recording.rows = recording.lengths.map(size => numbers.subarray(end, (end += size)));
  return recording;
}

/** The row of a point: `places` has one number per control. */
export function row(recording, places) {
  const index = recording.controls.reduce(
    (sum, control, at) => sum * control.words.length + places[at], 0);
  return recording.rows[index];
}

/** The table of a row: headings, and columns of as many cells. */
export function table(recording, numbers) {
  const end = numbers.length - (recording.scenes?.length ? 1 : 0);
  return Array.from(numbers.subarray(4 + numbers[3], end), column => recording.columns[column]);
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** A slider with a box to type in, or a menu; calls `moved(place)`. */
function input(control, moved) {
  const last = control.words.length - 1;
  if (!control.numbers) {
    const menu = element("select", { className: `choice-${control.name}` },
      ...control.words.map((word, place) => element("option", { value: place }, word)));
    menu.value = control.start;
    menu.onchange = () => moved(Number(menu.value));
    return [element("span", {}, control.label), menu];
  }
  const slider = element("input", {
    type: "range", min: 0, max: last, step: 1, value: control.start,
    className: `slider-${control.name}`,
  });
  const box = element("input", {
    type: "number", step: "any", value: control.numbers[control.start],
    min: control.numbers[0], max: control.numbers[last], className: `box-${control.name}`,
    title: `Takes the nearest of ${last + 1} values computed in advance`,
  });
  box.setAttribute("aria-label", `${control.label}: type a value`);
  const show = place => {
    slider.value = place;
    slider.setAttribute("aria-valuetext", control.words[place]);
    box.value = control.numbers[place];
    moved(place);
  };
  slider.setAttribute("aria-valuetext", control.words[control.start]);
  slider.oninput = () => show(Number(slider.value));
  box.onchange = () => {
    const distances = control.numbers.map(number => Math.abs(number - Number(box.value)));
    show(distances.indexOf(Math.min(...distances)));
  };
  return [element("span", {}, control.label), slider, box];
}

/** The player of toolkit/lab/kit/player.js without a kernel: its element, and what shows a scene. */
function player({ timed, size, bar_control: bar, time_control: step }) {
  const box = element("div"), values = { selected: -1, movable: false, timed, size }, told = {};
  box.append(element("style", { textContent: globalThis.toolkitPlayer.style }));
  const model = {
    get: name => values[name],
    set: (name, value) => {
      values[name] = value;
      // As in a notebook: the bar that is chosen, and where time rests, say what is shown below.
      const control = { selected: bar, time: step }[name];
      const box = control && model.el.closest(".replay").querySelector(`.box-${control}`);
      const found = name === "selected" ? values.scene.picks[value] ?? -1
        : Math.min(Math.floor(value) + 1, Math.round(values.scene.end));
      if (!box || value < 0 || found < 0) return;
      box.value = found;
      box.dispatchEvent(new Event("change"));
    },
    on: (event, act) => { told[event] = act; }, save_changes() {}, send() {},
  };
  model.el = box;
  return [box, scene => {
    const before = values.scene;
    if (scene === before) return;
    // As `Player.show` has it: time stays in a scene as long, the selection among the same bars.
    if (before?.end !== scene.end) values.time = -1;
    if (before?.bars.label.join() !== scene.bars.label.join()) values.selected = -1;
    values.scene = scene;
    if (told["change:scene"]) told["change:scene"]();
    else globalThis.toolkitPlayer.render({ model, el: box });
  }];
}

/** Put a recording into an empty place of the page; `start` has words for some controls. */
export function replay(place, recording, start = {}) {
  const [width, height] = recording.size;
  const picture = element("div", { className: "replay-picture", tabIndex: 0 });
  const caption = element("p", { className: "replay-caption" });
  const error = element("p", { className: "replay-error", hidden: true });
  const numbers = element("table");
  const details = element("details", { className: "replay-numbers" },
    element("summary", {}, "Show the numbers"), element("div", { tabIndex: 0 }, numbers));
  caption.setAttribute("aria-live", "polite");
  error.setAttribute("role", "alert");
  picture.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img">` +
    `<defs>${recording.patterns}</defs><g></g><g></g></svg>`;
  const svg = picture.firstChild;
  const [below, above] = svg.querySelectorAll(":scope > g");
  for (const control of recording.controls) {
    const place = control.words.indexOf(start[control.name]);
    if (place >= 0) control.start = place;
  }
  const places = recording.controls.map(control => control.start);
  const [playing, play] = recording.scenes?.length ? player(recording) : [""];
  let background = -1;
  let shown;

  function write() {
    if (!details.open) return;
    const columns = table(recording, shown);
    const head = element("tr", {}, ...columns.map(([name]) => element("th", { scope: "col" }, name)));
    const rows = columns[0][1].map((_, at) =>
      element("tr", {}, ...columns.map(([, cells]) => element("td", {}, cells[at]))));
    numbers.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  }

  function show() {
    const found = row(recording, places);
    error.hidden = found[2] < 0;
    error.textContent = found[2] < 0 ? "" : recording.words[found[2]];
    place.dataset.point = places.join(" ");
    if (found[2] >= 0) return;  // the picture stays, as the panel's does
    shown = found;
    if (found[0] !== background) {
      background = found[0];
      below.innerHTML = recording.backgrounds[background];
    }
    const elements = found.subarray(4, 4 + found[3]);
    above.innerHTML = Array.from(elements, one => recording.elements[one]).join("");
    play?.(recording.scenes[found[found.length - 1]]);
    caption.textContent = recording.words[found[1]];
    svg.setAttribute("aria-label", caption.textContent);
    write();
  }

  details.ontoggle = write;
  const controls = recording.controls.map((control, at) => element("label",
    { title: control.explanation, className: "replay-control" },
    ...input(control, chosen => { places[at] = chosen; show(); })));
  const held = recording.held ? ` Held: ${recording.held}.` : "";
  place.replaceChildren(
    element("p", { className: "replay-title" }, recording.title),
    element("div", { className: "replay-controls" }, ...controls),
    playing, picture, error, caption, details,
    element("p", { className: "replay-origin" }, `${recording.origin}.${held}`));
  show();
}

/** What the browser keeps of an earlier visit; null if nothing, or if it keeps nothing. */
function kept(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

/** Put a question into an empty place; `unlock` follows a guess. */
export function ask(place, question, unlock) {
  const error = element("p", { className: "replay-error", hidden: true });
  const button = element("button", {}, "Enter my guess");
  const inputs = question.options.length
    ? question.options.map(option => element("label", {},
      element("input", { type: "radio", name: place.dataset.guess, value: option }), option))
    : [element("label", {}, element("input", { type: "text", inputMode: "decimal" }), question.unit)];
  if (!question.options.length) {
    const unit = question.unit && `, in ${question.unit}`;
    inputs[0].firstChild.setAttribute("aria-label", `Your guess${unit}`);
  }
  const legend = element("legend", {}, element("b", {}, "Your guess first. "), question.text);
  const fields = element("fieldset", {}, legend, ...inputs, button);
  const form = element("form", { className: "replay-question" }, fields, error);
  error.setAttribute("role", "alert");
  const key = `toolkit-guess ${place.dataset.lesson} ${place.dataset.guess}`;
  const options = question.options.length;
  form.onsubmit = event => {
    event.preventDefault();
    const given = options ? form.querySelector("input:checked")?.value
      : form.querySelector("input").value.replaceAll(",", "").trim();
    const isWrong = options ? !given : !given || !Number.isFinite(Number(given)) ||
      Number(given) < (question.low ?? -Infinity) || Number(given) > (question.high ?? Infinity);
    error.hidden = !isWrong;
    if (isWrong) {
      const limits = question.low === null ? "" : ` from ${question.low}` +
        (question.high === null ? " up" : ` to ${question.high}`);
      error.textContent = options ? "Choose one of them." : `Wanted a number${limits}.`;
      return;
    }
    fields.disabled = true;
    const isNew = kept(key) === null;
    kept(key, given);
    const guess = options ? `“${given}”`
      : Number(given).toLocaleString("en-US", { maximumSignificantDigits: 10 });
    const answer = element("p", { className: "replay-answer", tabIndex: -1 },
      `You guessed ${guess}. ${question.words}`);
    form.append(answer, element("p", { className: "replay-origin" }, question.origin));
    if (isNew) answer.focus();
    unlock();
  };
  place.replaceChildren(form);
  const before = kept(key);
  if (before === null) return;
  if (options) {
    const chosen = [...form.querySelectorAll("input")].find(input => input.value === before);
    if (!chosen) return;  // the question has other options now
    chosen.checked = true;
  } else {
    form.querySelector("input").value = before;
  }
  form.requestSubmit();
}

/** What FOLDER/NAME.js holds. */
async function load(folder, name) {
  await new Promise((onload, onerror) => {
    document.head.append(element("script", { src: `${folder}${name}.js`, onload, onerror }));
  });
  return unpack(globalThis.toolkitReplays[name]);
}

/** Fill a place: a panel where its still was, or a question that locks one. */
async function begin(place) {
  const { folder, replay: name, lesson, guess, start } = place.dataset;
  const show = async where => replay(where, await load(folder, name), JSON.parse(start ?? "{}"));
  if (guess) {
    const questions = await load(folder, `questions-${lesson}`);
    ask(place, questions[guess], () => {
      if (!name) return;
      const below = element("div");
      place.append(below);
      show(below);
    });
  } else {
    await show(place);
  }
  place.closest(".cell_output")?.classList.add("replayed");  // its stylesheet hides the still
}

// Near enough to be seen soon: a page of several panels reads the first one first.
const nearby = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) {
      nearby.unobserve(target);
      begin(target).catch(error => console.warn("a panel stays as it was:", error));
    }
  }
}, { rootMargin: "600px" });
for (const place of document.querySelectorAll(".replay")) nearby.observe(place);
