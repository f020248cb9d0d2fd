"use strict";
const rows = [...document.querySelectorAll(".row")];
const words = rows.map((row) => row.textContent.toLowerCase());
const edges = [...document.querySelectorAll(".edge")];
const box = document.querySelector("input");
const count = document.querySelector("output");
let hits = [];
let at = -1;

function show() {
  count.textContent = box.value.trim() ? `${hits.length ? at + 1 : 0} of ${hits.length}` : "";
  if (hits.length) hits[at].scrollIntoView({ block: "center" });
}

box.addEventListener("input", () => {
  const word = box.value.trim().toLowerCase();
  const found = rows.map((_, row) => word !== "" && words[row].includes(word));
  rows.forEach((row, place) => row.classList.toggle("hit", found[place]));
  hits = rows.filter((_, place) => found[place]);
  at = 0;
  show();
});

box.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && hits.length) {
    at = (at + (event.shiftKey ? hits.length - 1 : 1)) % hits.length;
    show();
  }
});

// A node that is clicked shows its edges.
rows.forEach((row, place) => {
  row.addEventListener("click", () => {
    const chosen = row.classList.toggle("chosen");
    for (const edge of edges) {
      if (edge.dataset.rows.split(" ").includes(String(place))) edge.classList.toggle("chosen", chosen);
    }
  });
});
