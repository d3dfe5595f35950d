// The images that were made: kept by the browser, shown small, and in full with their settings.
import { $, $$, button, div, el, pictures } from "./kept.js";

const MOST = 300; // images that are kept
const SETTING = /\s*(\w[\w \-/+]*):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)/g;
const images = []; // the newest first
let at = 0, use; // the one in view; what its buttons do elsewhere

const name = (image) => `ldm_lite-${image.plot ? "plot-" : ""}${image.seed}.png`;
const title = (image) => (image.plot ? "X/Y plot" : `Seed ${image.seed}`);

/** Show what is kept; `actions` are settings(image), seed(image) and input(image). */
export async function open(actions) {
  use = actions;
  const view = $("#view");
  view.addEventListener("click", (event) => {
    const action = event.target.closest("[data-do]")?.dataset.do;
    if (action) act(action);
    else if (event.target === view || event.target.matches(".picture")) view.close();
  });
  view.addEventListener("keydown", (event) => {
    if (event.target.matches(".text")) return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") act(event.key === "ArrowLeft" ? "earlier" : "later");
  });
  view.addEventListener("close", () => $$("#gallery .tile")[at]?.focus());
  $("#newest").onclick = () => show(0);
  $("#clear").onclick = () => { if (confirm("Delete all images from this browser?")) remove(...images); };
  const kept = (await pictures("images", (store) => store.getAll())) ?? [];
  images.push(...kept.reverse());
  $("#gallery ul").append(...images.map(figure));
  update();
}

function figure(image) {
  const { width, height, plot, blob } = image, alt = `${title(image)}, ${width} by ${height}`;
  image.url = URL.createObjectURL(blob);
  const small = button("", () => show(images.indexOf(image)), { className: "tile", title: title(image) });
  small.append(el("img", { src: image.url, alt, width, height, loading: "lazy" }));
  return el("li", { className: plot ? "plot" : "" }, small);
}

/** Keep an image: { blob, seed, parameters, width, height, plot }. */
export async function add(image) {
  image.id = Math.max(Date.now(), (images[0]?.id ?? 0) + 1);
  await pictures("images", (store) => store.put({ ...image }));
  if ($("#view").open) at += 1;
  images.unshift(image);
  $("#gallery ul").prepend(figure(image));
  if (images.length > MOST) remove(...images.slice(MOST));
  update();
}

function remove(...gone) {
  for (const image of gone) {
    const place = images.indexOf(image);
    images.splice(place, 1);
    $$("#gallery li")[place].remove();
    URL.revokeObjectURL(image.url);
    pictures("images", (store) => store.delete(image.id));
  }
  update();
}

function update() {
  const newest = $("#newest"), image = images[0];
  $("#gallery").hidden = !image;
  $("#gallery-title").textContent = images.length === 1 ? "1 image" : `${images.length} images`;
  newest.hidden = !image;
  $("#stage .empty").hidden = Boolean(image);
  if (!image) return;
  const shown = $("img", newest);
  [shown.src, shown.alt, shown.width, shown.height] = [image.url, title(image), image.width, image.height];
}

function show(place) {
  at = place;
  const image = images[at], view = $("#view"), lines = (image.parameters ?? "").split("\n"), last = lines.pop();
  const start = lines.findIndex((line) => line.startsWith("Negative prompt:"));
  const [prompt, negative] = start < 0 ? [lines, []] : [lines.slice(0, start), lines.slice(start)];
  const list = el("dl"), add = (term, text) => {
    const both = [el("dt", { textContent: term }), el("dd", { textContent: text })];
    if (text) list.append(div(text.length > 18 ? "whole" : "", ...both));
  };
  add("Prompt", prompt.join("\n"));
  add("Negative prompt", negative.join("\n").replace("Negative prompt:", "").trim());
  for (const [, key, value] of last.matchAll(SETTING)) add(key, value.replace(/^"(.*)"$/, "$1"));
  Object.assign($(".picture img", view), { src: image.url, alt: title(image) });
  $(".text", view).replaceChildren(list);
  $$("[data-do=seed], [data-do=input]", view).forEach((button) => { button.hidden = image.plot; });
  if (!view.open) view.showModal();
}

function act(action) {
  const image = images[at], view = $("#view");
  const by = { earlier: -1, later: 1 }[action];
  if (by) show((at + by + images.length) % images.length);
  else if (action === "close") view.close();
  else if (action === "save") el("a", { href: image.url, download: name(image) }).click();
  else if (action === "remove") {
    remove(image);
    if (images.length) show(Math.min(at, images.length - 1));
    else view.close();
  } else {
    view.close();
    use[action](image);
  }
}
