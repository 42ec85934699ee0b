// The button of the theme on pages without charts: those of recipes.
"use strict";
const button = document.createElement("button");
button.id = "theme";
button.type = "button";
button.addEventListener("click", () => { H.setTheme(H.nextTheme()); H.nameTheme(); });
document.querySelector(".top").append(button);
H.nameTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", H.nameTheme);
