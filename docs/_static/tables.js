// A table that is too wide for the page gets smaller letters; where that does not help on a narrow page, or names in it
// are broken, it becomes a list: a block for every row, a line for every cell.
function fit() {
    for (const table of document.querySelectorAll("article .table-wrapper > table")) {
        const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
        for (const row of table.querySelectorAll("tbody tr")) {
            [...row.cells].forEach((cell, place) => {
                cell.dataset.head = heads[place] || "";
                cell.classList.toggle("blank", !cell.textContent.trim());
            });
        }
        const wide = () => table.parentElement.scrollWidth > table.parentElement.clientWidth;
        const broken = () => [...table.querySelectorAll("code")].some((name) => name.getClientRects().length > 1);
        table.classList.remove("small", "listed");
        if (wide()) table.classList.add("small");
        if (matchMedia("(max-width: 46em)").matches && (wide() || broken())) {
            table.classList.remove("small");
            table.classList.add("listed");
        }
    }
}

addEventListener("load", fit);
addEventListener("resize", fit);
