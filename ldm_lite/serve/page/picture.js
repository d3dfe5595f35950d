// Pictures that a request takes along: chosen, dropped, pasted, kept by the browser; and the mask painted on one.
import { $, $$, button, bytes, dataUrl, div, el, load, p, pictures, post, save } from "./kept.js";

const MOST_SIDE = 2048; // pixels of a mask
const KEY_STEP = 0.25; // of the brush's width, that an arrow key moves it
const KEYS = "Mask. Arrow keys move the brush, Space paints, E erases, brackets change the brush, Ctrl+Z takes back.";

/** A place for one picture.  `changed` is called after each change. */
export class Picture {
  constructor(place, name, hint, changed, tools = []) {
    Object.assign(this, { name, changed, blob: null });
    const id = `f-${name}`;
    this.file = el("input", { type: "file", accept: "image/*", className: "unseen", id, ariaLabel: hint });
    this.file.setAttribute("aria-describedby", `e-${name}`);
    this.image = el("img", { alt: "The picture that was chosen" });
    this.frame = div("frame", this.image);
    this.zone = div("drop", el("label", { className: "hint", htmlFor: id, textContent: hint }), this.file, this.frame,
      div("tools", ...tools, el("span", { className: "space" }), button("Remove", () => this.set(null))));
    this.zone.dataset.name = name;
    place.append(this.zone, p("error", "", { id: `e-${name}` }));
    this.file.onchange = () => { this.set(this.file.files[0] ?? null); this.file.value = ""; };
    this.image.onload = () => this.shown?.();
    this.image.onerror = () => this.ask();
    const kept = pictures("inputs", (store) => store.get(name));
    this.ready = kept.then((blob) => blob && !this.blob && this.show(blob));
  }

  set(blob) {
    pictures("inputs", (store) => (blob ? store.put(blob, this.name) : store.delete(this.name)));
    $(`#e-${this.name}`).textContent = "";
    this.show(blob);
    this.changed();
    return this;
  }

  show(blob) {
    URL.revokeObjectURL(this.image.src);
    this.blob = blob;
    this.zone.classList.toggle("full", Boolean(blob));
    if (blob) this.image.src = URL.createObjectURL(blob);
    else this.image.removeAttribute("src");
  }

  /** Show what the server reads of a file that the browser cannot show, or that it is no picture. */
  async ask() {
    const { blob } = this;
    try {
      const image = await dataUrl(blob), answer = await (await post("api/hint", { image, preprocess: "none" })).json();
      if (blob === this.blob) this.image.src = URL.createObjectURL(bytes(answer.image, "image/png"));
    } catch (error) {
      if (blob !== this.blob) return;
      this.set(null);
      $(`#e-${this.name}`).textContent = error.message;
    }
  }

  /** The picture in base64; undefined if there is none. */
  async sent() { return this.blob ? dataUrl(this.blob) : undefined; }
}

/** A picture on which a mask can be painted: with a mouse, a finger, a pen that presses, or the keyboard. */
export class Painted extends Picture {
  constructor(place, name, hint, changed) {
    const slider = el("input", { type: "range", id: "brush", min: 2, max: 160, value: load("brush", 36) });
    const erase = button("Erase", () => { erase.ariaPressed = String(erase.ariaPressed !== "true"); }, { id: "erase" });
    const undo = button("Undo", () => { this.strokes.pop(); this.redraw(true); }, { id: "undo" });
    const clear = button("Clear", () => { this.strokes = []; this.redraw(true); }, { id: "unmask" });
    const label = el("label", { htmlFor: "brush", textContent: "Brush" });
    super(place, name, hint, changed, [el("span", { className: "painting" }, label, slider, erase, undo, clear)]);
    Object.assign(this, { strokes: load("strokes", []), slider, erase, undo, clear });
    erase.ariaPressed = "false";
    this.canvas = el("canvas", { tabIndex: 0, role: "application", ariaLabel: KEYS });
    this.canvas.setAttribute("aria-describedby", "e-mask");
    this.ring = div("ring");
    this.ring.hidden = true;
    this.frame.append(this.canvas, this.ring);
    place.append(p("error", "", { id: "e-mask" }));
    slider.oninput = () => { save("brush", +slider.value); this.follow(); };
    this.canvas.onpointerdown = (event) => this.begin(event);
    this.canvas.onpointermove = (event) => this.move(event);
    this.canvas.onpointerup = this.canvas.onpointercancel = () => this.keep();
    this.canvas.onpointerleave = () => { this.ring.hidden = document.activeElement !== this.canvas; };
    this.canvas.onfocus = () => { if (this.canvas.matches(":focus-visible")) this.follow(this.brush); };
    this.canvas.onblur = () => { this.ring.hidden = true; };
    this.canvas.onkeydown = (event) => this.key(event);
  }

  /** Where the brush is, in pixels of the mask. */
  get brush() { return this.at ?? [this.canvas.width / 2, this.canvas.height / 2]; }

  /** The brush's width there. */
  get width() { return this.slider.value * this.canvas.width / (this.canvas.clientWidth || this.canvas.width); }

  show(blob) {
    if (!blob || this.blob) this.strokes = []; // not of the picture that is there after a reload
    super.show(blob);
  }

  shown() {
    const sides = [this.image.naturalWidth, this.image.naturalHeight];
    const scale = Math.min(1, MOST_SIDE / Math.max(...sides));
    [this.canvas.width, this.canvas.height] = sides.map((side) => Math.max(1, Math.round(side * scale)));
    this.at = undefined;
    this.redraw(true);
  }

  point(event) {
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const pressed = event.pointerType === "pen" ? 0.15 + 0.85 * event.pressure : 1;
    const x = (event.clientX - left) / width, y = (event.clientY - top) / height;
    const point = [x * this.canvas.width, y * this.canvas.height, this.width * pressed];
    return point.map((number) => Math.round(number * 10) / 10);
  }

  begin(event) {
    if (event.button) return;
    event.preventDefault(); // no selection; the focus follows by itself
    this.canvas.focus({ preventScroll: true, focusVisible: false });
    this.canvas.setPointerCapture(event.pointerId);
    this.strokes.push({ erase: this.erase.ariaPressed === "true", points: [this.point(event)] });
    this.redraw();
  }

  move(event) {
    const points = (event.getCoalescedEvents?.() ?? [event]).map((part) => this.point(part));
    this.follow(points.at(-1) ?? this.point(event));
    if (!this.canvas.hasPointerCapture(event.pointerId)) return;
    const stroke = this.strokes.at(-1), known = stroke.points.length;
    stroke.points.push(...points);
    this.draw(stroke, known);
  }

  key(event) {
    const { width, height } = this.canvas, { key } = event, [x, y] = this.brush, step = this.width * KEY_STEP;
    const across = { ArrowLeft: -step, ArrowRight: step }[key] ?? 0;
    const down = { ArrowUp: -step, ArrowDown: step }[key] ?? 0;
    const within = (number, most) => Math.max(0, Math.min(most, number));
    if (across || down) this.follow([within(x + across, width), within(y + down, height)]);
    else if (key === " ") {
      this.strokes.push({ erase: this.erase.ariaPressed === "true", points: [[x, y, this.width]] });
      this.redraw(true);
    } else if (key === "e") this.erase.click();
    else if (key === "[" || key === "]") {
      this.slider.value = +this.slider.value + (key === "]" ? 6 : -6);
      this.slider.oninput();
    } else if (key === "z" && (event.ctrlKey || event.metaKey)) this.undo.click();
    else return;
    event.preventDefault();
  }

  /** Show the brush at a point of the mask. */
  follow(point) {
    if (point) this.at = point;
    if (!this.at || !this.canvas.clientWidth) return;
    const scale = this.canvas.clientWidth / this.canvas.width;
    this.ring.hidden = false;
    const [left, top] = this.at.map((number) => `${number * scale}px`);
    Object.assign(this.ring.style, { left, top, width: `${this.slider.value}px` });
  }

  draw({ erase, points }, from = 0) {
    const pen = this.canvas.getContext("2d");
    pen.globalCompositeOperation = erase ? "destination-out" : "source-over";
    pen.lineCap = pen.lineJoin = "round";
    pen.strokeStyle = "#f60"; // seen on white and on black; mask() makes it white
    for (let i = from; i < points.length; i++) { // the width changes with the pressure
      const [x, y, width] = points[i], [fromX, fromY] = i ? points[i - 1] : [x + 0.01, y];
      pen.lineWidth = width;
      pen.beginPath();
      pen.moveTo(fromX, fromY);
      pen.lineTo(x, y);
      pen.stroke();
    }
  }

  redraw(keep = false) {
    this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.strokes.forEach((stroke) => this.draw(stroke));
    if (keep) this.keep();
  }

  keep() {
    save("strokes", this.strokes);
    this.undo.disabled = this.clear.disabled = !this.strokes.length;
    $("#e-mask").textContent = "";
  }

  /** The mask in base64, white where it was painted; undefined if nothing is. */
  mask() {
    if (!this.blob || this.strokes.every((stroke) => stroke.erase)) return undefined;
    const { width, height } = this.canvas, sheet = el("canvas", { width, height }), pen = sheet.getContext("2d");
    pen.drawImage(this.canvas, 0, 0);
    for (const [mode, colour] of [["source-in", "#fff"], ["destination-over", "#000"]]) {
      [pen.globalCompositeOperation, pen.fillStyle] = [mode, colour];
      pen.fillRect(0, 0, width, height);
    }
    return sheet.toDataURL("image/png");
  }
}

/** Give dropped and pasted pictures to `zoneOf(event)`, or where that is null to `take`. */
export function listen(zoneOf, take) {
  const mark = (event) => {
    const zone = event && zoneOf(event)?.zone;
    $$(".drop").forEach((place) => place.classList.toggle("over", place === zone));
    $("#drop").hidden = !event || Boolean(zone);
  };
  const give = (event, file) => { if (file) zoneOf(event)?.set(file) ?? take(file); };
  document.addEventListener("dragover", (event) => {
    event.preventDefault(); // a picture that is dropped must not replace the page
    if (event.dataTransfer.types.includes("Files")) mark(event);
  });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) mark(null); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(null);
    give(event, event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => {
    give(event, [...event.clipboardData.files].find(({ type }) => type.startsWith("image/")));
  });
}
