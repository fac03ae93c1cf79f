// A table that is too wide for the page gets smaller letters; where that does not help on a narrow page, it becomes a
// list: a block for every row, a line for every cell.
function fit() {
    for (const table of document.querySelectorAll("article .table-wrapper > table")) {
        const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
        for (const row of table.querySelectorAll("tbody tr")) {
            [...row.cells].forEach((cell, place) => (cell.dataset.head = heads[place] || ""));
        }
        const wide = () => table.parentElement.scrollWidth > table.parentElement.clientWidth;
        table.classList.remove("small", "listed");
        if (wide()) table.classList.add("small");
        if (wide() && matchMedia("(max-width: 46em)").matches) table.classList.replace("small", "listed");
    }
}

addEventListener("load", fit);
addEventListener("resize", fit);
