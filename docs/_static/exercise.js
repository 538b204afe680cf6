// Exercises that are checked in the reader's browser: Python itself runs there, under Pyodide.
//
// A page holds places: <div class="exercise" data-folder="FOLDER/" data-lesson="LESSON"
// data-exercise="NAME" data-stub="CODE">. FOLDER holds Pyodide (npm), toolkit.zip and exercise.py,
// which `toolkit export-site` puts there; nothing is fetched from anywhere else. Code is kept in the
// browser as it is typed, so that a page that is closed loses nothing.

let python;

/** Start Python once; resolves to `check(lesson, exercise, source)`. */
async function start(folder) {
  const at = name => new URL(`${folder}${name}`, document.baseURI).href;
  const { loadPyodide } = await import(at("pyodide.mjs"));
  const made = await loadPyodide({ indexURL: at("") });
  made.unpackArchive(await (await fetch(at("toolkit.zip"))).arrayBuffer(), "zip");
  made.FS.writeFile("exercise.py", await (await fetch(at("exercise.py"))).text());
  return made.pyimport("exercise").check;
}

function kept(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key);
  } catch {
    return null;  // a browser that keeps nothing
  }
}

export function exercise(place) {
  const { folder, lesson, exercise: name, stub } = place.dataset;
  const key = `toolkit-code ${lesson} ${name}`;
  const field = document.createElement("textarea");
  field.value = kept(key) ?? stub;
  field.rows = field.value.split("\n").length + 4;
  field.spellcheck = false;
  field.setAttribute("aria-label", `Your code for ${name}`);
  field.oninput = () => kept(key, field.value);
  const button = document.createElement("button");
  button.textContent = "Check";
  const words = document.createElement("p");
  words.setAttribute("role", "status");
  words.textContent = "Checked here, in your browser: Python is loaded at the first check (13 MB).";
  button.onclick = async () => {
    button.disabled = true;
    place.dataset.state = "working";
    words.textContent = python ? "Working …" : "Loading Python, about ten seconds …";
    await new Promise(painted => setTimeout(painted, 30));
    try {
      const check = await (python ??= start(folder));
      const found = check(lesson, name, field.value);
      const [isRight, said] = found.toJs();
      found.destroy();
      place.dataset.state = isRight ? "right" : "wrong";
      words.textContent = `${isRight ? "\u2713" : "\u2717"} ${said}`;
    } catch (error) {
      place.dataset.state = "wrong";
      words.textContent = location.protocol === "file:"
        ? "A browser loads Python from a server only: run `python -m http.server` in the folder."
        : `It could not be checked: ${error.message}`;
      console.warn(error);
    }
    button.disabled = false;
  };
  place.replaceChildren(field, button, words);
}

for (const place of document.querySelectorAll(".exercise")) exercise(place);
