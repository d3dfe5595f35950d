// The page: asks the server what there is, sends what the form says, and follows the events of the answer.
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import { $, bytes, dataUrl, post, save } from "./kept.js";
import { listen } from "./picture.js";

let running = null; // { abort, key, since } of the request that runs

async function run() {
  if (running) return;
  const now = running = { abort: new AbortController(), since: 0 };
  state("running");
  $("#failure").textContent = "";
  $("#remarks").hidden = true;
  status("\u2026");
  if (innerWidth < 720) scrollTo({ top: 0, behavior: "smooth" });
  try {
    const body = await form.request();
    form.remember(body);
    const response = await post("api/images", body, { signal: now.abort.signal });
    let ended = false;
    for await (const [kind, content] of events(response.body)) {
      await happened[kind]?.(content, now);
      ended ||= kind === "done" || kind === "error";
    }
    if (!ended) throw new Error("The connection to the server was lost.");
  } catch (error) { error.name === "AbortError" ? status("Interrupted", true) : fail(error.message, error.param); }
  running = null;
  state("idle");
}

const happened = {
  queued({ id }, now) { now.key = id; },
  progress({ state: where, before, image, images, step, steps, share }, now) {
    if (where === "queued") return status(before ? `Waiting: ${plural(before)} before yours` : "Starts now", true);
    now.since ||= performance.now();
    const seconds = (performance.now() - now.since) / 1000, left = share > 0.05 ? seconds * (1 / share - 1) : 0;
    status(`${images > 1 ? `Image ${image} of ${images}, step` : "Step"} ${step} of ${steps}`);
    $("#time").textContent = left >= 2 ? `${duration(left)} left` : "";
    $("#actions progress").value = share;
    document.title = `${Math.floor(share * 100)} % \u00b7 ldm_lite`;
  },
  preview({ image }) {
    const preview = $("#preview");
    preview.src = `data:image/jpeg;base64,${image}`;
    preview.hidden = false;
  },
  image: ({ image, ...about }) => gallery.add({ ...about, plot: false, blob: bytes(image, "image/png") }),
  plot: ({ image, ...about }) => gallery.add({ ...about, plot: true, blob: bytes(image, "image/png") }),
  done({ images, seconds, interrupted }) {
    status(`${interrupted ? "Interrupted: " : ""}${plural(images)} in ${duration(seconds)}`, true);
  },
  error: ({ message, param }) => fail(message, param),
};

const plural = (count) => `${count} image${count === 1 ? "" : "s"}`;
const duration = (time) => (time < 90 ? `${time.toFixed(time < 10 ? 1 : 0)} s` : `${Math.round(time / 60)} min`);

/** The events of a stream, as [kind, content]. */
async function* events(stream) {
  let text = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  const read = () => reader.read().catch(() => { throw new Error("The connection to the server was lost."); });
  for (let part = await read(); !part.done; part = await read()) {
    text += part.value;
    if (!part.value.includes("\n")) continue; // of a picture
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const event = /^event: (\w+)\ndata: (.*)$/.exec(block);
      if (event) yield [event[1], JSON.parse(event[2])];
    }
  }
}

async function stop() {
  if (!running) return;
  status("Stops after this step \u2026", true);
  $("#stop").disabled = true;
  try {
    if (running.key) await post(`api/images/${running.key}/interrupt`, {});
    else running.abort.abort();
  } catch { /* it has ended by itself */ }
}

function state(name) {
  const busy = name === "running", progress = $("#actions progress");
  document.body.dataset.state = name;
  $("#run").setAttribute("aria-disabled", busy);
  $("#run span").textContent = busy ? "Generating \u2026" : "Generate";
  $("#stop").disabled = !busy;
  [progress.hidden, progress.value] = [!busy, 0];
  $("#time").textContent = "";
  if (!busy) { $("#preview").hidden = true; $("#preview").removeAttribute("src"); document.title = "ldm_lite"; }
}

function status(text, aloud = false) {
  $("#status").textContent = text;
  if (aloud) $("#said").textContent = text; // steps are not read out
}

function fail(message, param) {
  status("");
  if (!param || !form.fail(param, message)) $("#failure").textContent = message.replaceAll("`", "");
}

/** Fill the form with the settings of a picture. */
async function settings(blob) {
  $("#failure").textContent = "";
  try {
    const { values, remarks } = await (await post("api/settings", { image: await dataUrl(blob) })).json();
    form.apply(values);
    $("#remarks").replaceChildren("The form has the settings of the picture. ", remarks.join(" "));
  } catch (error) { return fail(error.message); }
  $("#remarks").hidden = false;
}

function changeTheme() {
  const { dataset } = document.documentElement, isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = (dataset.theme || (isDark ? "dark" : "light")) === "dark" ? "light" : "dark";
  save("theme", dataset.theme);
}

async function start() {
  const response = await fetch("api/form");
  if (!response.ok) return fail(`The server answered with status ${response.status}.`);
  form.make(await response.json());
  listen((event) => {
    const name = event.target.closest?.(".drop")?.dataset.name;
    if (name) return [form.hint, ...form.references].find((picture) => picture.name === name) ?? form.source;
    return event.type === "paste" && form.task() !== "txt2img" ? form.source : null;
  }, settings);
  $("#form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  $("#stop").onclick = stop;
  $("#theme").onclick = changeTheme;
  $("#settings-file").onchange = ({ target }) => { if (target.files[0]) settings(target.files[0]); target.value = ""; };
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || $("#view").open) return;
    const starts = event.ctrlKey || event.metaKey;
    if (starts || event.target.matches("#form input")) event.preventDefault(); // Enter alone does not start
    if (starts) run();
  });
  state("idle");
  document.body.dataset.ready = Math.round(performance.now()); // milliseconds after the address was entered
  await gallery.open({
    settings: (image) => settings(image.blob),
    seed: (image) => { form.apply({ seed: image.seed }); },
    input: (image) => { form.source.set(image.blob); if (form.task() === "txt2img") form.choose("img2img"); },
  });
  document.body.dataset.gallery = "";
}

start().catch(() => fail("The server cannot be reached."));
