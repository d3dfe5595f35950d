// Before the first paint: light or dark as it was chosen here, otherwise as the system is.
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("ldm_lite.theme")) ?? "";
} catch { /* private mode */ }
