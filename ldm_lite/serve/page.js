// What the page does by itself: pictures stay in the browser until a request takes them, so the server keeps no file.
window.ldm = (() => {
  const $ = (selector, at = document) => at.querySelector(selector);
  const files = {}; // name of a drop zone -> data URL
  const strokes = []; // of the mask, in pixels of the picture
  const MOST_SIDE = 2048, MOST_PROMPTS = 50, MOST_EARLIER = 60, KEY = "ldm_lite.";

  // ---- the form -----------------------------------------------------------------------------------------------------
  const field = (id) => $(`#${id} textarea, #${id} input`);
  function set(id, value) {
    const input = field(id);
    input.value = value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }
  const press = (id) => ($(`button#${id}`) || $(`#${id} button`)).click();
  function task(name) {
    document.body.dataset.task = name;
    return name;
  }
  function choose(name) {
    $(`#tasks input[value="${name}"]`).click();
  }

  // ---- pictures -----------------------------------------------------------------------------------------------------
  const zone = (name) => $(`.drop[data-name="${name}"]`);
  const dataUrl = (blob) => new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
  async function take(name, blob) {
    if (blob) put(name, await dataUrl(blob));
  }
  function put(name, url) {
    const place = zone(name), image = $("img", place);
    files[name] = url;
    place.classList.add("full");
    image.alt = "the picture that was chosen";
    image.onerror = () => { image.alt = "a picture that this browser cannot show"; };
    image.onload = () => { if (name === "source") fit(image); };
    image.src = url;
    if (name === "info") press("read");
  }
  function remove(name) {
    delete files[name];
    zone(name).classList.remove("full");
    $("img", zone(name)).removeAttribute("src");
    if (name === "source") { strokes.length = 0; redraw(); }
  }

  // ---- the mask -----------------------------------------------------------------------------------------------------
  const canvas = () => $("canvas", zone("source"));
  function fit(image) {
    const scale = Math.min(1, MOST_SIDE / Math.max(image.naturalWidth, image.naturalHeight));
    strokes.length = 0;
    canvas().width = Math.max(1, Math.round(image.naturalWidth * scale));
    canvas().height = Math.max(1, Math.round(image.naturalHeight * scale));
    redraw();
  }
  function draw(pen, stroke) {
    pen.globalCompositeOperation = stroke.erase ? "destination-out" : "source-over";
    pen.lineCap = pen.lineJoin = "round";
    pen.lineWidth = stroke.width;
    pen.strokeStyle = "#f60"; // seen on white and on black; mask() makes it white
    pen.beginPath();
    stroke.points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    if (stroke.points.length === 1) pen.lineTo(stroke.points[0][0] + 0.01, stroke.points[0][1]);
    pen.stroke();
  }
  function redraw() {
    const pen = canvas().getContext("2d");
    pen.clearRect(0, 0, canvas().width, canvas().height);
    strokes.forEach((stroke) => draw(pen, stroke));
  }
  function point(event) {
    const box = canvas().getBoundingClientRect();
    return [((event.clientX - box.left) * canvas().width) / box.width, ((event.clientY - box.top) * canvas().height) / box.height];
  }
  function mask() {
    if (!strokes.some((stroke) => !stroke.erase)) return "";
    const sheet = document.createElement("canvas");
    [sheet.width, sheet.height] = [canvas().width, canvas().height];
    const pen = sheet.getContext("2d");
    pen.drawImage(canvas(), 0, 0);
    const fill = (mode, colour) => {
      [pen.globalCompositeOperation, pen.fillStyle] = [mode, colour];
      pen.fillRect(0, 0, sheet.width, sheet.height);
    };
    fill("source-in", "#fff");
    fill("destination-over", "#000");
    return sheet.toDataURL("image/png");
  }
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.matches(".drop canvas") || event.button) return;
    event.preventDefault();
    const scale = canvas().width / canvas().getBoundingClientRect().width;
    const erase = $("[data-do=erase]").getAttribute("aria-pressed") === "true";
    strokes.push({ width: $("#brush").value * scale, erase, points: [point(event)] });
    event.target.setPointerCapture(event.pointerId);
    redraw();
  });
  document.addEventListener("pointermove", (event) => {
    if (!event.target.matches(".drop canvas") || !event.target.hasPointerCapture(event.pointerId)) return;
    strokes.at(-1).points.push(point(event));
    redraw();
  });

  // ---- drop zones ---------------------------------------------------------------------------------------------------
  const over = (event) => event.target.closest && event.target.closest(".drop");
  document.addEventListener("dragover", (event) => {
    event.preventDefault(); // a picture dropped beside a zone must not replace the page
    document.querySelectorAll(".drop.over").forEach((each) => each.classList.remove("over"));
    if (over(event)) over(event).classList.add("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.querySelectorAll(".drop.over").forEach((each) => each.classList.remove("over"));
    if (over(event)) take(over(event).dataset.name, event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((each) => each.type.startsWith("image/"));
    if (file && document.body.dataset.task !== "txt2img") take("source", file);
  });
  document.addEventListener("change", (event) => {
    if (!event.target.matches(".drop input[type=file]")) return;
    take(over(event).dataset.name, event.target.files[0]);
    event.target.value = "";
  });

  // ---- results ------------------------------------------------------------------------------------------------------
  function blob(url) {
    const [head, data] = url.split(",");
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    return new Blob([bytes], { type: head.slice(5).split(";")[0] });
  }
  function download(figure) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob($("img", figure).src));
    link.download = figure.dataset.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }
  function show(figure) {
    const view = $("#view");
    const all = [...document.querySelectorAll(".gallery figure")];
    view.at = all.indexOf(figure);
    $("img", view).src = $("img", figure).src;
    $("pre", view).textContent = figure.dataset.parameters || "";
    if (!view.open) view.showModal();
  }
  function step(by) {
    const all = [...document.querySelectorAll(".gallery figure")];
    if (all.length) show(all[($("#view").at + by + all.length) % all.length]);
  }
  const shown = () => [...document.querySelectorAll(".gallery figure")][$("#view").at];

  // ---- prompts ------------------------------------------------------------------------------------------------------
  const prompts = () => {
    try { return JSON.parse(localStorage.getItem(KEY + "prompts")) || []; } catch { return []; }
  };
  function keep(list) {
    try { localStorage.setItem(KEY + "prompts", JSON.stringify(list.slice(0, MOST_PROMPTS))); } catch { /* private mode */ }
    history();
  }
  function remember(prompt, negative) {
    if (!prompt && !negative) return;
    keep([[prompt, negative], ...prompts().filter((each) => each[0] !== prompt || each[1] !== negative)]);
  }
  function history() {
    const list = $("#history ol");
    list.replaceChildren(...prompts().map(([prompt, negative], i) => {
      const item = document.createElement("li"), button = document.createElement("button");
      button.className = "plain";
      button.dataset.do = "recall";
      button.dataset.index = i;
      button.textContent = prompt + (negative ? ` \u2212 ${negative}` : "");
      item.append(button);
      return item;
    }));
    $("#history").hidden = !list.children.length;
  }

  // ---- buttons and keys ---------------------------------------------------------------------------------------------
  const actions = {
    theme() {
      const dark = document.body.classList.toggle("dark");
      try { localStorage.setItem(KEY + "theme", dark ? "dark" : "light"); } catch { /* private mode */ }
    },
    erase: (button) => button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true"),
    undo() { strokes.pop(); redraw(); },
    clear() { strokes.length = 0; redraw(); },
    remove: (button) => remove(button.closest(".drop").dataset.name),
    random: () => set("seed", "-1"),
    recall(button) {
      const [prompt, negative] = prompts()[button.dataset.index];
      set("prompt", prompt);
      set("negative_prompt", negative);
    },
    forget: () => keep([]),
    seed: (button, figure) => set("seed", figure.dataset.seed),
    save: (button, figure) => download(figure),
    use(button, figure) {
      put("source", $("img", figure).src);
      if (document.body.dataset.task === "txt2img") choose("img2img");
      if ($("#view").open) $("#view").close();
    },
    settings(button, figure) { put("info", $("img", figure).src); },
    view: (button, figure) => show(figure),
    close: () => $("#view").close(),
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-do]");
    if (button) {
      event.preventDefault();
      event.stopPropagation();
      actions[button.dataset.do](button, button.closest("figure") || shown());
    } else if (over(event) && !over(event).classList.contains("full")) {
      $("input[type=file]", over(event)).click();
    }
  });
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "Enter") {
      event.preventDefault();
      event.stopPropagation();
      document.activeElement.dispatchEvent(new Event("change", { bubbles: true }));
      press("run");
    } else if ($("#view") && $("#view").open && ["ArrowLeft", "ArrowRight"].includes(event.key)) {
      step(event.key === "ArrowLeft" ? -1 : 1);
    } else if (["Enter", " "].includes(event.key) && event.target.matches(".drop:not(.full), [role=button][data-do]")) {
      event.preventDefault();
      event.target.click();
    }
  }, true);

  return {
    task,
    start() { // once the form is there
      let theme = null;
      try { theme = localStorage.getItem(KEY + "theme"); } catch { /* private mode */ }
      document.body.classList.toggle("dark", theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
      task("txt2img");
      history();
    },
    run(prompt, negative) { // what a request takes along: the pictures; the results before it move down
      remember(prompt, negative);
      const earlier = $("#earlier");
      const old = [...document.querySelectorAll("#results figure")].map((each) => each.cloneNode(true));
      earlier.prepend(...old);
      [...earlier.children].slice(MOST_EARLIER).forEach((each) => each.remove());
      if (innerWidth < 700) $("#status").scrollIntoView({ behavior: "smooth" });
      return [files.source || "", document.body.dataset.task === "inpaint" ? mask() : "", files.control_image || ""];
    },
    info: () => files.info || "",
  };
})();
