// What the browser keeps: small values in localStorage, pictures in IndexedDB.  Where both are forbidden, nothing.

export function load(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(`ldm_lite.${name}`)) ?? otherwise; } catch { return otherwise; }
}

export function save(name, value) {
  try { localStorage.setItem(`ldm_lite.${name}`, JSON.stringify(value)); } catch { /* private mode, or full */ }
}

const database = new Promise((done) => {
  try {
    const request = indexedDB.open("ldm_lite", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("images", { keyPath: "id" });
      request.result.createObjectStore("inputs");
    };
    request.onsuccess = () => done(request.result);
    request.onerror = () => done(null);
  } catch { done(null); }
});

/** Run act(store) in a transaction; returns what its request finds. */
export async function pictures(name, act) {
  const open = await database;
  return open && new Promise((done) => {
    const change = open.transaction(name, "readwrite"), request = act(change.objectStore(name));
    change.oncomplete = () => done(request.result);
    change.onerror = change.onabort = () => done(undefined);
  });
}

/** Make an element: properties by their names, attributes by theirs. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export const div = (className, ...children) => el("div", { className }, ...children);
export const p = (className, textContent, more = {}) => el("p", { className, textContent, ...more });
export const button = (textContent, onclick, more = {}) =>
  el("button", { type: "button", className: "quiet", textContent, onclick, ...more });
export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

export const dataUrl = (blob) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(new Error("the picture cannot be read"));
  reader.readAsDataURL(blob);
});

/** Send JSON; returns the response.  Throws an Error with `param`, the field that is wrong. */
export async function post(path, content, more = {}) {
  let response;
  try {
    const headers = { "Content-Type": "application/json" };
    response = await fetch(path, { method: "POST", headers, body: JSON.stringify(content), ...more });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const error = new Error(answer.error?.message ?? `The server answered with status ${response.status}.`);
  throw Object.assign(error, { param: answer.error?.param });
}

export const bytes = (base64, type) =>
  new Blob([Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0))], { type });
