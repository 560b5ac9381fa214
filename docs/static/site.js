// Let keys scroll code and tables that are wider than the page, and give headings of the menu a level.

for (const each of document.querySelectorAll(".highlight pre, .table-wrapper")) {
  if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
}
for (const each of document.querySelectorAll(".caption[role=heading]")) each.ariaLevel = "2";
