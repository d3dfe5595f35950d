// The form: its fields come from the server's description of the command's options; the browser keeps their values.
import { $, $$, button, bytes, div, el, load, p, post, save } from "./kept.js";
import { Painted, Picture } from "./picture.js";

const BASICS = ["steps", "scale", "width", "height", "seed", "batch_size", "sampler", "spacing"];
const TITLES = { batch_size: "Images", spacing: "Schedule", lora_weight: "LoRA weight", hires: "Times larger" };
const EMPTY = { seed: "random", batch_size: "1", hires: "off" }; // what stands in an empty field
const BESIDE = ["strength", "feather", "noise_level"]; // the picture
const SLIDERS = { steps: 60, scale: 15, strength: 1 }; // fields -> how far a hand goes, if the server lets it
const SHAPES = [[1, 1], [3, 2], [2, 3], [16, 9], [9, 16]]; // of images
const OTHER = "\u2026"; // the choice that makes a list a field for text
const MOST_PROMPTS = 50;

const byName = new Map(); // the server's description of each field
const MOST_REFERENCES = 3;
export let source, hint, references = []; // the pictures of a request
let about, loras = []; // what the server offers; the LoRAs that are chosen

const input = (name) => $(`#f-${CSS.escape(name)}`);
const value = (name) => input(name).value.trim();
const option = (name, text = name) => el("option", { value: name, textContent: text });
const list = (...options) => el("select", {}, ...options);
const capital = (name) => (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");
const title = (name) => TITLES[name] ?? byName.get(name)?.title ?? capital(name);
const wrong = (name) => p("error", "", { id: `e-${name}` });
const plain = (text) => text.replaceAll("`", "");
export const task = () => $("#tasks input:checked").value;

// ---- making it ------------------------------------------------------------------------------------------------------
/** Make the form of what the server describes. */
export function make(description) {
  about = description;
  about.fields.forEach((field) => byName.set(field.name, field));
  const kept = load("form", { values: {}, loras: [], open: [], task: "txt2img" });
  const [first, second] = ["prompt", "hires"].map((name) => byName.get(name).group);
  const groups = new Map([first, ...about.fields.map(({ group }) => group)].map((group) => [group, el("section")]));
  groups.forEach((part, group) => part.append(el("h2", { textContent: group })));
  $("#basics").append(field("model", "Model", list(...about.models.map((name) => option(name)))));
  $("#basics").append(...BASICS.map((name) => declared(byName.get(name))));
  source = new Painted($("#source"), "init_img", "Choose a picture to start from, drop or paste it", changed);
  $("#source").append(div("grid", ...BESIDE.map((name) => declared(byName.get(name)))));
  for (const described of about.fields.filter(({ name }) => ![...BASICS, ...BESIDE].includes(name))) {
    const { name, group } = described, isPrompt = name.endsWith("prompt") && group === first;
    const place = isPrompt ? $("#prompts") : group === second ? $("#second .grid") : groups.get(group);
    place.append(declared(described, place === groups.get(group)));
  }
  groups.delete(second);
  $("#more .stack").append(...groups.values());
  const ariaLabel = "Exchange width and height", className = "swap quiet";
  input("width").closest(".field").append(button("\u21c4", exchange, { title: ariaLabel, ariaLabel, className }));
  makeChoices();
  makeLoras();
  makeControl();
  makeReferences();
  makeAxes();
  Object.entries(kept.values).forEach(([name, value]) => set(name, value));
  loras = kept.loras.filter(({ name }) => about.loras.includes(name));
  showLoras();
  $$("#form details").forEach((part) => { part.open = kept.open.includes(part.id); });
  choose(kept.task, kept.values);
  $("#form").addEventListener("input", ({ target }) => { clear(target); changed(); });
  $$("#form details").forEach((part) => part.addEventListener("toggle", changed));
  for (const place of [$("#tasks"), input("model")]) place.addEventListener("change", () => choose(task()));
  $("#find").addEventListener("input", find);
  $("#reset").addEventListener("click", reset);
  $("#forget").addEventListener("click", () => remember(null));
  addEventListener("pagehide", keep);
  showPrompts();
}

/** A field with its label, and a place for what is wrong with it. */
function field(name, label, element, help = "", helpIsShown = false) {
  Object.assign(element, { id: `f-${name}`, name });
  element.setAttribute("aria-describedby", `h-${name} e-${name}`);
  const named = el("label", { htmlFor: element.id, textContent: label, title: helpIsShown ? "" : help });
  const box = div("field", named, element, p(helpIsShown ? "help" : "unseen", help, { id: `h-${name}` }),
    wrong(name));
  Object.assign(box.dataset, { name, start: read(element) });
  return box;
}

/** The field of an option. */
function declared(described, helpIsShown = false) {
  const { name, help, kind, tasks, within } = described, label = title(name.replace("hires_", ""));
  const box = field(name, label, maker(described), plain(help), helpIsShown);
  box.classList.add(kind);
  box.dataset.tasks = tasks.join(" ");
  if (name in SLIDERS || name === "batch_size") {
    $("label", box).append(el("span", { textContent: within.join(" \u2013 "), className: "limits" }));
  }
  if (name in SLIDERS) { box.classList.add("slides"); $("label", box).after(slider(name, label, within)); }
  return box;
}

/** A slider for a field of a number, which shows the usual value as long as the field is empty. */
function slider(name, label, [least, most]) {
  const step = name === "steps" ? 1 : name === "strength" ? 0.05 : 0.5, max = Math.min(most, SLIDERS[name]);
  const range = el("input", { type: "range", id: `s-${name}`, min: name === "scale" ? 1 : least, max, step });
  range.ariaLabel = `${label}, slider`;
  range.oninput = () => { input(name).value = range.value; clear(input(name)); };
  return range;
}

/** Put the sliders where the fields are, or the usual values. */
function slide() {
  for (const name of Object.keys(SLIDERS)) $(`#s-${name}`).value = value(name) || usual(name) || 0.75;
}

/** What an empty field means; nothing if only the server knows it. */
function usual(name) {
  const isKnown = value("model") === about.models[0] && (task() === "txt2img" || !["width", "height"].includes(name));
  return isKnown ? about.usual[name] : "";
}

/** Prompts and shapes to click. */
function makeChoices() {
  $("#stage .understands").textContent = about.understands;
  $("#stage .chips").append(...about.examples.map((prompt) => button(prompt, () => apply({ prompt }))));
  const side = +about.usual.width, unit = side < 256 ? 16 : 64;
  const sizes = SHAPES.map(([across, down]) => [across / down, down / across].map((ratio) =>
    unit * Math.round(side * Math.sqrt(ratio) / unit)));
  const shapes = sizes.map(([width, height], place) => button(SHAPES[place].join(":"),
    () => apply({ width: String(width), height: String(height) }), { title: `${width} \u00d7 ${height}` }));
  const row = div("chips whole", ...shapes.filter((_, place) => sizes[place][0] * sizes[place][1] <= about.max_pixels));
  row.dataset.tasks = byName.get("width").tasks.join(" ");
  input("height").closest(".field").after(row);
}

function maker({ name, kind, choices, is_open: isOpen, within, default: start }) {
  if (kind === "flag") return el("input", { type: "checkbox", checked: start });
  if (choices) {
    const chosen = list(...Object.entries(choices).map((choice) => option(...choice)));
    if (isOpen) chosen.append(option(OTHER, "other \u2026"));
    chosen.value = start;
    chosen.addEventListener("change", () => { if (chosen.value === OTHER) write(chosen); });
    return chosen;
  }
  if (name === "prompt") return el("textarea", { rows: 3, placeholder: "What to make" });
  if (name === "negative_prompt") return el("textarea", { rows: 1, placeholder: "What to avoid" });
  const placeholder = EMPTY[name] ?? ([...BASICS, ...BESIDE].includes(name) ? "auto" : ""), value = name === "seed" ? "" : start;
  const text = el("input", { type: "text", autocomplete: "off", spellcheck: false, value, placeholder });
  if (kind === "text") return text;
  const step = { width: 64, height: 64 }[name] ?? (kind === "integer" ? 1 : within?.[1] === "1" ? 0.05 : 0.5);
  return Object.assign(text, { type: "number", step });
}

/** Put a field for text in place of a list, until it is left empty. */
function write(chosen) {
  const { id, name } = chosen;
  const text = el("input", { type: "text", id, name, placeholder: "its name", autocomplete: "off" });
  text.setAttribute("aria-describedby", chosen.getAttribute("aria-describedby"));
  text.addEventListener("blur", () => {
    if (text.value.trim()) return;
    chosen.value = "";
    text.replaceWith(chosen);
    changed();
  });
  chosen.replaceWith(text);
  text.focus();
}

const exchange = () => apply({ width: value("height"), height: value("width") });

// ---- LoRAs, ControlNet, axes ----------------------------------------------------------------------------------------
const none = (kind) => p("help", `There are none: start the server with --${kind} FOLDER.`);

function makeLoras() {
  const chosen = list(option("", "none chosen"), ...about.loras.map((name) => option(name)));
  chosen.onchange = () => {
    if (!loras.some(({ name }) => name === chosen.value)) loras.push({ name: chosen.value, weight: "1" });
    chosen.value = "";
    showLoras();
    changed();
  };
  $("#lora .stack").append(about.loras.length ? field("loras", "Add a LoRA", chosen) : none("loras"), div("loras"));
}

function showLoras() {
  $(".loras").replaceChildren(...loras.map((lora, place) => {
    const { name, weight } = lora, ariaLabel = `Weight of ${name}`;
    const share = parseFloat(weight) || 0;
    const range = el("input", { type: "range", min: -2, max: 2, step: 0.05, value: share, ariaLabel });
    const text = el("input", { type: "text", value: weight, className: "short", ariaLabel: `${ariaLabel} as a text` });
    range.oninput = () => { lora.weight = text.value = range.value; };
    text.oninput = () => { lora.weight = text.value; range.value = parseFloat(text.value) || 0; };
    const remove = button("\u00d7", () => { loras.splice(place, 1); showLoras(); changed(); $("#f-loras").focus(); });
    remove.ariaLabel = `Remove ${name}`;
    return div("lora", el("span", { textContent: name }), remove, range, text);
  }));
}

function makeControl() {
  const place = $("#controls .stack");
  const number = (name, label, value) => field(name, label, el("input", { type: "text", inputMode: "decimal", value }));
  if (!about.controlnets.length) $("#controls").append(none("controlnets"));
  place.hidden = !about.controlnets.length;
  const names = about.controlnets.map((name) => option(name));
  place.append(field("control", "ControlNet", list(option("", "none"), ...names)));
  hint = new Picture(place, "image", "Choose the picture that it follows, drop or paste it", preview);
  const ways = { none: "as it is", canny: "edges (Canny)", inpaint: "transparent is repainted" };
  const thresholds = div("grid", number("canny_low", "Edges from", "100"), number("canny_high", "Strong from", "200"));
  thresholds.id = "thresholds";
  const chosen = list(...Object.entries(ways).map((way) => option(...way)));
  place.append(field("preprocess", "Make of the picture", chosen), thresholds,
    el("img", { id: "hint", alt: "What the ControlNet sees of the picture", hidden: true }),
    div("grid three", number("control_weight", "Weight", "1"), number("control_start", "From (share)", "0"),
      number("control_end", "To", "1")));
  for (const name of ["preprocess", "canny_low", "canny_high"]) input(name).addEventListener("change", preview);
  hint.ready.then(preview);
}

const preprocess = () => {
  const way = value("preprocess");
  return way === "canny" ? `canny:${value("canny_low") || 100}:${value("canny_high") || 200}` : way;
};

/** Show what the ControlNet sees of its picture. */
async function preview() {
  const seen = $("#hint"), way = preprocess(), { blob } = hint;
  $("#thresholds").hidden = value("preprocess") !== "canny";
  seen.hidden = true;
  clear(input("control"));
  changed();
  if (!blob || way === "none") return;
  try {
    const answer = await (await post("api/hint", { image: await hint.sent(), preprocess: way })).json();
    if (way !== preprocess() || blob !== hint.blob) return; // it has changed meanwhile
    URL.revokeObjectURL(seen.src);
    seen.src = URL.createObjectURL(bytes(answer.image, "image/png"));
    seen.hidden = false;
  } catch (error) { fail("control", error.message); }
}

function makeReferences() {
  const place = $("#references .stack");
  for (let number = 1; number <= MOST_REFERENCES; number++) {
    references.push(new Picture(place, `reference_${number}`, `Choose picture ${number}, drop or paste it`, changed));
  }
  references.forEach((picture) => picture.ready.then(changed));
  place.append(wrong("reference"));
}

function makeAxes() {
  for (const letter of ["x", "y"]) {
    const values = el("input", { type: "text", placeholder: "5, 10, 20 or 1-5 or 0-1 [5]", autocomplete: "off" });
    const axis = field(letter, `${capital(letter)} axis`, list(option("", "none")));
    $("#plot .stack").append(div("grid", axis, field(`${letter}_values`, "Values", values)));
  }
  $("#plot .stack").append(p("help", "Replace looks for its first value in the prompts, and puts each in its place."));
}

/** Show what a task has. */
export function choose(name, axes = { x: value("x"), y: value("y") }) {
  $(`#tasks input[value="${name}"]`).checked = true;
  document.body.dataset.task = name;
  $$("[data-tasks]").forEach((part) => { part.hidden = !part.dataset.tasks.split(" ").includes(name); });
  for (const letter of ["x", "y"]) {
    const options = about.axes[name].map((axis) => option(axis, title(axis)));
    input(letter).replaceChildren(option("", "none"), ...options);
    set(letter, axes[letter] ?? "");
  }
  $$("#more section").forEach((part) => { part.hidden = !$(".field:not([hidden])", part); });
  for (const name of Object.keys(about.usual)) {
    const element = input(name), number = usual(name);
    const text = !number ? "auto" : name in SLIDERS ? `auto ${number}` : `auto (${number})`;
    if (element.options) element.options[0].textContent = text;
    else element.placeholder = text;
  }
  changed();
}

function find() {
  const words = $("#find").value.toLowerCase().split(/\s+/);
  const isMeant = (box) => words.every((word) => box.textContent.toLowerCase().includes(word));
  $$("#more .field").forEach((box) => box.classList.toggle("unmatched", !isMeant(box)));
  const isLeft = (part) => $(".field:not(.unmatched, [hidden])", part);
  $$("#more section").forEach((part) => part.classList.toggle("unmatched", !isLeft(part)));
}

// ---- values ---------------------------------------------------------------------------------------------------------
const read = (element) => (element.type === "checkbox" ? element.checked : element.value);

function set(name, value) {
  const element = input(name);
  if (!element) return;
  if (element.type === "checkbox") element.checked = String(value) === "true";
  else {
    const isMissing = element.options && ![...element.options].some((known) => known.value === value);
    if (isMissing && !byName.get(name)?.is_open) return;
    if (isMissing) element.append(option(value));
    element.value = value;
  }
  clear(element);
}

/** Put values, such as those of a picture's text, into the fields. */
export function apply(values) {
  Object.entries(values).forEach(([name, value]) => set(name, value));
  changed();
}

const isChanged = ({ dataset: { name, start } }) => String(read(input(name))).trim() !== start;

/** What a request sends: the fields of the task that are changed, and the pictures. */
export async function request() {
  $$("#form .error").forEach((place) => { place.textContent = ""; });
  $$("#form [aria-invalid]").forEach((element) => element.removeAttribute("aria-invalid"));
  const name = task(), body = { task: name, model: value("model"), loras };
  for (const box of $$(".field[data-tasks]:not([hidden])").filter(isChanged)) {
    const element = input(box.dataset.name);
    if (element.validity.badInput) throw Object.assign(new Error("expected a number"), { param: element.name });
    body[element.name] = read(element);
  }
  if (name !== "txt2img") body.init_img = await source.sent();
  if (name === "inpaint") body.mask = source.mask();
  if (value("control") && name !== "upscale") {
    const [weight, start, end] = ["weight", "start", "end"].map((part) => value(`control_${part}`));
    body.control = { name: value("control"), image: await hint.sent(), weight, start, end, preprocess: preprocess() };
  }
  const chosen = (await Promise.all(references.map((picture) => picture.sent()))).filter(Boolean);
  if (chosen.length && name !== "upscale") body.reference = chosen;
  for (const letter of ["x", "y"]) {
    if (value(letter)) body[letter] = { option: value(letter), values: value(`${letter}_values`) };
  }
  return body;
}

let timer;
function changed() {
  clearTimeout(timer);
  timer = setTimeout(keep, 200);
  slide();
  for (const part of $$("#form > details:not(#history)")) {
    const changes = $$(".field:not([hidden])", part).filter(isChanged).length + $$(".lora, [data-name^=reference].full", part).length;
    $("summary", part).dataset.count = changes || "";
  }
}

function keep() {
  const named = $$("#form [name]:not([type=radio])").map((element) => [element.name, read(element)]);
  const open = $$("#form details[open]").map((part) => part.id);
  save("form", { task: task(), values: Object.fromEntries(named), loras, open });
}

function reset() {
  loras = [];
  showLoras();
  references.forEach((picture) => picture.set(null));
  apply(Object.fromEntries($$("#form > :not(#prompts) .field").map(({ dataset: { name, start } }) => [name, start])));
}

// ---- errors ---------------------------------------------------------------------------------------------------------
/** Say what is wrong beside the field; returns whether there is one. */
export function fail(name, message) {
  const place = document.getElementById(`e-${name}`), element = name === "mask" ? source.canvas : input(name);
  if (!place || place.closest("[hidden]")) return false;
  for (let part = place.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  if ($("#find").value) { $("#find").value = ""; find(); }
  place.textContent = plain(message);
  element?.setAttribute("aria-invalid", "true");
  element?.focus();
  place.scrollIntoView({ block: "center" });
  return true;
}

function clear(element) {
  element.removeAttribute("aria-invalid");
  const place = document.getElementById(`e-${element.name}`) ?? (element.closest("#lora") && $("#e-loras"));
  if (place) place.textContent = "";
}

// ---- earlier prompts ------------------------------------------------------------------------------------------------
/** Keep the prompts of a request; null forgets all. */
export function remember(body) {
  const now = body && [body.prompt ?? "", body.negative_prompt ?? ""];
  if (now?.join("") === "") return;
  const others = load("prompts", []).filter((before) => String(before) !== String(now));
  save("prompts", now ? [now, ...others].slice(0, MOST_PROMPTS) : []);
  showPrompts();
}

function showPrompts() {
  const prompts = load("prompts", []);
  const others = about.examples.filter((prompt) => !prompts.some(([earlier]) => earlier === prompt));
  const all = [...prompts, ...others.map((prompt) => [prompt, ""])];
  $("#history summary").textContent = prompts.length ? "Earlier prompts" : "Examples of prompts";
  $("#forget").hidden = !prompts.length;
  $("#history ol").replaceChildren(...all.map(([prompt, negative_prompt]) => {
    const text = prompt + (negative_prompt ? ` \u2212 ${negative_prompt}` : "");
    return el("li", {}, button(text, () => apply({ prompt, negative_prompt })));
  }));
  $("#history").hidden = !all.length;
}
