// Shows openapi.json with Swagger UI, whose bundle defines SwaggerUIBundle.

const dark = matchMedia("(prefers-color-scheme: dark)");
const applyColorScheme = () => {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
};
dark.addEventListener("change", applyColorScheme);
applyColorScheme();

// The type of a problem links to its row in the table.
const row = document.getElementById(location.hash.slice(1));

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#reference",
  deepLinking: !row, // the fragment of the URL is either a row, or the open operation
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  validatorUrl: null, // no requests to other hosts
});

if (row) {
  // The row is below the reference, and moves down while the reference is built.
  const observer = new ResizeObserver(() => row.scrollIntoView({ block: "center" }));
  observer.observe(document.getElementById("reference"));
  for (const type of ["wheel", "touchstart", "pointerdown", "keydown"]) {
    addEventListener(type, () => observer.disconnect(), { once: true });
  }
}
